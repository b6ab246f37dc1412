"""Refuses a change of plan that needs what no living process holds; alike on every process."""

from collections.abc import Sequence

from ..errors import LostStateError
from ..plan.moves import Moves
from .words import Word

_NAMES_SAID = 4
"""So many in an error."""


def refuse_lost(moves: Moves) -> None:
    """LostStateError where a part has no source."""
    if moves.lost:
        names = tuple(dict.fromkeys(lost.name.partition(":")[0] for lost in moves.lost))
        needed = sorted({process for lost in moves.lost for process in lost.targets})
        raise LostStateError(
            f"the job keeps its plan: nobody has {_said(names)}, which process {needed[0]} would need; go "
            "back to a snapshot, or load a checkpoint",
            names,
        )


def refuse_lost_shards(words: Sequence[Word]) -> None:
    """LostStateError where a rank is missing that ZeRO gave a part of the states of others.

    Nobody tells of the states that only that rank had: they would look as if nothing had been trained.
    """
    shards = [shard for word in words if word.progress is not None for shard in word.progress.shards]
    there = {shard[0] for shard in shards}
    missing = sorted({rank for shard in shards for rank in shard[1:]} - there)
    if missing:
        raise LostStateError(
            "the job keeps its plan: nobody has the optimizer states that ZeRO gave to rank "
            f"{missing[0]} of the old one; go back to a snapshot, or load a checkpoint"
        )


def _said(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SAID} more" if len(names) > _NAMES_SAID else ""
    return ", ".join(names[:_NAMES_SAID]) + more
