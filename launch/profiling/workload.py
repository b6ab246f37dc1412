"""Finds the workload that a command line names."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from arachne_runtime.errors import ModelError, UsageError
from arachne_runtime.model.parts import ModelParts
from arachne_runtime.model.workload import Workload

LARGEST_VERIFIED_BYTES = 1 << 30
"""Parameters of the largest model that is run whole before it is measured."""


def load_workload(name: str) -> Workload:
    """``package.module:NAME`` or ``path/file.py:NAME`` → the Workload; UsageError where there is none."""
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise UsageError(f"workload {name!r} is not MODULE:NAME (or FILE.py:NAME)")
    module = _module(place)
    found = getattr(module, attribute, None)
    if isinstance(found, Workload):
        return found
    known = ", ".join(key for key, value in vars(module).items() if isinstance(value, Workload))
    what = f"is a {type(found).__name__}" if hasattr(module, attribute) else "does not exist"
    raise UsageError(f"{name} {what}; an arachne.Workload is needed (in {place}: {known or 'none'})")


def verify_blocks(workload: Workload) -> None:
    """Refuse a model whose blocks in a row do not compute what its ``forward`` does; ModelError.

    A module that ``@pipelined`` forgets is missed by nothing else if it has no parameters. Left out where the
    model is large, or cannot run here: layers for GPUs only.
    """
    try:
        parts = ModelParts.of(workload.model)
        infos = [info for block in range(parts.num_blocks) for info in parts.parameters_of(block)]
        if sum(info.numel * info.dtype.itemsize for info in infos) <= LARGEST_VERIFIED_BYTES:
            parts.verify(workload.batch(2), inputs=workload.inputs)
    except ModelError:
        raise
    except Exception:  # the user's own code: the ranks tell it, with the device that it may need
        return


def _module(place: str) -> ModuleType:
    if place.endswith(".py"):
        return _from_file(Path(place))
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place + ".").startswith(error.name + "."):
            raise UsageError(f"no module {place!r} (looked in {here} and sys.path)") from error
        raise


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module
