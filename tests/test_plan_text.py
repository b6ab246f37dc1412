"""The text of a plan: stable, complete, and a small change of the plan is a small change of the text."""

import re

import msgspec
from hypothesis import given

from arachne_runtime.plan.alike import alike, numbers, short
from arachne_runtime.plan.cluster import Cluster, Network, NodeEntry
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.plan.text import describe
from launch.report.tell_plan import shape_of
from tests.documents import CLUSTER, PLAN, REMOVED, changed, read
from tests.strategies import settings_of_a_plan

EXPECTED = """\
plan of tiny
  global batch  32 samples of 16 tokens
  schedule      1f1b
  blocks        5
  devices       6 (2 A100-40, 4 V100-16); not used: 2 A100-40
  predicted     500 ms an iteration, 64 samples/s
  made by       arachne 0.1.0, seed 7
    cluster     sha256:1
    model       sha256:2
    profile     sha256:3

pipeline 0: 4 micro-batches of 6 samples
  stage 0: blocks 0 to 1, recompute, ZeRO 1
    v-0:0         V100-16  4 samples  peak 1000 B
    v-0:1         V100-16  2 samples
  stage 1: blocks 2 to 4
    a:0 a:1       A100-40  TP 2  6 samples  peak 8.48 GiB

pipeline 1: 2 micro-batches of 4 samples
  stage 0: blocks 0 to 4
    v-1:0 v-1:1   V100-16  TP 2  4 samples"""


def test_the_whole_text():
    assert describe(read(PLAN, Plan), msgspec.convert(CLUSTER, Cluster)) == EXPECTED


def test_what_is_not_known_is_left_out():
    text = describe(read(changed(PLAN, {"predicted": REMOVED, "made_by": REMOVED}), Plan))
    assert "predicted" not in text
    assert "made by" not in text
    assert "  devices       6\n" in text
    assert "    v-0:1         2 samples\n" in text


def test_the_peak_of_a_replica_is_that_of_its_fullest_device():
    text = describe(read(changed(PLAN, {'predicted.peak_bytes["a:1"]': 9.9e9}), Plan))
    assert "    a:0 a:1       TP 2  6 samples  peak 9.22 GiB\n" in text


def test_a_changed_share_changes_one_line():
    stage = "pipelines[0].stages[0]"
    before = describe(read(PLAN, Plan)).splitlines()
    after = describe(
        read(changed(PLAN, {f"{stage}.replicas[0].share": 3, f"{stage}.replicas[1].share": 3}), Plan)
    ).splitlines()
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 2


def named(text: str) -> list[str]:
    """Every device that a text names, ranges written out."""
    found = []
    for node, first, last in re.findall(r" ([a-z0-9-]+):(\d+)(?:-(\d+))?(?= |$)", text, re.MULTILINE):
        found += [f"{node}:{index}" for index in range(int(first), int(last or first) + 1)]
    return found


@given(settings_of_a_plan())
def test_every_device_and_block_is_in_the_text(setting):
    cluster, _, plan = setting
    text = describe(plan, cluster)
    assert all(named(text).count(device) == 1 for device in plan.devices)
    assert text.count("  stage ") == sum(len(group.first.stages) for group in alike(plan, cluster))
    assert all(line == line.rstrip() for line in text.splitlines())


def many(copies: int, width: int) -> Plan:
    """``copies`` pipelines of two stages: ``width`` replicas of one device, then one group of two."""
    pipelines = tuple(
        Pipeline(
            micro_batches=4,
            micro_batch=width,
            stages=(
                Stage(
                    layers=(0, 2),
                    replicas=tuple(Replica(devices=(f"v-{p}:{i}",), share=1) for i in range(width)),
                ),
                Stage(layers=(2, 5), replicas=(Replica(devices=(f"a-{p}:0", f"a-{p}:1"), share=width),)),
            ),
        )
        for p in range(copies)
    )
    return Plan(model="tiny", global_batch=4 * width * copies, sequence=16, pipelines=pipelines)


def test_alike_pipelines_are_said_once():
    text = describe(many(copies=3, width=2))
    assert text.endswith("""

3 × pipeline (0-2): 4 micro-batches of 2 samples each
  stage 0: blocks 0 to 1
    2 × 1 sample
  stage 1: blocks 2 to 4
    1 × TP 2  2 samples
  devices, stage by stage
    0: v-0:0-1 | a-0:0-1
    1: v-1:0-1 | a-1:0-1
    2: v-2:0-1 | a-2:0-1""")


def test_many_alike_replicas_are_one_line():
    assert "    4 × " not in describe(many(copies=1, width=4))
    assert "    8 × 1 sample  v-0:0-7\n" in describe(many(copies=1, width=8))


def test_pipelines_of_unlike_devices_are_not_alike():
    entries = [
        {"name": "v", "device": "V100-16", "gpus": 8, "count": 2},
        {"name": "v-2", "device": "P100", "gpus": 8},
    ]
    entries.append({"name": "a", "device": "A100-40", "gpus": 2, "count": 3})
    cluster = msgspec.convert(
        {"format": "arachne.cluster/1", "node": entries, "network": {"inter_GBps": 1.0}}, Cluster
    )
    assert [group.pipelines for group in alike(many(copies=3, width=2), cluster)] == [(0, 1), (2,)]
    assert [group.pipelines for group in alike(many(copies=3, width=2))] == [(0, 1, 2)]


def test_short_names():
    assert short(["a-0:0", "a-0:1", "a-0:3", "b:0", "a-0:2"]) == "a-0:0-1 a-0:3 b:0 a-0:2"
    assert numbers([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def bare(pipeline: Pipeline) -> Pipeline:
    """The pipeline with the number of each replica's devices in place of their names."""

    def of(stage: Stage) -> Stage:
        counted = tuple(msgspec.structs.replace(r, devices=("x:0",) * len(r.devices)) for r in stage.replicas)
        return msgspec.structs.replace(stage, replicas=counted)

    return msgspec.structs.replace(pipeline, stages=tuple(map(of, pipeline.stages)))


@given(settings_of_a_plan())
def test_alike_is_equal_but_for_names(setting):
    _, _, plan = setting
    groups = alike(plan)
    assert sorted(p for group in groups for p in group.pipelines) == list(range(len(plan.pipelines)))
    kinds = [{bare(plan.pipelines[p]) for p in group.pipelines} for group in groups]
    assert all(len(kind) == 1 for kind in kinds)
    assert len({min(kind, key=repr) for kind in kinds}) == len(groups)


def test_other_cuts_are_not_alike():
    plan = many(copies=2, width=2)
    first, last = plan.pipelines[1].stages
    moved = tuple(
        msgspec.structs.replace(stage, layers=layers) for stage, layers in ((first, (0, 3)), (last, (3, 5)))
    )
    other = msgspec.structs.replace(plan.pipelines[1], stages=moved)
    plan = msgspec.structs.replace(plan, pipelines=(plan.pipelines[0], other))
    assert [group.pipelines for group in alike(plan)] == [(0,), (1,)]


def test_a_shape_does_not_depend_on_the_order_of_pipelines():
    nodes = (NodeEntry(name="a", device="A100-40", gpus=4), NodeEntry(name="v", device="V100-16", gpus=1))
    cluster = Cluster(node=nodes, network=Network(inter_GBps=1.0))

    def line(device: str, micro_batches: int, *cuts: tuple[int, int]) -> Pipeline:
        name, _, first = device.partition(":")
        stages = tuple(
            Stage(layers=cut, replicas=(Replica(devices=(f"{name}:{int(first) + n}",), share=2),))
            for n, cut in enumerate(cuts)
        )
        return Pipeline(micro_batches=micro_batches, micro_batch=2, stages=stages)

    early, late = line("a:0", 3, (0, 2), (2, 5)), line("a:2", 3, (0, 3), (3, 5))  # cut at another block
    alone = line("v:0", 1, (0, 5))
    for order in ((alone, early, late), (early, alone, late), (late, early, alone)):
        plan = Plan(model="m", global_batch=14, sequence=1, pipelines=order)
        words = "2 pipelines of 3 x 2 over 1 A100-40 (2 stages); 1 pipeline of 1 x 2 over 1 V100-16"
        assert shape_of(plan, cluster) == words
