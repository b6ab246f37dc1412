"""The one global order of samples: a function of (seed, epoch) that knows neither plan nor rank."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ..errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalOrder:
    """Which samples make up the global batch of every step.

    Epoch ``e`` visits the samples in the order ``torch.randperm(num_samples, generator=g)``, where the CPU
    generator ``g`` is seeded with ``seed + e``: the order of torch's ``DistributedSampler``, so that a script
    that moves from it keeps its global batches. Without ``shuffle`` it visits them in the order of the
    dataset. Step ``s`` takes the next ``global_batch`` of them; the last step of an epoch takes what is left,
    unless ``drop_last``.
    """

    num_samples: int
    global_batch: int
    seed: int = 0
    drop_last: bool = False
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.global_batch < 1 or self.num_samples < 1:
            raise UsageError(
                f"no step in {self.num_samples} samples with a global batch of {self.global_batch}"
            )
        if self.steps_per_epoch == 0:
            raise UsageError(
                f"drop_last leaves no step: {self.num_samples} samples, a global batch of {self.global_batch}"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch, the short one included where it is kept."""
        whole, rest = divmod(self.num_samples, self.global_batch)
        return whole + (1 if rest and not self.drop_last else 0)

    def num_rows(self, step: int) -> int:
        """Samples of the global batch of a step, counted over all epochs."""
        start = step % self.steps_per_epoch * self.global_batch
        return min(self.global_batch, self.num_samples - start)

    def samples(self, step: int, rows: range) -> list[int]:
        """Dataset indices of these rows of the global batch of a step, counted over all epochs."""
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self.global_batch
        return self.at(epoch, range(start + rows.start, start + rows.stop))

    def at(self, epoch: int, places: range) -> list[int]:
        """Dataset indices at these places of the order of an epoch."""
        order = self._of_epoch(epoch)[places.start : places.stop]
        return order.tolist() if isinstance(order, Tensor) else list(order)

    def num_rows_at(self, place: int) -> int:
        """Samples of the global batch that starts at this place of the order of an epoch; 0: it has ended."""
        rest = max(self.num_samples - place, 0)
        return 0 if rest < self.global_batch and self.drop_last else min(rest, self.global_batch)

    def with_batch(self, global_batch: int) -> "GlobalOrder":
        """The same order in steps of another size."""
        return replace(self, global_batch=global_batch)

    def _of_epoch(self, epoch: int) -> Sequence[int] | Tensor:
        return epoch_order(self.num_samples, self.seed, epoch) if self.shuffle else range(self.num_samples)


@lru_cache(maxsize=2)
def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """The order of one epoch's samples, shape ``(num_samples,)``; see ``GlobalOrder``."""
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(num_samples, generator=generator)
