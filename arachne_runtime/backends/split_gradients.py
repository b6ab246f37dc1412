"""ZeRO-2 and 3 of DeepSpeed for data-parallel plans: gradients are summed and split in each backward.

Every rank plays every micro-batch, since all communicate in each. The engine weighs, clips and commits.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import UnsupportedPlanError
from ..model import StageModule
from ..plan.order import REDUCTION_BYTES, Reduction
from ..units import Bytes
from .deepspeed import Split, load
from .protocol import GradientSums, states_of
from .split_states import refuse_dtypes, refuse_early_states

DTYPES = (torch.float32,)
"""DeepSpeed sums and steps in float32 here: bfloat16 would get float32 copies, float64 would lose digits."""
_BUCKET_ELEMENTS = REDUCTION_BYTES // 4
"""Of float32 in one sum, as in the engine's own; DeepSpeed's default would take 2 GB for its buffer."""
_SETTINGS: Mapping[int, Mapping[str, Any]] = {
    2: {
        "gradient_allreduce_op": "sum",  # its default is a mean, which rounds
        "zero_optimization": {"reduce_bucket_size": _BUCKET_ELEMENTS, "overlap_comm": False},
    },
    3: {
        "zero_optimization": {
            "reduce_bucket_size": _BUCKET_ELEMENTS,
            "overlap_comm": False,
            "stage3_param_persistence_threshold": 0,  # split all, as the plan's memory says
            "stage3_max_reuse_distance": 0,  # by default up to 10^9 gathered elements stay between uses
        },
    },
}


class SplitGradients:
    """The gradients and the optimizer of one rank, of which it holds a part: DeepSpeed's ZeRO-2 or 3."""

    parameters: Sequence[nn.Parameter] = ()
    """None keeps a gradient."""

    def __init__(self, module: nn.Module, stage: int, split: Split, group: dist.ProcessGroup) -> None:
        self.optimizer: Optimizer = split.zero.optimizer
        self._module = module
        self._stage = stage
        self._split = split
        self._group: dist.ProcessGroup | None = group
        self._order: list[int] = []
        """Parameters in the order in which they got gradients in this step, by their number."""
        self._num_backwards = 0
        self._parts: list[Tensor] = []
        """Sums of gradients of this rank's part, once a step's backwards are done."""

    @classmethod
    def of(
        cls,
        module: nn.Module,
        optimizer: Optimizer,
        stage: int,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> "SplitGradients":
        """Split gradients (``stage`` 2) and parameters (3) of a module over ``group``; it then has hooks.

        Raises:
            UnsupportedPlanError: Parameters that are not in float32, or an optimizer that cannot be split.

        """
        refuse_dtypes(optimizer, DTYPES, zero=stage)
        refuse_early_states(optimizer)
        load(device)
        if stage == 3:
            _number_from_zero()
        settings = {"managed_gradient_accumulation": False, **_SETTINGS[stage]}
        split = Split.of(module, optimizer, stage=stage, group=group, device=device, settings=settings)
        found = cls(module, stage, split, group)
        for number, parameter in enumerate(found._trained()):
            parameter.register_post_accumulate_grad_hook(partial(found._note, number))  # type: ignore[no-untyped-call]
        return found

    @property
    def sums(self) -> GradientSums:
        """Itself."""
        return self

    def begin(self) -> None:
        """Forget the last step."""
        self._order.clear()
        self._num_backwards = 0
        self._parts = []

    def enter(self) -> None:
        """A backward begins: DeepSpeed's hooks sum what it gives."""
        zero = self._split.zero
        zero.clear_backward_seen_flag()
        zero.backward_prologue()
        zero.enter_backward()

    def settle(self, sent: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """A backward has ended, and with it its sums; there is no stage before this one to send to."""
        self._num_backwards += 1
        return sent

    def passed(self, blocks: range) -> None:
        """No sum waits for blocks."""

    def pieces(self, stage: StageModule) -> tuple[range, ...]:
        """The stage in one."""
        return (stage.block_range,)

    def start(self, reduction: Reduction) -> bool:
        """No sum is the engine's."""
        raise AssertionError(f"{reduction.name} is summed by DeepSpeed")

    def finish(self, reduction: Reduction) -> None:
        """No sum is the engine's."""
        raise AssertionError(f"{reduction.name} is summed by DeepSpeed")

    def bytes_of(self, reduction: Reduction) -> Bytes:
        """No sum is the engine's."""
        raise AssertionError(f"{reduction.name} is summed by DeepSpeed")

    def squared_norm(self) -> float:
        """Sum of squares over this rank's part, after the last backward of a step.

        Raises:
            UnsupportedPlanError: The ranks used other parameters, or not every one in each micro-batch.

        """
        self._refuse_unlike_use()
        zero = self._split.zero
        zero.finalize_gradient_accumulation_boundary()
        self._parts = [part for parts in self._real_parts() for part in parts]
        if self._stage == 3:  # of which DeepSpeed only knows the mean
            torch._foreach_mul_(self._parts, float(dist.get_world_size(self._group)))
        return sum(float(part.double().square().sum()) for part in self._parts)

    def clip(self, norm: float, limit: float) -> None:
        """Scale down by ``limit / norm`` where the norm is above the limit, as PyTorch does."""
        torch._foreach_mul_(self._parts, min(1.0, limit / (norm + 1e-6)))

    def step(self) -> None:
        """Step this rank's part; DeepSpeed hands it round now (stage 2) or where it is used (3)."""
        self._split.step()
        assert not self._split.zero.overflow, (
            "a norm that is no number reached DeepSpeed, which skips the step"
        )

    def whole(self) -> AbstractContextManager[None]:
        """Gather the parameters of stage 3."""
        if self._stage < 3:
            return nullcontext()
        from deepspeed.runtime.zero import GatheredParameters

        gathered: AbstractContextManager[None] = GatheredParameters(list(self._module.parameters()))
        return gathered

    def kept(self) -> Iterator[Tensor]:
        """The states, DeepSpeed's own copy of the parameters of this part, and its gradients."""
        zero = self._split.zero
        yield from (
            zero.single_partition_of_fp32_groups if self._stage == 2 else zero.fp32_partitioned_groups_flat
        )
        yield from states_of(self.optimizer)
        yield from self._parts

    def close(self) -> None:
        """Let DeepSpeed go."""
        self._parts = []
        if self._group is not None:
            self._group = None
            self._split.close()

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self._module.parameters() if p.requires_grad]

    def _note(self, number: int, parameter: nn.Parameter) -> None:
        self._order.append(number)

    def _real_parts(self) -> Iterator[list[Tensor]]:
        """Sums of this rank's part by parameter group, without DeepSpeed's padding, which it never sets."""
        zero = self._split.zero
        for number, parts in zero.averaged_gradients.items():
            if self._stage == 2:
                yield parts
                continue
            place = dist.get_rank(self._group)
            sizes = (
                min(p.partition_numel(), max(0, p.ds_numel - place * p.partition_numel()))
                for p in zero.fp16_groups[number]
            )
            yield [part.view(-1)[:size] for part, size in zip(parts, sizes, strict=True)]

    def _refuse_unlike_use(self) -> None:
        """DeepSpeed packs gradients as they come: ranks that use other parameters would sum unlike ones."""
        every = list(range(len(self._trained())))
        unused = any(sorted(one) != every for one in self._by_backward(len(every)))
        mine = zlib.crc32(repr(self._order).encode())
        seen = torch.tensor([mine, -mine, unused])
        device = next(self._module.parameters()).device
        seen = seen.to(device)
        dist.all_reduce(seen, dist.ReduceOp.MAX, group=self._group)
        highest, lowest, anywhere = seen.tolist()
        if highest != -lowest or anywhere:
            never = sorted({name for n, name in enumerate(self._names()) if n not in self._order})
            told = f"; without a gradient on this rank: {', '.join(never)}" if never else ""
            raise UnsupportedPlanError(
                f"under ZeRO-{self._stage} every parameter needs a gradient in each micro-batch, and in the "
                f"same order on all ranks{told}; freeze what is not used, or set zero to 1 or 0 in the plan"
            )

    def _names(self) -> list[str]:
        return [name for name, p in self._module.named_parameters() if p.requires_grad]

    def _by_backward(self, num: int) -> Iterator[Sequence[int]]:
        if len(self._order) != num * self._num_backwards:
            yield ()
        for start in range(0, len(self._order), num):
            yield self._order[start : start + num]


def _number_from_zero() -> None:
    """DeepSpeed numbers modules and parameters by process and compares the numbers of ranks.

    A rank that had another engine before, or one that has just joined, would begin with others.
    """
    from deepspeed.runtime.zero import Init
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    Init.param_id = 0
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
