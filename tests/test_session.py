"""A training script alone, under torchrun, and inside ranks: same losses, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

import arachne_runtime as arachne
from arachne_runtime.data import GlobalOrder
from arachne_runtime.plan.files import write
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.surroundings import LONE_DEVICE
from arachne_runtime.testing import run_ranks
from launch.agent import free_port
from tests import train_gpt

ROOT = Path(__file__).parents[1]


def stage(first: int, stop: int, **shares: int) -> Stage:
    replicas = tuple(
        Replica(devices=(f"{name[0]}:{name[1:]}",), share=share) for name, share in shares.items()
    )
    return Stage(layers=(first, stop), replicas=replicas)


UNEQUAL = Plan(
    model="gpt",
    global_batch=9,
    sequence=8,
    pipelines=(
        Pipeline(micro_batches=3, micro_batch=2, stages=(stage(0, 2, a0=2), stage(2, 5, b1=2))),
        Pipeline(micro_batches=1, micro_batch=3, stages=(stage(0, 5, b0=3),)),
    ),
)
"""Two unlike pipelines on three devices, for the five blocks and the batches of train_gpt."""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "ARACHNE_PLAN", "ARACHNE_TRACE", "ARACHNE_TENSORBOARD"):
        monkeypatch.delenv(name, raising=False)


def torchrun(num_ranks: int, *command: str) -> subprocess.CompletedProcess[str]:
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *start, *command],
        env=variables,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_script_under_torchrun_with_unlike_pipelines_equals_one_process(tmp_path: Path) -> None:
    write(UNEQUAL, tmp_path / "plan.json")
    train_gpt.main(str(tmp_path / "one.json"))
    done = torchrun(
        3, str(ROOT / "tests/train_gpt.py"), str(tmp_path / "three.json"), str(tmp_path / "plan.json")
    )
    assert done.returncode == 0, done.stderr
    one, three = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "three.json"))
    assert [rows for rows, *_ in one] == [9, 9, 4, 9, 9, 4]
    assert one[0][1] > one[-1][1]
    torch.testing.assert_close(torch.tensor(three), torch.tensor(one), rtol=1e-4, atol=1e-5)
    assert done.stdout.count("step 0 loss") == 1


def little() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))


def make_engine(session: arachne.Session, model=little) -> arachne.Engine:
    return session.engine(
        model,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        loss=lambda output, batch: output.square().mean(),
    )


@pytest.mark.parametrize("overlap", [True, False])
def test_overlap_can_be_left_out_for_comparison(overlap: bool) -> None:
    with arachne.Session() as session:
        engine = session.engine(
            little, optimizer=torch.optim.SGD, loss=torch.nn.functional.mse_loss, overlap=overlap
        )
        assert engine._overlap is overlap


LITTLE = msgspec.structs.replace(
    UNEQUAL,
    global_batch=4,
    pipelines=(Pipeline(micro_batches=2, micro_batch=2, stages=(stage(0, 1, a0=2), stage(1, 3, b0=2))),),
)


def train_little(start: int, trace: Path | None = None) -> tuple[list[int], list[float], str]:
    with arachne.Session(LITTLE, device="cpu", trace=trace) as session:
        engine = make_engine(session)
        data = torch.arange(20.0).view(10, 2) / 20
        batches = list(session.batches(data, global_batch=4, seed=3, start=start))
        losses = [engine.step(batch).loss for batch in batches]
        return [batch.num_rows for batch in batches], losses, str(engine.stages[0].block_range)


def test_each_rank_builds_its_blocks_and_a_start_skips_steps(tmp_path: Path) -> None:
    (rows, losses, first), (_, others, last) = run_ranks(2, train_little, 1, tmp_path)
    assert rows == [4, 2]
    assert losses == others
    assert (first, last) == ("range(0, 1)", "range(1, 3)")
    for rank in range(2):
        records = [json.loads(line) for line in (tmp_path / f"rank-{rank}.jsonl").read_text().splitlines()]
        assert {record["step"] for record in records} == {0, 1}
        assert {record["rank"] for record in records} == {rank}


def own_group(port: int, fail: bool) -> tuple[bool, bool, list[str]]:
    """A rank whose session makes the process group itself, from the variables of torchrun."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size)
    )
    try:
        with arachne.Session(LITTLE, device="cpu"):
            inside = dist.is_initialized()
            if fail:
                dist.barrier()  # else one rank may leave while the other still enters
                raise ArithmeticError("of the script")
    except ArithmeticError as error:
        return inside, dist.is_initialized(), error.__notes__
    finally:
        for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
            del os.environ[name]
    return inside, dist.is_initialized(), []


def test_the_process_group_is_made_and_destroyed() -> None:
    assert run_ranks(2, own_group, free_port(), False) == [(True, False, [])] * 2


def test_an_error_leaves_with_rank_device_and_stage_and_no_process_group() -> None:
    notes = [
        ["rank 0 of 2 (a:0), stage 0 of pipeline 0, blocks 0:1"],
        ["rank 1 of 2 (b:0), stage 1 of pipeline 0, blocks 1:3"],
    ]
    assert run_ranks(2, own_group, free_port(), True) == [(True, False, note) for note in notes]


ENDS = """
import gc, os, sys
import torch
from torch import nn
import arachne_runtime as arachne
with arachne.Session(sys.argv[1]) as session:
    engine = session.engine(
        lambda: nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)),
        optimizer=lambda p: torch.optim.AdamW(p),
        loss=lambda output, batch: output.square().mean(),
    )
    loss = engine.step(torch.ones(4, 2)).loss
names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
os.write(1, f"left {[name for name in names if 'gloo' in name]}\\n".encode())  # whole: ranks write at once
try:
    engine.step(torch.ones(4, 2))
except arachne.UsageError as error:
    os.write(1, f"{error}\\n".encode())
"""


def test_no_thread_of_a_group_outlives_its_session(tmp_path: Path) -> None:
    """One that let go of a tensor at the interpreter's end aborted 1 rank in 30 on a slow device."""
    write(LITTLE, tmp_path / "plan.json")
    (tmp_path / "train.py").write_text(ENDS)
    done = torchrun(2, str(tmp_path / "train.py"), str(tmp_path / "plan.json"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("left []\n") == 2
    assert done.stdout.count("the engine is closed, since its session has ended") == 2


def test_without_a_plan_one_process_trains_the_whole_model() -> None:
    with arachne.Session(device="cpu") as session:
        engine = make_engine(session)
        assert session.plan is not None
        assert (session.plan.devices, session.plan.num_blocks) == ((LONE_DEVICE,), 3)
        sizes = [len(batch.rows(range(batch.num_rows))) for batch in session.batches(torch.ones(5, 2), 3)]
        assert sizes == [3, 2]
        assert engine.step(torch.ones(7, 2)).num_rows == 7


def test_a_session_without_a_plan_takes_several_models() -> None:
    with arachne.Session(device="cpu") as session:
        first = make_engine(session)
        second = make_engine(session, lambda: nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)))
        assert [engine.plan.num_blocks for engine in (first, second)] == [3, 2]
        assert first.step(torch.ones(2, 2)).is_finite
    for engine in (first, second):
        with pytest.raises(arachne.UsageError, match="the engine is closed, since its session has ended"):
            engine.step(torch.ones(2, 2))


@pytest.mark.parametrize("plan", [{"format": "arachne.plan/1"}, 5])
def test_what_is_no_plan_is_refused(plan: Any) -> None:
    with pytest.raises(arachne.UsageError, match=r"a plan is a Plan or the name of its file, not (dict|int)"):
        arachne.Session(plan)


def test_options_reach_the_engine() -> None:
    parts = arachne.ModelParts.of(lambda: nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1)))
    options = {
        "optimizer": lambda p: torch.optim.SGD(p, lr=1.0),
        "loss": lambda output, batch: output.square().sum(),
        "inputs": lambda batch: (batch["tokens"].double(),),
        "clip_norm": 1e-3,
        "lr_schedule": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        "num_items": lambda batch: 2 * len(batch["tokens"]),
        "seed": 5,
        "dtype": torch.float64,
    }
    with arachne.Session(device="cpu") as session:
        with pytest.raises(arachne.UnsupportedPlanError, match="stochastic=True"):
            session.engine(parts, **options)
        engine = session.engine(parts, stochastic=True, **options)
        before = [p.detach().clone() for p in engine.stages[0].parameters()]
        expected = parts.stage(range(3), device=torch.device("cpu"), seed=5, dtype=torch.float64)
        assert all(torch.equal(a, b) for a, b in zip(before, expected.parameters(), strict=True))
        assert engine.step({"tokens": torch.ones(3, 2)}).num_items == 6
        moved = sum(
            (a - b).square().sum() for a, b in zip(before, engine.stages[0].parameters(), strict=True)
        )
        assert moved.item() ** 0.5 == pytest.approx(1e-3, rel=1e-3)
        assert engine.optimizer.param_groups[0]["lr"] == 0.5


class Readers(Dataset[tuple[int, int]]):
    """Which sample, and which process read it."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, os.getpid()


def test_the_launcher_says_where_records_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARACHNE_TRACE", str(tmp_path / "launched"))
    for trace, folder in ((None, "launched"), (tmp_path / "mine", "mine")):
        with arachne.Session(device="cpu", trace=trace) as session:
            make_engine(session).step(torch.ones(2, 2))
        assert (tmp_path / folder / "rank-0.jsonl").stat().st_size > 0


def test_options_reach_the_loader() -> None:
    order = GlobalOrder(num_samples=5, global_batch=2, seed=7, drop_last=True)
    with arachne.Session(device="cpu") as session:
        make_engine(session)
        batches = session.batches(
            Readers(), 2, seed=7, epochs=2, drop_last=True, collate_fn=list, num_workers=1
        )
        found = [sample for batch in batches for sample in batch.rows(range(2))]
    assert [index for index, _ in found] == [i for step in range(4) for i in order.samples(step, range(2))]
    assert os.getpid() not in {process for _, process in found}


def test_the_plan_comes_from_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(LITTLE, tmp_path / "plan.json")
    monkeypatch.setenv("ARACHNE_PLAN", str(tmp_path / "plan.json"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    session = arachne.Session(device="cpu")
    assert (session.plan, session.rank, session.world_size) == (LITTLE, 1, 2)
    assert arachne.Session(LITTLE, device="cpu").plan == LITTLE
    with pytest.raises(
        arachne.UsageError, match=r"another plan than the one it was launched with, .*plan\.json"
    ):
        arachne.Session(UNEQUAL)


def test_only_rank_0_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        arachne.Session(LITTLE, device="cpu").print("from", rank)
    assert capsys.readouterr().out == "from 0\n"


def test_a_world_unlike_the_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        arachne.UsageError, match=r"uses 2 devices \(a:0, b:0\), but there are 1 processes; .*node 2"
    ):
        arachne.Session(LITTLE)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(arachne.UsageError, match="4 processes and no plan to share the work"):
        arachne.Session()


ALONE = msgspec.structs.replace(
    LITTLE, pipelines=(Pipeline(micro_batches=2, micro_batch=2, stages=(stage(0, 3, a0=2),)),)
)


def test_a_batch_unlike_the_plan_is_refused() -> None:
    with arachne.Session(ALONE, device="cpu") as session:
        make_engine(session)
        with pytest.raises(
            arachne.UsageError, match="global_batch=8, but the plan is for 4; pass global_batch=4"
        ):
            session.batches(torch.ones(5, 2), 8)
        with pytest.raises(arachne.UsageError, match="start=3 is not within the 2 steps of 1 epochs"):
            session.batches(torch.ones(5, 2), 4, start=3)
        for wrong in ({"global_batch": "4"}, {"global_batch": 4.0}, {"seed": None}, {"epochs": "1"}):
            (name,) = wrong
            with pytest.raises(arachne.UsageError, match=rf"^{name}=.* is no whole number; convert it"):
                session.batches(torch.ones(5, 2), **{"global_batch": 4} | wrong)
        assert len(list(session.batches(torch.ones(5, 2), 4))) == 2


def test_calls_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(arachne.UsageError, match="a session starts with its `with` block"):
        make_engine(arachne.Session(ALONE, device="cpu"))
    with (
        arachne.Session(ALONE, device="cpu") as session,
        pytest.raises(arachne.UsageError, match=r"call session\.engine\(\.\.\.\) before"),
    ):
        session.batches(torch.ones(5, 2), 4)


@pytest.mark.parametrize("seconds", ["60", 0, -1, float("nan")])
def test_a_time_limit_that_is_none_is_refused(seconds: Any) -> None:
    with pytest.raises(arachne.UsageError, match=r"timeout_s=.* is no time to wait; give seconds"):
        arachne.Session(ALONE, device="cpu", timeout_s=seconds)


def test_what_is_no_device_is_refused() -> None:
    with pytest.raises(arachne.UsageError, match=r"device='gpu' is no device of torch; give 'cpu'"):
        arachne.Session(device="gpu")


def test_a_missing_cuda_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    away = msgspec.structs.replace(
        ALONE, pipelines=(Pipeline(micro_batches=2, micro_batch=2, stages=(stage(0, 3, a3=2),)),)
    )
    with pytest.raises(
        arachne.UnsupportedEnvironmentError, match="rank 0 is a:3, but this machine has 2 CUDA"
    ):
        arachne.Session(away)
    assert arachne.Session(ALONE).device == torch.device("cuda:0")
    assert arachne.Session(away, device="cpu").device == torch.device("cpu")


def test_cuda_ranks_speak_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which backend and device, with CUDA and NCCL played by a log of calls."""
    calls: list[object] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, timeout: calls.append((backend, timeout.seconds))
    )
    monkeypatch.setattr(dist, "barrier", lambda device_ids: calls.append(device_ids))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroyed"))
    with arachne.Session(LITTLE, timeout_s=30):
        pass
    assert calls == [torch.device("cuda:0"), ("nccl", 30), [0], "destroyed"]
    calls.clear()
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: calls.append("aborted"))
    with pytest.raises(ArithmeticError), arachne.Session(LITTLE, timeout_s=30):
        raise ArithmeticError("of the script")
    assert calls == [torch.device("cuda:0"), ("nccl", 30), "aborted"]
