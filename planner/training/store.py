"""A folder of labels that grows: seeds that it lacks are labelled by a few processes; it may be stopped."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

from .draw import drawn
from .labelling import Effort, label
from .labels import Labels, ProblemSet, Space, line_of, read

FILE = "labels.jsonl"


@dataclass(frozen=True, slots=True)
class Labelled:
    """Where labelling stands."""

    done: int
    """Problems in the folder, of those that were asked for."""
    total: int


def produce(
    folder: Path,
    seeds: Sequence[int],
    *,
    problems: ProblemSet = ProblemSet.TRAINING,
    space: Space | None = None,
    effort: Effort | None = None,
    processes: int = 2,
    on_progress: Callable[[Labelled], None] | None = None,
) -> None:
    """Label those seeds that the folder does not have; each is written as soon as it is known."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    space = space or Space()
    whole_lines(path)
    known = {(each.problems, each.space, each.seed) for each in read(path)} if path.exists() else set()
    missing = [seed for seed in dict.fromkeys(seeds) if (problems, space, seed) not in known]
    total = len(set(seeds))
    done = total - len(missing)
    if on_progress is not None:
        on_progress(Labelled(done, total))
    with path.open("ab") as file:
        for found in _labelled(missing, problems, space, effort or Effort(), processes):
            file.write(line_of(found))
            file.flush()
            done += 1
            if on_progress is not None:
                on_progress(Labelled(done, total))


def whole_lines(path: Path) -> None:
    """Cut off a last line without its end, which a stopped writer left."""
    if path.exists():
        text = path.read_bytes()
        if not text.endswith(b"\n"):
            os.truncate(path, text.rfind(b"\n") + 1)


def _labelled(
    seeds: Sequence[int], problems: ProblemSet, space: Space, effort: Effort, processes: int
) -> Iterator[Labels]:
    """As they are known; in the order of the seeds with one process."""
    if processes == 1:
        yield from (_label(problems, seed, space, effort) for seed in seeds)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        jobs = (pool.submit(_label, problems, seed, space, effort) for seed in seeds)
        yield from _as_completed(jobs, 2 * processes)


def _as_completed(jobs: Iterable[Future[Labels]], ahead: int) -> Iterator[Labels]:
    """Few jobs are handed out ahead, so that stopping is quick."""
    waiting: set[Future[Labels]] = set()
    jobs = iter(jobs)
    while True:
        waiting |= set(islice(jobs, ahead - len(waiting)))
        if not waiting:
            return
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        yield from (job.result() for job in sorted(done, key=id))


def _label(problems: ProblemSet, seed: int, space: Space, effort: Effort) -> Labels:
    return label(drawn(problems, seed, space), effort)
