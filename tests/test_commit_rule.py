"""The commit rule holds in every order of events, and four simpler ones do not."""

import pytest

from arachne_runtime.membership.decision import Decision, Flags, Report, StatesDifferError, Verdict, decide

from .commit_model import Model, ViolationError, all_entered, anyone_completed, real_rule, yes_or_no


@pytest.mark.parametrize(
    ("ranks", "steps", "failures", "lost_may_act", "states"),
    [
        (4, 3, 2, False, 30_000),
        (3, 3, 2, False, 9_000),
        (3, 2, 1, True, 7_000),
        (3, 1, 2, True, 50_000),
    ],
)
def test_no_order_of_events_breaks_the_rule(ranks, steps, failures, lost_may_act, states):
    """Dead ranks never act again; ranks that are only cut off go on in their old generation."""
    assert Model(ranks, steps, failures, lost_may_act=lost_may_act).explore() > states


@pytest.mark.parametrize(
    ("ranks", "steps", "failures", "joins", "lost_may_act", "states"),
    [
        (2, 2, 2, 1, False, 50_000),
        (3, 2, 1, 1, False, 25_000),
        (2, 1, 1, 2, False, 10_000),
        (2, 1, 1, 1, True, 7_000),
    ],
)
def test_joiners_and_generations_that_are_never_completed_break_nothing(
    ranks, steps, failures, joins, lost_may_act, states
):
    """Whether a joiner's own parts count is the coordinator's to say, and it may not have heard."""
    model = Model(ranks, steps, failures, lost_may_act=lost_may_act, num_joins=joins)
    assert model.explore() > states


@pytest.mark.parametrize("wrong", ["hears_joiners", "trains_at_once"])
def test_joiners_need_that_nobody_counts_or_trains_before_all_are_ready(wrong):
    with pytest.raises((ViolationError, StatesDifferError)):
        Model(2, 2, 1, lost_may_act=False, num_joins=1, **{wrong: True}).explore()


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (yes_or_no, "applied from gradients of generations"),
        (anyone_completed, "applied from gradients of generations"),
        (all_entered, "with gradients -1"),
    ],
)
def test_the_checker_finds_what_is_wrong_with_a_simpler_rule(rule, words):
    with pytest.raises(ViolationError, match=words):
        Model(3, 2, 2, rule, lost_may_act=False).explore()


def test_a_report_before_the_freeze_is_wrong():
    with pytest.raises((ViolationError, StatesDifferError)):
        Model(3, 2, 1, real_rule, freezes_first=False, lost_may_act=False).explore()


def flags(step, **changes):
    return Flags(step=step, is_finite=True, **changes)


def test_survivors_in_different_steps_meet_in_the_smaller_one():
    ahead = Report(applied=5, entered=6, held=2, flags=flags(5, batch_vote=3))
    behind = Report(applied=4, entered=5, held=2)
    decision = decide([ahead, behind])
    assert decision == Decision(verdict=Verdict.APPLY, step=5, flags=flags(5, batch_vote=3))
    assert decision.next_step == 6


def test_one_that_has_not_entered_makes_all_go_on_from_the_step_before():
    decision = decide([Report(applied=4, entered=5, held=0), Report(applied=4, entered=4)])
    assert (decision.verdict, decision.step, decision.next_step) == (Verdict.APPLY, 4, 5)


def test_gradients_of_two_generations_or_none_are_discarded():
    kept, other, none = (Report(applied=4, entered=5, held=held) for held in (1, 2, None))
    assert decide([kept, kept]).verdict is Verdict.APPLY
    for reports in ([kept, other], [kept, none]):
        assert (decide(reports).verdict, decide(reports).next_step) == (Verdict.REDO, 5)


@pytest.mark.parametrize(
    ("reports", "words"),
    [
        (
            [Report(applied=1, entered=1), Report(applied=3, entered=3)],
            "applied step 3, another entered only 1",
        ),
        (
            [Report(applied=0, entered=0), Report(applied=1, entered=1)],
            "applied step 1, another entered only 0",
        ),
        ([Report(applied=2, entered=1)], "without having entered"),
        ([Report(applied=1, entered=3)], "without having applied step 2"),
        ([Report(applied=3, entered=3, flags=flags(7))], "flags of step 7"),
        (
            [Report(applied=3, entered=3, flags=flags(3, batch_vote=vote)) for vote in (0, 1)],
            "unlike flags of step 3",
        ),
    ],
)
def test_reports_that_no_job_gives_are_refused(reports, words):
    with pytest.raises(StatesDifferError, match=words):
        decide(reports)


def test_without_a_report_there_is_nothing_to_decide():
    with pytest.raises(ValueError, match="no report"):
        decide([])
