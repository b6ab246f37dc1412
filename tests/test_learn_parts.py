"""Parts of training that need no long run: credit, gradients kept apart, rewards, curves, files."""

from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arachne_runtime.plan import cluster as places
from arachne_runtime.plan.plan import ScheduleKind
from planner import catalog
from planner.policy.choosers import Network, Uniform, forced
from planner.policy.decision import Head
from planner.policy.policy import Policy
from planner.policy.roll import roll
from planner.policy.site import Site
from planner.request import Request
from planner.search.columns import Completion
from planner.search.shapes import expanded
from planner.search.supply import Supply
from planner.training.advantage import LOST, advantages, rewards_of
from planner.training.buffer import Buffer, Kept, sequence_of
from planner.training.curves import Curves, draw_curves
from planner.training.examples import Examples, Kind, batches, examples_of
from planner.training.explore import Exploring
from planner.training.group_relative import apart, group_of
from planner.training.labels import Run
from planner.training.learner import Learner
from planner.training.problem import Problem
from planner.training.recipe import Exploration
from planner.training.record import Recorder
from planner.training.reward import reward

REWARDS = st.lists(st.floats(-2, 0), min_size=4, max_size=8).map(np.array)


def added_to_best(rewards, best_of):
    """By going through every set of companions."""
    found = []
    for i, own in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if j != i]
        sets = list(combinations(others, best_of - 1))
        found.append(np.mean([max(0.0, own - max(companions)) for companions in sets]))
    return np.array(found)


@settings(max_examples=60, deadline=None)
@given(REWARDS, st.integers(2, 4))
def test_credit_is_what_a_rollout_adds_to_the_best_of_some(rewards, best_of):
    wanted = added_to_best(rewards, best_of)
    if wanted.std() < 1e-4:
        return
    found = advantages(rewards, best_of)
    assert found == pytest.approx((wanted - wanted.mean()) / wanted.std(), abs=1e-6)


def test_credit_of_one_is_the_reward_over_the_mean_of_the_group():
    found = advantages(np.array([-1.0, 0.0, -1.0, 0.0]), 1)
    assert found.tolist() == [-1, 1, -1, 1]
    assert advantages(np.full(5, -0.3), 1).tolist() == [0] * 5


def test_a_rollout_that_does_not_fit_is_a_bad_one_not_an_endless_one():
    assert rewards_of(np.array([0.0, 50.0, 100.0])) == pytest.approx([-LOST, np.log(0.5), 0.0])
    assert rewards_of(np.zeros(3)).tolist() == [-LOST] * 3


def test_conflicting_gradients_are_kept_apart():
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 1.0])
    found = apart([a, b])
    assert torch.dot(found, a) >= 0
    assert torch.dot(found, b) >= 0
    assert torch.equal(apart([a, torch.tensor([0.0, 2.0])]), torch.tensor([0.5, 1.0]))


def test_a_learner_goes_on_from_its_file_as_if_it_had_not_stopped(tmp_path):
    def steps(learner, number):
        for k in range(number):
            learner.step(learner.gradient(((learner.tensors["w"] - k) ** 2).sum()))

    whole, first = (Learner({"w": np.ones(3), "b": np.zeros(2)}, 0.1) for _ in range(2))
    steps(whole, 4)
    first.save(tmp_path / "empty.npz")
    steps(first, 4)
    first.save(tmp_path / "learner.npz", done=np.array(4))
    second = Learner({"w": np.zeros(3), "b": np.zeros(2)}, 0.1)
    assert second.load(tmp_path / "learner.npz")["done"] == 4
    steps(whole, 3)
    steps(second, 3)
    assert np.array_equal(second.arrays["w"], whole.arrays["w"])
    assert not np.array_equal(first.arrays["w"], whole.arrays["w"])
    second.load(tmp_path / "empty.npz")
    assert second.arrays["w"].tolist() == [1, 1, 1]


def test_curves_forget_what_a_killed_run_measured_later(tmp_path):
    path = tmp_path / "curves.jsonl"
    curves = Curves.at(path)
    for step in range(4):
        curves.add("imitation", step, {"loss": 1 / (step + 1)})
    curves.add("policy_gradient", 0, {"lost": 0.5})
    again = Curves.at(path)
    assert again.points == curves.points
    again.add("imitation", 2, {"loss": 9.0})
    assert Curves.at(path).of("imitation", "loss") == ([0, 1, 2], [1.0, 0.5, 9.0])
    assert Curves.at(path).of("policy_gradient", "lost") == ([0], [0.5])


def test_curves_are_drawn_where_matplotlib_is_there(tmp_path, monkeypatch):
    curves = Curves.at(tmp_path / "curves.jsonl")
    curves.add("imitation", 0, {"loss": 1.0})
    assert draw_curves(curves, tmp_path / "curves.png", [("imitation", ["loss"])])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("planner.training.curves.find_spec", lambda name: None)
    assert not draw_curves(curves, tmp_path / "none.png", [("imitation", ["loss"])])


@pytest.fixture(scope="module")
def two_pools():
    """A dense model on devices of two kinds, each of which can hold it."""
    cluster = places.Cluster(
        node=(
            places.NodeEntry(name="a", device="A100-40", gpus=2, count=2),
            places.NodeEntry(name="v", device="V100-32", gpus=2),
        ),
        network=places.Network(inter_GBps=12.5),
    )
    model = catalog.model("opt-350m", sequence=1024)
    profile = catalog.profile_for(model, ["A100-40", "V100-32"])
    request = Request(cluster=cluster, model=model, profile=profile, global_batch=128)
    supply = Supply.of(request)
    return Site.of(request, supply), Completion(request, supply, ScheduleKind.ONE_F_ONE_B)


def alone(pool):
    return ((Run(pool, 1, 1, 1),),)


def test_a_rollout_of_one_template_is_worth_its_best_numbers(two_pools):
    site, completion = two_pools
    sequences = [alone(0), alone(1)]
    rollouts = roll(site, 2, forced(site, sequences))
    templates, origin = expanded(completion, rollouts.shapes)
    wanted = []
    for k in range(2):
        columns = completion.columns(templates.take(origin == k))
        wanted.append(completion.request.global_batch / columns.seconds.min())
    assert reward(completion, rollouts) == pytest.approx(np.array(wanted)[rollouts.rollout])


def test_unlike_templates_share_the_batch_so_that_both_end_at_once(two_pools):
    site, completion = two_pools
    both = roll(site, 3, forced(site, [alone(0), alone(1), (*alone(0), *alone(1))]))
    first, second, together = reward(completion, both)
    assert max(first, second) < together < (first + second) * 1.01
    assert together > 0.85 * (first + second)


def test_a_rollout_that_is_slow_fits_nevertheless(two_pools, monkeypatch):
    _, completion = two_pools
    throughput = np.array([0.0, 1.0, 40.0, 100.0])
    monkeypatch.setattr("planner.training.group_relative.reward", lambda *_: throughput)
    problem = Problem(completion.request, 0, (alone(0),), (1.0,), 1.0)
    learner, generator = Learner(Policy.new(0).parameters, 1e-3), np.random.default_rng(0)
    group = group_of(learner, problem, Buffer(), Exploration(rollouts=4), 0.5, generator)
    assert group.fits == 0.75


def test_equal_rollouts_have_equal_rewards_wherever_they_stand(two_pools):
    site, completion = two_pools
    sequences = [alone(0), alone(1), alone(0), alone(1), alone(0)]
    found = reward(completion, roll(site, 5, forced(site, sequences)))
    assert found[0] == found[2] == found[4]
    assert found[1] == found[3] != found[0]


def test_what_was_sampled_is_kept_as_a_label_is(two_pools):
    site, _ = two_pools
    rollouts = roll(site, 16, Uniform(np.random.default_rng(0)))
    for number in range(16):
        sequence = sequence_of(rollouts, number)
        again = roll(site, 1, forced(site, [sequence]))
        assert sequence_of(again, 0) == sequence
        assert all(a[:3] != b[:3] for runs in sequence for a, b in pairwise(runs))


def test_the_buffer_keeps_the_best_of_each_depth():
    def kept(depth, throughput):
        return Kept(problem=7, throughput=throughput, sequence=((Run(0, 1, 1, depth),),))

    buffer = Buffer([kept(2, 5.0), kept(2, 4.0), *(kept(d, 1.0 + d) for d in range(3, 12))])
    assert sorted(each.sequence[0][0].length for each in buffer) == [6, 7, 8, 9, 10, 11]
    sequences, weights = buffer.best(7)
    assert [s[0][0].length for s in sequences] == [11, 10, 9, 8, 7, 6]
    assert sum(weights) == pytest.approx(1)
    assert weights == sorted(weights, reverse=True)
    again = Buffer.decoded(buffer.encoded())
    assert list(again) == list(buffer)
    assert buffer.best(8) == ([], [])


def test_sequences_that_start_alike_share_their_first_decisions(two_pools):
    site, _ = two_pools
    weights = [0.5, 0.3, 0.2]
    rows = list(examples_of(site, [alone(0), alone(1), (*alone(0), *alone(1))], weights))
    first_depth, first_pool = rows[0][1], rows[1][1]
    assert first_depth.target.sum(axis=1) == pytest.approx([1.0])
    assert first_pool.target[:, :2] == pytest.approx(np.array([[0.7, 0.3]]))
    assert all((part.mask.sum(axis=1) > 1).all() for _, part in rows)
    depths = [part.target.sum() for kind, part in rows if kind.head is Head.DEPTH]
    assert sum(depths) == pytest.approx(2.0)


def test_a_batch_has_every_example_once():
    def part(first, num):
        options = np.arange(first, first + num, dtype=np.float32)[:, None, None]
        ones = np.ones((num, 1))
        return Examples(options, ones > 0, ones[:, :1], options, ones > 0, np.zeros(num, int), ones)

    kinds = {Kind(Head.POOL, 1, 1): part(0, 100), Kind(Head.TP, 1, 1): part(100, 30)}
    found = list(batches(kinds, 48, np.random.default_rng(0)))
    seen = [float(v) for batch in found for _, rows in batch for v in rows.options.ravel()]
    assert sorted(seen) == list(range(130))
    assert seen != sorted(seen)
    assert all(sum(len(rows) for _, rows in batch) >= 48 for batch in found[:-1])


def test_exploration_forces_depths_and_draws_one_rollouts_pools(two_pools):
    site, _ = two_pools
    sure = Network({name: 30 * value for name, value in Policy.new(0).parameters.items()})
    told, free = [], []
    for forced_depth in (0.0, 1.0):
        exploring = Exploring(sure, np.random.default_rng(0), forced_depth)
        record = Recorder(exploring)
        roll(site, 64, record)
        told.append(np.unique(record.choices[0]).size)
        free.append(~exploring.own[0])
        for decision, own in zip(record.decisions, exploring.own, strict=True):
            if decision.head is Head.POOL:
                assert (own == (decision.active != 0)).all()
    assert told[1] > told[0]
    assert not free[0].any()
    assert free[1].all()
