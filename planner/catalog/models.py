"""Models by name: their spec and the measurements that the wheel carries, each file with its source."""

from functools import cache
from importlib import resources

import msgspec

from arachne_runtime.errors import UsageError
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.profile import Profile

from .packed import Entry

_DATA = "data"


def model(name: str) -> ModelSpec:
    """The spec of a model of the catalog; UsageError, with the known ones, where there is none."""
    packed = entry(name).model
    assert packed is not None
    return packed.unpack()


@cache
def profile(name: str) -> Profile:
    """The measurements of a model of the catalog; UsageError, with the known ones, where there is none."""
    return entry(name).profiles[0].unpack(name)


def model_names() -> tuple[str, ...]:
    """Every model of the catalog."""
    files = (resources.files(__package__) / _DATA).iterdir()
    return tuple(sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json")))


@cache
def entry(name: str) -> Entry:
    """The whole data file of a model."""
    if name not in model_names():
        raise UsageError(f"no model named {name!r} in the catalog; known: {', '.join(model_names())}")
    file = resources.files(__package__) / _DATA / f"{name}.json"
    return msgspec.json.decode(file.read_bytes(), type=Entry)
