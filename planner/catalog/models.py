"""Models by name: their spec and the measurements that the wheel carries, each file with its source."""

from functools import cache
from importlib import resources

import msgspec

from arachne_runtime.errors import UsageError
from arachne_runtime.plan.document import Document
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.profile import Profile


class Entry(Document, frozen=True, kw_only=True):
    """One data file of the catalog."""

    source: str
    """Repository, commit and files that the figures come from."""
    licence: str
    notes: str
    """What was done to the figures, and what is known to be wrong with them."""
    model: ModelSpec
    profile: Profile


def model(name: str) -> ModelSpec:
    """The spec of a model of the catalog; UsageError, with the known ones, where there is none."""
    return entry(name).model


def profile(name: str) -> Profile:
    """The measurements of a model of the catalog; UsageError, with the known ones, where there is none."""
    return entry(name).profile


def model_names() -> tuple[str, ...]:
    """Every model of the catalog."""
    files = resources.files(__package__).iterdir()
    return tuple(sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json")))


@cache
def entry(name: str) -> Entry:
    """The whole data file of a model."""
    if name not in model_names():
        raise UsageError(f"no model named {name!r} in the catalog; known: {', '.join(model_names())}")
    return msgspec.json.decode((resources.files(__package__) / f"{name}.json").read_bytes(), type=Entry)
