"""What verbs take from the command line: a model or a profile, by file or by its name in the catalog."""

import json
from pathlib import Path

from arachne_runtime.errors import InvalidFileError, Problem, UsageError
from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.files import read_model, read_profile
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.profile import Profile


def model_from(text: str, sequence: int | None = None) -> ModelSpec:
    """A model.json, a config.json, a folder of either, or a model of the catalog, of ``sequence`` tokens.

    UsageError, with the known names, where there is none; a model.json has its own number of tokens.
    """
    from planner import catalog

    if not is_file_name(text):
        return catalog.model(text, sequence=sequence)
    path = _file_of(Path(text))
    if not _is_config(path):
        return read_model(path)
    if sequence is None:
        raise UsageError(f"--model {text} says nothing of the length of samples: give --sequence, in tokens")
    return catalog.model_from_config(path, sequence=sequence)


def dtype_source(text: str) -> str | None:
    """Why a model that is a config.json is trained in its dtype; None for any other model."""
    from planner import catalog

    path = _file_of(Path(text)) if is_file_name(text) else None
    if path is None or not _is_config(path):
        return None
    return f"as {path} states it" if catalog.stated_dtype(path) else f"since {path} states none"


def profile_from(profile: str | None, model: str, spec: ModelSpec, cluster: Cluster) -> Profile:
    """The measurements in a file, beside the model, or of the catalog by name; else what the catalog knows.

    That is measured where it has measurements of ``spec`` on the cluster's device types, else estimated and
    marked so. UsageError for a model.json without a profile, or a device type that is not in the catalog.
    """
    if profile is not None and is_file_name(profile):
        return read_profile(Path(profile))
    if profile is None and (Path(model) / "model.json").exists():
        return read_profile(Path(model) / "profile.json")
    from planner import catalog

    if profile is not None:
        return catalog.profile(profile)
    if has_no_measurements(model):
        raise UsageError(f"--model {model} is a file, so --profile must say where its measurements are")
    return catalog.profile_for(spec, dict.fromkeys(entry.device for entry in cluster.node))


def has_no_measurements(model: str) -> bool:
    """Whether a model is one that somebody measured themselves, so that its profile is theirs to give."""
    path = Path(model)
    return is_file_name(model) and not path.is_dir() and not _is_config(path)


def is_file_name(text: str) -> bool:
    """A text with a folder or an ending ``.json``, or the name of something that exists."""
    return "/" in text or text.endswith(".json") or Path(text).exists()


def _file_of(path: Path) -> Path:
    """The file itself, or the model in a folder: what `arachne profile` wrote, else a config.json."""
    if not path.is_dir():
        return path
    for name in ("model.json", "config.json"):
        if (path / name).exists():
            return path / name
    fault = "holds no model.json, which `arachne profile` writes, and no config.json"
    raise InvalidFileError(str(path), [Problem("$", fault)])


def _is_config(path: Path) -> bool:
    """Whether a file is a Hugging Face config.json: it has a ``model_type`` and no ``format`` of ours.

    InvalidFileError where it has neither.
    """
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):  # the reader of documents says what is wrong with it
        return False
    if isinstance(found, dict) and not {"model_type", "format"} & found.keys():
        fault = "has no format, as a model.json has, and no model_type, as a config.json has"
        raise InvalidFileError(str(path), [Problem("$", fault)])
    return isinstance(found, dict) and "format" not in found
