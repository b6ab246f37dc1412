"""Rows, segments, placement: every row once, every block once, the same ranks everywhere."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from arachne_runtime.plan.cluster import Cluster, index_of, node_of
from arachne_runtime.plan.files import read_cluster
from arachne_runtime.plan.placement import holding, places, rank_order
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.rows import consecutive, micro_batch_rows, overlaps, replica_rows
from arachne_runtime.plan.segments import segments
from tests.documents import CLUSTER_TOML, PLAN, changed, read, written
from tests.strategies import clusters, plans


def flat(ranges) -> list[int]:
    return [row for rows in ranges for row in rows]


@st.composite
def plans_with_rows(draw) -> tuple[Plan, int]:
    plan = draw(plans())
    return plan, draw(st.integers(0, plan.global_batch))


# --- rows


@given(st.lists(st.integers(0, 5)), st.integers(0, 9))
def test_consecutive_ranges_touch(counts, start):
    ranges = consecutive(counts, start)
    assert [len(r) for r in ranges] == counts
    assert flat(ranges) == list(range(start, start + sum(counts)))


@given(plans_with_rows())
def test_every_row_is_in_one_micro_batch(case):
    plan, num_rows = case
    rows = micro_batch_rows(plan, num_rows)
    assert [len(mine) for mine in rows] == [p.micro_batches for p in plan.pipelines]
    assert flat(r for mine in rows for r in mine) == list(range(num_rows))


@given(plans())
def test_a_full_batch_has_full_micro_batches(plan):
    for pipeline, mine in zip(plan.pipelines, micro_batch_rows(plan, plan.global_batch), strict=True):
        assert {len(rows) for rows in mine} == {pipeline.micro_batch}
        for stage in pipeline.stages:
            assert tuple(len(r) for r in replica_rows(stage, mine[0])) == stage.shares


@given(plans_with_rows())
def test_every_row_crosses_every_boundary_once(case):
    """Whatever the widths and shares on both sides, and however short the batch."""
    plan, num_rows = case
    for pipeline, mine in zip(plan.pipelines, micro_batch_rows(plan, num_rows), strict=True):
        for rows in mine:
            for before, after in pairwise(pipeline.stages):
                held, taken = replica_rows(before, rows), replica_rows(after, rows)
                crossing = overlaps(held, taken)
                assert flat(o.rows for o in crossing) == list(rows)
                assert all(set(o.rows) <= set(held[o.sender]) & set(taken[o.receiver]) for o in crossing)
                assert len({(o.sender, o.receiver) for o in crossing}) == len(crossing)


def test_rows_of_a_short_batch_by_hand():
    plan = read(PLAN, Plan)  # micro-batches of 6, 6, 6, 6 and 4, 4: 32 rows
    assert [len(r) for mine in micro_batch_rows(plan, 5) for r in mine] == [1, 1, 1, 1, 1, 0]
    assert [len(r) for mine in micro_batch_rows(plan, 32) for r in mine] == [6, 6, 6, 6, 4, 4]
    assert replica_rows(plan.pipelines[0].stages[0], range(10, 13)) == (range(10, 12), range(12, 13))


def test_overlaps_by_hand():
    crossing = overlaps((range(4), range(4, 6)), (range(1), range(1, 5), range(5, 6)))
    assert [(o.sender, o.receiver, o.rows) for o in crossing] == [
        (0, 0, range(1)),
        (0, 1, range(1, 4)),
        (1, 1, range(4, 5)),
        (1, 2, range(5, 6)),
    ]


# --- segments


@given(plans())
def test_segments_cover_every_block_once(plan):
    found = segments(plan)
    assert flat(s.blocks for s in found) == list(range(plan.num_blocks))
    assert all(s.blocks for s in found)


@given(plans())
def test_a_segment_is_held_whole_by_one_stage_of_each_pipeline(plan):
    for segment in segments(plan):
        assert [p for p, _ in segment.holders] == list(range(len(plan.pipelines)))
        for p, s in segment.holders:
            assert set(segment.blocks) <= set(plan.pipelines[p].stages[s].blocks)


@given(plans())
def test_segments_are_maximal(plan):
    found = segments(plan)
    for before, after in pairwise(found):
        assert before.holders != after.holders


# --- placement


@given(plans())
def test_every_device_has_one_rank_and_its_place(plan):
    found = places(plan)
    assert [place.rank for place in found] == list(range(len(plan.devices)))
    assert tuple(place.device for place in found) == rank_order(plan)
    for place in found:
        _, _, replica = holding(plan, place)
        assert replica.devices[place.tp_rank] == place.device


@given(plans())
def test_ranks_go_node_by_node_then_by_index(plan):
    order = rank_order(plan)
    nodes = [node_of(device) for device in order]
    assert list(dict.fromkeys(nodes)) == list(dict.fromkeys(node_of(d) for d in plan.devices))
    for a, b in pairwise(order):
        assert node_of(a) != node_of(b) or index_of(a) < index_of(b)
    assert len(set(nodes)) == sum(a != b for a, b in pairwise(nodes)) + 1


def test_ranks_by_hand():
    plan = read(
        changed(PLAN, {"pipelines[0].stages[1].replicas[0].devices": ["a:10", "a:9"], "predicted": None}),
        Plan,
    )
    assert rank_order(plan) == ("v-0:0", "v-0:1", "a:9", "a:10", "v-1:0", "v-1:1")
    assert [(p.pipeline, p.stage, p.replica, p.tp_rank) for p in places(plan)] == [
        (0, 0, 0, 0),
        (0, 0, 1, 0),
        (0, 1, 0, 1),
        (0, 1, 0, 0),
        (1, 0, 0, 0),
        (1, 0, 0, 1),
    ]


# --- the cluster's devices and links


@given(clusters())
def test_devices_of_a_cluster_are_unique_and_typed(cluster):
    assert len(set(cluster.devices)) == len(cluster.devices) == sum(n.count * n.gpus for n in cluster.node)
    assert {cluster.device_type(d) for d in cluster.devices} == {n.device for n in cluster.node}


@given(clusters(), st.data())
def test_a_link_is_the_same_both_ways(cluster, data):
    a, b = (data.draw(st.sampled_from(cluster.nodes)).name for _ in range(2))
    there, back = cluster.link(a, b), cluster.link(b, a)
    assert (there.inter_GBps, there.latency_us) == (back.inter_GBps, back.latency_us)


def test_the_most_particular_pair_wins(tmp_path):
    text = CLUSTER_TOML + '[[network.pair]]\nbetween = ["z1", "z2"]\ninter_GBps = 1.0\n'
    text += '[[network.pair]]\nbetween = ["v-1", "a"]\ninter_GBps = 2.0\n'
    cluster: Cluster = read_cluster(written(tmp_path, text, "c.toml"))
    assert cluster.link("a", "v-0").inter_GBps == 6.0
    assert cluster.link("a", "v-1").inter_GBps == 2.0
    assert cluster.link("a", "v-1").latency_us == 10
    assert cluster.link("v-0", "v-1").inter_GBps == 8.0


def test_a_rank_of_an_interleaved_plan_has_a_place_in_each_of_its_stages():
    replicas = PLAN["pipelines"][0]["stages"][0]["replicas"]
    changes = {"schedule": "interleaved_1f1b", "pipelines[0].stages[1].replicas": replicas}
    found = places(read(changed(PLAN, changes), Plan))
    assert [(p.rank, p.device, p.pipeline, p.stage) for p in found] == [
        (0, "v-0:0", 0, 0), (0, "v-0:0", 0, 1), (1, "v-0:1", 0, 0), (1, "v-0:1", 0, 1),
        (2, "v-1:0", 1, 0), (3, "v-1:1", 1, 0),
    ]  # fmt: skip
