"""Unequal shares in Hugging Face's Trainer, whose losses are over samples or over all ranks' tokens."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..data_parallel import HeteroLoader
from ..data_parallel.link import Turn, Weight
from ..errors import UnsupportedEnvironmentError, UsageError
from .accelerate import HeteroAccelerator

try:
    from transformers import Trainer, TrainingArguments
except ImportError as error:
    raise UnsupportedEnvironmentError(
        f"this needs transformers, which cannot be imported ({error}): "
        "pip install 'arachne-hetero[huggingface]'"
    ) from error

_IGNORED = -100
"""The label of what no loss of transformers counts."""
_SHUFFLES = {"random": True, "sequential": False}
"""By ``train_sampling_strategy``."""


class HeteroTrainer(Trainer):
    """A Trainer whose ranks take unequal shares of ``per_device_train_batch_size`` times the ranks.

    It stands in for Trainer with the same arguments; shares follow the devices, what is trained is what one
    process trains on the whole batch. Losses are logged as means over the whole batch. Evaluation is the
    Trainer's own. A rank that runs out of memory ends the training on all: nothing repeats the step.

    Args:
        args: For Trainer.
        num_items: Counts the items of a batch over which the model's loss is the mean, where it is neither a
            mean over samples nor one that takes ``num_items_in_batch`` (which needs nothing).
        named: For Trainer.

    Raises:
        UsageError: A setting with which it would not be exact.

    """

    def __init__(self, *args: Any, num_items: Callable[[Any], Any] | None = None, **named: Any) -> None:
        self._num_items = num_items
        self._batches: Batches | None = None
        self._turn: Turn | None = None
        """Of the inputs that train now."""
        self._is_whole = False
        """Whether their loss is over the tokens of all ranks."""
        super().__init__(*args, **named)
        _refuse(self.args)
        if type(self)._get_train_sampler is not Trainer._get_train_sampler:
            raise UsageError(
                "_get_train_sampler is overridden, but HeteroTrainer shares out one order of its own; leave "
                "it out, and order or weigh samples in the dataset"
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Trainer's, which makes an accelerate.Accelerator without asking which."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = HeteroAccelerator  # adds methods, and no state

    def get_train_dataloader(self) -> Any:
        """``Batches`` of the dataset and with the collation that Trainer would take."""
        given = super().get_train_dataloader()
        if self._batches is None or self._batches.dataset is not given.dataset:
            loader = HeteroLoader(
                given.dataset,
                self.args.per_device_train_batch_size * self.args.world_size,
                seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
                shuffle=_SHUFFLES[self.args.train_sampling_strategy],
                drop_last=self.args.dataloader_drop_last,
                num_items=self._num_items,
                collate_fn=given.collate_fn,
                pin_memory=given.pin_memory,
                num_workers=given.num_workers,
                prefetch_factor=given.prefetch_factor,
                multiprocessing_context=given.multiprocessing_context,
            )
            self._batches = Batches(loader, given.dataset)
        return self._batches

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Trainer's, with the weight of these inputs; gives their part of the loss over the whole batch."""
        if self._batches is None:
            raise UsageError(
                "get_train_dataloader gave a DataLoader of its own, whose parts are even; leave it to "
                "HeteroTrainer, and give train_dataset and data_collator"
            )
        self._is_whole, self._turn = False, self._batches.turns.popleft()
        self._batches.loader.link.turn = self._turn
        loss = super().training_step(model, inputs, num_items_in_batch)
        if num_items_in_batch is not None and not self._is_whole and self._num_items is None:
            raise UsageError(
                "compute_loss is overridden and hands no num_items_in_batch on to Trainer's, so its loss is "
                "a mean over items of this rank: say over which by HeteroTrainer(num_items=), which "
                "counts those of a batch, or hand it on"
            )
        weight, self._turn = self._turn.weight.value(), None
        return loss * (weight * self.args.world_size) if weight else torch.zeros_like(loss)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Trainer's; where it is over the tokens of all ranks, such sums weigh the same on every rank."""
        if num_items_in_batch is not None and self._turn is not None and self._batches is not None:
            self._refuse_local_tokens()
            # this rank's sum, times the ranks, over the tokens of all: DDP's mean makes it whole
            weight = Weight(float(self._turn.rows > 0), float(self.args.world_size))
            self._turn, self._is_whole = replace(self._turn, weight=weight), True
            self._batches.loader.link.turn = self._turn
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _refuse_local_tokens(self) -> None:
        if not self.args.average_tokens_across_devices:
            raise UsageError(
                "average_tokens_across_devices=False takes a mean over each rank's tokens, then over ranks, "
                "which is not the mean over all tokens; leave it at True"
            )


class Batches:
    """What Trainer takes for its DataLoader; it asks for all batches of an update at once, so turns wait."""

    def __init__(self, loader: HeteroLoader, dataset: Any) -> None:
        self.loader = loader
        loader.link.is_read_ahead = True
        self.dataset = dataset
        self.turns: deque[Turn] = deque()
        """Of the batches that are given out and not trained."""

    def __len__(self) -> int:
        """Steps of a whole epoch."""
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration with this epoch."""
        self.loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """The batches of an epoch; of one that is another rank's, no label counts."""
        self.turns.clear()
        for batch in self.loader:
            turn = self.loader.link.turn
            assert turn is not None
            self.turns.append(turn)
            yield batch if turn.rows else _without_labels(batch)

    @property
    def sampler(self) -> NoReturn:
        """What accelerate asks for to start in the middle of an epoch.

        Raises:
            UsageError: Always.

        """
        raise UsageError(
            "the checkpoint is from the middle of an epoch, and Trainer skips its batches in a way of its "
            "own, which knows no shares; save at the end of epochs (save_strategy='epoch'), or start this "
            "epoch anew with ignore_data_skip=True"
        )


def _without_labels(batch: Any) -> Any:
    names = [name for name in ("labels", "shift_labels") if name in batch]
    masked = {name: torch.full_like(batch[name], _IGNORED) for name in names if _is_counted(batch[name])}
    return {**batch, **masked}


def _is_counted(labels: Any) -> bool:
    return isinstance(labels, Tensor) and not labels.is_floating_point()


def _refuse(args: TrainingArguments) -> None:
    found = {
        "split_batches": (
            getattr(args.accelerator_config, "split_batches", False),
            "per_device_train_batch_size is of one device here; divide it by the ranks instead",
        ),
        "auto_find_batch_size": (args.auto_find_batch_size, "the global batch would change in the middle"),
        f"train_sampling_strategy={args.train_sampling_strategy!r}": (
            args.train_sampling_strategy not in _SHUFFLES,
            "the loader has an order of its own; use 'random' or 'sequential'",
        ),
        f"{args.n_gpu} GPUs in one process": (
            args.n_gpu > 1,
            "they would take equal parts; start one process for each, by torchrun",
        ),
    }
    for name, (is_asked, why) in found.items():
        if is_asked:
            raise UsageError(f"HeteroTrainer does not take {name}: {why}")
