"""Schedules: the notation, the order of 1F1B and GPipe, the grid, and faults that are pointed at."""

from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arachne_runtime.errors import UsageError
from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.plan.schedule import (
    PRICEABLE,
    Action,
    Work,
    deferred,
    in_flight,
    row_actions,
    stage_actions,
)
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


def test_zero_bubble_by_hand():
    # stage s owes the weights' gradients of s micro-batches
    rows = [Row(f"a:{s}", row_actions(ScheduleKind.ZERO_BUBBLE, s, 3, 3, 3)) for s in range(3)]
    assert [" ".join(map(str, row.actions)) for row in rows] == [
        "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2",
        "1F0 1F1 1I0 1F2 1I1 1W0 1I2 1W1 1W2",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2W1 2W2",
    ]


def test_interleaved_by_hand():
    # two sets of devices, two stages each, four micro-batches in rounds of two
    def words(row: int) -> str:
        return " ".join(map(str, row_actions(ScheduleKind.INTERLEAVED, row, 2, 4, 4)))

    assert words(0).startswith("0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1")
    assert words(1) == "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"
    assert stage_actions(ScheduleKind.INTERLEAVED, 2, 4, 4, num_rows=2)[:3] == tuple(
        map(Action.parse, ("2F0", "2F1", "2B0"))
    )


def test_rows_that_do_not_fit_the_stages_are_refused():
    with pytest.raises(UsageError, match="2 rows cannot hold 3 stages"):
        row_actions(ScheduleKind.INTERLEAVED, 0, 2, 3, 4)
    with pytest.raises(UsageError, match="a row for each stage"):
        row_actions(ScheduleKind.ONE_F_ONE_B, 0, 2, 4, 4)


@pytest.mark.parametrize("kind", PRICEABLE)
@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 3))
def test_every_schedule_runs(kind, num_rows, num_micro_batches, chunks):
    num_stages = num_rows * chunks if kind is ScheduleKind.INTERLEAVED else num_rows
    rows = [
        Row(f"a:{r}", row_actions(kind, r, num_rows, num_stages, num_micro_batches)) for r in range(num_rows)
    ]
    check_schedule(rows, num_stages=num_stages, num_micro_batches=num_micro_batches)
    assert parse_grid(print_grid(rows)) == tuple(rows)


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ("0F0 0W0 0I0", "comes before its gradient of the input 0I0"),
        ("0F0 0I0", "0W0 is missing"),
        ("0I0 0W0 0F0", "comes before its forward 0F0"),
    ],
)
def test_halves_of_a_backward_come_in_order_and_both(row, wrong):
    with pytest.raises(UsageError, match=wrong):
        check_schedule(parse_grid(f"a:0  {row}"), num_stages=1, num_micro_batches=1)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))
def test_interleaved_keeps_as_many_in_flight_as_the_formula(rows, rounds, chunks):
    # min(M v, (v - 1) R + 2 (p - 1 - r) + 1), R the micro-batches of a round (Megatron-LM)
    count = rounds * rows
    for row in range(rows):
        flight = most = 0
        for action in row_actions(ScheduleKind.INTERLEAVED, row, rows, rows * chunks, count):
            flight += 1 if action.work is Work.FORWARD else -1
            most = max(most, flight)
        ahead = (chunks - 1) * rows + 2 * (rows - 1 - row) + 1 if chunks > 1 else rows - row
        assert most == min(count * chunks, ahead)
        held = [
            in_flight(ScheduleKind.INTERLEAVED, s, rows * chunks, count, rows)
            for s in range(row, rows * chunks, rows)
        ]
        assert max(held) <= most <= sum(held)


def test_a_schedule_is_the_same_whether_it_is_named_or_spelled():
    """What is remembered for the name is what the spelling would be given, and the other way round."""
    spelled = stage_actions("zero_bubble", 1, 3, 17)
    assert spelled == stage_actions(ScheduleKind.ZERO_BUBBLE, 1, 3, 17)
    assert Work.WEIGHT in {action.work for action in spelled}


@given(st.integers(1, 6), st.integers(1, 12))
def test_zero_bubble_holds_no_more_than_the_first_stage_of_1f1b(num_stages, count):
    for stage in range(num_stages):
        held, owed, most, most_owed = 0, 0, 0, 0
        for action in stage_actions(ScheduleKind.ZERO_BUBBLE, stage, num_stages, count):
            held += {Work.FORWARD: 1, Work.INPUT: 0, Work.WEIGHT: -1}[action.work]
            owed += {Work.FORWARD: 0, Work.INPUT: 1, Work.WEIGHT: -1}[action.work]
            most, most_owed = max(most, held), max(most_owed, owed)
        assert most == in_flight(ScheduleKind.ZERO_BUBBLE, stage, num_stages, count)
        assert most_owed == 1 + deferred(ScheduleKind.ZERO_BUBBLE, stage, count)


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
