"""``arachne status`` in words: of a whole look, and of one line for each change."""

import time
from collections.abc import Iterator

import msgspec

from arachne_runtime.membership.messages import Status


class StatusAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--json`` prints: every field is there."""

    job: str
    phase: str
    generation: int
    plan: str
    members: tuple[str, ...]
    idle: tuple[str, ...]
    suspected: tuple[str, ...]
    why: str
    step: int
    samples_per_s: float


def status_json(job: str, status: Status) -> str:
    """One line."""
    fields = {name: getattr(status, name) for name in StatusAnswer.__struct_fields__ if name != "job"}
    return msgspec.json.encode(StatusAnswer(job=job, **fields)).decode()


def status_text(job: str, status: Status) -> str:
    """A block for a person."""
    rows = [f"job {job}: {status.phase}, generation {status.generation}"]
    return "\n".join([*rows, *(f"  {name:<9} {words}" for name, words in _rows(status) if words)])


def status_line(status: Status) -> str:
    """One line, with the time of day."""
    speed = _speed(status)
    parts = [
        f"{status.phase}, generation {status.generation} of {len(status.members)}",
        f"idle: {', '.join(status.idle)}" if status.idle else "",
        f"silent: {', '.join(status.suspected)}" if status.suspected else "",
        speed,
        status.why,
    ]
    return f"{time.strftime('%H:%M:%S')}  " + "; ".join(part for part in parts if part)


def _rows(status: Status) -> Iterator[tuple[str, str]]:
    yield "plan", status.plan
    yield "members", ", ".join(status.members)
    yield "idle", ", ".join(status.idle)
    yield "silent", ", ".join(f"node {node}" for node in status.suspected)
    yield "speed", _speed(status)
    yield "since", status.why


def _speed(status: Status) -> str:
    """Nothing before the first member has told of a step."""
    if not status.step:
        return ""
    return f"step {status.step}, {status.samples_per_s:.3g} samples/s"
