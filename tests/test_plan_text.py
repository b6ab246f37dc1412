"""The text of a plan: stable, complete, and a small change of the plan is a small change of the text."""

import msgspec
from hypothesis import given

from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.text import describe
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


@given(settings_of_a_plan())
def test_every_device_and_block_is_in_the_text(setting):
    cluster, _, plan = setting
    text = describe(plan, cluster)
    for device in plan.devices:
        assert text.count(f" {device} ") == 1
    assert text.count("  stage ") == sum(len(pipeline.stages) for pipeline in plan.pipelines)
    assert all(line == line.rstrip() for line in text.splitlines())
