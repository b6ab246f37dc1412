"""What processes tell one another before and after a change of plan; nothing that is read is a pickle."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ..errors import ReplanError
from ..measure.together import Together
from ..plan.moves import Kept
from ..plan.shards import Part
from .carry import label
from .holdings import VALUE, Holding, Scalar, States, dtype_called, dtype_name
from .job import Positions, RandomState

Runs = tuple[tuple[tuple[int, int], ...], ...]
"""Of each dim, where runs start and stop."""


class Told(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A part that a process has, or is to have."""

    name: str
    key: str
    label: str
    shape: tuple[int, ...]
    dtype: str
    runs: Runs
    is_buffer: bool = False

    @classmethod
    def of(cls, holding: Holding) -> "Told":
        """Of a holding."""
        runs = tuple(tuple((run.start, run.stop) for run in dim) for dim in holding.part)
        dtype = dtype_name(holding.tensor.dtype)
        return cls(holding.name, holding.key, label(holding), holding.shape, dtype, runs, holding.is_buffer)

    @property
    def part(self) -> Part:
        """Which part it is."""
        return tuple(tuple(range(start, stop) for start, stop in dim) for dim in self.runs)


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an optimizer and its learning-rate schedule go by."""

    groups: tuple[dict[str, Any], ...]
    """Of each parameter group: all but its parameters."""
    schedule: dict[str, Any] | None
    """State of the schedule."""


class Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a process has come; all that hold any state say the same, but for ``shards`` and ``notes``."""

    num_steps: int
    """Done."""
    scale: tuple[float, int, int] | None = None
    """Of the losses, in float16: the fields of ``LossScale``."""
    feeds: Positions = ()
    notes: bytes = b""
    """What else a joiner is to hear, as the first of the others says it."""
    shards: tuple[tuple[int, ...], ...] = ()
    """Of each rank whose states are here and were split by ZeRO: its rank, then those of all that split."""


class Word(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one process says in one round."""

    fault: str = ""
    """Why it cannot go on."""
    parts: tuple[Told, ...] = ()
    scalars: dict[str, dict[str, Scalar]] = {}
    """Numbers of the optimizer, by parameter and key."""
    frozen: tuple[str, ...] = ()
    """Parameters that were frozen since the engine was made."""
    settings: bytes = b""
    """``Settings`` as a message; nothing on a process that has none, or such as no message holds."""
    progress: Progress | None = None
    """None on a process that holds nothing."""
    is_new: bool = False
    """Whether it has not trained yet, though it may hold what was brought to it."""
    random: RandomState | None = None
    """For a joiner, of a process that has trained."""


def agreed(together: Together, action: Callable[[], Word]) -> tuple[Word, ...]:
    """The words of all processes, after each has done its ``action``.

    Raises:
        ReplanError: On every process, where the action of any failed.

    """
    error = None
    try:
        mine = action()
    except Exception as caught:
        error, mine = caught, Word(fault=f"{type(caught).__name__}: {caught}")
    words = tuple(_DECODER.decode(each) for each in together.gather(msgspec.msgpack.encode(mine)))
    faults = {process: word.fault for process, word in enumerate(words) if word.fault}
    if faults:
        said = "; ".join(f"process {process}: {fault}" for process, fault in faults.items())
        raise ReplanError(f"the job keeps its plan: {said}", tuple(faults)) from error
    return words


def first_unlike(told: Sequence[bytes]) -> int | None:
    """The first process that was given something else than process 0; None where all agree."""
    return next((process for process, each in enumerate(told) if each != told[0]), None)


def progress_of(words: Sequence[Word]) -> Progress:
    """What all that hold any state have done; ReplanError, alike on every process, where they differ."""
    told = [(process, word.progress) for process, word in enumerate(words) if word.progress is not None]
    if not told:
        raise ReplanError("no process holds any state; load a checkpoint")
    first, progress = told[0]
    for process, other in told[1:]:
        if (other.num_steps, other.scale, other.feeds) != (
            progress.num_steps,
            progress.scale,
            progress.feeds,
        ):
            raise ReplanError(
                f"processes {first} and {process} are not between the same two steps: {_said(progress)}, and "
                f"{_said(other)}; the job keeps its plan"
            )
    return progress


def _said(progress: Progress) -> str:
    places = [feed.steps if feed is not None else 0 for feed in progress.feeds]
    return f"{progress.num_steps} steps done, at {places} of its data, loss scale {progress.scale}"


def states_told(words: Iterable[Word]) -> dict[str, States]:
    """Which states the parameters have, from the words of all; a parameter without any is not there."""
    dtypes: dict[str, dict[str, Any]] = {}
    scalars: dict[str, Mapping[str, Scalar]] = {}
    for word in words:
        scalars |= word.scalars
        for told in word.parts:
            if told.key != VALUE:
                dtypes.setdefault(told.name, {})[told.key] = dtype_called(told.dtype)
    names = dict.fromkeys((*dtypes, *scalars))
    return {name: States(dtypes=dtypes.get(name, {}), scalars=scalars.get(name, {})) for name in names}


def kept_of(before: Sequence[Word], after: Sequence[Word]) -> tuple[Kept, ...]:
    """Who has and who needs what, from the words of all."""
    had, needed = parts_by_label(before), parts_by_label(after)
    tellings = {told.label: told for words in (after, before) for word in words for told in word.parts}
    return tuple(
        Kept(
            name=name,
            shape=tellings[name].shape,
            itemsize=dtype_called(tellings[name].dtype).itemsize,
            before=had.get(name, {}),
            after=needed[name],
        )
        for name in sorted(needed)
    )


def parts_by_label(words: Sequence[Word]) -> dict[str, dict[int, tuple[Part, ...]]]:
    """By label of the whole tensor and process, the parts that are told."""
    found: dict[str, dict[int, tuple[Part, ...]]] = {}
    for process, word in enumerate(words):
        for told in word.parts:
            parts = found.setdefault(told.label, {})
            parts[process] = (*parts.get(process, ()), told.part)
    return found


_DECODER = msgspec.msgpack.Decoder(Word)
