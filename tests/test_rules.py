"""Each rule has a document that breaks it and no other; every rule is in the table, every check runs it."""

import inspect
from types import ModuleType
from typing import Any

import pytest

from arachne_runtime.errors import InvalidFileError, Problem
from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.profile import Profile
from arachne_runtime.plan.rules import check_cluster, check_model, check_plan, check_profile
from arachne_runtime.plan.rules import cluster as cluster_rules
from arachne_runtime.plan.rules import model as model_rules
from arachne_runtime.plan.rules import plan as plan_rules
from arachne_runtime.plan.rules import plan_fit as fit_rules
from arachne_runtime.plan.rules import profile as profile_rules
from tests.documents import CLUSTER, MODEL, PLAN, PROFILE, REMOVED, changed, read
from tests.rule_cases import (
    CLUSTER_CASES,
    MODEL_CASES,
    PLAN_CASES,
    PLAN_CLUSTER_CASES,
    PLAN_MODEL_CASES,
    PROFILE_CASES,
    STAGE,
    Case,
    Rule,
)

P, C, M, F, FIT = plan_rules, cluster_rules, model_rules, profile_rules, fit_rules


CLUSTER_READ = read(CLUSTER, Cluster)
MODEL_READ = read(MODEL, ModelSpec)


def broken(rules: tuple[Rule, ...], *documents: Any) -> dict[Rule, list[Problem]]:
    found = {rule: list(rule(*documents)) for rule in rules}
    return {rule: problems for rule, problems in found.items() if problems}


def named(cases: list[Case]) -> list[Any]:
    return [pytest.param(*case, id=f"{case[0].__name__}-{i}") for i, case in enumerate(cases)]


def assert_only(found: dict[Rule, list[Problem]], rule: Rule, path: str, words: str) -> None:
    assert list(found) == [rule]
    (problem,) = found[rule]
    assert problem.path == path
    assert words in problem.message


@pytest.mark.parametrize(("rule", "changes", "path", "words"), named(PLAN_CASES))
def test_plan_rules(rule, changes, path, words):
    plan = read(changed(PLAN, changes), Plan)
    rules = (*P.PLAN_RULES, P.pipelines_stop_at_the_same_block)
    assert_only(broken(rules, plan), rule, path, words)
    assert [p.path for p in check_plan(plan)] == [path]


@pytest.mark.parametrize(("rule", "changes", "path", "words"), named(PLAN_CLUSTER_CASES))
def test_plan_rules_that_need_a_cluster(rule, changes, path, words):
    plan = read(changed(PLAN, changes), Plan)
    assert_only(broken(FIT.PLAN_CLUSTER_RULES, plan, CLUSTER_READ), rule, path, words)
    assert check_plan(plan) == ()
    assert [p.path for p in check_plan(plan, cluster=CLUSTER_READ)] == [path]


@pytest.mark.parametrize(("rule", "changes", "path", "words"), named(PLAN_MODEL_CASES))
def test_plan_rules_that_need_a_model(rule, changes, path, words):
    plan = read(changed(PLAN, changes), Plan)
    assert_only(broken(FIT.PLAN_MODEL_RULES, plan, MODEL_READ), rule, path, words)
    assert [p.path for p in check_plan(plan, model=MODEL_READ)] == [path]


@pytest.mark.parametrize(("rule", "changes", "path", "words"), named(CLUSTER_CASES))
def test_cluster_rules(rule, changes, path, words):
    cluster = read(changed(CLUSTER, changes), Cluster)
    assert_only(broken(C.CLUSTER_RULES, cluster), rule, path, words)
    assert [p.path for p in check_cluster(cluster)] == [path]


@pytest.mark.parametrize(("rule", "changes", "path", "words"), named(MODEL_CASES))
def test_model_rules(rule, changes, path, words):
    model = read(changed(MODEL, changes), ModelSpec)
    assert_only(broken(M.MODEL_RULES, model), rule, path, words)
    assert [p.path for p in check_model(model)] == [path]


@pytest.mark.parametrize(("rule", "changes", "path", "words"), named(PROFILE_CASES))
def test_profile_rules(rule, changes, path, words):
    profile = read(changed(PROFILE, changes), Profile)
    assert_only(broken(F.PROFILE_RULES, profile), rule, path, words)
    assert [p.path for p in check_profile(profile)] == [path]


def test_the_documents_themselves_are_valid():
    assert check_cluster(CLUSTER_READ) == ()
    assert check_model(MODEL_READ) == ()
    assert check_profile(read(PROFILE, Profile)) == ()
    assert check_plan(read(PLAN, Plan), cluster=CLUSTER_READ, model=MODEL_READ) == ()


@pytest.mark.parametrize(
    ("module", "cases"),
    [
        (plan_rules, PLAN_CASES),
        (fit_rules, PLAN_CLUSTER_CASES + PLAN_MODEL_CASES),
        (cluster_rules, CLUSTER_CASES),
        (model_rules, MODEL_CASES),
        (profile_rules, PROFILE_CASES),
    ],
)
def test_every_rule_is_in_the_table(module: ModuleType, cases: list[Case]):
    rules = {
        function
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith(("_", "check_"))
    }
    assert rules
    assert rules - {case[0] for case in cases} == set()


def test_a_device_in_two_pipelines_is_refused_whatever_the_schedule():
    changes = {"schedule": "interleaved_1f1b", "pipelines[1].stages[0].replicas[0].devices": ["a:0"]}
    (problem,) = check_plan(read(changed(PLAN, changes), Plan))
    assert problem.message == "a:0 is already in pipeline 0, stage 1; a device belongs to one stage"


def test_an_interleaved_schedule_lets_a_device_hold_several_stages():
    devices = {
        "pipelines[0].stages[1].replicas": PLAN["pipelines"][0]["stages"][0]["replicas"],
        "predicted": REMOVED,
    }
    assert check_plan(read(changed(PLAN, devices | {"schedule": "interleaved_1f1b"}), Plan)) == ()
    assert len(check_plan(read(changed(PLAN, devices), Plan))) == 2


def test_the_engine_checks_a_plan_that_no_reader_has_seen():
    from arachne_runtime.engine.refusals import refuse_plan  # loads torch, which no rule needs

    plan = read(changed(PLAN, {f"{STAGE}.replicas[0].share": 3}), Plan)
    with pytest.raises(InvalidFileError, match="shares add up to 5, but micro_batch is 6"):
        refuse_plan(plan, len(plan.devices))


def test_all_violations_come_at_once():
    changes = {"global_batch": 99, f"{STAGE}.replicas[0].share": 1, "pipelines[0].stages[1].layers": [3, 6]}
    paths = [problem.path for problem in check_plan(read(changed(PLAN, changes), Plan))]
    assert paths == [
        "$.pipelines[0].stages[1].layers",
        "$.pipelines[0].stages[0].replicas",
        "$.global_batch",
        "$.pipelines[1].stages[0].layers",
    ]


def test_names_that_int_would_take_are_no_devices():
    for name in (
        "a:01",
        "a:+1",
        "a:1_0",
        "a:\u0661",
        "a: 1",
        "a:-1",
        ":1",
        "a:b:1",
        "a:",
        "a:1\n",
        "a:9999999999",
    ):
        plan = read(
            changed(PLAN, {"pipelines[0].stages[0].replicas[0].devices": [name], "predicted": REMOVED}), Plan
        )
        assert [p.path for p in check_plan(plan)] == ["$.pipelines[0].stages[0].replicas[0].devices[0]"], name
