"""Models by name or from a Hugging Face ``config.json``: counted, or as who measured them built them."""

from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from arachne_runtime.errors import InvalidFileError, Problem, UsageError
from arachne_runtime.plan.document import Document
from arachne_runtime.plan.model import ModelSpec

from .configs import architecture
from .counting import ELEMENT_BYTES, count
from .entries import entry, measured_names
from .names import unknown

DTYPE = "bfloat16"
"""Of a counted model where none is given."""
SEQUENCE = 2048
"""Tokens of a counted model where none are given, or fewer where its learned positions end before."""


class Named(Document, frozen=True, kw_only=True):
    """A model of models.toml."""

    published: int | None = None
    """Parameters; None: the model is not published."""
    active: int | None = None
    """Parameters that work on a token, rounded; only where experts are."""
    source: str
    """Who publishes it."""
    config: dict[str, Any]
    """The fields of its config.json that counting needs."""


def model(
    name: str, *, sequence: int | None = None, dtype: str | None = None, half_layers: bool = False
) -> ModelSpec:
    """The spec of a model of the catalog.

    What a source measured under this name is meant where it states sequence and dtype (or neither is given);
    otherwise the published model is counted. ``half_layers`` makes attention and MLP blocks of their own, and
    always counts. UsageError, with the known names, where there is none.
    """
    named = named_model(name)
    if not half_layers:
        built = _as_built(name, sequence, dtype)
        if built is not None:
            return built
    sequence, dtype = _defaults(name, named, sequence, dtype)
    return count(architecture(name, named.config), sequence=sequence, dtype=dtype, half_layers=half_layers)


def model_from_config(
    config: Path | Mapping[str, Any],
    *,
    sequence: int,
    dtype: str | None = None,
    half_layers: bool = False,
    name: str | None = None,
) -> ModelSpec:
    """A model by counting from its config.json; UsageError for a family or a field that is not known.

    Trained in the dtype that it states where none is given, and in bfloat16 where it states none.
    """
    if isinstance(config, Path):
        name = name or (config.parent.name if config.stem == "config" else config.stem)
        config = _read(config)
    title = name or str(config.get("_name_or_path") or config.get("model_type"))
    dtype = dtype or stated_dtype(config) or DTYPE
    return count(architecture(title, config), sequence=sequence, dtype=dtype, half_layers=half_layers)


def stated_dtype(config: Path | Mapping[str, Any]) -> str | None:
    """The ``dtype`` (in older files ``torch_dtype``) of a config.json; None where it leaves it open.

    UsageError for one that is not known.
    """
    if isinstance(config, Path):
        config = _read(config)
    field = "dtype" if config.get("dtype") is not None else "torch_dtype"
    stated = config.get(field)
    if stated in (None, "auto"):
        return None
    dtype = str(stated).removeprefix("torch.")
    if dtype not in ELEMENT_BYTES:
        raise UsageError(
            f"config.json: its {field} {stated!r} is not known; known: {', '.join(ELEMENT_BYTES)}; change "
            f"it to what the training computes in, or leave it out"
        )
    return dtype


def config(name: str) -> Mapping[str, Any]:
    """What the catalog knows of a model's config.json."""
    return named_model(name).config


def named_model(name: str) -> Named:
    """The catalog's line for a model; UsageError, with the known names, where there is none."""
    if name not in _named():
        raise unknown("the catalog has no model", name, "known", model_names())
    return _named()[name]


def model_names() -> tuple[str, ...]:
    """Every model of the catalog."""
    return tuple(_named())


@cache
def _named() -> dict[str, Named]:
    raw = (resources.files(__package__) / "models.toml").read_bytes()
    return msgspec.toml.decode(raw, type=dict[str, Named])


def _as_built(name: str, sequence: int | None, dtype: str | None) -> ModelSpec | None:
    """The spec that a source of measurements built in its own way, where the question fits it."""
    if name not in measured_names():
        return None
    packed = entry(name).model
    if packed is None or packed.name != name:
        return None
    asked = (sequence or packed.sequence, dtype or packed.dtype)
    return packed.unpack() if asked == (packed.sequence, packed.dtype) else None


def _defaults(name: str, named: Named, sequence: int | None, dtype: str | None) -> tuple[int, str]:
    """What was measured of the published model and fits the question, else common values."""
    found = entry(name) if name in measured_names() else None
    for packed in found.profiles if found and found.model is None else ():
        if sequence in (None, packed.sequence) and dtype in (None, packed.dtype):
            return packed.sequence, packed.dtype
    longest = named.config.get("max_position_embeddings", named.config.get("n_positions"))
    return sequence or min(SEQUENCE, longest or SEQUENCE), dtype or DTYPE


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise InvalidFileError(str(path), [Problem("$", str(error))]) from None
    if not isinstance(found, dict):
        raise InvalidFileError(str(path), [Problem("$", "is not an object; give a model's config.json")])
    return found
