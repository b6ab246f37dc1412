"""ZeRO-1: the engine sums gradients over all holders, the replicas of a stage split their optimizer states.

DeepSpeed is given the finished sums of this rank's part, so it communicates once: to hand round the
parameters that each rank has stepped.
"""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import UnsupportedPlanError, UsageError
from .deepspeed import Split, load
from .protocol import GradientSums, StateRun, states_of

DTYPES: Mapping[int, tuple[torch.dtype, ...]] = {
    1: (torch.float32, torch.float64, torch.bfloat16),
    2: (torch.float32,),
    3: (torch.float32,),
}
"""Of parameters that can be split, by stage of ZeRO. In the first, states are kept in the parameters' own
dtype, as torch's optimizers do; in the others DeepSpeed sums and steps in float32 here: bfloat16 would get
float32 copies, float64 would lose digits."""
PLACEHOLDER_PER_RANK = 2
"""Elements a rank of what stands in an empty parameter group: DeepSpeed pads to two of each rank."""


class SplitStates:
    """A rank's optimizer, whose states are a part of the stage's: DeepSpeed's ZeRO-1."""

    sums: GradientSums | None = None

    def __init__(self, split: Split, names: dict[int, str], group: dist.ProcessGroup) -> None:
        self.optimizer: Optimizer = split.zero.optimizer
        self._split = split
        self._names = names
        self._group: dist.ProcessGroup | None = group
        self._place = dist.get_rank(group)
        """Which part is this rank's."""
        self._num_steps = 0
        self._num_trained: dict[int, int] = {}
        """Steps with a gradient, by id of the parameter."""
        self._idle: dict[int, list[range]] = {}
        """By parameter group: elements of this rank's part without a gradient in this step."""
        self._kept: list[_Kept] = []
        self._hooks = (
            self.optimizer.register_step_pre_hook(self._keep),
            self.optimizer.register_step_post_hook(self._restore),
        )

    @classmethod
    def of(
        cls,
        named: Sequence[tuple[str, nn.Parameter]],
        optimizer: Optimizer,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> "SplitStates":
        """Split the states of ``optimizer`` over ``group``, whose ranks have equal parameters.

        Raises:
            UnsupportedPlanError: A parameter group with several dtypes, or one that is not supported; an
                optimizer that has states before its first step.

        """
        prepare(optimizer, 1, device)
        _fill_empty_groups(optimizer, like=named[0][1], num_ranks=dist.get_world_size(group))
        held = nn.ParameterList(p for g in optimizer.param_groups for p in g["params"])
        settings = {"zero_optimization": {"compute_grad_norm": False, "contiguous_gradients": False}}
        split = Split.of(held, optimizer, stage=1, group=group, device=device, settings=settings)
        for hook in split.zero._grad_acc_hooks:  # the engine sums gradients, so DeepSpeed must not take them
            hook.remove()
        _keep_dtype(split, dist.get_rank(group))
        return cls(split, {id(p): name for name, p in named}, group)

    def step(self) -> None:
        """Step this rank's part and hand it round; gradients stay readable.

        A parameter without a gradient stays as it is, and so does its state, as in torch.

        Raises:
            UnsupportedPlanError: A parameter has a gradient in some steps only, where steps count.

        """
        zero = self._split.zero
        parameters = [p for group in zero.bit16_groups for p in group]
        gradients = [p.grad for p in parameters]
        self._count(parameters)
        for number, group in enumerate(zero.bit16_groups):
            zero.averaged_gradients[number] = list(self._part(number, group))  # then DeepSpeed frees .grad
        self._split.step()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    def whole(self) -> AbstractContextManager[None]:
        """Only the states are split."""
        return nullcontext()

    def take_parameters(self) -> None:
        """Step from the parameters as they are now; a script may have loaded others.

        Raises:
            UsageError: They are in other memory now, at which DeepSpeed does not look.

        """
        zero = self._split.zero
        for number, group in enumerate(zero.bit16_groups):
            home = zero.bit16_groups_flat[number].untyped_storage().data_ptr()
            for parameter in group:
                if parameter.untyped_storage().data_ptr() != home:
                    raise UsageError(
                        f"{self._names[id(parameter)]} is in other memory than when the optimizer was split; "
                        "move and convert the model before, and load values in place (load_state_dict)"
                    )
            part = zero.parallel_partitioned_bit16_groups[number][self._place]
            zero.single_partition_of_fp32_groups[number].data.copy_(part)

    def whole_states(self) -> dict[int, dict[str, Any]]:
        """States by id of the parameter, on every rank; all call it together.

        A parameter that has never had a gradient has none.
        """
        found: dict[int, dict[str, Any]] = {}
        zero = self._split.zero
        for group, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
            state = self.optimizer.state.get(flat, {})
            whole = {key: self._gathered(v) for key, v in state.items() if _is_by_element(v, flat)}
            stop = 0
            for parameter in group:
                start, stop = stop, stop + parameter.numel()
                if id(parameter) in self._num_trained:
                    found[id(parameter)] = {
                        key: whole[key][start:stop].clone().view(parameter.shape)
                        if key in whole
                        else copy.deepcopy(value)
                        for key, value in state.items()
                    }
        return found

    def take_states(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Go on from whole states, by id of the parameter.

        Raises:
            UnsupportedPlanError: Parameters of one group have taken unlike numbers of steps.

        """
        zero = self._split.zero
        for number, group in enumerate(zero.bit16_groups):
            flat = zero.single_partition_of_fp32_groups[number]
            held = self._empty_state([(p, states[id(p)]) for p in group if id(p) in states], flat)
            for parameter, mine, inside in _inside(group, self._place, int(zero.partition_size[number])):
                for key, value in states.get(id(parameter), {}).items():
                    if _is_by_element(held[key], flat):
                        held[key][mine.start : mine.stop] = value.reshape(-1)[inside]
            self.optimizer.state[flat] = held
        self._num_trained = dict.fromkeys(states, 1)
        self._num_steps = 1 if states else 0

    def _empty_state(
        self, given: Sequence[tuple[nn.Parameter, Mapping[str, Any]]], flat: Tensor
    ) -> dict[str, Any]:
        """Zeros for what is by element, and what all parameters have alike."""
        held: dict[str, Any] = {}
        by_element = {key for _, state in given for key in state}
        for parameter, state in given:  # of a parameter of shape () the number of steps has that shape too
            by_element -= {key for key, value in state.items() if not _is_by_element(value, parameter)}
        for parameter, state in given:
            for key, value in state.items():
                if key in by_element:
                    held.setdefault(key, torch.zeros_like(flat, requires_grad=False))
                elif held.setdefault(key, copy.deepcopy(value)) != value:
                    raise UnsupportedPlanError(
                        f"{key} of {self._names[id(parameter)]} is {value}, of others in its group "
                        f"{held[key]}; DeepSpeed's ZeRO-1 has one for all of a group: do without ZeRO"
                    )
        return held

    def _gathered(self, part: Tensor) -> Tensor:
        whole = part.new_empty(dist.get_world_size(self._group) * part.numel())
        dist.all_gather_into_tensor(whole, part, group=self._group)
        return whole

    def kept(self) -> Iterator[Tensor]:
        """The states, and DeepSpeed's own copy of the parameters of this part."""
        yield from self._split.zero.single_partition_of_fp32_groups
        yield from states_of(self.optimizer)

    def runs(self) -> Iterator[StateRun]:
        """The elements of this rank's part, by parameter."""
        zero = self._split.zero
        for number, group in enumerate(zero.bit16_groups):
            flat, size = zero.single_partition_of_fp32_groups[number], int(zero.partition_size[number])
            for parameter, mine, inside in _inside(group, self._place, size):
                if id(parameter) in self._names:  # else it stands in for an empty group
                    elements, here = range(inside.start, inside.stop), slice(mine.start, mine.stop)
                    trained = bool(self._num_trained.get(id(parameter)))
                    yield StateRun(parameter, elements, flat, here, is_trained=trained)

    def set_trained(self, trained: Collection[nn.Parameter]) -> None:
        """Count their steps anew, from one."""
        self._num_steps = int(bool(trained))
        self._num_trained = {id(parameter): 1 for parameter in trained}

    def close(self) -> None:
        """Let DeepSpeed go."""
        for hook in self._hooks:
            hook.remove()
        self._group = None
        self._split.close()

    def _count(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is None:
                continue
            found = self._num_trained.get(id(parameter), 0)
            if found != self._num_steps and self._counts_steps():
                raise UnsupportedPlanError(
                    f"{self._names[id(parameter)]} has a gradient in step {self._num_steps}, but had none in "
                    f"{self._num_steps - found} of the steps before; {type(self.optimizer).__name__} counts "
                    "steps, and DeepSpeed's ZeRO-1 counts them once for all parameters, unlike one process; "
                    "do without ZeRO, or use the parameter in every step"
                )
            self._num_trained[id(parameter)] = found + 1
        self._num_steps += 1

    def _counts_steps(self) -> bool:
        """Whether a parameter's update depends on how many came before, beside its elements' own states."""
        flats = self._split.zero.single_partition_of_fp32_groups
        if any(group.get("dampening") for group in self.optimizer.param_groups):
            return True
        return any(not _is_by_element(v, flat) for flat in flats for v in self.optimizer.state[flat].values())

    def _part(self, number: int, group: Sequence[nn.Parameter]) -> Iterator[Tensor]:
        """The gradients of this rank's part of a parameter group, flat, zeros where there are none."""
        size, stop = int(self._split.zero.partition_size[number]), 0
        like = self._split.zero.single_partition_of_fp32_groups[number]
        self._idle[number] = []
        for parameter, mine, inside in _inside(group, self._place, size):
            stop = mine.stop
            if parameter.grad is None:
                self._idle[number].append(mine)
                yield like.new_zeros(len(mine))
            else:
                yield parameter.grad.reshape(-1)[inside]
        if stop < size:
            yield like.new_zeros(size - stop)

    def _keep(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Before the step of one parameter group: what must not change with it."""
        (flat,) = optimizer.param_groups[0]["params"]
        number = next(i for i, f in enumerate(self._split.zero.single_partition_of_fp32_groups) if f is flat)
        self._kept = [_Kept.of(flat, optimizer.state[flat], span) for span in self._idle[number]]

    def _restore(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for kept in self._kept:
            kept.restore(optimizer.state[kept.flat])
        self._kept = []


class _Kept:
    """A run of elements of a flat parameter that a step must leave alone, with their states."""

    def __init__(self, flat: Tensor, span: slice, values: Tensor, states: dict[str, Tensor]) -> None:
        self.flat, self._span, self._values, self._states = flat, span, values, states

    @classmethod
    def of(cls, flat: Tensor, state: dict[str, Any], where: range) -> "_Kept":
        span = slice(where.start, where.stop)
        states = {key: v[span].clone() for key, v in state.items() if _is_by_element(v, flat)}
        return cls(flat, span, flat.detach()[span].clone(), states)

    def restore(self, state: dict[str, Any]) -> None:
        """Put all back; a state that did not exist before begins with zeros."""
        self.flat.detach()[self._span] = self._values
        for key, value in state.items():
            if _is_by_element(value, self.flat):
                value[self._span] = self._states.get(key, 0)


def prepare(optimizer: Optimizer, zero: int, device: torch.device) -> None:
    """All that can fail on one rank alone before ranks split ``optimizer`` together.

    Raises:
        UnsupportedPlanError: It cannot be split.
        UnsupportedEnvironmentError: DeepSpeed is missing, or computes on another type of device.

    """
    _refuse_dtypes(optimizer, DTYPES[zero], zero=zero)
    _refuse_early_states(optimizer)
    load(device)


def _refuse_dtypes(optimizer: Optimizer, allowed: Sequence[torch.dtype], *, zero: int) -> None:
    """Refuse parameters that DeepSpeed cannot put into one flat tensor of their own dtype."""
    for number, group in enumerate(optimizer.param_groups):
        found = sorted({str(p.dtype) for p in group["params"]})
        if len(found) > 1 or not all(p.dtype in allowed for p in group["params"]):
            raise UnsupportedPlanError(
                f"parameter group {number} of the optimizer holds {', '.join(found)}; ZeRO-{zero} needs one "
                f"dtype in a group, of {', '.join(map(str, allowed))}: pass dtype=, make a group for each "
                "dtype, or do without ZeRO"
            )


def _refuse_early_states(optimizer: Optimizer) -> None:
    """Refuse states that DeepSpeed would lose, with the settings of all groups but the first (Adagrad)."""
    if optimizer.state:
        raise UnsupportedPlanError(
            f"{type(optimizer).__name__} makes its states before the first step, which DeepSpeed's ZeRO "
            "cannot split; use one of the SGD or Adam families, or do without ZeRO"
        )


def _fill_empty_groups(optimizer: Optimizer, like: Tensor, num_ranks: int) -> None:
    """DeepSpeed fails on a parameter group that has no parameter in this stage: zeros stand in."""
    for group in optimizer.param_groups:
        if not group["params"]:
            group["params"] = [nn.Parameter(like.new_zeros(PLACEHOLDER_PER_RANK * num_ranks))]


def _keep_dtype(split: Split, place: int) -> None:
    """DeepSpeed keeps copies of the parameters in float32; here they take the parameters' dtype."""
    zero = split.zero
    flats = zip(zero.single_partition_of_fp32_groups, zero.parallel_partitioned_bit16_groups, strict=True)
    for flat, parts in flats:
        if flat.dtype != parts[place].dtype:
            flat.data = parts[place].detach().clone()


def _inside(
    group: Sequence[nn.Parameter], place: int, size: int
) -> Iterator[tuple[nn.Parameter, range, slice]]:
    """Parameters of which part ``place`` (``size`` elements) has some: which of its, which of theirs."""
    start = 0
    for parameter in group:
        low, high = max(start, place * size), min(start + parameter.numel(), (place + 1) * size)
        if low < high:
            yield parameter, range(low - place * size, high - place * size), slice(low - start, high - start)
        start += parameter.numel()


def _is_by_element(value: Any, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape
