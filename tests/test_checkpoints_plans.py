"""A checkpoint loads into any other plan exactly, on real ranks, and training goes on at the next sample."""

import random
import re
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

import arachne_runtime as arachne
from arachne_runtime.errors import WorkerFailedError
from arachne_runtime.plan.plan import Pipeline, Plan
from arachne_runtime.state import keeper
from arachne_runtime.state.holdings import holdings, scalars
from arachne_runtime.testing import run_ranks
from bench import exactness_plans
from bench.cases import SEQUENCE, VOCABULARY, WIDTH, Case
from bench.exactness_tensor import BLOCKS
from tests.test_holdings import drawn, joined, optimizer, same
from tests.test_session import LITTLE, make_engine, stage

MOST_ROWS = 20


def samples(global_batch: int) -> list[dict[str, torch.Tensor]]:
    """Three steps of an epoch, the last with one sample."""
    source = torch.Generator().manual_seed(2)
    return [
        {
            "tokens": torch.randint(VOCABULARY, (SEQUENCE,), generator=source),
            "targets": torch.randint(VOCABULARY, (SEQUENCE,), generator=source),
            "position": torch.randn(SEQUENCE, WIDTH, generator=source, dtype=torch.float64),
        }
        for _ in range(2 * global_batch + 1)
    ]


def schedule(made: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.MultiStepLR(made, [1, 3], gamma=0.5)


def trained(case: Case, folder: Path, last: int, background: bool) -> tuple[tuple, list[float], tuple]:
    """The state that the job begins with, its losses, and the state that it ends with."""
    with arachne.Session(case.plan, device="cpu") as session:
        engine = session.engine(
            case.model,
            optimizer=partial(optimizer, case),
            loss=case.loss,
            inputs=lambda batch: (batch["tokens"],),
            lr_schedule=schedule,
            dtype=case.dtype,
            seed=5,
        )
        session.checkpoints(folder, every=2, background=background)
        start, losses = state_of(engine), []
        batches = session.batches(samples(case.plan.global_batch), case.plan.global_batch, epochs=3)
        while engine.num_steps < last:
            losses.append(engine.step(next(batches)).loss)
        return start, losses, state_of(engine)


def state_of(engine: arachne.Engine) -> tuple[list, dict]:
    found = [(h.name, h.key, h.shape, h.part, h.tensor.clone()) for h in holdings(engine)]
    return found, scalars(engine)


def pair_of(kinds: tuple[str, str], adam: bool) -> tuple[Case, Case]:
    """Two random plans of one global batch."""
    source = random.Random(f"{kinds} {adam}")
    while True:
        one, other = drawn(source, kinds[0], adam), drawn(source, kinds[1], adam)
        if one.plan.global_batch == other.plan.global_batch < MOST_ROWS and one.plan != other.plan:
            return one, other


@pytest.fixture(autouse=True)
def _models_of_one_length(monkeypatch):
    monkeypatch.setattr(exactness_plans, "BLOCKS", BLOCKS)


@pytest.mark.parametrize(
    ("kinds", "adam"),
    [
        (("plain", "tensor"), True),
        (("tensor", "plain"), False),
        (("experts", "experts"), True),
        (("zero", "plain"), False),
        (("tensor", "zero"), True),
    ],
)
def test_a_checkpoint_loads_into_another_plan(kinds, adam, tmp_path):
    one, other = pair_of(kinds, adam)
    num_ranks, num_others = len(one.plan.devices), len(other.plan.devices)
    before = run_ranks(num_ranks, trained, one, tmp_path, 4, adam)
    after = run_ranks(num_others, trained, other, tmp_path, 7, False)
    whole = run_ranks(num_ranks, trained, one, tmp_path / "whole", 7, False)
    assert same(joined([start for start, _, _ in after]), joined([end for _, _, end in before]))
    assert len(after[0][1]) == 3
    assert before[0][1] + after[0][1] == pytest.approx(whole[0][1], rel=1e-9)


def unlike(folder: Path, case: Case) -> None:
    with arachne.Session(case.plan, device="cpu") as session:
        session.engine(
            case.model, optimizer=torch.optim.SGD, loss=case.loss, inputs=lambda batch: (batch["tokens"],)
        )
        session.checkpoints(folder, every=2 + session.rank)


def test_ranks_that_ask_for_unlike_checkpoints_are_told(tmp_path):
    case = drawn(random.Random(1), "plain", False)
    with pytest.raises(WorkerFailedError, match=r"the ranks call session.checkpoints with other arguments"):
        run_ranks(len(case.plan.devices), unlike, tmp_path, case)


def not_shared(folder: Path, case: Case) -> str:
    """Each rank has a folder of its own under the same name, as on nodes without a shared file system."""
    with arachne.Session(case.plan, device="cpu") as session:
        engine = session.engine(
            case.model, optimizer=torch.optim.SGD, loss=case.loss, inputs=lambda batch: (batch["tokens"],)
        )
        checkpoints = session.checkpoints(folder, every=100)
        keeper.VISIBLE_S = 0.2
        checkpoints._folder_of = lambda steps: folder / str(session.rank) / f"step-{steps:08d}"
        engine.num_steps = 1
        try:
            checkpoints.save()
        except arachne.ArachneError as error:
            return str(error)
        finally:
            keeper.VISIBLE_S = 60.0
    return ""


def test_a_folder_that_ranks_do_not_share_is_told(tmp_path):
    case = drawn(random.Random(1), "plain", False)
    first, *others = run_ranks(len(case.plan.devices), not_shared, tmp_path, case)
    assert "the ranks do not share this folder" in first
    assert all("another rank could not write its part" in told for told in others)


SWAPPED = msgspec.structs.replace(
    LITTLE,
    pipelines=(Pipeline(micro_batches=2, micro_batch=2, stages=(stage(0, 2, b0=2), stage(2, 3, a0=2))),),
)
"""The same devices the other way round: the process of rank 0 becomes rank 1."""


def little(folder: Path, last: int, other: Plan | None = None) -> tuple[list[float], float]:
    """Losses until ``last`` steps are done, the first by LITTLE and the others by another plan; a draw."""
    with arachne.Session(LITTLE, device="cpu") as session:
        engine = make_engine(session)
        torch.manual_seed(session.rank)
        session.checkpoints(folder, every=1)
        losses = []
        for batch in session.batches(torch.arange(40.0).view(20, 2) / 40, global_batch=4):
            if other is not None and engine.num_steps == 1:
                session.replan(other)
            if engine.num_steps == last:
                break
            losses.append(engine.step(batch).loss)
        return losses, float(torch.rand(()))


def test_a_checkpoint_after_a_change_of_plan_loads_into_the_first_one(tmp_path):
    whole = run_ranks(2, little, tmp_path / "whole", 5)
    first = run_ranks(2, little, tmp_path / "changed", 3, SWAPPED)
    rest = run_ranks(2, little, tmp_path / "changed", 5)
    for before, after, expected in zip(first, rest, whole, strict=True):
        assert len(after[0]) == 2
        assert before[0] + after[0] == pytest.approx(expected[0], rel=1e-5)


def saved_at_a_change(folder: Path, last: int, wishes: list[Plan]) -> list[float]:
    """Losses until ``last`` steps are done; the only checkpoint is written as the plan changes."""
    with arachne.Session(LITTLE, device="cpu") as session:
        engine = make_engine(session)
        checkpoints = session.checkpoints(folder, every=100)
        session.watch_plan(lambda: wishes.pop() if wishes else None)
        session.on_replan(lambda change: checkpoints.save())
        losses = []
        for batch in session.batches(torch.arange(40.0).view(20, 2) / 40, global_batch=4):
            losses.append(engine.step(batch).loss)
            if engine.num_steps == last:
                break
        return losses


def test_a_checkpoint_written_as_the_plan_changes_knows_the_step_before(tmp_path):
    whole = run_ranks(2, saved_at_a_change, tmp_path / "whole", 3, [])
    first = run_ranks(2, saved_at_a_change, tmp_path / "saved", 1, [SWAPPED])
    rest = run_ranks(2, saved_at_a_change, tmp_path / "saved", 3, [])
    for before, after, expected in zip(first, rest, whole, strict=True):
        assert before + after == pytest.approx(expected, rel=1e-5)


def test_ranks_that_draw_unlike_numbers_get_their_own_back(tmp_path):
    first = run_ranks(2, little, tmp_path, 3)
    again = run_ranks(2, little, tmp_path, 3)
    assert [draw for _, draw in again] == [draw for _, draw in first]
    assert first[0][1] != first[1][1]


def test_the_page_is_what_a_script_says(tmp_path, monkeypatch):
    page = (Path(__file__).parents[1] / "docs" / "checkpoints.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    names = {"arachne": arachne, "make_engine": make_engine, "dataset": torch.ones(1024, 2)}
    exec(code.replace("session.engine(...)", "make_engine(session)").replace("every=100", "every=2"), names)
    assert names["engine"].num_steps == 6
    assert sorted(path.name for path in (tmp_path / "runs/one").glob("step-*"))[-1] == "step-00000006"
