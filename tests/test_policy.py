"""The learned policy: what is sampled can be built, names and orders change nothing, weights as files."""

import dataclasses
import random

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arachne_runtime.errors import InvalidFileError, PolicyMissingError, PolicyStaleError, UsageError
from arachne_runtime.plan.cluster import Cluster, Network, NodeEntry
from arachne_runtime.plan.model import BlockSpec, ModelSpec
from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.plan.profile import BlockTiming, Profile, UpdateTiming
from planner.policy import (
    FEATURES_VERSION,
    MOST_RUNS,
    WIDTHS,
    Architecture,
    Head,
    Learned,
    Meta,
    Policy,
    Rollouts,
    Sampler,
    Site,
    Uniform,
    UniformRandom,
    forced,
    logits,
    roll,
)
from planner.policy import Network as PolicyNetwork
from planner.policy.beam import Noise, beam_search
from planner.policy.point import Point, Rolling
from planner.request import Request
from planner.search import Enumeration
from planner.search.batch import Templates
from planner.search.columns import Completion
from planner.search.shapes import Shapes, shapes_of
from planner.search.supply import Supply, use_of

MB = 10**6
POLICY = Policy.new(7)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A device type."""

    name: str
    degrees: tuple[int, ...] = (1, 2, 4)
    least: int = 1
    """Smallest share that was measured."""
    slow: float = 1.0
    memory_GiB: float = 8.0
    intra_GBps: float = 50.0


def request_of(nodes, *, blocks=10, global_batch=64, experts=0, **more):
    """``nodes``: (kind, gpus, count) of each."""
    layer = BlockSpec(
        kind="layer",
        parameters=40 * MB,
        activation_bytes=60 * MB,
        output_bytes=4 * MB,
        flops=1e9,
        experts=experts,
        experts_per_token=2 if experts else 0,
        expert_parameters=32 * MB if experts else 0,
    )
    kinds = list(dict.fromkeys(kind for kind, _, _ in nodes))
    timings = [
        BlockTiming(
            kind="layer",
            device=kind.name,
            tp=tp,
            samples=n,
            forward_s=kind.slow * (0.001 + 0.002 * n) / tp**0.8,
            backward_s=kind.slow * (0.001 + 0.004 * n) / tp**0.8,
        )
        for kind in kinds
        for tp in kind.degrees
        for n in (kind.least, 64)
    ]
    updates = [
        UpdateTiming(kind="layer", device=k.name, tp=tp, update_s=k.slow * 0.002 / tp)
        for k in kinds
        for tp in k.degrees
    ]
    entries = [
        NodeEntry(
            name=f"n{i}",
            device=kind.name,
            gpus=gpus,
            count=count,
            memory_GiB=kind.memory_GiB,
            intra_GBps=kind.intra_GBps,
        )
        for i, (kind, gpus, count) in enumerate(nodes)
    ]
    return Request(
        cluster=Cluster(node=tuple(entries), network=Network(inter_GBps=5.0)),
        model=ModelSpec(name="m", sequence=1, blocks=(layer,) * blocks),
        profile=Profile(model="m", sequence=1, timings=tuple(timings), updates=tuple(updates)),
        global_batch=global_batch,
        **more,
    )


def random_nodes(rng):
    """Up to three types in nodes of all sizes; degrees odd, even, or all above 1; shares from 1 to 3."""
    kinds = [
        Kind(
            f"t{i}",
            degrees=tuple(sorted(rng.sample(range(1, 9), rng.randint(1, 4)))),
            least=rng.choice([1, 1, 2, 3]),
            slow=rng.uniform(0.5, 3),
            memory_GiB=rng.uniform(2, 20),
        )
        for i in range(rng.randint(1, 3))
    ]
    return [
        (kind, rng.randint(kind.degrees[0], 9), rng.randint(1, 9))
        for kind in kinds
        for _ in range(rng.randint(1, 3))
    ]


def site_of(request):
    supply = Supply.of(request)
    return Site.of(request, supply), supply


A = Kind("a", slow=1.0, memory_GiB=12)
B = Kind("b", slow=2.5, memory_GiB=4, degrees=(1, 2))
MIXED = request_of([(A, 4, 3), (B, 4, 2), (B, 2, 3)])


def completion_of(request):
    return Completion(request, Supply.of(request), ScheduleKind.ONE_F_ONE_B)


def seen_by(site, num=16, seed=0, **more):
    """Decisions of rollouts with uniform choices."""
    decisions = []
    uniform = Uniform(np.random.default_rng(seed))

    def choose(decision):
        decisions.append(decision)
        return uniform(decision)

    return decisions, roll(site, num, choose, **more)


# --- what is sampled can be built


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.booleans())
def test_all_templates_of_a_rollout_stand_at_once(rng, learned):
    request = request_of(
        random_nodes(rng), blocks=rng.randint(1, 40), global_batch=rng.randint(3, 200), max_micro_batch=9
    )
    site, supply = site_of(request)
    generator = np.random.default_rng(rng.randrange(2**32))
    choose = Sampler(PolicyNetwork(POLICY.parameters), generator) if learned else Uniform(generator)
    found = roll(site, 12, choose)
    shapes = found.shapes
    assert set(found.rollout.tolist()) == set(range(12))
    assert (shapes.depth >= 1).all()
    assert (shapes.depth <= len(request.model.blocks)).all()
    assert (found.copies >= 1).all()
    assert (np.gcd.reduce(shapes.width, axis=1) == 1).all()
    there = shapes.width > 0
    for p, pool in enumerate(supply.pools):
        assert set(shapes.tp[there & (shapes.pool == p)].tolist()) <= set(pool.degrees)
    use = use_of(supply.limits, shapes.pool, shapes.tp, shapes.width) * found.copies[:, None]
    total = np.zeros((12, len(supply.limits)), np.int64)
    np.add.at(total, found.rollout, use)
    assert (total <= [limit.places for limit in supply.limits]).all()
    samples = np.zeros(12, np.int64)
    np.add.at(samples, found.rollout, found.copies * shapes.width.max(axis=1))
    assert (samples <= request.global_batch).all()


@settings(max_examples=15, deadline=None)
@given(st.randoms(use_true_random=False))
def test_no_template_that_fits_is_kept_out(rng):
    """Whatever completes within memory can be said, in clusters where little does."""
    kinds = [
        Kind(f"t{i}", degrees=rng.choice([(1, 2), (2,), (1, 2, 4)]), memory_GiB=rng.uniform(1.2, 4))
        for i in range(rng.randint(1, 3))
    ]
    nodes = [(kind, rng.choice([2, 4]), rng.randint(1, 3)) for kind in kinds]
    request = request_of(nodes, max_zero=rng.choice([0, 0, 1, 3]), experts=rng.choice([0, 0, 8]))
    completion = completion_of(request)
    site = Site.of(request, completion.supply)
    templates = Templates.joined([Templates.of([]), *Enumeration().batches(completion, 0)])
    columns = completion.columns(templates.take(np.arange(0, len(templates), 7)))
    if columns is None:
        return
    shapes = shapes_of(columns.templates).distinct()
    said = [k for k in range(len(shapes)) if set(shapes.width[k].tolist()) <= {0, *WIDTHS}]
    sequences = sequences_of(
        Rollouts(shapes, np.arange(len(shapes)), *[np.ones(0, np.int64)] * 2, len(shapes))
    )
    for k in said:
        roll(site, 1, forced(site, [sequences[k]]))


def test_depths_that_cannot_hold_the_model_are_left_out():
    """10 blocks of 40 M parameters with 16 bytes each on devices of which 1 GiB is kept."""
    for memory, least in ((2.0, 6), (8.0, 1)):
        site, supply = site_of(request_of([(Kind("a", degrees=(1,), memory_GiB=memory), 1, 12)]))
        first = seen_by(site)[0][0]
        assert first.head is Head.DEPTH
        room = supply.pools[0].room_bytes
        assert int(np.nonzero(first.mask[0])[0][0]) == -(-10 * 40 * MB * 16 // room) == least


def test_every_copy_that_fits_stands():
    """First templates leave no room for one more of themselves; the second one is made of the rest."""
    site, supply = site_of(MIXED)
    _, found = seen_by(site, 64)
    assert (found.position == 1).any()
    first = found.position == 0
    use = use_of(supply.limits, *(a[first] for a in dataclasses.astuple(found.shapes)))
    more = use * (found.copies[first] + 1)[:, None]
    over = (more > [limit.places for limit in supply.limits]).any(axis=1)
    widest = found.shapes.width[first].max(axis=1)
    assert (over | ((found.copies[first] + 1) * widest > MIXED.global_batch)).all()


def test_a_pool_with_no_degree_for_the_batch_is_left_out():
    request = request_of([(A, 4, 1), (Kind("c", least=5), 4, 4)], max_micro_batch=4)
    site, supply = site_of(request)
    _, found = seen_by(site, 32)
    used = found.shapes.pool[found.shapes.width > 0]
    assert {supply.pools[p].device for p in used.tolist()} == {"a"}


def test_without_masks_what_cannot_be_built_is_dropped():
    site, supply = site_of(MIXED)
    _, found = seen_by(site, 64, masked=False)
    _, kept = seen_by(site, 64)
    assert 0 < len(set(found.rollout.tolist())) < 64 == len(set(kept.rollout.tolist()))
    use = use_of(supply.limits, *dataclasses.astuple(found.shapes)) * found.copies[:, None]
    assert (use <= [limit.places for limit in supply.limits]).all()


def test_decisions_have_finite_features_of_their_heads_and_something_to_choose():
    for masked in (True, False):
        decisions, _ = seen_by(site_of(MIXED)[0], masked=masked)
        assert {d.head for d in decisions} == set(Head)
        for d in decisions:
            assert d.mask.any(axis=1).all()
            assert d.options.shape[:2] == d.mask.shape
            for array in (d.pools, d.overall, d.options):
                assert array.dtype == np.float32
                assert np.isfinite(array).all()
                assert np.abs(array).max() < 20


# --- order and names


@settings(max_examples=15, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_order_of_pools_changes_nothing(rng):
    """The same decisions about pools in another order: the same logits, in that order."""
    request = request_of(random_nodes(rng))
    site, supply = site_of(request)
    order = rng.sample(range(len(supply.pools)), len(supply.pools))
    other = Site.of(request, Supply(tuple(supply.pools[p] for p in order)))
    place = np.argsort(order)
    uniform = Uniform(np.random.default_rng(rng.randrange(2**32)))
    seen = []

    def choose(decision):
        seen.append((decision, uniform(decision)))
        return seen[-1][1]

    def again(decision):
        before, chosen = seen.pop(0)
        here, there = scores_of(before), scores_of(decision)
        is_pool = decision.head is Head.POOL
        assert np.allclose(here[:, order] if is_pool else here, there, atol=1e-4)
        return place[chosen] if is_pool else chosen

    found, other_found = roll(site, 4, choose), roll(other, 4, again)
    assert not seen
    assert np.array_equal(found.copies, other_found.copies)


def sequences_of(found):
    """What ``forced`` takes, as the rollouts chose."""
    sequences = [[] for _ in range(found.num)]
    s = found.shapes
    for k, rollout in enumerate(found.rollout.tolist()):
        runs = []
        for pool, tp, width in zip(
            *(a[k, : s.depth[k]].tolist() for a in (s.pool, s.tp, s.width)), strict=True
        ):
            if runs and runs[-1][:3] == (pool, tp, width):
                runs[-1] = (pool, tp, width, runs[-1][3] + 1)
            else:
                runs.append((pool, tp, width, 1))
        sequences[rollout].append(runs)
    return sequences


def scores_of(d, parameters=POLICY.parameters):
    return logits(parameters, d.head, d.pools, d.overall, d.options, d.mask, d.chosen_pool, np)


def test_names_change_nothing():
    named = request_of(
        [(dataclasses.replace(A, name="z9"), 4, 3), (dataclasses.replace(B, name="A100"), 4, 2)]
    )
    plain = request_of([(A, 4, 3), (B, 4, 2)])
    for one, other in zip(*(fields_of(site_of(r)[0]) for r in (plain, named)), strict=True):
        assert np.array_equal(one, other)


def fields_of(site):
    return [np.asarray(getattr(site, f.name)) for f in dataclasses.fields(site)]


def test_behaviour_changes_something():
    """What the test of names would miss if nothing ever differed."""
    slower = request_of([(dataclasses.replace(A, slow=1.3), 4, 3), (B, 4, 2)])
    plain = request_of([(A, 4, 3), (B, 4, 2)])
    pairs = zip(*(fields_of(site_of(r)[0]) for r in (plain, slower)), strict=True)
    assert not all(np.array_equal(one, other) for one, other in pairs)


# --- the network


@pytest.mark.parametrize("film", [True, False])
def test_numpy_and_torch_agree(film):
    parameters = Policy.new(3, Architecture(hidden=32, film=film)).parameters
    tensors = {name: torch.from_numpy(array) for name, array in parameters.items()}
    assert ("film.weight" in parameters) == film
    decisions, _ = seen_by(site_of(MIXED)[0])
    for d in decisions:
        arrays = [torch.from_numpy(a) for a in (d.pools, d.overall, d.options, d.mask, d.chosen_pool)]
        found = logits(tensors, d.head, *arrays, torch)
        assert found.dtype == torch.float32
        expected = scores_of(d, parameters)
        assert expected.dtype == np.float32
        assert np.abs(found.numpy() - expected)[d.mask].max() < 1e-5


def test_padding_has_no_effect():
    """Pools that are not there, in a batch with sites that have more."""
    for d in seen_by(site_of(MIXED)[0])[0]:
        pools = np.concatenate([d.pools, np.full_like(d.pools, 3.0)], axis=1)
        there = np.zeros(pools.shape[:2], bool)
        there[:, : d.pools.shape[1]] = True
        options, mask = d.options, d.mask
        if d.head is Head.POOL:
            options, mask = (
                np.concatenate([options] * 2, axis=1),
                np.concatenate([mask, mask & False], axis=1),
            )
        found = logits(POLICY.parameters, d.head, pools, d.overall, options, mask, d.chosen_pool, np, there)
        assert np.allclose(found[:, : d.mask.shape[1]], scores_of(d), atol=1e-5)


def test_every_weight_counts():
    """A layer whose change changes no logit is never used."""
    decisions, _ = seen_by(site_of(MIXED)[0], 3)
    before = [scores_of(d) for d in decisions]
    for name, array in POLICY.parameters.items():
        changed = {**POLICY.parameters, name: array + 0.1}
        after = [scores_of(d, changed) for d in decisions]
        assert any(not np.array_equal(a, b) for a, b in zip(before, after, strict=True)), name


# --- labels


def test_forced_choices_give_the_sequences_again():
    site, _ = site_of(MIXED)
    _, found = seen_by(site, 32)
    again = roll(site, 32, forced(site, sequences_of(found)))
    for one, other in zip(dataclasses.astuple(found.shapes), dataclasses.astuple(again.shapes), strict=True):
        assert sorted(map(tuple, one.tolist())) == sorted(map(tuple, other.tolist()))
    assert sorted(found.copies.tolist()) == sorted(again.copies.tolist())


@pytest.mark.parametrize(
    ("sequence", "said"),
    [
        ([[(0, 1, 1, 65)]], "depth 65"),
        ([[(0, 8, 1, 1)]], "tp 8"),
        ([[(0, 1, 9, 1)]], "width 9"),
        ([[(0, 4, 4, 1)]], "width 4"),
        ([[(3, 1, 1, 1)]], "pool 3"),
        ([[(0, 1, 4, 4)]], "length 4"),
        ([[(0, 1, 1, 1)], [(0, 1, 1, 1)]], "template 1"),
        ([], "depth 0"),
    ],
)
def test_a_label_that_cannot_be_built_is_refused(sequence, said):
    site, _ = site_of(request_of([(A, 4, 3)]))
    assert 9 not in WIDTHS
    with pytest.raises(UsageError, match=said):
        roll(site, 1, forced(site, [sequence]))


# --- sources


@pytest.mark.parametrize("source", [Learned(POLICY, rollouts=16), UniformRandom(rollouts=16)])
def test_sources_repeat_and_propose_what_can_be_completed(source):
    completion = completion_of(MIXED)
    first, again, other = (list(source.batches(completion, seed)) for seed in (1, 1, 2))
    assert len(first) > 1
    assert all(
        np.array_equal(x, y)
        for a, b in zip(first, again, strict=True)
        for x, y in zip(dataclasses.astuple(a), dataclasses.astuple(b), strict=True)
    )
    assert not np.array_equal(first[-1].pool, other[-1].pool)
    columns = completion.columns(first[-1])
    assert columns is not None
    assert len(columns) > 0
    shapes = [rows_of(s) for s in source.shapes(site_of(MIXED)[0], 1)]
    every = [row for rows in shapes for row in rows]
    assert len(every) == len(set(every))
    assert set(rows_of(shapes_of(first[0]))) <= set(shapes[0])


def rows_of(shapes: Shapes):
    columns = (shapes.pool, shapes.tp, shapes.width)
    return [tuple(tuple(c[k, : shapes.depth[k]].tolist()) for c in columns) for k in range(len(shapes))]


def test_a_beam_is_the_likeliest_of_all():
    """Against every template of a small site, with its likelihood."""
    site, _ = site_of(
        request_of([(Kind("a", degrees=(1, 2)), 2, 2), (Kind("b", degrees=(1,)), 1, 1)], blocks=2)
    )
    network = PolicyNetwork(Policy.new(5).parameters)
    likely = {}
    for seed in range(6):
        chances = np.zeros(64)
        sampler = Sampler(network, np.random.default_rng(seed))

        def choose(decision, sampler=sampler, chances=chances):
            chosen = sampler(decision)
            of = network(decision).astype(float)
            of = np.where(decision.mask, of, -np.inf)
            of -= np.log(np.exp(of).sum(axis=1, keepdims=True))
            chances[decision.active] += of[np.arange(len(of)), chosen] if decision.position.max() == 0 else 0
            return chosen

        found = roll(site, 64, choose, most_templates=1)
        for row, rollout in zip(rows_of(found.shapes), found.rollout.tolist(), strict=True):
            likely[row] = max(likely.get(row, -np.inf), chances[rollout])
    best = sorted(likely, key=lambda row: -likely[row])
    beam = rows_of(beam_search(site, network, 200))
    assert len(best) > 15
    assert set(beam) >= set(best[:15])
    assert beam[0] == best[0]


def test_samples_without_replacement_are_as_likely_as_the_network_says():
    """The first of them is a plain sample; the others are not the same again."""
    site, _ = site_of(request_of([(Kind("a", degrees=(1, 2)), 2, 1)], blocks=2))
    parameters = {
        n: a * (8 if n.endswith("score.weight") else 1) for n, a in Policy.new(2).parameters.items()
    }
    network = PolicyNetwork(parameters)
    generator = np.random.default_rng(0)
    beams = [rows_of(beam_search(site, network, 3, Noise(generator, 1.3))) for _ in range(150)]
    plain = rows_of(roll(site, 2000, Sampler(network, generator, 1.3), most_templates=1).shapes)
    for row in set(plain):
        part = plain.count(row) / len(plain)
        error = (part * (1 - part) * (1 / 150 + 1 / 2000)) ** 0.5
        assert abs(sum(beam[0] == row for beam in beams) / 150 - part) < 4 * error + 1e-3
    assert 0.1 < max(plain.count(row) for row in set(plain)) / len(plain) < 0.9
    assert all(len(set(beam)) == len(beam) > 1 for beam in beams)


# --- files


def test_weights_come_back(tmp_path):
    policy = Policy.new(1, Architecture(hidden=16, film=False))
    policy = dataclasses.replace(policy, meta=msgspec.structs.replace(policy.meta, trained="on two problems"))
    path = tmp_path / "deep" / "policy.npz"
    policy.save(path)
    again = Policy.load(path)
    assert again.meta == policy.meta
    assert all(np.array_equal(again.parameters[n], a) for n, a in policy.parameters.items())
    assert set(again.parameters) == set(policy.parameters)
    again.save(tmp_path / "other.npz")
    assert path.read_bytes() == (tmp_path / "other.npz").read_bytes()


def test_weights_that_are_missing_or_stale_say_the_way_out(tmp_path):
    with pytest.raises(
        PolicyMissingError, match=r"nothing\.npz; make them with `arachne learn`, or plan without"
    ):
        Policy.load(tmp_path / "nothing.npz")
    stale = Policy(Policy.new(0).parameters, Meta(features=FEATURES_VERSION + 1))
    stale.save(tmp_path / "stale.npz")
    with pytest.raises(
        PolicyStaleError, match=f"version {FEATURES_VERSION + 1}, .*version {FEATURES_VERSION}"
    ):
        Policy.load(tmp_path / "stale.npz")


def test_files_that_are_no_weights_are_refused(tmp_path):
    path = tmp_path / "policy.npz"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(InvalidFileError, match="holds no weights"):
        Policy.load(path)
    np.savez(path, meta=np.array([{"code": print}], dtype=object))
    with pytest.raises(InvalidFileError, match="pickle"):
        Policy.load(path)
    np.savez(path, **Policy.new(0).parameters)
    with pytest.raises(InvalidFileError, match=r"\$\.meta"):
        Policy.load(path)
    broken = dict(Policy.new(0).parameters)
    broken["pool.1.bias"] = np.full_like(broken["pool.1.bias"], np.nan)
    broken["context.weight"] = broken["context.weight"][:3]
    broken.pop("tp.score.bias")
    Policy(broken, Meta()).save(path)
    with pytest.raises(InvalidFileError, match=r"3 problems") as caught:
        Policy.load(path)
    assert [p.path for p in caught.value.problems] == ["$.context.weight", "$.tp.score.bias", "$.pool.1.bias"]


def test_random_is_of_the_seed_alone():
    rng = random.Random(3)
    site, _ = site_of(request_of(random_nodes(rng)))
    first, again = (
        roll(site, 20, Sampler(PolicyNetwork(POLICY.parameters), np.random.default_rng(9))) for _ in range(2)
    )
    assert np.array_equal(first.shapes.width, again.shapes.width)
    assert np.array_equal(first.copies, again.copies)


def test_rollouts_that_chose_differently_are_unlike_whatever_the_number_of_pools():
    point = Point(Rolling.of(site_of(MIXED)[0], 2))
    point.tell(np.array([0, 1]))
    point.tell(np.array([65, 0]))
    assert point.alike[0] != point.alike[1]


def test_alike_runs_are_one_where_there_is_a_choice():
    """Neighbouring runs differ, but where only one kind of stage is left."""
    site, _ = site_of(MIXED)
    runs = {}

    def choose(decision):
        chosen = Uniform(np.random.default_rng(len(runs)))(decision)
        keys = zip(decision.active.tolist(), decision.position.tolist(), decision.run.tolist(), strict=True)
        for row, key in enumerate(keys):
            if decision.head in (Head.POOL, Head.TP, Head.WIDTH):
                runs.setdefault(key, []).append((int(chosen[row]), int(decision.mask[row].sum())))
        return chosen

    roll(site, 64, choose)
    pairs = [(runs[a, b, c - 1], run) for (a, b, c), run in runs.items() if c]
    same = [run for before, run in pairs if [x for x, _ in before] == [x for x, _ in run]]
    assert len(pairs) > 100
    assert all(run[-1][1] == 1 for run in same)


@settings(max_examples=15, deadline=None)
@given(st.randoms(use_true_random=False))
def test_templates_have_no_more_runs_than_there_may_be(rng):
    """Also where one pool is hardly enough for a run."""
    site, _ = site_of(request_of([(Kind(f"t{i}", degrees=(1,)), 1, rng.randint(1, 3)) for i in range(10)]))
    runs = []

    def choose(decision):
        runs.append(int(decision.run.max()))
        return Uniform(np.random.default_rng(rng.randrange(2**32)))(decision)

    found = roll(site, 16, choose)
    assert max(runs) < MOST_RUNS
    assert found.shapes.depth.max() > 3
