"""Where nothing fits: what is missing; each change that is named helps, and a smaller one does not."""

import re
import time
from dataclasses import replace

import msgspec
import pytest
import typer

from arachne_runtime.errors import NoFeasiblePlanError
from arachne_runtime.plan.cluster import Cluster, Network, NodeEntry
from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.plan.profile import Profile
from arachne_runtime.plan.schedule import PRICEABLE
from arachne_runtime.units import GIB
from launch.cli import app
from planner import catalog
from planner.request import Request
from planner.search import Change, ChangeKind, Leanest, Missing, find_plan, what_is_missing
from tests.test_losses import problem


def tight(
    memory_GiB: float, *, gpus: int = 2, count: int = 1, tp: tuple[int, ...] = (1,), **fields
) -> Request:
    """OPT-350M on V100s with little memory; ``tp``: degrees that were measured."""
    node = NodeEntry(name="v", device="V100-16", gpus=gpus, count=count, memory_GiB=memory_GiB)
    measured = catalog.profile("opt-350m")
    rows = [
        msgspec.structs.replace(row, tp=degree)
        for row in measured.timings
        for degree in tp
        if row.tp == 1 and row.device == "V100-16"
    ]
    profile = Profile(model="opt-350m", sequence=2048, dtype=measured.dtype, timings=tuple(rows))
    return Request(
        cluster=Cluster(node=(node,), network=Network(inter_GBps=12.5)),
        model=catalog.model("opt-350m"),
        profile=profile,
        global_batch=16,
        **fields,
    )


def change(missing: Missing, kind: ChangeKind) -> Change | None:
    return next((c for c in missing.changes if c.kind is kind), None)


def fits(request: Request) -> bool:
    try:
        find_plan(request, evaluations=40, peers=())
    except NoFeasiblePlanError:
        return False
    return True


def test_what_is_missing_names_stage_memory_and_amount():
    missing = what_is_missing(tight(5.0))
    assert missing.device_type == "V100-16"
    assert missing.needed_bytes - missing.available_bytes == missing.over_bytes > 0
    assert missing.available_bytes == 5 * GIB
    assert (missing.depth, missing.tp, missing.width) == (2, 1, 1)
    for words in ("no plan fits opt-350m", f"stage {missing.stage} (blocks ", "more memory a device"):
        assert words in missing.text


def test_the_search_says_it():
    with pytest.raises(NoFeasiblePlanError) as caught:
        find_plan(tight(5.0), evaluations=20)
    assert str(caught.value) == what_is_missing(tight(5.0)).text


def test_more_memory_is_enough_and_less_is_not():
    over = change(what_is_missing(tight(5.0)), ChangeKind.MEMORY).amount / GIB
    assert fits(tight(5.0 + over * 1.01))
    assert not fits(tight(5.0 + over * 0.9))


def test_more_devices_are_enough_and_fewer_are_not():
    added = change(what_is_missing(tight(5.0)), ChangeKind.DEVICES).amount
    assert fits(tight(5.0, gpus=2 + added))
    assert not fits(tight(5.0, gpus=2 + added - 1))


def test_a_large_cluster_is_asked_for_nodes():
    nodes = [(f"f{i}", "fast", 3) for i in range(3)]
    request = _forty_blocks(nodes)
    devices = change(what_is_missing(request), ChangeKind.DEVICES)
    assert (devices.device, devices.amount % 3) == ("fast", 0)
    assert devices.text == f"{devices.amount} further fast devices ({devices.amount // 3} nodes of 3)"
    enough = [(f"f{i}", "fast", 3) for i in range(3 + devices.amount // 3)]
    for given, fitting in ((enough, True), (enough[1:], False)):
        request = _forty_blocks(given)
        assert (Leanest(request).shortage().over_bytes <= 0) is Leanest(request).fits() is fitting


def test_devices_alone_cannot_always_help():
    missing = what_is_missing(tight(1.5))
    assert change(missing, ChangeKind.DEVICES) is None
    assert change(missing, ChangeKind.MEMORY) is not None


def test_zero_helps_where_many_replicas_would_share():
    request = tight(4.6, gpus=8)
    one_stage = replace(request, model=request.model)
    missing = what_is_missing(one_stage)
    assert missing.over_bytes <= 0  # eight stages fit
    shallow = _one_block(memory_GiB=2.9)
    found = change(what_is_missing(shallow), ChangeKind.ZERO)
    assert found.amount == 1
    assert Leanest(replace(shallow, max_zero=1)).shortage().over_bytes <= 0
    assert "in Python max_zero=1 of the Request" in what_is_missing(shallow).text


def _one_block(memory_GiB: float) -> Request:
    """A model that cannot be cut: 250 million parameters, 1 + 1 + 2 GB in float32."""
    request = tight(memory_GiB, gpus=4)
    block = msgspec.structs.replace(
        request.model.blocks[1], parameters=125_000_000, activation_bytes=10**6, output_bytes=0, tied_to=None
    )
    rows = tuple(
        msgspec.structs.replace(row, activation_bytes=None)
        for row in request.profile.timings
        if row.kind == block.kind
    )
    return replace(
        request,
        model=msgspec.structs.replace(request.model, blocks=(block,)),
        profile=msgspec.structs.replace(request.profile, timings=rows),
    )


def test_tensor_parallelism_that_was_not_measured_is_proposed():
    request = _one_block(memory_GiB=2.9)
    found = change(what_is_missing(request), ChangeKind.TENSOR)
    assert found.amount == 2
    assert found.text == "tensor parallelism of degree 2, of which nothing was measured"
    rows = tuple(msgspec.structs.replace(row, tp=2) for row in request.profile.timings)
    measured = msgspec.structs.replace(request.profile, timings=request.profile.timings + rows)
    assert Leanest(replace(request, profile=measured)).shortage().over_bytes <= 0


def test_a_smaller_micro_batch_that_was_not_measured_is_proposed():
    request = tight(9.9)
    assert what_is_missing(request).over_bytes <= 0
    rows = tuple(row for row in request.profile.timings if row.samples == 4)
    large = replace(request, profile=msgspec.structs.replace(request.profile, timings=rows))
    found = change(what_is_missing(large), ChangeKind.SHARE)
    assert found.text == "micro-batches of 1 sample, of which nothing was measured (smallest: 4)"


def test_a_leaner_schedule_is_proposed():
    request = tight(9.95, schedules=(ScheduleKind.GPIPE,))
    found = change(what_is_missing(request), ChangeKind.SCHEDULE)
    assert found.text == "in Python schedules=('1f1b',) of the Request"
    assert fits(tight(9.95))


def test_where_the_leanest_fits_nothing_is_missing():
    missing = what_is_missing(tight(16.0))
    assert missing.over_bytes < 0
    assert missing.changes == ()
    assert missing.text.endswith(
        "give the search more time (--time-budget; in Python time_budget_s or evaluations of find_plan), "
        "or in Python a Request with more schedules than 1f1b"
    )
    narrow = tight(16.0, schedules=PRICEABLE, max_micro_batch=2)
    assert what_is_missing(narrow).text.endswith("or in Python a Request with a max_micro_batch above 2")
    assert what_is_missing(tight(16.0, schedules=PRICEABLE)).text.endswith("evaluations of find_plan)")


def test_every_option_that_is_named_is_one_of_the_command_line():
    command = typer.main.get_command(app()).commands["plan"]
    known = {option for parameter in command.params for option in parameter.opts}
    texts = [what_is_missing(request).text for request in (tight(16.0), _one_block(2.9), tight(5.0))]
    named = {word for text in texts for word in re.findall(r"--[a-z-]+", text)}
    assert named == {"--time-budget"} < known


def test_one_node_is_no_nodes():
    nodes = [(f"f{i}", "fast", 3) for i in range(10)]
    fitting = next(n for n in range(3, 10) if _fits_on(nodes[:n]))
    missing = what_is_missing(_forty_blocks(nodes[: fitting - 1]))
    assert change(missing, ChangeKind.DEVICES).text == "3 further fast devices (1 node of 3)"


def _forty_blocks(nodes: list[tuple[str, str, int]]) -> Request:
    return problem(*nodes, batch=64, blocks=40, parameters=10**8, memory_GiB=6.0)


def _fits_on(nodes: list[tuple[str, str, int]]) -> bool:
    return Leanest(_forty_blocks(nodes)).fits()


def test_a_large_model_is_told_in_time():
    """It took 3.1 s of CPU time with a table for each number of micro-batches in flight; 0.5 s without."""
    node = NodeEntry(name="a", device="A100-40", gpus=8, count=3)
    model = catalog.model("deepseek-v3-like", sequence=2048)
    request = Request(
        cluster=Cluster(node=(node,), network=Network(inter_GBps=12.5)),
        model=model,
        profile=catalog.profile_for(model, ["A100-40"]),
        global_batch=256,
    )
    before = time.thread_time()
    assert change(what_is_missing(request), ChangeKind.DEVICES).amount == 296
    assert time.thread_time() - before < 1.5


def test_experts_are_spread():
    node = NodeEntry(name="a", device="A100-40", gpus=8, count=2)
    model = catalog.model("mixtral-8x7b", sequence=1024)
    request = Request(
        cluster=Cluster(node=(node,), network=Network(inter_GBps=12.5)),
        model=model,
        profile=catalog.profile_for(model, ["A100-40"]),
        global_batch=64,
    )
    missing = what_is_missing(request)
    assert missing.over_bytes > 0  # 47e9 parameters of 16 bytes
    spread = Leanest(request).expert_parallel(Leanest(request).shortage().place)
    assert f"experts spread over {spread} devices" in missing.text
    added = change(missing, ChangeKind.DEVICES).amount
    assert (16 + added) * 40 * GIB > 16 * 46.7e9
