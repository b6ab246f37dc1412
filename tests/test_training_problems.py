"""Random problems and their labels: what is drawn, that it repeats, and that labels can be built and kept."""

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from hashlib import sha256
from math import inf
from pathlib import Path

import msgspec
import pytest

from arachne_runtime.errors import InvalidFileError
from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.files import encode
from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.plan.rules.cluster import check_cluster
from planner.catalog import device, device_names
from planner.catalog.estimate import estimate
from planner.exhaustive.oracle import solve
from planner.exhaustive.random_problems import Limits, random_request
from planner.search.supply import Pool, Supply
from planner.training import clusters
from planner.training.behaviour import MOST_EXTRA_S
from planner.training.draw import Drawn, draw, drawn, held_out, validation
from planner.training.every import every_shape
from planner.training.labelling import NEAR, Effort, label
from planner.training.labels import Labels, ProblemSet, Run, Space, line_of, load, read
from planner.training.models import HELD_OUT_FAMILY, num_parameters
from planner.training.problem import Problem
from planner.training.sequences import Form, copies_of, runs_of
from planner.training.store import FILE, Labelled, produce

SMALL = Space(devices=(2, 10), parameters=(0.1e9, 2e9))
QUICK = Effort(enumerated=300, rounds=2, priced=3, numbered=2)


def types_of(cluster: Cluster) -> set[str]:
    return {entry.device for entry in cluster.node}


@pytest.fixture(scope="module")
def many() -> list[Drawn]:
    return [draw(seed) for seed in range(100)]


@pytest.fixture(scope="module")
def some() -> list[tuple[Drawn, Labels]]:
    problems = [draw(seed, SMALL) for seed in range(8)]
    return [(problem, label(problem, QUICK)) for problem in problems]


def test_the_ranges_are_covered(many: list[Drawn]) -> None:
    devices = [len(d.request.cluster.devices) for d in many]
    assert min(devices) <= 4
    assert max(devices) >= 400
    assert all(2 <= number <= 1024 for number in devices)
    sizes = [num_parameters(d.request.model) / 1e9 for d in many]
    assert min(sizes) < 0.5
    assert max(sizes) > 50
    assert all(0.1 <= size <= 100 for size in sizes)
    assert {len(types_of(d.request.cluster)) for d in many} == {1, 2, 3, 4, 5}
    assert {e.gpus for d in many for e in d.request.cluster.node} == set(range(1, 9))
    batches = [d.request.global_batch for d in many]
    assert min(batches) <= 48
    assert max(batches) >= 2048
    assert all(32 <= batch <= 4096 for batch in batches)


def test_every_kind_of_problem_is_drawn(many: list[Drawn]) -> None:
    def part(wanted: Iterable[bool]) -> float:
        found = list(wanted)
        return sum(found) / len(found)

    assert 0.15 < part(any(b.experts for b in d.request.model.blocks) for d in many) < 0.6
    assert 0.2 < part(any(len({n for _, n in p.nodes}) > 1 for p in d.supply.pools) for d in many) < 0.9
    assert 0.05 < part(any(e.zone for e in d.request.cluster.node) for d in many) < 0.4
    inter = [d.request.cluster.network.inter_GBps for d in many]
    assert min(inter) < 1.5
    assert max(inter) > 60
    intra = [e.intra_GBps or 0 for d in many for e in d.request.cluster.node]
    assert min(intra) < 15
    assert max(intra) > 400


def test_problems_are_valid_and_few_are_drawn_again(many: list[Drawn]) -> None:
    assert all(check_cluster(d.request.cluster) == () for d in many)
    assert sum(d.tries for d in many) < 1.5 * len(many)
    for d in many:
        largest: dict[str, int] = {}
        for entry in d.request.cluster.node:
            largest[entry.device] = max(entry.gpus, largest.get(entry.device, 0))
        assert all(d.request.tables.tp_degrees(name)[-1] <= gpus for name, gpus in largest.items())


def test_a_type_is_not_as_fast_as_its_data_sheet_says() -> None:
    """Seconds over the catalog's estimate differ by about a fifth, and are near it on the whole."""
    ratios = []
    for model, profile in ((d.request.model, d.request.profile) for d in map(draw, range(25))):
        for row in profile.timings:
            if row.samples == 8 and row.tp == 1 and row.device in device_names() and model.dtype != "float32":
                block = next(i for i, b in enumerate(model.blocks) if b.kind == row.kind)
                _, back = estimate(
                    model,
                    block,
                    device(row.device),
                    1,
                    8,
                    arithmetic=model.dtype,
                    communication=profile.tp_communication,
                )
                if back > 20 * MOST_EXTRA_S:
                    ratios.append(row.backward_s / back)
    assert len(ratios) > 30
    ratios.sort()
    tenth = len(ratios) // 10
    assert ratios[-tenth] > 1.15 * ratios[tenth]
    assert 0.8 < ratios[len(ratios) // 2] < 1.25


def test_the_same_seed_is_the_same_problem_whatever_the_hash_seed() -> None:
    code = (
        "from hashlib import sha256; from planner.training.draw import drawn, ProblemSet\n"
        "from arachne_runtime.plan.files import encode\n"
        "for s in (ProblemSet.TRAINING, ProblemSet.VALIDATION, ProblemSet.HELD_OUT):\n"
        "    for i in range(4):\n"
        "        r = drawn(s, i).request\n"
        "        text = encode(r.cluster) + encode(r.model) + encode(r.profile) + b'%d' % r.global_batch\n"
        "        print(sha256(text).hexdigest())"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(told) == 1
    assert len(set(next(iter(told)).split())) == 12


def test_held_out_types_and_family_are_held_out(many: list[Drawn]) -> None:
    for d in [*many, *map(validation, range(15))]:
        assert not types_of(d.request.cluster) & set(clusters.HELD_OUT_TYPES)
        assert HELD_OUT_FAMILY not in d.request.model.name
        assert "deepseek" not in d.request.model.name
    seen = set()
    for d in map(held_out, range(12)):
        found = types_of(d.request.cluster) & set(clusters.HELD_OUT_TYPES)
        assert len(found) == 1
        seen |= found
        assert d.request.model.name == f"drawn-{HELD_OUT_FAMILY}"
    assert seen == set(clusters.HELD_OUT_TYPES)


def test_no_made_up_type_is_like_a_held_out_one(many: list[Drawn], monkeypatch: pytest.MonkeyPatch) -> None:
    held = [device(name) for name in clusters.HELD_OUT_TYPES]

    def alike(drawn_types: Iterable[object]) -> int:
        return sum(clusters._alike(t, h) for t in drawn_types for h in held)  # type: ignore[arg-type]

    import random

    def made(number: int) -> list[object]:
        return [clusters._made_up(random.Random(i), "made", 100 + i % 80) for i in range(number)]

    assert alike(made(3000)) == 0
    monkeypatch.setattr(clusters, "HELD_OUT_TYPES", ())
    assert alike(made(3000)) > 0


def test_validation_problems_are_no_training_problems(many: list[Drawn]) -> None:
    def digest(d: Drawn) -> str:
        return sha256(encode(d.request.cluster) + encode(d.request.profile)).hexdigest()

    assert not {digest(d) for d in many} & {digest(validation(seed)) for seed in range(40)}


def test_labels_can_be_built_and_are_near_the_best(some: list[tuple[Drawn, Labels]]) -> None:
    for problem, found in some:
        form = Form(problem.request, problem.supply)
        assert Problem.of(found).request.profile == problem.request.profile
        assert 1 <= len(found.sequences) <= 8
        assert len(found.relative) == len(found.sequences)
        assert list(found.relative) == sorted(found.relative)
        assert 1 <= found.relative[0] <= found.relative[-1] <= NEAR
        assert len(set(found.sequences)) == len(found.sequences)
        for sequence in found.sequences:
            copies = copies_of(form.site, sequence)
            assert copies is not None
            assert len(copies) == len(sequence)
            _fits(problem, sequence, copies)


def _fits(problem: Drawn, sequence: tuple[tuple[Run, ...], ...], copies: list[int]) -> None:
    """Devices by pool, counted here."""
    used = [0] * len(problem.supply.pools)
    for runs, number in zip(sequence, copies, strict=True):
        for pool, tp, width, length in runs:
            used[pool] += number * tp * width * length
    assert all(n <= pool.num_devices for n, pool in zip(used, problem.supply.pools, strict=True))


def test_some_labels_are_of_unlike_pipelines_and_some_of_every_template() -> None:
    found = [label(draw(seed, Space(devices=(2, 5))), QUICK) for seed in range(12)]
    assert any(len(sequence) > 1 for each in found for sequence in each.sequences)
    assert sum(each.every_template for each in found) > 6


def test_tiny_problems_are_labelled_with_their_optimum_or_nearly_so() -> None:
    """Against the oracle: it may also mix replicas in a stage and give each pipeline its own micro-batch."""
    ratios = []
    for seed in range(16):
        limits = Limits(devices=4, blocks=5, global_batch=16, tp=(1, 2))
        request = replace(random_request(seed, limits), schedules=(ScheduleKind.ONE_F_ONE_B,))
        best = solve(request)
        if best is not None:
            supply = Supply.of(request)
            training = ProblemSet.TRAINING
            tiny = Drawn(request=request, problems=training, seed=seed, space=SMALL, tries=1, supply=supply)
            ratios.append((label(tiny).best_s or inf) / best.estimate.iteration_s)
    assert len(ratios) > 10
    assert min(ratios) > 0.999
    assert sorted(ratios)[len(ratios) // 2] < 1.001
    assert sorted(ratios)[len(ratios) * 3 // 4] < 1.1


def test_a_longer_search_finds_no_slower_plan() -> None:
    problems = [draw(seed, SMALL) for seed in range(2)]
    more = Effort(enumerated=600, rounds=4, priced=6)
    ratios = [(label(p, more).best_s or inf) / (label(p, QUICK).best_s or inf) for p in problems]
    assert all(ratio < 1.02 for ratio in ratios)


def test_labels_repeat(some: list[tuple[Drawn, Labels]]) -> None:
    problem, found = some[3]
    assert label(draw(problem.seed, SMALL), QUICK) == found


def test_alike_neighbours_are_one_run() -> None:
    stages = ((0, 2, 1), (0, 2, 1), (1, 1, 4), (0, 2, 1))
    assert runs_of(stages) == (Run(0, 2, 1, 2), Run(1, 1, 4, 1), Run(0, 2, 1, 1))


def test_every_template_of_two_alike_devices() -> None:
    nodes = (("a", 1), ("b", 1))
    supply = Supply((Pool(device="any", room_bytes=1, price_per_hour=0.0, nodes=nodes, degrees=(1,)),))
    assert every_shape(supply, 10, 100) == [((0, 1, 1),), ((0, 1, 1), (0, 1, 1))]
    assert every_shape(supply, 1, 100) == [((0, 1, 1),)]
    assert every_shape(supply, 10, 1) is None


def test_labelling_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    told: list[Labelled] = []
    produce(tmp_path, range(3), space=SMALL, effort=QUICK, processes=1, on_progress=told.append)
    assert [each.done for each in told] == [0, 1, 2, 3]
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[:-20])  # stopped in the middle of a line
    assert [each.seed for each in load(tmp_path)] == [0, 1]
    told.clear()
    produce(tmp_path, range(5), space=SMALL, effort=QUICK, processes=2, on_progress=told.append)
    assert [each.done for each in told] == [2, 3, 4, 5]
    assert [each.seed for each in load(tmp_path)] == list(range(5))
    assert (tmp_path / FILE).read_bytes().startswith(whole[:-20][: whole.rindex(b"\n", 0, -20) + 1])
    assert list(load(tmp_path, ProblemSet.VALIDATION)) == []


def test_a_file_of_other_labels_is_refused_with_the_way_out(tmp_path: Path) -> None:
    found = label(drawn(ProblemSet.VALIDATION, 0, Space(devices=(2, 3))), QUICK)
    (tmp_path / "a.jsonl").write_bytes(line_of(msgspec.structs.replace(found, version=0)))
    with pytest.raises(InvalidFileError, match="version 0, not 1; delete the file and label again"):
        list(load(tmp_path))
    (tmp_path / "a.jsonl").write_bytes(line_of(found) + b"{}\n")
    with pytest.raises(InvalidFileError, match="line 2"):
        list(read(tmp_path / "a.jsonl"))
