"""A Lightning Trainer with HeteroStrategy and random shares trains like one process."""

import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import arachne_runtime as arachne
from arachne_runtime.errors import UnsupportedEnvironmentError, UsageError
from arachne_runtime.testing import run_ranks
from tests.adapters import ACCUMULATE, as_torchrun_starts, mean_loss, net, train_alone, wild
from tests.unequal import data, gap, values

needs_lightning = pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")


def module_of(early: Any = None, automatic: bool = True) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.automatic_optimization = automatic

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch[0]))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 0.01)

        def train_dataloader(self) -> Any:
            return early or wild(arachne.HeteroLoader(data(), 5))

    return Module()


def trainer_of(**others: Any) -> Any:
    import lightning

    from arachne_runtime.adapters.lightning import HeteroStrategy

    return lightning.Trainer(
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        strategy=HeteroStrategy(),
        **{
            "max_epochs": 2,
            "accumulate_grad_batches": ACCUMULATE,
            "gradient_clip_val": 0.3,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **others,
        },
    )


def train() -> dict[str, Tensor]:
    with as_torchrun_starts():
        module = module_of()
        trainer_of().fit(module)
    return values(module.net)


def wanted() -> dict[str, Tensor]:
    model = net()
    # five batches an epoch: the last update of each takes one batch only, and Lightning divides it by two
    train_alone(
        model,
        torch.optim.AdamW(model.parameters(), 0.01),
        data(),
        mean_loss,
        global_batch=5,
        epochs=2,
        accumulate=ACCUMULATE,
        clip=0.3,
    )
    return values(model)


@needs_lightning
def test_it_trains_like_one_process():
    for found in run_ranks(3, train):
        assert gap(found, wanted()) < 1e-9


def train_with_a_break(path: str) -> dict[str, Tensor]:
    import lightning

    class SaveAfterFour(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.fit_loop.total_batch_idx == 3:
                trainer.save_checkpoint(path)

    with as_torchrun_starts():
        trainer_of(max_epochs=1, callbacks=[SaveAfterFour()]).fit(module_of())
        module = module_of()
        trainer_of().fit(module, ckpt_path=path)
    return values(module.net)


@needs_lightning
def test_it_goes_on_in_the_middle_of_an_epoch(tmp_path):
    for found in run_ranks(2, train_with_a_break, str(tmp_path / "last.ckpt")):
        assert gap(found, wanted()) < 1e-9


def fit_wrongly() -> list[str]:
    from arachne_runtime.adapters.lightning import HeteroStrategy

    lone = [torch.distributed.new_group([rank]) for rank in range(torch.distributed.get_world_size())]
    early = arachne.HeteroLoader(data(), 5, process_group=lone[torch.distributed.get_rank()])
    told, adaptive = [], arachne.AdaptiveBatch()
    with as_torchrun_starts():
        manual = trainer_of(accumulate_grad_batches=1, gradient_clip_val=None)
        for act in (
            lambda: trainer_of().fit(module_of(early=early)),
            lambda: manual.fit(module_of(automatic=False)),
            lambda: HeteroStrategy(find_unused_parameters=True),
            lambda: trainer_of().fit(module_of(early=arachne.HeteroLoader(data(), 5, adaptive=adaptive))),
        ):
            try:
                act()
            except UsageError as error:
                told.append(str(error))
    return told


@needs_lightning
def test_what_is_not_exact_is_refused():
    for early, manual, option, adaptive in run_ranks(2, fit_wrongly):
        assert "make it in train_dataloader()" in early
        assert "automatic_optimization is off" in manual
        assert "find_unused_parameters" in option
        assert "Lightning counts" in adaptive


def test_without_lightning_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning.pytorch.strategies", None)
    monkeypatch.delitem(sys.modules, "arachne_runtime.adapters.lightning", raising=False)
    with pytest.raises(UnsupportedEnvironmentError, match=r"arachne-hetero\[lightning\]"):
        import arachne_runtime.adapters.lightning  # noqa: F401
