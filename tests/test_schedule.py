"""Schedules: the notation, the order of 1F1B and GPipe, the grid, and faults that are pointed at."""

from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arachne_runtime.errors import UsageError
from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.plan.schedule import PLAYABLE, Action, Work, stage_actions
from arachne_runtime.plan.schedule_grid import Row, check_schedule, parse_grid, pipeline_rows, print_grid
from tests.strategies import plans


def grid(text: str) -> str:
    return dedent(text).strip("\n")


def refused(text: str, stages: int = 2, micro_batches: int = 2) -> str:
    with pytest.raises(UsageError) as caught:
        check_schedule(parse_grid(text), num_stages=stages, num_micro_batches=micro_batches)
    return str(caught.value).split("\n", 1)[1]


@given(st.integers(0, 500), st.sampled_from(list(Work)), st.integers(0, 500))
def test_an_action_prints_and_parses(stage, work, micro_batch):
    action = Action(stage, work, micro_batch)
    assert Action.parse(str(action)) == action


def test_the_notation():
    assert str(Action(2, Work.FORWARD, 0)) == "2F0"
    assert Action.parse("11B7") == Action(11, Work.BACKWARD, 7)


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "2F0 ", " 2F0", "-1F0", "2f0", "2F0B"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(UsageError, match="no action in"):
        Action.parse(text)


def test_1f1b_and_gpipe_by_hand():
    def words(kind: ScheduleKind, stage: int) -> str:
        return " ".join(map(str, stage_actions(kind, stage, 3, 4)))

    assert words(ScheduleKind.ONE_F_ONE_B, 0) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert words(ScheduleKind.ONE_F_ONE_B, 1) == "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"
    assert words(ScheduleKind.ONE_F_ONE_B, 2) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    assert words(ScheduleKind.GPIPE, 1) == "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3"


@pytest.mark.parametrize("kind", [ScheduleKind.INTERLEAVED, ScheduleKind.ZERO_BUBBLE])
def test_a_schedule_that_is_not_played_yet_says_so(kind):
    with pytest.raises(UsageError, match=f"schedule {kind} cannot be played yet"):
        stage_actions(kind, 0, 2, 2)


@pytest.mark.parametrize("kind", PLAYABLE)
@given(st.integers(1, 8), st.integers(1, 12))
def test_every_schedule_runs(kind, num_stages, num_micro_batches):
    rows = [Row(f"a:{s}", stage_actions(kind, s, num_stages, num_micro_batches)) for s in range(num_stages)]
    check_schedule(rows, num_stages=num_stages, num_micro_batches=num_micro_batches)


@given(plans())
def test_the_rows_of_a_plan_run(plan):
    for p, pipeline in enumerate(plan.pipelines):
        rows = pipeline_rows(plan, p)
        check_schedule(rows, num_stages=len(pipeline.stages), num_micro_batches=pipeline.micro_batches)
        assert parse_grid(print_grid(rows)) == rows


@given(st.integers(1, 8), st.integers(1, 12))
def test_1f1b_keeps_few_micro_batches_in_flight(num_stages, num_micro_batches):
    for stage in range(num_stages):
        flight = most = 0
        for action in stage_actions(ScheduleKind.ONE_F_ONE_B, stage, num_stages, num_micro_batches):
            flight += 1 if action.work is Work.FORWARD else -1
            most = max(most, flight)
        assert most == min(num_stages - stage, num_micro_batches)


def test_a_grid():
    rows = [Row("a-0:0", stage_actions(ScheduleKind.ONE_F_ONE_B, 0, 2, 2))]
    rows.append(Row("v-0:0", stage_actions(ScheduleKind.ONE_F_ONE_B, 1, 2, 2)))
    assert print_grid(rows) == grid(
        """
        a-0:0  0F0 0F1     0B0     0B1
        v-0:0      1F0 1B0 1F1 1B1
        """
    )


def test_a_row_may_hold_several_stages():
    text = "a:0  0F0 2F0 2B0 0B0\na:1  1F0 1B0"
    check_schedule(parse_grid(text), num_stages=3, num_micro_batches=1)
    assert print_grid(parse_grid(text)) == grid(
        """
        a:0  0F0     2F0 2B0     0B0
        a:1      1F0         1B0
        """
    )


def test_what_nobody_sends_is_pointed_at():
    assert refused("a-0:0  0F0 0F1 0B0 0B1\nv-0:0  1F0 1B0 1F1\nt-0:0  2F0 2F1 2B1", 3) == grid(
        """
        a-0:0  0F0 0F1 0B0 0B1
        v-0:0      1F0 1B0 1F1
                       ^ waits for 2B0, which nobody sends
        t-0:0          2F0 2F1 2B1
        """
    )


def test_a_deadlock_is_pointed_at():
    assert refused("a:0  0F0 0B0 0F1 0B1\na:1  1F0 1F1 1B0 1B1") == grid(
        """
        a:0  0F0 0B0 0F1 0B1
                 ^ waits for 1B0, which a:1 does only after 1F1
        a:1      1F0 1F1 1B0 1B1
        """
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a:0  0F0 0F1 0B0 0B1\na:1  1F0 1B0 1F1 1F0 1B1", "^ 1F0 is done twice"),
        ("a:0  0B0 0F0 0F1 0B1\na:1  1F0 1B0 1F1 1B1", "^ comes before its forward 0F0"),
        ("a:0  0F0 0F1 0B0\na:1  1F0 1B0 1F1 1B1", "^ 0B1 is missing"),
        ("a:0  0F0 0F1 0B0 0B1\na:1  1F0 1B0 1F1 1B1 1F2", "^ there is no micro-batch 2: the pipeline has 2"),
        ("a:0  0F0 0F1 0B0 0B1\na:1  1F0 1B0 1F1 1B1 2F0", "^ there is no stage 2: the pipeline has 2"),
        ("a:0  0F0 0B0\na:1  1F0 1B0", "^ 0F1 is missing"),
    ],
)
def test_faults_are_pointed_at(text, words):
    shown = refused(text)
    line = next(line for line in shown.splitlines() if "^" in line)
    assert line.strip() == words


def test_the_caret_stands_under_the_action():
    lines = refused("a:0  0F0 0F1 0B0 0B1\na:1  1F0 1B0 1F1 1F0 1B1").splitlines()
    caret = next(i for i, line in enumerate(lines) if "^" in line)
    assert lines[caret - 1][lines[caret].index("^") :].startswith("1F0")


@given(plans(tp=1), st.data())
def test_a_spoilt_schedule_is_refused(plan, data):
    """Dropping any action, doing one twice, or a backward before its forward never goes unnoticed."""
    pipeline = plan.pipelines[0]
    rows = list(pipeline_rows(plan, 0))
    r = data.draw(st.integers(0, len(rows) - 1))
    actions = list(rows[r].actions)
    i = data.draw(st.integers(0, len(actions) - 1))
    match data.draw(st.sampled_from(("drop", "twice", "backward first"))):
        case "drop":
            del actions[i]
        case "twice":
            actions.insert(data.draw(st.integers(0, len(actions))), actions[i])
        case "backward first":
            backward = Action(actions[i].stage, Work.BACKWARD, actions[i].micro_batch)
            actions.remove(backward)
            forward = Action(backward.stage, Work.FORWARD, backward.micro_batch)
            actions.insert(actions.index(forward), backward)
    rows[r] = Row(rows[r].name, tuple(actions))
    with pytest.raises(UsageError, match="cannot run"):
        check_schedule(rows, num_stages=len(pipeline.stages), num_micro_batches=pipeline.micro_batches)


def test_a_schedule_without_rows_is_refused():
    with pytest.raises(UsageError, match="without a row"):
        check_schedule([], num_stages=1, num_micro_batches=1)
