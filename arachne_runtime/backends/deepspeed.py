"""The one door to DeepSpeed: imports it quietly, and makes its ZeRO optimizer on a group of ranks.

Written against DeepSpeed 0.19.8. It reads its device from an environment variable, compiles an extension for
messages in shared memory that ZeRO never uses, keeps the last groups in a global, and under stage 3 puts its
own function in the place of ``torch.nn.functional.linear``: all of that stays here.
"""

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import UnsupportedEnvironmentError

SHARED_MEMORY_OP = "deepspeed_shm_comm"
"""Compiled at the first start (up to 70 s, with g++ and ninja) for all-reduces of inference on CPUs."""
LOCAL_RANK = "LOCAL_RANK"
"""Where DeepSpeed reads the index of its device: in a plan that is the device's, not the process's."""

EXPECTED = ("Setting accelerator to CPU", "using ZeRO with an untested optimizer")
"""Words of warnings that say what was asked for: a rank on a CPU, and an optimizer that we have tried."""


class Split:
    """DeepSpeed's engine around a module whose optimizer is split over a group; an open handle on it."""

    def __init__(self, engine: Any, own: "_Globals") -> None:
        self._engine = engine
        self._own = own
        self.zero: Any = engine.optimizer
        """Its ZeRO optimizer; the interface is DeepSpeed's own and not typed."""

    @classmethod
    def of(
        cls,
        module: nn.Module,
        optimizer: Optimizer,
        *,
        stage: int,
        group: dist.ProcessGroup,
        device: torch.device,
        settings: Mapping[str, Any],
    ) -> "Split":
        """Split ``optimizer`` of ``module`` over ``group``; all its ranks call this together.

        Only the group's ranks communicate. DeepSpeed neither clips nor scales: ``gradient_clipping`` is 0
        (its default of 1 would clip each stage alone).

        Args:
            module: Holds the parameters of the optimizer.
            optimizer: Its parameters become this rank's part of them, flat.
            stage: Of ZeRO, 1 to 3.
            group: The ranks.
            device: Of this rank.
            settings: For DeepSpeed's configuration, beside those that hold for every stage.

        Raises:
            UnsupportedEnvironmentError: DeepSpeed is missing, or computes on another type of device.

        """
        deepspeed = load(device)
        config = {
            "train_micro_batch_size_per_gpu": 1,  # it must be told, and is used for nothing here
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": None,
            **settings,
        }
        config["zero_optimization"] = {"stage": stage, **settings.get("zero_optimization", {})}
        with _opening(device):
            engine, *_ = deepspeed.initialize(
                model=module, optimizer=optimizer, mpu=_Group(group), config=config
            )
        return cls(engine, _OPEN[-1])

    def step(self) -> None:
        """DeepSpeed's step: the part of this rank, then all parts go to all ranks."""
        self.zero.step()

    def close(self) -> None:
        """Remove its hooks and let go of the group, which a global of DeepSpeed's also holds."""
        self._engine.destroy()
        self._engine = self.zero = None
        _OPEN.remove(self._own)
        _go_by_last()


def load(device: torch.device) -> Any:
    """Import DeepSpeed without its chatter and without compiling anything.

    Raises:
        UnsupportedEnvironmentError: It is missing, or would compute on another type of device.

    """
    logging.getLogger("DeepSpeed").addFilter(_matters)
    # torch 2.13 warns of two functions that DeepSpeed 0.19 calls in every step, also within a backward
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    try:
        import deepspeed
        import deepspeed.ops
    except ImportError as error:
        raise UnsupportedEnvironmentError(
            f"ZeRO needs DeepSpeed, which cannot be imported ({error}): "
            "pip install 'arachne-hetero[deepspeed]', or set zero to 0 in the plan"
        ) from error
    deepspeed.ops.__compatible_ops__[SHARED_MEMORY_OP] = False
    there = deepspeed.accelerator.get_accelerator().device_name()
    if there != device.type:
        raise UnsupportedEnvironmentError(
            f"DeepSpeed computes on {there} here, but this rank's device is {device}; "
            f"set DS_ACCELERATOR={device.type} before the start, or set zero to 0 in the plan"
        )
    return deepspeed


class _Group:
    """Tells DeepSpeed which ranks hold the same parameters; its name for this is mpu."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._group

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._group)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._group)

    def get_model_parallel_group(self) -> None:
        """No other rank has a part in what DeepSpeed sums: the engine sums and clips."""

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1


def _matters(record: logging.LogRecord) -> bool:
    """Whether a message is worth a user's attention."""
    text = record.getMessage()
    return record.levelno >= logging.WARNING and not any(words in text for words in EXPECTED)


@dataclass(frozen=True, slots=True, eq=False)
class _Globals:
    """What DeepSpeed reads in the whole process, and what it puts elsewhere."""

    mpu: Any
    """Stands for the group."""
    local_rank: str | None
    """The variable with its device, which stage 3 reads in every step."""
    linear: Callable[..., Tensor]
    """DeepSpeed's for stage 3, which rounds otherwise under autocast."""

    @classmethod
    def now(cls) -> "_Globals":
        from deepspeed.utils import groups

        return cls(groups.mpu, os.environ.get(LOCAL_RANK), nn.functional.linear)

    def set(self) -> None:
        from deepspeed.utils import groups

        groups.mpu = self.mpu
        nn.functional.linear = self.linear
        if self.local_rank is None:
            os.environ.pop(LOCAL_RANK, None)
        else:
            os.environ[LOCAL_RANK] = self.local_rank


_OPEN: list[_Globals] = []
"""As they were before the first optimizer was split, then those of each that is open: a change of plan makes
one beside another, and either may go first."""


@contextmanager
def _opening(device: torch.device) -> Iterator[None]:
    """Inside DeepSpeed is as it began, on this device; what it sets is the new optimizer's own."""
    if not _OPEN:
        _OPEN.append(_Globals.now())
    replace(_OPEN[0], local_rank=str(device.index or 0)).set()
    try:
        yield
        _OPEN.append(_Globals.now())
    finally:
        _go_by_last()


def _go_by_last() -> None:
    """Behind the last optimizer all is as it was."""
    _OPEN[-1].set()
    if len(_OPEN) == 1:
        _OPEN.clear()
