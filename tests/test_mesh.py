"""Process groups: made once, in one order, with their members."""

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
        side_effect=lambda ranks, backend: calls.append(("group", *ranks)) or len(calls),
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
