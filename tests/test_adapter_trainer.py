"""Hugging Face's Trainer with unequal shares trains like one process, and logs the same losses."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from arachne_runtime.errors import UsageError
from arachne_runtime.testing import run_ranks
from tests.adapters import as_torchrun_starts, train_alone, wild
from tests.test_adapter_accelerate import forget_states
from tests.unequal import gap, values

pytestmark = pytest.mark.skipif(
    not (find_spec("accelerate") and find_spec("transformers")), reason="accelerate is not installed"
)
WIDTH, KINDS, WORDS, SEQUENCE, NUM_SAMPLES, EPOCHS, SEED = 6, 3, 11, 5, 13, 2, 42


@dataclass(frozen=True)
class Case:
    words: bool
    """A language model, whose loss is over tokens; else a mean over samples."""
    rows_a_rank: int
    accumulate: int


class Classifier(nn.Module):
    """(B, WIDTH), (B,) → a mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, KINDS))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.body(x)
        return {"loss": F.cross_entropy(scores, labels), "logits": scores}


def dataset(case: Case) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(3)
    if not case.words:
        x = torch.randn(NUM_SAMPLES, WIDTH, generator=random, dtype=torch.float64)
        y = torch.randint(KINDS, (NUM_SAMPLES,), generator=random)
        return [{"x": row, "labels": kind} for row, kind in zip(x, y, strict=True)]
    tokens = torch.randint(WORDS, (NUM_SAMPLES, SEQUENCE), generator=random)
    labels = tokens.clone()
    for number, row in enumerate(labels):
        row[: number % (SEQUENCE - 1)] = -100
    return [{"input_ids": a, "labels": b} for a, b in zip(tokens, labels, strict=True)]


def model_of(case: Case) -> nn.Module:
    torch.manual_seed(7)
    if not case.words:
        return Classifier().double()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=SEQUENCE,
    )
    return LlamaForCausalLM(config).double()


def loss_of(model: nn.Module, batches: list[Any]) -> Tensor:
    if isinstance(model, Classifier):
        return sum(model(**batch)["loss"] for batch in batches) / len(batches)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
        wanted = batch["labels"][:, 1:].flatten()
        total = total + F.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum")
        count += int((wanted != -100).sum())
    return total / count


def arguments_of(folder: str, case: Case, **others: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=case.rows_a_rank,
        gradient_accumulation_steps=case.accumulate,
        max_grad_norm=0.3,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        seed=SEED,
        **{"save_strategy": "no", "num_train_epochs": EPOCHS, **others},
    )


def trainer_of(case: Case, arguments: Any) -> Any:
    from arachne_runtime.adapters.transformers import HeteroTrainer

    class WithWildShares(HeteroTrainer):
        def get_train_dataloader(self) -> Any:
            batches = super().get_train_dataloader()
            wild(batches.loader)
            return batches

    model = model_of(case)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return WithWildShares(model, arguments, train_dataset=dataset(case), optimizers=(optimizer, None))


def train(folder: str, case: Case) -> tuple[dict[str, Tensor], list[float], str]:
    with as_torchrun_starts():
        trainer = trainer_of(case, arguments_of(folder, case))
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        kind = type(trainer.model_wrapped).__name__
        forget_states()
    return values(trainer.model), losses, kind


CASES = {
    "a mean over samples": (3, Case(words=False, rows_a_rank=1, accumulate=1)),
    "a mean over samples, accumulated": (2, Case(words=False, rows_a_rank=2, accumulate=2)),
    "tokens of all ranks": (3, Case(words=True, rows_a_rank=1, accumulate=1)),
    "tokens of all ranks, accumulated": (2, Case(words=True, rows_a_rank=2, accumulate=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_it_trains_like_one_process(name, tmp_path):
    num_ranks, case = CASES[name]
    model = model_of(case)
    wanted = train_alone(
        model,
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        dataset(case),
        loss_of,
        global_batch=case.rows_a_rank * num_ranks,
        epochs=EPOCHS,
        accumulate=case.accumulate,
        clip=0.3,
        seed=SEED,
    )
    for found, losses, kind in run_ranks(num_ranks, train, str(tmp_path), case):
        assert kind == "HeteroDDP"
        assert gap(found, values(model)) < (1e-7 if case.words else 1e-9)  # its loss rounds to float32
        assert losses == pytest.approx(wanted, rel=1e-4)  # Trainer adds them up in float32


def resume(folder: str, case: Case, settings: dict[str, Any]) -> tuple[dict[str, Tensor], str]:
    with as_torchrun_starts():
        trainer_of(case, arguments_of(folder, case, **settings)).train()
        torch.distributed.barrier()  # the first rank has written
        again = trainer_of(case, arguments_of(folder, case))
        try:
            again.train(resume_from_checkpoint=True)
        except UsageError as error:
            return {}, str(error)
        finally:
            forget_states()
    return values(again.model), ""


def test_it_goes_on_from_the_end_of_an_epoch(tmp_path):
    case = CASES["tokens of all ranks"][1]
    (straight, *_), *_ = run_ranks(2, train, str(tmp_path), case)
    settings = {"save_strategy": "epoch", "num_train_epochs": 1}
    for found, _ in run_ranks(2, resume, str(tmp_path), case, settings):
        assert gap(found, straight) < 1e-7


def test_a_checkpoint_in_the_middle_of_an_epoch_is_refused(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    case = CASES["a mean over samples"][1]
    told = run_ranks(2, resume, str(tmp_path), case, settings)
    assert all("middle of an epoch" in text for _, text in told)


def refused(folder: str, case: Case, others: dict[str, Any]) -> str:
    with as_torchrun_starts():
        try:
            trainer_of(case, arguments_of(folder, case, **others)).train()
        except UsageError as error:
            return str(error)
        finally:
            forget_states()
    return ""


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices"),
        ({"train_sampling_strategy": "group_by_length"}, "order of its own"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches"),
    ],
)
def test_settings_that_are_not_exact_are_refused(others, told, tmp_path):
    case = Case(words=True, rows_a_rank=1, accumulate=1)
    assert all(told in text for text in run_ranks(2, refused, str(tmp_path), case, others))


def own_loss(trainer: Any, model: nn.Module, inputs: Any, *_: Any, **named: Any) -> Tensor:
    """A mean over this rank's own tokens."""
    logits = model(input_ids=inputs["input_ids"]).logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, inputs["labels"][:, 1:].flatten(), ignore_index=-100)


OVERRIDES = {
    "_get_train_sampler": lambda *_: None,
    "get_train_dataloader": lambda trainer: DataLoader(trainer.train_dataset),
    "compute_loss": own_loss,
}


def overridden(folder: str, case: Case, name: str, num_items: Any) -> tuple[dict[str, Tensor], str]:
    from arachne_runtime.adapters.transformers import HeteroTrainer

    class WithWildShares(HeteroTrainer):
        def get_train_dataloader(self) -> Any:
            batches = super().get_train_dataloader()
            wild(batches.loader)
            return batches

    kind = type("Trainer", (WithWildShares,), {name: OVERRIDES[name]})
    with as_torchrun_starts():
        model = model_of(case)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        try:
            trainer = kind(
                model,
                arguments_of(folder, case),
                train_dataset=dataset(case),
                optimizers=(optimizer, None),
                num_items=num_items,
            )
            trainer.train()
        except UsageError as error:
            return {}, str(error)
        finally:
            forget_states()
    return values(model), ""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("_get_train_sampler", "_get_train_sampler"),
        ("get_train_dataloader", "get_train_dataloader gave a DataLoader"),
        ("compute_loss", "num_items"),
    ],
)
def test_overrides_that_would_be_passed_over_are_refused(name, told, tmp_path):
    case = Case(words=True, rows_a_rank=2, accumulate=1)
    assert all(told in text for _, text in run_ranks(2, overridden, str(tmp_path), case, name, None))


def count_tokens(batch: Any) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def test_a_loss_of_its_own_is_exact_where_it_says_over_what_it_is_the_mean(tmp_path):
    num_ranks, case = CASES["tokens of all ranks"]
    model = model_of(case)
    train_alone(
        model,
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        dataset(case),
        loss_of,
        global_batch=case.rows_a_rank * num_ranks,
        epochs=EPOCHS,
        clip=0.3,
        seed=SEED,
    )
    for found, told in run_ranks(num_ranks, overridden, str(tmp_path), case, "compute_loss", count_tokens):
        assert told == ""
        assert gap(found, values(model)) < 1e-7
