"""What verbs take from the command line: a model or a profile, by file or by its name in the catalog."""

from pathlib import Path

from arachne_runtime.plan.files import read_model, read_profile
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.profile import Profile


def model_from(text: str) -> ModelSpec:
    """The model in a file, or one of the catalog; UsageError, with the known names, where there is none."""
    if is_file_name(text):
        return read_model(Path(text))
    from planner import catalog  # a verb that reads files does not need it

    return catalog.model(text)


def profile_from(text: str) -> Profile:
    """The measurements in a file, or those that the catalog has for a model of that name."""
    if is_file_name(text):
        return read_profile(Path(text))
    from planner import catalog

    return catalog.profile(text)


def is_file_name(text: str) -> bool:
    """A text with a folder or an ending ``.json``, or the name of something that exists."""
    return "/" in text or text.endswith(".json") or Path(text).exists()
