"""A save that is killed at any of its lines leaves a checkpoint to load: the new one or the one before."""

import os
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import arachne_runtime as arachne
from arachne_runtime.state import checkpoint, disk, keeper

SAVING = {module.__file__ for module in (checkpoint, disk, keeper)}
KILLED = 9
POINTS = 60


def weights(folder: Path, after=lambda engine, checkpoints: None) -> tuple[int, list[float]]:
    """Steps done, and what the model then holds."""
    with arachne.Session(device="cpu") as session:
        engine = session.engine(
            lambda: nn.Sequential(nn.Linear(2, 2)),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            loss=lambda y, x: y.square().mean(),
        )
        checkpoints = session.checkpoints(folder, every=10**6, keep=1)
        after(engine, checkpoints)
        return engine.num_steps, [v for p in engine.stages[0].parameters() for v in p.flatten().tolist()]


def step_and_save(engine, checkpoints) -> None:
    engine.step(torch.ones(3, 2))
    checkpoints.save()


class Lines:
    """Counts the lines of a save that are run, and ends the process before one of them."""

    def __init__(self, last: int | None) -> None:
        self.count, self.last = 0, last

    def __call__(self, frame, event, argument):
        if frame.f_code.co_filename not in SAVING:
            return None
        if event == "line":
            if self.count == self.last:
                os._exit(KILLED)
            self.count += 1
        return self


def traced(folder: Path, lines: Lines) -> None:
    def save(engine, checkpoints) -> None:
        engine.step(torch.ones(3, 2))
        sys.settrace(lines)
        try:
            checkpoints.save()
        finally:
            sys.settrace(None)

    weights(folder, save)


def killed(folder: Path, last: int) -> int:
    """How a process ends that saves and is to be killed at a line."""
    child = os.fork()
    if not child:
        try:
            traced(folder, Lines(last))
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def copy_of(folder: Path, name: Path) -> Path:
    shutil.copytree(folder, name, symlinks=True)
    return name


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_save_killed_at_any_point_leaves_one_to_load(tmp_path):
    weights(tmp_path / "old", step_and_save)
    old, counted = weights(tmp_path / "old"), Lines(None)
    traced(copy_of(tmp_path / "old", tmp_path / "new"), counted)
    new = weights(tmp_path / "new")
    assert (old[0], new[0]) == (1, 2)
    assert old[1] != new[1]
    assert counted.count > 2 * POINTS
    found = []
    for index, last in enumerate(sorted(random.Random(0).sample(range(counted.count), POINTS))):
        folder = copy_of(tmp_path / "old", tmp_path / f"killed-{index}")
        assert killed(folder, last) == KILLED
        found.append(weights(folder))
        assert found[-1] in (old, new), last
        assert not [path for path in folder.iterdir() if path.name.startswith(disk.ATTEMPT)]
    assert found == sorted(found, key=lambda state: state[0])
    assert {steps for steps, _ in found} == {1, 2}
