"""One global order of samples that a plan only slices."""

from .batch import StepBatch, WholeBatch, as_step_batch, default_inputs
from .loader import LoadedRows, LoaderSettings, load_steps
from .order import GlobalOrder

__all__ = [
    "GlobalOrder",
    "LoadedRows",
    "LoaderSettings",
    "StepBatch",
    "WholeBatch",
    "as_step_batch",
    "default_inputs",
    "load_steps",
]
