"""Says of an error on which rank, at what and in which step it happened."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..plan.placement import Place, holding, places_of
from ..plan.plan import Plan

if TYPE_CHECKING:
    from .engine import Engine


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


def annotate(error: BaseException, plan: Plan | None, rank: int, engine: "Engine | None") -> None:
    """Say which rank an error leaves, unless its engine has said so, or there is no plan yet."""
    if plan is None or any(note.startswith("rank ") for note in getattr(error, "__notes__", ())):
        return
    place = engine.places[0] if engine is not None else places_of(plan, rank)[0]
    first, stop = holding(plan, place)[1].layers
    error.add_note(
        f"rank {rank} of {len(plan.devices)} ({place.device}), stage {place.stage} of pipeline "
        f"{place.pipeline}, blocks {first}:{stop}"
    )
