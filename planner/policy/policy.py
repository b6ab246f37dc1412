"""Weights with what they were trained on: to and from one file, which holds arrays and no code."""

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from arachne_runtime.errors import InvalidFileError, PolicyMissingError, PolicyStaleError, Problem
from arachne_runtime.plan.document import Document
from arachne_runtime.plan.files import write_whole

from .decision import Floats
from .features import FEATURES_VERSION
from .network import initial_parameters, sizes

WEIGHTS = Path(__file__).parent / "weights" / "policy.npz"
"""The weights that ship."""

META = "meta"
"""Name of the entry that says what the others are."""


class Architecture(Document, frozen=True, kw_only=True):
    """What the network looks like."""

    hidden: int = 64
    """Width of every hidden layer."""
    film: bool = True
    """Whether the site scales and shifts hidden layers."""


class Meta(Document, frozen=True, kw_only=True):
    """Beside the weights."""

    format: Literal["arachne.policy/1"] = "arachne.policy/1"
    features: int = FEATURES_VERSION
    """Version of the features that the weights know."""
    architecture: Architecture = Architecture()
    trained: str = "not trained"
    """On what, how and when, in words."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A network's parameters, ready to use."""

    parameters: Mapping[str, Floats]
    meta: Meta

    @classmethod
    def new(cls, seed: int, architecture: Architecture | None = None) -> "Policy":
        """With random weights."""
        made = architecture or Architecture()
        return cls(initial_parameters(seed, hidden=made.hidden, film=made.film), Meta(architecture=made))

    @classmethod
    def load(cls, path: Path | None = None) -> "Policy":
        """From a file, by default the shipped one.

        Raises PolicyMissingError without a file, PolicyStaleError where it belongs to other features, and
        InvalidFileError where it is not such a file.
        """
        path = path or WEIGHTS
        if not path.is_file():
            raise PolicyMissingError(
                f"no weights of the learned policy at {path}; make them with `arachne learn`, or plan without"
            )
        arrays = _arrays(path)
        policy = cls({n: a for n, a in arrays.items() if n != META}, _meta(path, arrays))
        _check_shapes(path, policy)
        return policy

    def save(self, path: Path) -> None:
        """To a file, whole or not at all; the same weights give the same bytes."""
        content = io.BytesIO()
        words = msgspec.json.encode({"format": self.meta.format, **_plain(self.meta)})
        arrays: dict[str, NDArray[Any]] = {META: np.frombuffer(words, np.uint8)}
        arrays.update(sorted(self.parameters.items()))
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, array in arrays.items():
                entry = io.BytesIO()
                np.save(entry, array, allow_pickle=False)
                # without a date, which is 1980 then
                archive.writestr(zipfile.ZipInfo(f"{name}.npy"), entry.getvalue(), zipfile.ZIP_DEFLATED)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content.getvalue())


def _plain(meta: Meta) -> dict[str, object]:
    """All fields: a reader of another version has other defaults."""
    return {
        "features": meta.features,
        "architecture": {"hidden": meta.architecture.hidden, "film": meta.architecture.film},
        "trained": meta.trained,
    }


def _arrays(path: Path) -> dict[str, Floats]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidFileError(str(path), [Problem("$", f"holds no weights of a policy: {error}")]) from error


def _meta(path: Path, arrays: Mapping[str, Floats]) -> Meta:
    try:
        raw = msgspec.json.decode(arrays[META].tobytes() if META in arrays else b"{}")
        version = raw.get("features") if isinstance(raw, dict) else None
        if isinstance(version, int) and version != FEATURES_VERSION:
            raise PolicyStaleError(
                f"weights of the learned policy at {path} know features of version {version}, this program "
                f"has version {FEATURES_VERSION}; make new ones with `arachne learn`, or plan without"
            )
        return msgspec.convert({"features": None, **raw}, Meta)
    except (msgspec.DecodeError, msgspec.ValidationError, TypeError) as error:
        raise InvalidFileError(str(path), [Problem(f"$.{META}", str(error))]) from error


def _check_shapes(path: Path, policy: Policy) -> None:
    """Every layer is there, with numbers."""
    made = policy.meta.architecture
    wanted: dict[str, tuple[int, ...]] = {}
    for name, (inputs, outputs) in sizes(made.hidden, film=made.film).items():
        wanted[f"{name}.weight"], wanted[f"{name}.bias"] = (inputs, outputs), (outputs,)
    problems = [
        Problem(f"$.{name}", f"has shape {shape}, not {wanted.get(name, 'any: it is unknown')}")
        for name in sorted({*wanted, *policy.parameters})
        if (shape := np.shape(policy.parameters[name]) if name in policy.parameters else None)
        != wanted.get(name)
    ]
    problems += [
        Problem(f"$.{name}", "has values that are no finite float32 numbers")
        for name, array in policy.parameters.items()
        if array.dtype != np.float32 or not np.isfinite(array).all()
    ]
    if problems:
        raise InvalidFileError(str(path), problems)
