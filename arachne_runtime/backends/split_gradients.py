"""ZeRO-2 and 3 of DeepSpeed for data-parallel plans: gradients are summed and split in each backward.

Every rank plays every micro-batch, since all communicate in each. The engine weighs, clips and commits.
"""

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import NonFiniteGradientError, UnsupportedPlanError
from ..model import StageModule
from ..plan.order import REDUCTION_BYTES, Reduction
from ..units import Bytes
from .deepspeed import Split
from .protocol import GradientSums, StateRun, refuse_thawed, states_of

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

    def __init__(
        self, module: nn.Module, stage: int, split: Split, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.optimizer: Optimizer = split.zero.optimizer
        self._module = module
        self._stage = stage
        self._split = split
        self._group: dist.ProcessGroup | None = group
        trained = [p for p in module.parameters() if p.requires_grad]
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        groups = enumerate(split.zero.bit16_groups if stage == 2 else ())  # stage 3 asks for no group
        self._ordered = _Ordered(split.zero, trained, {id(p): (i,) for i, group in groups for p in group})
        self._calls = _Calls(module) if stage == 3 else None
        self._device = device
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

        ``split_states.prepare`` has looked at the optimizer.
        """
        if stage == 3:
            _number_from_zero()
        settings = {"managed_gradient_accumulation": False, **_SETTINGS[stage]}
        split = Split.of(module, optimizer, stage=stage, group=group, device=device, settings=settings)
        return cls(module, stage, split, group, device)

    @property
    def sums(self) -> GradientSums:
        """Itself."""
        return self

    def begin(self) -> None:
        """Forget the last step; UsageError where a parameter was frozen when it was made."""
        refuse_thawed(self._frozen)
        self._ordered.used = [False] * len(self._ordered.used)
        if self._calls is not None:
            self._calls.number = 0
        self._parts = []

    def enter(self) -> None:
        """A backward begins: DeepSpeed's hooks sum what it gives."""
        zero = self._split.zero
        self._ordered.begin()
        zero.clear_backward_seen_flag()
        zero.backward_prologue()
        zero.enter_backward()

    def settle(self, sent: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """A backward has ended, and with it its sums; there is no stage before this one to send to."""
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
            UnsupportedPlanError: A parameter has no gradient on any rank; under stage 3, the ranks called
                other modules.

        """
        self._refuse_unlike_calls()
        self._refuse_unused()
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
        """Step this rank's part; DeepSpeed hands it round now (stage 2) or where it is used (3).

        Raises:
            NonFiniteGradientError: On all ranks, since DeepSpeed looks at all parts, and skips the step.

        """
        self._split.step()
        if self._split.zero.overflow:
            raise NonFiniteGradientError(
                f"a gradient is not finite; under ZeRO-{self._stage} no rank has whole gradients to say "
                "which. No parameter was changed: look at this batch, lower the learning rate, clip the "
                "steps before (clip_norm=), or set zero to 1 to be told the parameter"
            )

    def whole(self) -> AbstractContextManager[None]:
        """Gather the parameters of stage 3."""
        if self._stage < 3:
            return nullcontext()
        from deepspeed.runtime.zero import GatheredParameters

        gathered: AbstractContextManager[None] = GatheredParameters(list(self._module.parameters()))
        return gathered

    def kept(self) -> Iterator[Tensor]:
        """The states, DeepSpeed's own copy of the parameters of this part, its gradients, and of stage 3 its
        part of the parameters and a buffer for sums.
        """
        zero = self._split.zero
        yield from (
            zero.single_partition_of_fp32_groups if self._stage == 2 else zero.fp32_partitioned_groups_flat
        )
        yield from states_of(self.optimizer)
        yield from self._parts
        if self._stage == 3:
            yield from (p.ds_tensor for p in self._module.parameters())  # type: ignore[attr-defined]
            yield from (b.buffer for b in zero.ipg_buckets.values() if b.buffer is not None)

    def runs(self) -> Iterator[StateRun]:
        """They cannot be read yet."""
        raise self._unreadable()

    def set_trained(self, trained: Collection[nn.Parameter]) -> None:
        """They cannot be written yet."""
        raise self._unreadable()

    def take_parameters(self) -> None:
        """They cannot be written yet."""
        raise self._unreadable()

    def _unreadable(self) -> UnsupportedPlanError:
        return UnsupportedPlanError(
            f"the state of a job whose plan has ZeRO-{self._stage} can be neither saved nor moved: its parts "
            "lie as DeepSpeed packs them; set zero to 1 or 0 in the plan"
        )

    def close(self) -> None:
        """Let DeepSpeed go."""
        self._parts = []
        if self._group is not None:
            self._group = None
            self._split.close()
            if self._calls is not None:
                self._calls.close()

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

    def _refuse_unlike_calls(self) -> None:
        """Ranks that call other modules gather other parameters, which may even fit."""
        mine = 0 if self._calls is None else self._calls.number
        seen = torch.tensor([mine, -mine], device=self._device)
        dist.all_reduce(seen, dist.ReduceOp.MAX, group=self._group)
        highest, lowest = seen.tolist()
        if highest != -lowest:
            raise UnsupportedPlanError(
                "the ranks called other modules in this step, or in another order, but under ZeRO-3 they "
                "gather the parameters of each together; call all for every sample, or set zero to 2 or less"
            )

    def _refuse_unused(self) -> None:
        """Without a gradient on any rank it stays as it is in one process; here zeros would step it."""
        used = torch.zeros(len(self._ordered.used), dtype=torch.int32, device=self._device)
        used[[number for number, mine in enumerate(self._ordered.used) if mine]] = 1
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self._group)
        if not used.all():
            named = [name for name, p in self._module.named_parameters() if p.requires_grad]
            told = ", ".join(name for name, mine in zip(named, used.tolist(), strict=True) if not mine)
            raise UnsupportedPlanError(
                f"no sample of this step gives {told} a gradient; DeepSpeed's ZeRO-{self._stage} would step "
                "by zeros, unlike one process: freeze what is not used, or set zero to 1 or 0 in the plan"
            )


class _Ordered:
    """Hands gradients to DeepSpeed in one order on all ranks, from the last parameter down.

    It packs them as they come and sums the packs, but autograd may give those of a module in any order, and
    a parameter that no sample of a rank uses has none: zeros then stand in.
    """

    def __init__(
        self, zero: Any, parameters: Sequence[nn.Parameter], group: Mapping[int, tuple[int, ...]]
    ) -> None:
        """Take the place of two of DeepSpeed's methods; ``group``: what they want to know of a parameter."""
        self._parameters = parameters
        self._number = {id(p): number for number, p in enumerate(parameters)}
        self._waiting: dict[int, tuple[Any, ...]] = {}
        self._next = -1
        self.used = [False] * len(parameters)
        """Which had a gradient in this step."""
        self._reduce = zero.reduce_ready_partitions_and_remove_grads
        self._end = zero.independent_gradient_partition_epilogue
        self._group = group
        zero.reduce_ready_partitions_and_remove_grads = self._ready
        zero.independent_gradient_partition_epilogue = self._finish

    def begin(self) -> None:
        """A backward begins."""
        self._waiting.clear()
        self._next = len(self._parameters) - 1

    def _ready(self, parameter: nn.Parameter, *group: int) -> None:
        number = self._number[id(parameter)]
        self.used[number] = True
        self._waiting[number] = (parameter, *group)
        self._hand_over()

    def _hand_over(self) -> None:
        while self._next in self._waiting:
            self._reduce(*self._waiting.pop(self._next))
            self._next -= 1

    def _finish(self) -> None:
        """The backward has ended: zeros for what it did not reach, then the last sums."""
        while self._next >= 0:
            parameter = self._parameters[self._next]
            _give_zeros(parameter)
            self._waiting[self._next] = (parameter, *self._group.get(id(parameter), ()))
            self._hand_over()
        self._end()


def _give_zeros(parameter: nn.Parameter) -> None:
    """A gradient of the whole shape, which torch takes only while the data have it too."""
    held = parameter.data
    parameter.data = parameter.new_zeros(getattr(parameter, "ds_shape", parameter.shape))
    parameter.grad = torch.zeros_like(parameter)
    parameter.data = held


class _Calls:
    """Which modules were called, in order: stage 3 gathers the parameters of each, on all ranks together."""

    def __init__(self, module: nn.Module) -> None:
        self.number = 0
        """Of the calls of a step."""
        self._hooks = [
            each.register_forward_pre_hook(partial(self._note, index))
            for index, each in enumerate(module.modules())
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _note(self, index: int, module: nn.Module, inputs: Any) -> None:
        self.number = zlib.crc32(index.to_bytes(4, "little"), self.number)


def _number_from_zero() -> None:
    """DeepSpeed numbers modules and parameters by process and compares the numbers of ranks.

    A rank that had another engine before, or one that has just joined, would begin with others.
    """
    from deepspeed.runtime.zero import Init
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    Init.param_id = 0
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
