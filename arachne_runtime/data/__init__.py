"""One global order of samples that a plan only slices."""

from .batch import StepBatch, WholeBatch, as_step_batch, default_inputs

__all__ = ["StepBatch", "WholeBatch", "as_step_batch", "default_inputs"]
