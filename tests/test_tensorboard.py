"""Scalars for TensorBoard, read back by TensorBoard itself."""

import builtins
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import arachne_runtime as arachne
from arachne_runtime.errors import UnsupportedEnvironmentError, WorkerFailedError
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.testing import run_ranks

pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
STEPS = 3


def two_stages():
    stages = tuple(
        Stage(layers=layers, replicas=(Replica(devices=(f"n:{s}",), share=2),))
        for s, layers in enumerate(((0, 1), (1, 2)))
    )
    pipeline = Pipeline(micro_batches=2, micro_batch=2, stages=stages)
    return Plan(model="m", global_batch=4, sequence=1, pipelines=(pipeline,))


def train(folder):
    torch.manual_seed(0)
    with arachne.Session(two_stages(), device="cpu", tensorboard=folder) as session:
        engine = session.engine(
            lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            loss=lambda output, batch: F.mse_loss(output, batch[1]),
        )
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
        return [(r.loss, r.grad_norm, r.seconds) for r in (engine.step((x, x)) for _ in range(STEPS))]


def scalars(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_rank_0_writes_what_a_step_reports(tmp_path):
    reports = run_ranks(2, train, tmp_path)[0]
    assert len(list(tmp_path.iterdir())) == 1  # one file: of rank 0
    found = scalars(tmp_path)
    assert set(found) == {
        "train/loss", "train/grad_norm", "speed/samples_per_s", "speed/step_s",
        "waiting/pipeline-0-stage-0", "waiting/pipeline-0-stage-1",
    }  # fmt: skip
    assert [step for step, _ in found["train/loss"]] == list(range(STEPS))
    for tag, values in (
        ("train/loss", [loss for loss, _, _ in reports]),
        ("train/grad_norm", [norm for _, norm, _ in reports]),
        ("speed/step_s", [seconds for _, _, seconds in reports]),
        ("speed/samples_per_s", [4 / seconds for _, _, seconds in reports]),
    ):
        assert [value for _, value in found[tag]] == pytest.approx(values, rel=1e-5)
    waits = [value for s in (0, 1) for _, value in found[f"waiting/pipeline-0-stage-{s}"]]
    assert all(0 < value < 1 for value in waits)


def disagree(folder):
    import torch.distributed as dist

    return train(folder if dist.get_rank() == 0 else None)


def test_ranks_that_differ_in_it_are_told(tmp_path):
    with pytest.raises(WorkerFailedError, match="tensorboard"):
        run_ranks(2, disagree, tmp_path)


def test_without_the_extra_the_install_line_is_told(tmp_path, monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **options):
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    with (
        arachne.Session(device="cpu", tensorboard=tmp_path) as session,
        pytest.raises(UnsupportedEnvironmentError, match=r"arachne-hetero\[tensorboard\]"),
    ):
        session.engine(
            lambda: nn.Sequential(nn.Linear(3, 3)),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            loss=lambda output, batch: output.mean(),
        )
