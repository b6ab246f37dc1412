"""Recorded runs in folders feed a profile back: finds them and their plans, and lets the planner correct."""

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from arachne_runtime.errors import ArachneError, InvalidFileError, Problem, UsageError
from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.files import digest, read_cluster, read_plan, read_profile, write
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.plan import PLAN_FORMAT, Plan

from .folders import check_writable, make_writable
from .inputs import model_from
from .report.recorded import Recorded, read_recorded

if TYPE_CHECKING:  # loads NumPy, which `arachne --help` does without
    from planner.feedback import Correction, Run

    from .report.tell_correction import CorrectionAnswer

LONGEST_PLAN_BYTES = 16 * 2**20
"""Larger files below the runs are not looked into for plans (one of 4,096 devices has 0.5 MB)."""
SHOWN_FAULTS = 3
"""Unreadable lines of a folder that are named; the others are only counted."""
_DIGEST = re.compile(rb'"plan" ?: ?"(sha256:[0-9a-f]{64})"')


@dataclass(frozen=True, slots=True)
class Fed:
    """What was learnt from the runs below a folder."""

    correction: "Correction"
    runs: tuple["Run", ...]
    """With their cluster, model and plan."""
    notes: tuple[str, ...]
    """What was left out, a sentence each: of folders and files, then of records and rows."""


def feed_back(runs: Path, profile: Path) -> Fed:
    """Correct ``profile`` by every run recorded in ``runs`` or below it.

    A run is a folder of ``rank-*.jsonl``, as ``arachne run --trace`` writes it; its plan lies in it or
    anywhere below ``runs``. Cluster and model lie beside the profile, where
    ``arachne profile`` puts them, or in ``runs``. Records that cannot be read,
    or whose plan is not there, are left out and named in the notes. Raises UsageError where there is nothing
    to learn from, InvalidFileError for the files given.
    """
    from planner.feedback import correct

    measured = read_profile(profile)
    homes = profile.parent, runs
    places = read_cluster(_cluster_in(homes))
    spec = model_from(_model_in(homes, measured.model), measured.sequence)
    notes: list[str] = []
    found = list(_runs(runs, places, spec, notes))
    if not found:
        said = "".join(f"\n  {note}" for note in notes)
        raise UsageError(
            f"{runs} holds no recorded run; record some: arachne run PLAN --trace {runs}/NAME{said}"
        )
    correction = correct(measured, found)
    return Fed(correction, tuple(found), (*notes, *correction.notes))


def learn_costs(runs: Path, profile: Path, file: Path) -> tuple[Fed, "CorrectionAnswer"]:
    """Correct a profile by runs and write it to ``file``: all of ``arachne learn --from`` or its first half.

    A ``profile.json`` gets the model and the cluster beside it, where nothing of that name is yet: its folder
    is then one of measurements, which ``--model`` takes. Raises UnsupportedEnvironmentError where ``file``
    cannot be written, and what ``feed_back`` raises.
    """
    from .report.tell_correction import correction_answer

    make_writable(file.parent, "--out")
    check_writable(file, "--out")
    fed = feed_back(runs, profile)
    write(fed.correction.profile, file)
    if file.name == "profile.json":
        for name in ("model.json", "cluster.toml"):
            _copy_beside(file, name, homes=(profile.parent, runs))
    return fed, correction_answer(str(file), fed.correction, fed.notes)


def _copy_beside(file: Path, name: str, homes: tuple[Path, ...]) -> None:
    found = next((home / name for home in homes if (home / name).exists()), None)
    if found is not None and not (file.parent / name).exists():
        shutil.copyfile(found, file.parent / name)


def _cluster_in(homes: tuple[Path, ...]) -> Path:
    for home in homes:
        if (home / "cluster.toml").exists():
            return home / "cluster.toml"
    fault = f"no such file, nor in {homes[1]}; put the cluster.toml of the runs in one of them"
    raise InvalidFileError(str(homes[0] / "cluster.toml"), [Problem("$", fault)])


def _model_in(homes: tuple[Path, ...], name: str) -> str:
    """A model.json, or the name of the model, which the catalog may know."""
    return next((str(h / "model.json") for h in homes if (h / "model.json").exists()), name)


def _runs(runs: Path, cluster: Cluster, model: ModelSpec, notes: list[str]) -> Iterator["Run"]:
    from planner.feedback import Run

    plans = {digest(plan): plan for plan in _plans(runs)}
    for folder in sorted({path.parent for path in runs.rglob("rank-*.jsonl")}):
        name = str(folder.relative_to(runs)) if folder != runs else runs.name
        ran = _digests(folder)  # a folder of long runs is read once for each plan that ran there, not for all
        read = [
            (plans[number], found)
            for number in ran
            if number in plans and (found := _recorded(folder, plans[number])) is not None
        ]
        notes += (f"{name}: {note}" for note in _left_out(read, [n for n in ran if n not in plans]))
        for plan, found in read:
            one = name if len(read) == 1 else f"{name} ({digest(plan)[:14]})"
            yield Run(name=one, plan=plan, cluster=cluster, model=model, records=found.records)


def _digests(folder: Path) -> tuple[str, ...]:
    """Plans that the records of a folder name, in order of first appearance."""
    found: dict[str, None] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        with suppress(OSError), path.open("rb") as file:
            for line in file:
                found |= {match.decode(): None for match in _DIGEST.findall(line)}
    return tuple(found)


def _plans(runs: Path) -> Iterator[Plan]:
    """Every plan below a folder; other files, and what cannot be read, are none."""
    for path in sorted(runs.rglob("*.json")):
        try:
            if path.stat().st_size < LONGEST_PLAN_BYTES and PLAN_FORMAT.encode() in path.read_bytes():
                yield read_plan(path)
        except (ArachneError, OSError):
            continue


def _recorded(folder: Path, plan: Plan) -> Recorded | None:
    try:
        return read_recorded(folder, plan)
    except (ArachneError, OSError):
        return None


def _left_out(read: list[tuple[Plan, Recorded]], others: Sequence[str]) -> Iterator[str]:
    """What of a folder is not in its runs."""
    if not read:
        yield "left out: no record is of a plan below the folder of runs; put the plan that ran there"
        return
    if others:
        yield f"left out: records of plans that are not below the folder of runs: {', '.join(others)}"
    if earlier := max(found.earlier_runs for _, found in read):
        yield f"left out: earlier runs of its plan in the same files: {earlier}"
    faults = read[0][1].faults  # the same for every plan of a folder
    if faults:
        shown = "; ".join(faults[:SHOWN_FAULTS])
        more = f" and {len(faults) - SHOWN_FAULTS} more" if len(faults) > SHOWN_FAULTS else ""
        yield f"left out: lines that are no records: {shown}{more}"
