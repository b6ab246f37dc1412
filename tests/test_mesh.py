"""Process groups: made once, in one order, with their members, and with the time limit of the default one."""

from datetime import timedelta

import msgspec
import pytest
import torch
import torch.distributed as dist

from arachne_runtime.mesh import GlooTransport, Mesh, NcclTransport
from arachne_runtime.plan.order import Summed
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.testing import run_ranks

CPU = torch.device("cpu")


def stage(layers, *replicas):
    return Stage(layers=layers, replicas=tuple(Replica(devices=(d,), share=share) for d, share in replicas))


UNLIKE = Plan(
    model="tiny",
    global_batch=6,
    sequence=1,
    pipelines=(
        Pipeline(
            micro_batches=1,
            micro_batch=4,
            stages=(stage((0, 2), ("a:0", 3), ("a:1", 1)), stage((2, 5), ("b:0", 4))),
        ),
        Pipeline(
            micro_batches=1, micro_batch=2, stages=(stage((0, 3), ("b:1", 2)), stage((3, 5), ("c:0", 2)))
        ),
    ),
)


def forms():
    made, new_group = [], dist.new_group
    dist.new_group = lambda ranks, **options: made.append(tuple(ranks)) or new_group(ranks, **options)
    try:
        mesh = Mesh.form(UNLIKE, Summed({"blocks.0.weight": (0, 4)}), dist.get_rank(), CPU)
    finally:
        dist.new_group = new_group
    found = {members: dist.get_process_group_ranks(group) for members, group in mesh.groups.items()}
    mesh.close()
    return made, found, [r.name for r in mesh.reductions], mesh.places[0].device


def test_groups_are_made_once_in_one_order_and_hold_their_members():
    found = run_ranks(5, forms)
    assert all(made == found[0][0] for made, _, _, _ in found)
    assert found[0][0] == [(0, 1, 3), (2, 3), (2, 4)]
    for rank, (_, groups, _, _) in enumerate(found):
        assert all(rank in members and list(members) == ranks for members, ranks in groups.items())
        assert (0, 1, 2, 3, 4) in groups
    assert [names for _, _, names, _ in found] == [
        ["0:2", "blocks.0.weight"],
        ["0:2", "blocks.0.weight"],
        ["2:3", "3:5", "blocks.0.weight"],
        ["0:2", "2:3", "blocks.0.weight"],
        ["3:5", "blocks.0.weight"],
    ]
    assert [device for _, _, _, device in found] == ["a:0", "a:1", "b:0", "b:1", "c:0"]


TILED = Plan(
    model="tiny",
    global_batch=4,
    sequence=1,
    pipelines=(
        Pipeline(
            micro_batches=1,
            micro_batch=4,
            stages=(
                Stage(layers=(0, 2), replicas=(Replica(devices=("a:0", "a:1"), share=4),)),
                Stage(
                    layers=(2, 5),
                    replicas=(Replica(devices=("a:2",), share=2), Replica(devices=("a:3",), share=2)),
                    expert_parallel=2,
                ),
            ),
        ),
    ),
)
"""A tensor-parallel stage, and one whose two replicas share out experts; both sum gradients too."""


def limits_of_groups(timeout_s):
    """Seconds and members of each group of this rank; those that torch knows beside them, at the end too."""
    alone = [dist.group.WORLD]
    mesh = Mesh.form(TILED, Summed(), dist.get_rank(), CPU, timeout_s=timeout_s)
    groups = mesh.every_group()
    made = [group for group in dist.distributed_c10d._world.pg_map if group not in alone]
    limits = [group._get_backend(CPU).options._timeout for group in groups]
    members = [tuple(dist.get_process_group_ranks(group)) for group in groups]
    mesh.close()
    left = list(dist.distributed_c10d._world.pg_map)
    return members, limits, {*groups} == {*alone, *made}, left == alone and mesh.every_group() == ()


@pytest.mark.parametrize("timeout_s", [None, 7.0])
def test_every_group_is_named_and_has_the_time_limit_of_the_default_one_or_its_own(timeout_s):
    found = run_ranks(4, limits_of_groups, timeout_s, timeout_s=41)
    everyone = (0, 1, 2, 3)
    assert [members for members, *_ in found] == [
        [everyone, (0, 1), (0, 1)],
        [everyone, (0, 1), (0, 1)],
        [everyone, (2, 3), (2, 3)],
        [everyone, (2, 3), (2, 3)],
    ]
    for _, (default, *limits), is_all, none_left in found:
        assert default == timedelta(seconds=41)
        assert {*limits} == {timedelta(seconds=timeout_s or 41)}
        assert is_all
        assert none_left


def test_a_single_rank_needs_no_process_group():
    pipeline = Pipeline(micro_batches=1, micro_batch=2, stages=(stage((0, 5), ("a:0", 2)),))
    mesh = Mesh.form(msgspec.structs.replace(UNLIKE, global_batch=2, pipelines=(pipeline,)), Summed(), 0, CPU)
    assert mesh.groups == {}
    assert mesh.world is None
    assert isinstance(mesh.transport, GlooTransport)


@pytest.fixture
def nccl_calls(mocker):
    """What a rank would ask of NCCL, since there is no GPU here."""
    calls = []
    mocker.patch("torch.distributed.get_rank", return_value=1)
    mocker.patch(
        "torch.distributed.new_group",
        side_effect=lambda ranks, timeout, backend: calls.append(("group", *ranks)) or len(calls),
    )
    for name in ("isend", "irecv"):
        mocker.patch(
            f"torch.distributed.{name}",
            side_effect=lambda tensor, peer, group, name=name: (
                calls.append((name, peer, group)) or mocker.Mock()
            ),
        )
    return calls


def test_nccl_has_a_communicator_for_each_direction_and_no_tags(nccl_calls):
    pairs = [(0, 1), (1, 0), (1, 2), (2, 1), (0, 3)]
    transport = NcclTransport.form(pairs, 1, CPU, range(4))
    groups = {(0, 1): 1, (0, 3): 2, (1, 0): 3, (1, 2): 4, (2, 1): 5}
    assert nccl_calls[:5] == [("group", *sorted(pair)) for pair in groups]
    assert nccl_calls[5:] == [("irecv", 0, 1), ("isend", 0, 3), ("isend", 2, 4), ("irecv", 2, 5)]
    transport.send(torch.zeros(1), 2, tag=7)
    transport.receive(torch.zeros(1), 2, tag=8)
    assert nccl_calls[-2:] == [("isend", 2, 4), ("irecv", 2, 5)]
    assert transport.matches_in_order
    assert transport.groups() == (1, 3, 4, 5)
    transport.close()
    assert transport.groups() == ()
