"""Random numbers of the user's dataset: the same for a sample wherever, and however often, it is loaded."""

import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from numpy import random as numpy_random
from torch.utils.data import Dataset

from ..errors import UsageError


class Seeded(Dataset[Any]):
    """A dataset whose samples draw under (seed, epoch, sample), and leave the script's random state alone.

    The first and the last stage load the same sample on different ranks, one for its inputs and one for its
    targets: what is drawn (a crop, a mask) must be the same. Python's, NumPy's global and torch's CPU
    generator are seeded.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, *, exact: bool = True) -> None:
        """Wrap ``dataset``; where ``exact``, the 1st, 2nd, 4th, 8th, ... sample is read twice."""
        self._dataset = dataset
        self._seed = seed
        self._exact = exact
        self._num_read = 0

    def __getitems__(self, places: list[tuple[int, int]]) -> list[Any]:
        """The samples of some (epoch, index); UsageError where a dataset that loads many at once draws."""
        many = getattr(self._dataset, "__getitems__", None)
        with random_states_kept():
            if many is None:
                return [self._sample(*place) for place in places]
            found: list[Any] = refusing_draws(many, "the dataset's __getitems__")([i for _, i in places])
            return found

    def _sample(self, epoch: int, index: int) -> Any:
        found = self._read(epoch, index)
        self._num_read += 1
        looks = self._exact and self._num_read & (self._num_read - 1) == 0
        if looks and not alike(found, self._read(epoch, index)):
            raise UsageError(
                f"sample {index} of {type(self._dataset).__name__} differs when it is read again, so ranks "
                "that hold its inputs and its targets would not agree: it draws from a generator of its own; "
                "draw from those of torch, random or numpy.random, which are seeded by sample, or waive this "
                "with session.engine(..., stochastic=True)"
            )
        return found

    def _read(self, epoch: int, index: int) -> Any:
        seed_all(zlib.crc32(f"{self._seed}:{epoch}:{index}".encode()))
        return self._dataset[index]


def refusing_draws(function: Callable[[list[Any]], Any], name: str) -> Callable[[list[Any]], Any]:
    """``function``, which takes some samples at once; UsageError where it draws.

    Which samples are taken together is the plan's choice.
    """
    return _Drawless(function, name)


@dataclass(frozen=True, slots=True)
class _Drawless:
    """See ``refusing_draws``; a class, since it goes to worker processes."""

    function: Callable[[list[Any]], Any]
    name: str

    def __call__(self, samples: list[Any]) -> Any:
        """Call the function."""
        before = random_states()
        batch = self.function(samples)
        if random_states() != before:
            raise UsageError(
                f"{self.name} draws random numbers, and ranks that hold the inputs and the targets of a "
                "sample would draw different ones; draw in the dataset's __getitem__, seeded by sample"
            )
        return batch


def random_states() -> tuple[object, ...]:
    """States of torch's CPU generator, of Python's, and of NumPy's global one."""
    numpy: Any = numpy_random.get_state(legacy=True)
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy[1].tobytes(), numpy[2:]


def seed_all(seed: int) -> None:
    """Seed the generators of ``random_states`` with 32 bits."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy_random.seed(seed)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Put back the states of ``random_states`` afterwards."""
    cpu, python, numpy = torch.get_rng_state(), random.getstate(), numpy_random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        random.setstate(python)
        numpy_random.set_state(numpy)


@contextmanager
def drawn_under(seed: int, device: torch.device) -> Iterator[None]:
    """Draw under a seed of 32 bits, on the device too; afterwards all states are as they were."""
    devices = [device] if device.type == "cuda" else []
    with random_states_kept(), torch.random.fork_rng(devices=devices):
        seed_all(seed)
        for each in devices:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        yield


def alike(a: Any, b: Any) -> bool:
    """Whether two samples hold the same numbers, texts and arrays; what else they hold is not looked at."""
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(alike(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a.nan_to_num(), b.nan_to_num()))
    if hasattr(a, "tobytes"):  # arrays, images
        return bool(a.tobytes() == b.tobytes())
    return bool(a == b or a != a) if isinstance(a, bool | int | float | str | bytes) else True
