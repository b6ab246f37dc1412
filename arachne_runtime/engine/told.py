"""Says of an error on which rank, at what and in which step it happened."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..plan.placement import Place


@contextmanager
def told(places: Sequence[Place], where: str, step: int, stage: int | None = None) -> Iterator[None]:
    """An error leaves with a note of who was doing what; ``stage`` of several, if one was."""
    try:
        yield
    except Exception as error:
        place = next((p for p in places if p.stage == stage), places[0])
        who = f"rank {place.rank} ({place.device}), stage {place.stage} of pipeline {place.pipeline}"
        error.add_note(f"{who}, at {where}, in step {step}")
        raise
