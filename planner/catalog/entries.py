"""Data files of the catalog: what was measured of a model, by whom, and what is missing."""

from functools import cache
from importlib import resources

import msgspec

from arachne_runtime.plan.profile import Profile

from .names import unknown
from .packed import Entry

_DATA = "data"


@cache
def measured_names() -> tuple[str, ...]:
    """Models of which the catalog holds measurements."""
    files = (resources.files(__package__) / _DATA).iterdir()
    return tuple(sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json")))


@cache
def entry(name: str) -> Entry:
    """The whole data file of a model; UsageError, with those that were measured, where there is none."""
    if name not in measured_names():
        raise unknown("the catalog holds no measurements of a model", name, "measured", measured_names())
    file = resources.files(__package__) / _DATA / f"{name}.json"
    return msgspec.json.decode(file.read_bytes(), type=Entry)


@cache
def profile(name: str) -> Profile:
    """What was measured of a model, without estimates, at the sequence and dtype that its entry puts first.

    Where the source built a model of its own, the profile bears that model's name. UsageError, with those
    that were measured, where there is none.
    """
    found = entry(name)
    return found.profiles[0].unpack(found.model.name if found.model else name)
