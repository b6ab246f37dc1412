"""Labels of random problems: good plans as sequences of templates, kept as JSON lines in a folder."""

from collections.abc import Iterator
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import msgspec

from arachne_runtime.errors import InvalidFileError, Problem, UsageError
from arachne_runtime.plan.document import Document
from arachne_runtime.units import Seconds

VERSION = 1
"""Of drawing and labelling: where a seed gives another problem, or a label means another thing, it grows."""


class ProblemSet(StrEnum):
    """Disjoint families of random problems; ``planner.training.draw`` defines them."""

    TRAINING = "training"
    VALIDATION = "validation"
    """Drawn alike, from seeds of their own."""
    HELD_OUT = "held-out"
    """With the device types and the model family that no other problem has."""
    TUNING = "tuning"
    """Parts of the clusters of recorded runs, of their model: ``variants`` draws them, no seed alone does."""
    TUNING_VALIDATION = "tuning-validation"
    """Drawn alike; never tuned on."""


class Space(Document, frozen=True, kw_only=True):
    """How large problems are: the fewest and the most of each."""

    devices: tuple[int, int] = (2, 1024)
    """Of the cluster."""
    parameters: tuple[float, float] = (0.1e9, 100e9)
    """Of the model, by number."""


class Run(NamedTuple):
    """Alike neighbouring stages of a template."""

    pool: int
    """Index of ``Supply.pools``."""
    tp: int
    width: int
    """Replicas of each stage; the widths of a template have no common divisor."""
    length: int
    """Number of stages."""


TemplateRuns = tuple[Run, ...]
"""One template, first stage to last."""
TemplateSequence = tuple[TemplateRuns, ...]
"""Unlike templates side by side; each takes as many copies as the devices that are left hold."""


class Labels(Document, frozen=True, kw_only=True):
    """What a long search found for one problem; a line of the file."""

    version: int
    """``VERSION`` of what wrote it."""
    problems: ProblemSet
    seed: int
    space: Space = Space()
    """That the problem was drawn from: ``draw.drawn(problems, seed, space)`` is it, but for tuning."""
    sequences: tuple[TemplateSequence, ...]
    """Best first; empty where none of the best plans can be said by templates."""
    relative: tuple[float, ...]
    """Of each sequence: seconds of its plan over those of the best plan; from 1 on."""
    best_s: Seconds | None
    """Iteration of the best plan; None where the search found none."""
    every_template: bool = False
    """Whether all that the devices hold were tried."""
    dropped: int = 0
    """Plans as good that the policy's form cannot say."""
    evaluations: int = 0
    """Plans that were priced."""


def load(folder: Path, problems: ProblemSet = ProblemSet.TRAINING) -> Iterator[Labels]:
    """Labels of a folder in the order of their seeds, each seed once.

    InvalidFileError for a line that is none, or one of another version: delete it and label again. A last
    line without its end is passed over: its writer was stopped, and writes it again.
    """
    found: dict[int, Labels] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for each in read(path):
            if each.problems is problems:
                found.setdefault(each.seed, each)
    return iter(found[seed] for seed in sorted(found))


def digest_of(folder: Path) -> str:
    """``sha256:`` and the hash of all labels of a folder as they stand there; UsageError without any."""
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        raise UsageError(f"{folder} holds no labels (*.jsonl); give a folder that has some")
    return "sha256:" + sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def read(path: Path) -> Iterator[Labels]:
    """Labels of one file, as they were written."""
    *lines, _ = path.read_bytes().split(b"\n")
    decoder = msgspec.json.Decoder(Labels)
    for number, line in enumerate(lines, 1):
        try:
            found = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise InvalidFileError(str(path), [Problem(f"line {number}", str(error))]) from None
        if found.version != VERSION:
            said = f"holds labels of version {found.version}, not {VERSION}; delete the file and label again"
            raise InvalidFileError(str(path), [Problem(f"line {number}", said)])
        yield found


def line_of(labels: Labels) -> bytes:
    """As it stands in a file."""
    return msgspec.json.encode(labels) + b"\n"
