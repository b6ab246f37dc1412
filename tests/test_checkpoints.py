"""Checkpoints of one process: a run that goes on is the one that was never stopped; what cannot is told."""

import errno
import random
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors import safe_open
from torch import nn

import arachne_runtime as arachne
from arachne_runtime.errors import InvalidFileError, UsageError
from arachne_runtime.state import disk
from arachne_runtime.state.checkpoint import MANIFEST

DATA = torch.randn(22, 4, generator=torch.Generator().manual_seed(1))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def optimizer(parameters) -> torch.optim.Optimizer:
    """Groups by shape, of which the schedule knows the number."""
    held = list(parameters)
    groups = [
        {"params": [p for p in held if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in held if p.dim() == 1], "lr": 1e-2, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=3e-2)


def schedule(made: torch.optim.Optimizer):
    kinds = torch.optim.lr_scheduler
    first = kinds.LinearLR(made, start_factor=0.1, total_iters=3)
    return kinds.SequentialLR(made, [first, kinds.MultiStepLR(made, [2, 5], gamma=0.5)], milestones=[3])


def train(folder: Path, steps: int, make=model, **options: Any) -> tuple[list[float], dict, Any]:
    """Losses of the steps until ``steps``, the last parameters, and where it began."""
    with arachne.Session(device="cpu") as session:
        engine = session.engine(
            make, optimizer=optimizer, loss=lambda y, x: (y - x[:, :2]).square().mean(), lr_schedule=schedule
        )
        checkpoints = session.checkpoints(folder, **{"every": 2} | options)
        losses = []
        for batch in session.batches(DATA, global_batch=5, epochs=4):
            if engine.num_steps == steps:
                break
            losses.append(float(torch.rand(()) + numpy.random.rand() + random.random()))
            losses.append(engine.step(batch).loss)
        state = {name: value.clone() for name, value in engine.stages[0].state_dict().items()}
        return losses, state, checkpoints.resumed_from


@pytest.mark.parametrize("background", [False, True])
def test_a_run_that_goes_on_is_the_run_that_was_not_stopped(tmp_path, background):
    torch.manual_seed(3), numpy.random.seed(3), random.seed(3)
    whole, state, start = train(tmp_path / "whole", 17)
    assert (len(whole), start) == (34, None)
    torch.manual_seed(3), numpy.random.seed(3), random.seed(3)
    first, _, _ = train(tmp_path / "cut", 7, background=background)
    rest, there, start = train(tmp_path / "cut", 17, background=background)
    assert start == 6
    assert first == whole[:14]
    assert rest == whole[12:]
    assert {path.name for path in (tmp_path / "cut").iterdir()} == {
        "step-00000012",
        "step-00000014",
        "step-00000016",
        "latest",
    }
    assert (tmp_path / "cut" / "latest").resolve().name == "step-00000016"
    assert all(torch.equal(state[name], there[name]) for name in state)


def saved(folder: Path) -> Path:
    train(folder, 4, every=2, keep=2)
    return folder / "step-00000004"


@pytest.mark.parametrize("name", [MANIFEST, "rank-00000.safetensors"])
def test_an_altered_or_shortened_file_is_refused_with_its_name(tmp_path, name):
    """Every byte of the manifest and of the header, and some of the tensors."""
    file = saved(tmp_path) / name
    content = file.read_bytes()
    source = random.Random(0)
    for at in (0, 9, 60, len(content) - 1, *(source.randrange(len(content)) for _ in range(12))):
        altered = bytearray(content)
        altered[at] ^= 1 << source.randrange(8)
        file.write_bytes(altered)
        with pytest.raises(InvalidFileError, match=rf"{name}: 1 problem\n.*remove its folder"):
            train(tmp_path, 5)
    for length in (0, 7, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(InvalidFileError, match=rf"{name}: 1 problem\n.*remove its folder"):
            train(tmp_path, 5)
    file.unlink()
    with pytest.raises(InvalidFileError, match=rf"{name}: 1 problem"):
        train(tmp_path, 5)
    shutil.rmtree(file.parent)
    assert train(tmp_path, 5)[2] == 2


def test_files_are_safetensors_under_global_names(tmp_path):
    folder = saved(tmp_path)
    with safe_open(folder / "rank-00000.safetensors", framework="pt") as file:
        names = {name.split(" ", 1)[1] for name in file.keys()}  # noqa: SIM118 - it is no mapping
    assert {"blocks.0.weight", "blocks.0.weight exp_avg", "blocks.1.running_mean"} <= names
    assert b"pickle" not in (folder / MANIFEST).read_bytes()


def test_every_call_of_batches_goes_on_where_it_was(tmp_path):
    def epochs(stop: int) -> list[tuple[int, float]]:
        """Three epochs, each a call of its own, with an evaluation behind each."""
        with arachne.Session(device="cpu") as session:
            engine = session.engine(
                lambda: nn.Sequential(nn.Linear(4, 2)),
                optimizer=torch.optim.SGD,
                loss=lambda y, x: y.square().mean(),
            )
            session.checkpoints(tmp_path / "calls", every=1)
            seen = []
            for epoch in range(3):
                for batch in session.batches(DATA, global_batch=5, seed=epoch):
                    if engine.num_steps == stop:
                        return seen
                    seen.append((engine.num_steps, engine.step(batch).loss))
                seen.append((-1, engine.evaluate(session.batches(DATA, global_batch=5, shuffle=False)).loss))
            return seen

    whole = epochs(100)
    shutil.rmtree(tmp_path / "calls")
    parts = [epochs(stop) for stop in (2, 5, 7, 12, 100)]
    steps = [pair for part in parts for pair in part if pair[0] >= 0]
    assert steps == [pair for pair in whole if pair[0] >= 0]
    assert parts[-1][-1] == whole[-1]


def test_evaluations_behind_steps_move_no_later_call(tmp_path):
    def phases(stop: int) -> list[tuple[int, float]]:
        """Two calls that train, with evaluations in the middle of them."""
        with arachne.Session(device="cpu") as session:
            engine = session.engine(
                lambda: nn.Sequential(nn.Linear(4, 2)),
                optimizer=torch.optim.SGD,
                loss=lambda y, x: y.square().mean(),
            )
            session.checkpoints(tmp_path / "phases", every=1)
            seen = []
            for phase in range(2):
                for batch in session.batches(DATA, global_batch=5, seed=phase):
                    if engine.num_steps == stop:
                        return seen
                    seen.append((engine.num_steps, engine.step(batch).loss))
                    if engine.num_steps % 2 == 0:
                        engine.evaluate(session.batches(DATA, global_batch=5, shuffle=False))
            return seen

    whole = phases(100)
    shutil.rmtree(tmp_path / "phases")
    assert [pair for stop in (3, 7, 9, 100) for pair in phases(stop)] == whole


def test_another_order_of_samples_or_another_model_is_refused(tmp_path):
    saved(tmp_path)
    with arachne.Session(device="cpu") as session:
        engine = session.engine(model, optimizer=optimizer, loss=lambda y, x: y.mean(), lr_schedule=schedule)
        session.checkpoints(tmp_path)
        engine.evaluate(session.batches(DATA[:20], global_batch=5))
        with pytest.raises(UsageError, match=r"batches has 20 samples .* but had 22 samples"):
            engine.step(next(session.batches(DATA[:20], global_batch=5)))
    with pytest.raises(UsageError, match=r"of another model: only the checkpoint has blocks\.2"):
        train(tmp_path, 5, lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
    with pytest.raises(UsageError, match=r"blocks.0.weight is \(9, 4\) float32 here and is \(8, 4\) float32"):
        train(tmp_path, 5, lambda: nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.Linear(9, 2)))


def test_calls_that_make_no_sense_are_refused(tmp_path):
    with arachne.Session(device="cpu") as session:
        with pytest.raises(UsageError, match=r"behind session.engine\(...\)"):
            session.checkpoints(tmp_path)
        engine = session.engine(model, optimizer=optimizer, loss=lambda y, x: y.mean())
        for wrong in ({"every": 0}, {"keep": 0}):
            with pytest.raises(UsageError, match="both must be at least 1"):
                session.checkpoints(tmp_path, **wrong)
        with pytest.raises(UsageError, match="every='5' is no whole number"):
            session.checkpoints(tmp_path, every="5")
        engine.step(DATA)
        with pytest.raises(UsageError, match="the engine has done 1 steps"):
            session.checkpoints(tmp_path)


class Opaque:
    def __init__(self, made) -> None:
        self.function = len

    def step(self) -> None: ...

    def state_dict(self) -> dict:
        return {"function": self.function}


def test_a_schedule_that_is_no_plain_data_is_refused(tmp_path):
    with arachne.Session(device="cpu") as session:
        engine = session.engine(model, optimizer=optimizer, loss=lambda y, x: y.mean(), lr_schedule=Opaque)
        session.checkpoints(tmp_path, every=1)
        with pytest.raises(UsageError, match=r"lr_schedule.function is of type builtin_function"):
            engine.step(DATA)


def test_the_loss_scale_goes_along(tmp_path):
    def scales(steps: int) -> list[tuple[float, int]]:
        with arachne.Session(device="cpu") as session:
            engine = session.engine(
                lambda: nn.Sequential(nn.Linear(4, 2)),
                optimizer=torch.optim.SGD,
                loss=lambda y, x: y.square().mean(),
                precision="fp16",
            )
            if session.checkpoints(tmp_path, every=1).resumed_from is None:
                engine.scale.value = 8.0
            found = [(engine.scale.value, engine.scale.num_fine)]
            engine.scale.growth_steps = 2
            for _ in range(steps):
                engine.step(DATA)
                found.append((engine.scale.value, engine.scale.num_fine))
            return found

    first, second = scales(3), scales(2)
    assert second[0] == first[-1] == (16.0, 1)
    assert second[1] == (32.0, 0)


def test_a_save_asked_for_and_one_that_cannot_be_written(tmp_path, monkeypatch):
    with arachne.Session(device="cpu") as session:
        engine = session.engine(model, optimizer=optimizer, loss=lambda y, x: y.mean())
        checkpoints = session.checkpoints(tmp_path, every=100)
        engine.step(DATA)
        checkpoints.save()
        checkpoints.save()  # it is there
        assert checkpoints.steps() == (1,)
        engine.step(DATA)
        monkeypatch.setattr(disk, "sync", full)
        with pytest.raises(OSError, match="No space left"):
            checkpoints.save()
        assert checkpoints.steps() == (1,)
        monkeypatch.undo()
        checkpoints.save()  # there is room again
    assert checkpoints.steps() == (1, 2)


def test_a_folder_that_cannot_be_made_is_an_error_like_any_other(tmp_path, monkeypatch):
    with arachne.Session(device="cpu") as session:
        engine = session.engine(model, optimizer=optimizer, loss=lambda y, x: y.mean())
        checkpoints = session.checkpoints(tmp_path, every=1, background=True)
        monkeypatch.setattr(Path, "mkdir", lambda path, **options: full(path))
        engine.step(DATA)
        with pytest.raises(OSError, match="No space left"):
            checkpoints.wait()
        monkeypatch.undo()
        engine.step(DATA)
    assert checkpoints.steps() == (2,)


def full(path: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_fails_in_the_background_is_told_at_the_next_step(tmp_path, monkeypatch):
    with arachne.Session(device="cpu") as session:
        engine = session.engine(model, optimizer=optimizer, loss=lambda y, x: y.mean())
        checkpoints = session.checkpoints(tmp_path, every=1, background=True)
        monkeypatch.setattr(disk, "sync", full)
        engine.step(DATA)
        checkpoints._writing.thread.join()
        with pytest.raises(OSError, match="No space left"):
            engine.step(DATA)
    assert checkpoints.steps() == ()
