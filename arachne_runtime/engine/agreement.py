"""What every rank must have been given alike, as numbers that ranks can compare."""

import zlib

import torch

from ..data.batch import StepBatch, WholeBatch, tensors_of
from ..data.loader import LoadedRows
from ..model import ModelParts
from ..plan.files import digest
from ..plan.plan import Plan


def settings_number(plan: Plan, parts: ModelParts, *settings: object) -> int:
    """Of 32 bits: from the plan, the names and shapes of the model, and settings of the engine."""
    blocks = [parts.parameters_of(block) for block in range(parts.num_blocks)]
    return zlib.crc32(repr((digest(plan), blocks, settings)).encode())


def batch_number(batch: StepBatch) -> int:
    """Of 32 bits: from the first and the last row of a whole batch, or from the place in the global order."""
    if isinstance(batch, LoadedRows):
        return zlib.crc32(repr(batch.samples).encode())
    found = 0
    if isinstance(batch, WholeBatch):
        for tensor in tensors_of(batch.tree):
            for row in (tensor[:1], tensor[-1:]) if tensor.dim() else (tensor.reshape(1),):
                memory = row.detach().cpu().contiguous().flatten().view(torch.uint8)
                found = zlib.crc32(memory.numpy().tobytes(), found)
    return found
