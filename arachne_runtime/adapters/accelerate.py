"""Unequal shares in a script of Hugging Face accelerate: its Accelerator, which wraps models in HeteroDDP."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..data_parallel import HeteroDDP, HeteroLoader
from ..data_parallel.step import StepBody
from ..errors import UnsupportedEnvironmentError, UsageError

try:
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderStateMixin
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.state import GradientState
    from accelerate.utils import DDPCommunicationHookType, DistributedType, recursively_apply, send_to_device
except ImportError as error:
    raise UnsupportedEnvironmentError(
        f"this needs accelerate, which cannot be imported ({error}): "
        "pip install 'arachne-hetero[huggingface]'"
    ) from error

_TYPES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""In which accelerate would wrap a model in DistributedDataParallel, or in nothing."""


class HeteroAccelerator(Accelerator):
    """An Accelerator for unequal shares; ``prepare`` takes a HeteroLoader in place of a DataLoader.

        accelerator = HeteroAccelerator()
        loader = arachne.HeteroLoader(dataset, global_batch=512)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    Accumulation, clipping, mixed precision and compilation are accelerate's. ``save_state`` has the loader's
    place if it is registered (``accelerator.register_for_checkpointing(loader)``). ``gather`` wants equal
    parts; ``gather_for_metrics`` and ``arachne.evaluate`` do not.

    Make the loader after the accelerator, which starts the process group. The prepared loader's ``step``,
    around the body of the loop, takes the prepared optimizer and schedule: for an adaptive batch, or where
    memory may run out.
    """

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """As accelerate's; batches of a HeteroLoader arrive on the device.

        Raises:
            UsageError: A loader was made before the process group.

        """
        taken = (self._place(arg) if isinstance(arg, HeteroLoader) else arg for arg in args)
        return super().prepare(*taken, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """As accelerate's, with HeteroDDP where that has DistributedDataParallel.

        Raises:
            UsageError: Something is asked for that only DistributedDataParallel has, or that shards models.

        """
        if evaluation_mode or isinstance(model, HeteroDDP):
            return super().prepare_model(model, device_placement, evaluation_mode=True)
        self._refuse_others()
        prepared = super().prepare_model(model, device_placement, evaluation_mode=True)
        if not any(p.requires_grad for p in prepared.parameters()):
            return prepared
        prepared._is_accelerate_prepared = False  # of the two it is the outer one
        self._models[-1] = HeteroDDP(prepared)
        return self._models[-1]

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The model that was given to ``prepare``."""
        inner = model.module if isinstance(model, HeteroDDP) else model
        return super().unwrap_model(inner, keep_fp32_wrapper, keep_torch_compile)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As accelerate's; rows of a HeteroLoader's batch come in its order, each once.

        Raises:
            UsageError: A tensor whose first dim is not the rows of the batch.

        """
        active = self.gradient_state.active_dataloader
        if use_gather_object or not isinstance(active, PlacedLoader):
            return super().gather_for_metrics(input_data, use_gather_object)
        return recursively_apply(
            partial(self._gather_rows, active.loader), input_data, error_on_other_type=True
        )

    def _gather_rows(self, loader: HeteroLoader, rows: Tensor) -> Tensor:
        """(rows of this rank, ...) → (rows of all ranks, ...)."""
        if rows.dim() == 0 or self.num_processes == 1:
            return self.gather(rows)
        if len(rows) != max(loader.num_rows, 1):
            raise UsageError(
                f"gather_for_metrics got {len(rows)} rows, but this rank has {loader.num_rows} rows of the "
                "batch; give tensors with the rows of the batch, or numbers"
            )
        most = max(loader.shares)
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: loader.num_rows] = rows[: loader.num_rows]
        parts = self.gather(padded).split(most)
        return torch.cat([part[:share] for part, share in zip(parts, loader.shares, strict=True)])

    def _place(self, loader: HeteroLoader) -> "PlacedLoader":
        if loader.link.peers.num_ranks != self.num_processes:
            raise UsageError(
                f"the HeteroLoader shares out among {loader.link.peers.num_ranks} ranks, but there are "
                f"{self.num_processes}; make it after the accelerator, which starts the process group"
            )
        return PlacedLoader(loader, self.device)

    def _refuse_others(self) -> None:
        handler = self.ddp_handler
        found = {
            f"{self.distributed_type}": self.distributed_type not in _TYPES,
            "a parallelism_config": getattr(self, "parallelism_config", None) is not None,
            f"{handler and handler.comm_hook}": handler and handler.comm_hook != DDPCommunicationHookType.NO,
        }
        if asked := [name for name, is_asked in found.items() if is_asked]:
            raise UsageError(
                f"HeteroAccelerator stands in for DistributedDataParallel, on which {asked[0]} does not "
                "rest; use accelerate's own Accelerator, or leave this out"
            )


class PlacedLoader(DataLoaderStateMixin):
    """A HeteroLoader whose batches are on the device, and of which accelerate knows when it ends."""

    def __init__(self, loader: HeteroLoader, device: Any) -> None:
        self.loader = loader
        self.device = device
        self.gradient_state = GradientState()

    def __len__(self) -> int:
        """Steps of a whole epoch."""
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        """Whatever the loader has."""
        return getattr(self.loader, name)

    def step(self, *actors: Any) -> StepBody:
        """As HeteroLoader's; optimizers and schedules that ``prepare`` gave act through the user's own.

        Raises:
            UsageError: A loss is scaled, for which accelerate changes ``optimizer.step`` itself.

        """
        return self.loader.step(*map(_users_own, actors))

    def __iter__(self) -> Iterator[Any]:
        """The batches of the rest of this epoch, or of the next one."""
        self.begin()
        try:
            for batch in self.loader:
                self.end_of_dataloader = self.loader.is_at_end
                yield send_to_device(batch, self.device)
        finally:
            self.end()


def _users_own(actor: Any) -> Any:
    if isinstance(actor, AcceleratedOptimizer):
        if actor.scaler is not None:
            raise UsageError(
                "mixed_precision='fp16' changes optimizer.step in each step, past what loader.step does to "
                "it; use 'bf16', or leave loader.step out"
            )
        return actor.optimizer
    return actor.scheduler if isinstance(actor, AcceleratedScheduler) else actor
