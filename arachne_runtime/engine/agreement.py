"""What every rank must have been given alike, as numbers that ranks can compare."""

import zlib
from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from ..data.batch import StepBatch, WholeBatch, tensors_of
from ..data.loader import LoadedRows
from ..errors import DisagreementError
from ..measure.recorder import Records
from ..mesh import Mesh
from ..model import ModelParts
from ..plan.files import digest
from ..plan.plan import Plan
from ..plan.records import RecordKind

MODULUS = 2**16
"""Squares of what is left by it stay whole numbers in float64, for 2^20 ranks and more."""


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


Same: TypeAlias = tuple[int, int, int, int]
"""Step, rows, settings and samples of a rank, which are those of all."""


def added(figures: tuple[float, float, float], same: Same, mesh: Mesh) -> tuple[float, float, float]:
    """Loss, squared norm and noise of all ranks, before the commit word: its end says that all have them.

    DisagreementError where ``same`` is not that of all: none of them must come to hold this step.
    """
    if mesh.num_ranks == 1:
        return figures
    total = torch.tensor([*figures, *_to_compare(same)], dtype=torch.float64, device=mesh.device)
    dist.all_reduce(total)
    loss, squares, noise, *sums = total.tolist()
    _refuse_disagreement(same, sums, mesh)
    return loss, squares, noise


def committed(
    mine: tuple[float, float, float, bool], same: Same, mesh: Mesh, records: Records
) -> tuple[float, float, float, bool]:
    """Loss, squared norm and noise of all ranks, and whether any wants another plan, from this rank's parts.

    It is the last communication of a step. DisagreementError where ``same`` is not that of all.
    """
    if mesh.num_ranks == 1:
        return mine
    words = [*mine, *_to_compare(same)]
    total = torch.tensor(words, dtype=torch.float64, device=mesh.device)
    with records.timed(RecordKind.COMMIT, "commit", sent_bytes=total.nbytes):
        dist.all_reduce(total)
    loss, squared_norm, noise, wishes, *sums = total.tolist()
    _refuse_disagreement(same, sums, mesh)
    return loss, squared_norm, noise, wishes > 0


def _to_compare(same: Same) -> list[int]:
    small = [number % MODULUS for number in same]
    return [*same, *small, *(number * number for number in small)]


def _refuse_disagreement(mine: Same, total: Sequence[float], mesh: Mesh) -> None:
    """Refuse ranks that differ in step, rows, settings or samples, from this rank's numbers and all sums.

    A rank whose number is the mean of all sees by the squares that others differ: n Σx² = (Σx)² for equal
    ones only (Cauchy and Schwarz).

    Raises:
        DisagreementError: Says in what they differ, and the way out.

    """
    ranks = mesh.num_ranks
    sums, small, squares = total[:4], total[4:8], total[8:]
    step, rows, settings, content = (
        t == m * ranks and ranks * square == part * part
        for t, m, part, square in zip(sums, mine, small, squares, strict=True)
    )
    if not (step and rows):
        raise DisagreementError(
            f"rank {mesh.rank} is in step {mine[0]} with {mine[1]} rows, the mean of all is "
            f"{total[0] / ranks:g} with {total[1] / ranks:g}; give all the same batches"
        )
    if not settings:
        raise DisagreementError(
            "the engines of the ranks differ in plan, model, seed, dtype, precision, accumulate, clip_norm, "
            "stochastic, noise, or in having num_items or tensorboard; make them with the same arguments on "
            "every rank"
        )
    if not content:
        raise DisagreementError(
            "the ranks have different samples in this step, so inputs and targets would not belong "
            "together; seed the shuffling alike on every rank, or use session.batches(...)"
        )
