"""The policy's benchmark: what it concludes from records, how it counts evaluations, how it goes on."""

from inspect import signature
from math import inf
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from arachne_runtime.errors import NoFeasiblePlanError
from arachne_runtime.plan.cluster import Cluster, Network, NodeEntry
from bench import learned_cells as cells
from bench import learned_curves, learned_search, learned_units
from bench.learned_cells import Effort
from bench.learned_contestants import Contestant
from bench.learned_curves import Trial, curve, distinct
from bench.learned_pictures import draw
from bench.learned_problems import one_node_less, one_node_more
from bench.learned_records import (
    ENUMERATION,
    LEARNED,
    RANDOM,
    TOGETHER,
    USUAL,
    Contest,
    Curve,
    Planned,
    Sort,
    Timed,
    kept,
)
from bench.learned_search import Searched
from bench.learned_tables import Ablation, shares, shares_in_time, table, with_variants
from bench.learned_units import known_peer
from bench.learned_verdicts import contested, enough, planned, unseen
from bench.planners import code
from bench.planners_records import Figures, Record, write
from launch.verbs.plan import command as plan_verb
from planner import catalog, find_plan
from planner.exhaustive import Limits, random_request
from planner.peers import PEERS
from planner.request import Request
from planner.search import Enumeration
from planner.search.batch import Templates

MARKS = (10, 100, 1000)
PLAIN = Sort(num_devices=8, num_types=2, mixed_nodes=False, experts=False)
MIXED = Sort(num_devices=64, num_types=2, mixed_nodes=True, experts=False)


def contest(learned, random, in_time=(1.0, 1.0), sort=PLAIN, seeds=(0, 1, 2), **others) -> Contest:
    """Curves by evaluations; samples a second with the policy and of the enumeration in 100 ms."""
    curves = [
        Curve(contestant=name, seed=seed, evaluations=MARKS, samples_per_s=values)
        for name, values in {LEARNED: learned, RANDOM: random, **others}.items()
        for seed in seeds
    ]
    ours, theirs = in_time
    found = {LEARNED: ours, TOGETHER: ours, ENUMERATION: theirs, USUAL: theirs}
    timed = [
        Timed(contestant=name, seed=0, budget_s=0.1, cpu_s=0.1, samples_per_s=value)
        for name, value in {**found, **{name: values[0] for name, values in others.items()}}.items()
    ]
    return Contest(problem="p", sort=sort, curves=tuple(curves), timed=tuple(timed))


def verdict(results) -> dict[str, tuple[float, bool]]:
    return {result.name: (result.figure, result.holds) for result in results}


def test_evaluations_that_the_policy_needs_for_random_proposals_result():
    quick = contest((5.0, 8.0, 8.0), (1.0, 2.0, 5.0))
    assert verdict(contested([quick], 1000))["learned-evaluations-to-random"] == (10, True)
    slow = contest((1.0, 2.0, 5.0), (1.0, 2.0, 5.0))
    assert verdict(contested([slow], 1000))["learned-evaluations-to-random"] == (1000, False)
    never = contest((1.0, 2.0, 4.9), (1.0, 2.0, 5.0))
    assert verdict(contested([never], 1000))["learned-evaluations-to-random"] == (inf, False)
    both = contested([quick, slow, quick], 1000)
    assert verdict(both)["learned-evaluations-to-random"] == (10, True)


def test_a_seed_that_differs_widens_the_range():
    one = contest((5.0, 8.0, 8.0), (1.0, 2.0, 5.0))
    curves = [c for c in one.curves if (c.contestant, c.seed) != (LEARNED, 2)]
    worse = Curve(contestant=LEARNED, seed=2, evaluations=MARKS, samples_per_s=(1.0, 5.0, 5.0))
    mixed = Contest(problem="p", sort=PLAIN, curves=(*curves, worse), timed=one.timed)
    result = next(contested([mixed], 1000))
    assert (result.figure, result.detail["range"]) == (10, (10, 100))


def test_at_least_as_good_as_the_enumeration_in_nine_of_ten():
    good, bad = contest((1,) * 3, (1,) * 3, (1.0, 1.0)), contest((1,) * 3, (1,) * 3, (0.99, 1.0))
    nine = verdict(contested([good] * 9 + [bad], 1000))
    assert nine["learned-at-least-enumeration"] == (pytest.approx(0.9), True)
    eight = verdict(contested([good] * 8 + [bad] * 2, 1000))
    assert eight["learned-at-least-enumeration"] == (pytest.approx(0.8), False)


def test_the_gain_counts_where_nodes_or_many_types_are_mixed():
    plain, mixed = (contest((1,) * 3, (1,) * 3, (g, 1.0), sort=s) for g, s in ((2.0, PLAIN), (1.03, MIXED)))
    assert verdict(contested([plain, mixed], 1000))["learned-gain-where-mixed"] == (pytest.approx(1.03), True)
    assert not verdict(contested([plain], 1000))["learned-gain-where-mixed"][1]  # nothing was shown
    lone = contest((1,) * 3, (1,) * 3, (1.0, 0.0), sort=MIXED)
    assert verdict(contested([lone], 1000))["learned-gain-where-mixed"] == (inf, True)
    neither = contest((1,) * 3, (1,) * 3, (0.0, 0.0), sort=MIXED)
    nothing = {result.name: result for result in contested([neither, mixed], 1000)}
    assert nothing["learned-gain-where-mixed"].figure == pytest.approx(
        1.03
    )  # where nobody has a plan says nothing
    assert nothing["learned-at-least-enumeration"].detail["nobody_has_a_plan"] == 1


def test_where_the_enumeration_is_enough_is_said_with_figures():
    gained = contest((1,) * 3, (1,) * 3, (1.05, 1.0), sort=MIXED)
    assert list(enough([gained], 0.1)) == ["in 100 ms the enumeration is enough in no group of problems"]
    lost = contest((1,) * 3, (1,) * 3, (0.97, 1.0))
    assert list(enough([gained, lost], 0.1)) == [
        "in 100 ms the enumeration is enough for:",
        "  2 types, equal nodes, up to 16 devices: with the policy 0.9700 x enumeration "
        "(median of 1 problems)",
    ]


def test_shares_are_of_the_best_plan_that_anybody_found():
    found = contest((5.0, 8.0, 8.0), (1.0, 2.0, 5.0), (4.0, 10.0))
    assert [cell.figure for cell in shares([found], MARKS)[LEARNED]] == [0.5, 0.8, 0.8]
    assert shares_in_time([found], (0.1,))[ENUMERATION][0].figure == 1.0
    lines = list(table("parts", ["10", "100", "1000"], shares([found], MARKS)))
    assert lines[1].split() == [
        "learned",
        "0.5",
        "[0.5,",
        "0.5]",
        "0.8",
        "[0.8,",
        "0.8]",
        "0.8",
        "[0.8,",
        "0.8]",
    ]


def test_the_ablation_has_a_row_for_each_variant_that_was_measured():
    plain = contest((5.0, 8.0, 8.0), (1.0, 2.0, 5.0))
    varied = contest((5.0, 8.0, 8.0), (1.0, 2.0, 5.0), **{"without masks": (1.0, 5.0, 8.0)})
    assert with_variants([plain, varied]) == [varied]
    found = Ablation.of([varied], MARKS, (0.1,))
    assert [cell.figure for cell in found.rows["without masks"]] == [1 / 8, 5 / 8, 1.0, 100, 1 / 8]
    assert list(found.rows) == [LEARNED, "without masks"]
    assert (found.result().figure, found.result().holds) == (1, False)


def cell(
    quality=(1.0,), cpu_s=(0.3,), peer=0.5, replan=(0.1,), num_devices=64, refined=10.0, name="c", default=()
) -> Planned:
    sort = Sort(num_devices=num_devices, num_types=2, mixed_nodes=False, experts=False)
    return Planned(
        problem=name,
        sort=sort,
        cpu_s=cpu_s,
        samples_per_s=tuple(10 * q for q in quality),
        default_cpu_s=(5.0,) * len(default),
        default_samples_per_s=tuple(10 * q for q in default),
        replan_cpu_s=replan,
        replan_share=(1.0,) * len(replan),
        refined_s=60.0 if refined else 0.0,
        refined=refined,
        peer="amp",
        peer_samples_per_s=10 * peer,
    )


def test_planning_replanning_quality_and_peers():
    good = [cell(), cell((0.996,), num_devices=512, name="d"), cell(num_devices=4096, cpu_s=(2.9,), name="e")]
    assert all(holds for _, holds in verdict(planned(good)).values())
    assert verdict(planned(good))["learned-quality-worst"] == (pytest.approx(0.996), True)
    for bad, name in (
        (cell(cpu_s=(0.1, 0.6, 0.7)), "learned-planning-512-devices"),
        (cell(cpu_s=(3.1,), num_devices=4096), "learned-planning-4096-devices"),
        (cell(replan=(0.1, 0.3)), "learned-replan"),
        (cell((0.97,)), "learned-quality-worst"),
        (cell((1.0, 0.4), peer=0.5), "learned-over-best-peer"),
    ):
        assert not verdict(planned([*good, bad]))[name][1], name


def test_what_is_planned_by_default_is_judged_beside_what_is_planned_at_once():
    found = verdict(planned([cell((0.9,), default=(0.999,)), cell((0.8,), default=(0.997,), name="d")]))
    assert found["learned-quality-median"] == (pytest.approx(0.85), False)
    assert found["learned-default-quality-median"] == (pytest.approx(0.998), True)
    assert found["learned-default-quality-worst"] == (pytest.approx(0.997), True)
    assert found["learned-default-over-best-peer"][1]
    below = verdict(planned([cell(default=(0.4,), peer=0.5)]))
    assert not below["learned-default-over-best-peer"][1]
    assert cell((0.5,), default=(2.0,)).qualities == (0.25,)  # the best known plan, whoever found it
    assert verdict(unseen([cell((0.5,), default=(0.99,))]))["learned-default-quality-unseen-median"][1]


def test_a_search_is_judged_as_it_ships(monkeypatch):
    """The policy after all moves; with it from the start only where that is asked for."""
    asked = []

    def ships(request, **how):
        asked.append((how["sources"], how["learned"]))
        raise NoFeasiblePlanError("none")

    monkeypatch.setattr(learned_search, "find_plan", ships)
    request = Pair().request()
    learned_search.searched(request, budget_s=0.1, sources=None)
    for contestant in (Contestant(name=TOGETHER, sources=None), Contestant(name=LEARNED, sources=())):
        learned_curves.timed(request, contestant, seed=0, budget_s=0.1)
    assert asked == [(None, False), (None, True), ((), False)]


def test_the_default_budget_is_that_of_the_planner_and_its_verb():
    for shipped, name in ((find_plan, "time_budget_s"), (plan_verb, "time_budget")):
        assert signature(shipped).parameters[name].default == cells.DEFAULT_S


def test_a_plan_that_was_not_refined_shows_no_quality():
    assert np.isnan(verdict(planned([cell(refined=0.0)]))["learned-quality-median"][0])
    assert not verdict(planned([cell(refined=0.0)]))["learned-quality-median"][1]


def test_no_plan_is_a_quality_of_nothing_and_a_better_one_than_the_refinement_is_the_best_known():
    assert cell((0.0, 1.0)).qualities == (0.0, 1.0)
    assert cell((0.9, 1.2)).qualities == (0.75, 1.0)
    assert verdict(unseen([cell((0.99,)), cell((0.97,)), cell((0.985,))])) == {
        "learned-quality-unseen-median": (pytest.approx(0.985), True)
    }


def test_a_record_is_kept_for_the_same_code_alone(tmp_path):
    file = tmp_path / "cell.json"
    first = kept(file, "one", Planned, lambda: cell((0.5,)))
    assert kept(file, "one", Planned, lambda: pytest.fail("measured again")) == first
    assert kept(file, "two", Planned, lambda: cell((0.7,))) == cell((0.7,))
    assert kept(None, "two", Planned, lambda: cell((0.9,))) == cell((0.9,))


# --- evaluations


class InTurn:
    """The enumeration's templates, one a batch, each said twice."""

    name = "in turn"

    def batches(self, completion, seed):
        every = Templates.joined(list(Enumeration().batches(completion, seed)))
        for k in range(len(every)):
            yield every.take(np.array([k, k]))


def test_shapes_are_counted_once_however_they_come():
    request = random_request(3, Limits(devices=4, blocks=5, global_batch=8))
    completion = Trial(request).completion
    together = [row for shapes in distinct(completion, Enumeration(), 0) for row in rows(shapes)]
    apart = [row for shapes in distinct(completion, InTurn(), 0) for row in rows(shapes)]
    assert apart == together
    assert len(set(apart)) == len(apart) > 3


def rows(shapes):
    return [
        tuple(zip(*(a[k, :d].tolist() for a in (shapes.pool, shapes.tp, shapes.width)), strict=True))
        for k, d in enumerate(shapes.depth.tolist())
    ]


def test_a_curve_grows_to_what_all_evaluations_give():
    request = random_request(5, Limits(devices=4, blocks=5, global_batch=8))
    few = curve(request, InTurn(), seed=0, marks=(2, 4, 8))
    assert 0 == few[0] < few[1] < few[2]
    whole = curve(request, Enumeration(), seed=0, marks=(2, 4, 8, 1000, 2000))
    assert whole[:3] == few
    assert whole[3] == whole[4] >= few[2]


def test_mixtures_are_part_of_what_evaluations_give():
    request = random_request(12, Limits(devices=6, blocks=6, global_batch=16))
    packed, alone = (
        curve(request, Enumeration(), seed=0, marks=(1000,), packed=packed) for packed in (True, False)
    )
    assert packed[0] > alone[0] > 0


# --- the planner on one problem


class Pair:
    """Two kinds of nodes, three of the one."""

    name = "pair"

    def request(self):
        nodes = [
            NodeEntry(name=name, device=device, gpus=2, count=count)
            for name, device, count in (("a", "A100-40", 3), ("v", "V100-16", 1))
        ]
        return Request(
            cluster=Cluster(node=tuple(nodes), network=Network(inter_GBps=12.5)),
            model=catalog.model("opt-350m"),
            profile=catalog.profile("opt-350m"),
            global_batch=16,
        )


BRIEF = Effort(seeds=(0,), refined_s=0, peers_s=0, replans=False, default_s=0)


def test_one_problem_is_planned_replanned_refined_and_compared(monkeypatch):
    monkeypatch.setattr(cells, "PLANNING_S", 0.15)
    effort = Effort(seeds=(0, 1), refined_s=0.4, peers_s=0.05, default_s=0.5)
    found = cells.planned(Pair(), effort, (Enumeration(),))
    assert len(found.cpu_s) == len(found.samples_per_s) == len(found.replan_cpu_s) == 2
    assert found.sort == Sort(num_devices=8, num_types=2, mixed_nodes=False, experts=False)
    assert 0.1 < found.refined_s < 2
    assert 0.5 < min(found.qualities) <= max(found.qualities) <= 1
    assert found.peer
    assert found.over_peer > 0.9
    assert len(found.default_cpu_s) == len(found.default_qualities) == 2
    assert min(found.default_over_peer, *found.default_qualities) > 0.9
    known = cells.planned(Pair(), BRIEF, (), (9.0, "amp"))
    assert (known.peer, known.peer_samples_per_s, known.qualities) == ("amp", 9.0, ())


def test_peers_are_read_where_the_planners_benchmark_has_all_of_them(tmp_path):
    folder = tmp_path / "learned"
    (tmp_path / "planners").mkdir()
    assert known_peer(folder, "cell") is None
    peers = {peer.name: Figures(samples_per_s=None, seconds=1.0) for peer in PEERS}
    peers["metis"] = Figures(samples_per_s=7.0, seconds=1.0)
    record = Record(cell="cell", group="g", commit="c", code=code(), budget_s=20.0, peers=peers)
    write(record, tmp_path / "planners" / "cell.json")
    assert known_peer(folder, "cell") == (7.0, "metis")
    del peers["amp"]
    write(replace(record, peers=peers), tmp_path / "planners" / "cell.json")
    assert known_peer(folder, "cell") is None


def test_a_refinement_goes_on_from_its_best_plan(monkeypatch):
    plans = iter([3.0, 5.0, 4.0])
    known = []

    def one_second(request, *, budget_s, sources, seed, peers):
        known.append([peer.plan for peer in peers])
        value = next(plans)
        return Searched(1.0, SimpleNamespace(plan=value, estimate=SimpleNamespace(samples_per_s=value)))

    monkeypatch.setattr(cells, "searched", one_second)
    found = cells.refined(Pair().request(), 3.0, ())
    assert (found.samples_per_s, found.cpu_s) == (5.0, 3.0)
    assert known == [[], [3.0], [5.0]]


def test_a_node_goes_and_comes_without_a_change_of_names():
    request = Pair().request()
    there, less, more = (
        set(r.cluster.devices) for r in (request, one_node_less(request), one_node_more(request))
    )
    assert less < there < more
    assert len(there) - len(less) == len(more) - len(there) == 2
    assert one_node_less(one_node_less(request)) is None  # one more and its name would be another


def test_the_curves_are_drawn(tmp_path):
    draw([contest((5.0, 8.0, 8.0), (1.0, 2.0, 5.0))], MARKS, (0.1,), tmp_path / "learned.png")
    assert (tmp_path / "learned.png").read_bytes().startswith(b"\x89PNG")


def test_the_digest_sees_every_file_that_measures():
    root = Path(learned_units.__file__).parents[1]
    seen = {file.stem for file in learned_units._sources(root)}
    loaded = {cells.__name__, learned_curves.__name__, learned_units.__name__}
    for module in (cells, learned_curves, learned_units):
        loaded |= {value.__module__ for value in vars(module).values() if hasattr(value, "__module__")}
    measuring = {name.removeprefix("bench.") for name in loaded if name.startswith("bench.learned_")}
    assert measuring
    assert measuring <= seen
