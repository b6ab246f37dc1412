"""What replicas share: ZeRO and experts, their bytes, their traffic, and what it costs; by hand."""

import msgspec
import pytest

from arachne_runtime.plan.cluster import NetworkPair
from arachne_runtime.plan.model import BlockSpec
from arachne_runtime.plan.plan import Replica, ScheduleKind
from planner.cost import Estimate, price, stage_memory
from planner.cost.actors import in_step
from planner.cost.experts import expert_tilings, groups_of
from planner.cost.simulate import Actor
from planner.request import Request
from tests.test_price import FAST, MB, SLOW, ends, model, plan, profile, request, stage

TWO = [("a", FAST, 1), ("b", FAST, 1)]
BIG = 250 * MB
"""Parameters of 4 bytes: 1 GB, so a ring of two over 1 GB/s takes 0.5 s each way."""


def two_replicas(zero: int, count: int = 2, blocks: int = 1, update_s: float = 0.0) -> Estimate:
    spec = model(blocks, parameters=BIG // blocks)
    ask = request(TWO, spec, profile(update_s=update_s), global_batch=2 * count, memory_GiB=64)
    return price(plan((count, stage((0, blocks), ("a:0", 1), ("b:0", 1), zero=zero))), ask)


def test_zero_1_scatters_the_sums_halves_the_optimizer_and_gathers_the_weights():
    whole, shared = two_replicas(0, update_s=1.0), two_replicas(1, update_s=1.0)
    assert whole.iteration_s == pytest.approx(2 * 3 + 1.0 + 1.0, abs=1e-3)
    assert shared.iteration_s == pytest.approx(2 * 3 + 0.5 + 0.5 + 0.5, abs=1e-3)


def test_zero_2_scatters_in_every_backward_and_only_the_last_block_shows():
    found = two_replicas(2, blocks=2)
    # forward 2, backward 4 beside 0.5 s of traffic, of which the last block's half shows; then a gather
    assert ends(found, "a:0")["0B1"] == pytest.approx(2 * (2 + 4 + 0.25), abs=2e-3)
    assert found.iteration_s == pytest.approx(12.5 + 0.5, abs=5e-3)


def test_zero_3_gathers_for_every_forward_and_backward_and_never_again():
    found = two_replicas(3)
    assert found.iteration_s == pytest.approx(2 * (1 + 0.5 + 2 + 1.0), abs=5e-3)


def test_shards_are_summed_across_pipelines():
    spec = model(1, parameters=BIG)
    nodes = [(n, FAST, 1) for n in "abcd"]
    ask = request(nodes, spec, global_batch=4, memory_GiB=64)
    pairs = [(1, stage((0, 1), (f"{x}:0", 1), (f"{y}:0", 1), zero=2)) for x, y in ("ab", "cd")]
    found = price(plan(*pairs), ask)
    (reduction,) = (s for s in found.timeline["a:0"] if s.name == "0:1")
    # half of 1 GB in a ring of two pipelines, not 1 GB in a ring of four
    assert reduction.end_s - reduction.start_s == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize(
    ("zero", "weights", "gradients", "optimizer"),
    [(0, 4, 4, 8), (1, 4, 4, 2), (2, 4, 1, 2), (3, 1 + 2 * 4, 1, 2)],
)
def test_bytes_under_zero(zero, weights, gradients, optimizer):
    # one block of 1000 parameters, four replicas; ZeRO-3 holds two whole blocks of weights beside its shard
    tables = request(TWO, model(1, parameters=1000)).tables
    found = stage_memory(tables, start=0, stop=1, device=FAST, tp=1, samples=1, held=1, zero=zero, width=4)
    assert (found.weights, found.gradients, found.optimizer) == (
        1000 * weights, 1000 * gradients, 1000 * optimizer,
    )  # fmt: skip


# --- experts


def moe(output_bytes: int = 100 * MB, parameters: int = 0, expert_parameters: int = 0):
    """Two blocks alike, each token to two of eight experts; the second's output does not count."""
    block = BlockSpec(
        kind="layer",
        parameters=parameters,
        activation_bytes=0,
        output_bytes=output_bytes,
        flops=1.0,
        experts=8,
        expert_parameters=expert_parameters,
        experts_per_token=2,
    )
    return msgspec.structs.replace(model(2), blocks=(block, block))


FOUR = [("a", FAST, 2), ("b", FAST, 2)]
DEVICES = ("a:0", "a:1", "b:0", "b:1")


def experts_plan(parallel: int, tensor: int = 1, count: int = 1, **fields):
    replicas = [(device, 1) for device in DEVICES]
    return plan((count, stage((0, 2), *replicas, expert_parallel=parallel, expert_tensor=tensor, **fields)))


def test_tilings_divide_devices_and_experts_and_keep_tensor_groups_in_a_node():
    found = set(expert_tilings(["a", "a", "b", "b"], 8))
    assert found == {(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)}
    assert set(expert_tilings(["a", "b"], 8)) == {(1, 1), (2, 1)}
    assert set(expert_tilings(["a"] * 4, 6)) == {(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)}


def test_tokens_go_to_the_experts_and_back_over_the_links_between_them():
    ask = request(FOUR, moe(), memory_GiB=64)
    apart = price(experts_plan(1), ask).iteration_s
    # 200 MB a device, a quarter to each peer: 100 MB leave the node of two senders in 0.2 s; there and back,
    # two blocks, forward and backward
    assert price(experts_plan(4), ask).iteration_s - apart == pytest.approx(2 * 2 * 2 * 0.2, abs=1e-3)
    # groups of two stay in their node; so does a gather over ETP
    assert price(experts_plan(2), ask).iteration_s - apart == pytest.approx(0, abs=1e-3)
    assert price(experts_plan(1, 2), ask).iteration_s - apart == pytest.approx(0, abs=1e-3)
    again = price(experts_plan(4, recompute=True), ask).iteration_s
    assert again - price(experts_plan(1, recompute=True), ask).iteration_s == pytest.approx(
        3 * 2 * 2 * 0.2, abs=1e-3
    )


def test_only_devices_with_the_same_experts_sum_their_gradients():
    ask = request(FOUR, moe(0, parameters=BIG, expert_parameters=BIG), memory_GiB=64)

    def sums(parallel: int) -> dict[str, float]:
        spans = price(experts_plan(parallel), ask).timeline["a:0"]
        return {s.name: s.end_s - s.start_s for s in spans if "experts" in s.name}

    assert sums(4) == {}  # every device has experts of its own
    # 1 GB in a ring of a:0 and b:0, beside that of a:1 and b:1 over the same NICs
    assert sums(2) == {"0:2:experts": pytest.approx(2 * 0.5 * 2, abs=1e-2)}
    assert sums(1)["0:2:experts"] == pytest.approx(2 * 3 / 4 * 2 / 1.0, abs=2e-2)


def test_bytes_of_experts_are_divided_by_the_tile_and_the_rest_by_tp():
    tables = request(FOUR, moe(0, parameters=1000, expert_parameters=800)).tables
    one = {"start": 0, "stop": 2, "device": FAST, "samples": 1, "held": 1}
    spread = stage_memory(tables, **one, tp=1, width=4, expert_parallel=4)
    assert spread.weights == 2 * 4 * (200 + 800 / 4)
    tensor = stage_memory(tables, **one, tp=1, width=4, expert_parallel=2, expert_tensor=2, zero=1)
    assert tensor.optimizer == 2 * 8 * (200 / 4 + 800 / 4)  # a device's experts are nobody else's


def test_replicas_that_exchange_tokens_run_in_step():
    first, second = Actor(1.0, 2.0, ((0, 0.5),)), Actor(3.0, 1.0, ((0, 0.1), (1, 0.2)))
    alike = in_step([first, second, first], [0, 0, 2])
    assert alike[0] == alike[1] == Actor(3.0, 2.0, ((0, 0.5), (1, 0.2)))
    assert alike[2] is not first
    assert alike[2] == first
    pairs = stage((0, 1), *[(d, 1) for d in DEVICES], expert_parallel=2)
    assert groups_of(pairs) == [0, 0, 2, 2]
    wide = msgspec.structs.replace(
        pairs, replicas=(Replica(devices=("a:0", "a:1"), share=2), Replica(devices=("b:0", "b:1"), share=2))
    )
    assert groups_of(wide) == [0, 1]
    ask = request([("a", FAST, 2), ("b", SLOW, 2)], moe(0), memory_GiB=64)
    assert price(experts_plan(4), ask).iteration_s == pytest.approx(2 * 6.0, abs=1e-3)


@pytest.mark.parametrize("schedule", list(ScheduleKind))
def test_every_schedule_has_a_price_with_experts_and_zero(schedule):
    ask = request(FOUR, moe(MB, parameters=1000, expert_parameters=800), memory_GiB=64)
    halves = [
        stage((b, b + 1), *[(d, 1) for d in DEVICES[2 * b : 2 * b + 2]], zero=z, expert_parallel=2)
        for b, z in ((0, 2), (1, 3))
    ]
    assert isinstance(price(plan((4, *halves), schedule=schedule), ask), Estimate)


# --- money


def test_devices_and_traffic_have_a_price():
    def ask(price_per_hour: float | None, price_per_GB: float | None) -> Request:
        asked = request(TWO, model(2, 100 * MB, parameters=MB), global_batch=4, memory_GiB=64)
        node = tuple(msgspec.structs.replace(n, price_per_hour=price_per_hour) for n in asked.cluster.node)
        paid = NetworkPair(between=("a", "b"), inter_GBps=1.0, price_per_GB=price_per_GB)
        network = msgspec.structs.replace(asked.cluster.network, pair=(paid,))
        return Request(
            cluster=msgspec.structs.replace(asked.cluster, node=node, network=network),
            model=asked.model,
            profile=asked.profile,
            global_batch=4,
        )

    chain = plan((4, stage((0, 1), ("a:0", 1)), stage((1, 2), ("b:0", 1))))
    found = price(chain, ask(3.6, 0.5))
    traffic = 4 * 2 * 0.1 * 0.5  # 100 MB there and back, four times
    assert found.traffic_per_hour == pytest.approx(traffic * 3600 / found.iteration_s)
    assert found.price_per_hour == 7.2 + found.traffic_per_hour
    assert found.cost_per_sample == pytest.approx((0.002 * found.iteration_s + traffic) / 4)
    assert found.currency == "USD"
    wide = plan((2, stage((0, 2), ("a:0", 1), ("b:0", 1))))
    # a ring of two sends 8 MB over each of its two edges
    ring = price(wide, ask(3.6, 0.5))
    assert ring.traffic_per_hour * ring.iteration_s / 3600 == pytest.approx(2 * 0.008 * 0.5)
    free = price(chain, ask(None, None))
    assert (free.price_per_hour, free.traffic_per_hour, free.cost_per_sample) == (None, 0.0, None)
