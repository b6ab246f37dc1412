"""A mixture of experts in every tiling of up to six devices: outputs and gradients of the whole block."""

from dataclasses import dataclass
from itertools import accumulate, product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from arachne_runtime.errors import ModelError
from arachne_runtime.measure.live import counted
from arachne_runtime.model.exchange import Peers
from arachne_runtime.model.experts import Activation, ExpertMesh, MoE, balancing_loss, experts_alone
from arachne_runtime.model.extra_loss import add_loss, extra_losses
from arachne_runtime.plan.plan import Replica, Stage
from arachne_runtime.plan.shards import even_part
from arachne_runtime.plan.tiling import tiles
from arachne_runtime.testing import run_ranks

HIDDEN, FFN, EXPERTS, SEQUENCE, BALANCE = 6, 5, 7, 3, 0.1


@dataclass(frozen=True)
class Layout:
    """A stage with rows for each replica, and its block."""

    degrees: tuple[int, ...]
    """TP degree of each replica."""
    rows: tuple[int, ...]
    ep: int
    etp: int
    activation: Activation = Activation.SWIGLU
    normalise: bool = True
    swapped: bool = False
    """The stage's devices are not in the order of the ranks."""

    def moe(self) -> MoE:
        torch.manual_seed(3)
        made = MoE(
            HIDDEN, FFN, EXPERTS, 2, activation=self.activation, normalise=self.normalise, balance=BALANCE
        )
        return made.double()

    @property
    def stage(self) -> Stage:
        starts = accumulate(self.degrees, initial=0)
        replicas = tuple(
            Replica(devices=tuple(f"a:{start + i}" for i in range(tp)), share=1)
            for start, tp in zip(starts, self.degrees, strict=False)
        )
        return Stage(layers=(0, 1), replicas=replicas, expert_parallel=self.ep, expert_tensor=self.etp)

    @property
    def ranks(self) -> list[int]:
        """Rank of each device of the stage."""
        ranks = list(range(sum(self.degrees)))
        return ranks[::-1] if self.swapped else ranks

    @property
    def replicas(self) -> list[list[int]]:
        """Devices of each replica."""
        starts = accumulate(self.degrees, initial=0)
        return [list(range(start, start + tp)) for start, tp in zip(starts, self.degrees, strict=False)]

    def inputs(self) -> tuple[Tensor, Tensor]:
        """Rows of all replicas, and the gradient of what comes out for them."""
        random = torch.Generator().manual_seed(1)
        shape = (sum(self.rows), SEQUENCE, HIDDEN)
        return tuple(torch.randn(*shape, generator=random, dtype=torch.float64) for _ in range(2))


def whole(layout: Layout):
    moe, (x, gradient) = layout.moe(), layout.inputs()
    return train(moe, x, gradient, len(x))


def train(moe: MoE, x: Tensor, gradient: Tensor, all_rows: int) -> dict[str, Tensor]:
    """Output and gradients of sum(output x gradient) + mean over all rows of the added loss."""
    x = x.clone().requires_grad_()
    with extra_losses() as added:
        output = moe(x)
    extra = [loss * (len(x) / all_rows) for loss in added]
    torch.autograd.backward([output, *extra], [gradient, *(None for _ in extra)])
    return {
        "output": output.detach(), "x": x.grad, "extra": sum((e.detach() for e in extra), torch.zeros(())),
        "router": moe.router.weight.grad, "up": moe.up.grad, "down": moe.down.grad,
    }  # fmt: skip


def cut(moe: MoE, layout: Layout, ep: int, etp: int) -> None:
    """Leave this device's part of the experts."""
    experts = even_part(EXPERTS, ep, layout.ep)
    inner = even_part(FFN, etp, layout.etp)
    rows = [half * FFN + i for half in range(len(moe.halves)) for i in inner]
    moe.up = torch.nn.Parameter(moe.up.detach()[experts.start : experts.stop, rows].clone())
    moe.down = torch.nn.Parameter(
        moe.down.detach()[experts.start : experts.stop, :, inner.start : inner.stop].clone()
    )


def in_tiling(layout: Layout):
    """One rank's part of the block."""
    ranks, stage = layout.ranks, layout.stage
    me = ranks.index(dist.get_rank())
    groups = {}
    wanted = [[ranks[d] for d in members] for t in tiles(stage) for members in (t.experts, t.tensors)]
    wanted += [[ranks[d] for d in members] for members in layout.replicas]
    for members in sorted({tuple(sorted(m)) for m in wanted if len(m) > 1}):
        groups[members] = dist.new_group(list(members))

    def peers(devices):
        members = [ranks[d] for d in devices]
        return Peers.of(groups[tuple(sorted(members))], members) if len(members) > 1 else None

    tile = tiles(stage)[me]
    replica = next(r for r, devices in enumerate(layout.replicas) if me in devices)
    start = sum(layout.rows[:replica])
    x, gradient = (t[start : start + layout.rows[replica]] for t in layout.inputs())
    moe = layout.moe()
    cut(moe, layout, tile.expert, tile.tensor)
    mesh = ExpertMesh(
        experts=peers(tile.experts), tensor=peers(tile.tensors), replica=peers(layout.replicas[replica])
    )
    moe.place_experts(mesh)
    found = train(moe, x, gradient, sum(layout.rows))
    moe.place_experts(ExpertMesh())
    for group in groups.values():
        dist.destroy_process_group(group)
    return found


def all_in_tiling(layouts):
    mine = [layout for layout in layouts if dist.get_world_size() == sum(layout.degrees)]
    return [in_tiling(layout) for layout in mine]


def check(layout: Layout, by_rank) -> None:
    wanted = whole(layout)
    by_device = [by_rank[rank] for rank in layout.ranks]
    outputs = [by_device[devices[0]] for devices in layout.replicas]
    for name in ("output", "x"):
        close(torch.cat([found[name] for found in outputs]), wanted[name])
    for devices in layout.replicas:  # all devices of a replica hold the same
        for device, name in product(devices, ("output", "x", "router", "extra")):
            close(by_device[device][name], by_device[devices[0]][name])
    router = [found["router"] for found in outputs if found["router"] is not None]
    close(torch.stack(router).sum(0), wanted["router"])
    close(sum(found["extra"] for found in outputs), wanted["extra"])
    check_experts(layout, by_device, wanted)


def check_experts(layout: Layout, by_device, wanted) -> None:
    """The parts of a copy put together, the copies added up."""
    num_halves = len(layout.moe().halves)
    up, down = torch.zeros_like(wanted["up"]), torch.zeros_like(wanted["down"])
    for found, tile in zip(by_device, tiles(layout.stage), strict=True):
        experts = even_part(EXPERTS, tile.expert, layout.ep)
        inner = even_part(FFN, tile.tensor, layout.etp)
        rows = [half * FFN + i for half in range(num_halves) for i in inner]
        for i, expert in enumerate(experts):
            up[expert, rows] += found["up"][i]
            down[expert][:, list(inner)] += found["down"][i]
    close(up, wanted["up"])
    close(down, wanted["down"])


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert not found.numel() or (found - wanted).abs().max() < 1e-12


def layouts():
    """Every tiling of up to six devices, with TP 1, with all TP, and mixed; rows unequal, some none."""
    found = []
    for num_devices in range(1, 7):
        for ep, etp in product(range(1, num_devices + 1), repeat=2):
            if num_devices % (ep * etp):
                continue
            for degrees in {
                (1,) * num_devices,
                (num_devices,),
                (num_devices - 1, 1) if num_devices > 1 else (1,),
            }:
                rows = tuple((r * 2 + ep + etp) % 4 for r in range(len(degrees)))
                rows = rows if sum(rows) else (1, *rows[1:])
                found.append(
                    Layout(
                        degrees, rows, ep, etp,
                        activation=list(Activation)[(ep + num_devices) % 2],
                        normalise=(ep + etp) % 2 == 0,
                        swapped=num_devices % 2 == 1 and etp == 1,
                    )
                )  # fmt: skip
    return sorted(found, key=repr)


@pytest.mark.parametrize("num_ranks", range(1, 7))
def test_every_tiling_equals_the_block_as_a_whole(num_ranks) -> None:
    mine = [layout for layout in layouts() if sum(layout.degrees) == num_ranks]
    assert any(0 in layout.rows for layout in mine) or num_ranks == 1
    found = run_ranks(num_ranks, all_in_tiling, mine)
    for layout, by_rank in zip(mine, zip(*found, strict=True), strict=True):
        check(layout, by_rank)


def test_the_comparison_can_fail() -> None:
    layout = Layout((1, 1), (1, 2), 2, 1)
    found = run_ranks(2, all_in_tiling, [layout])
    with pytest.raises(AssertionError):
        check(Layout((1, 1), (1, 2), 2, 1, normalise=False), [f[0] for f in found])


def test_all_tokens_on_one_expert() -> None:
    """Nothing is dropped, however full an expert is."""
    torch.manual_seed(0)
    moe = MoE(HIDDEN, FFN, 4, 1, activation="gelu").double()
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[2] = 1.0
    x = torch.rand(5, 8, HIDDEN, dtype=torch.float64)
    wanted = torch.nn.functional.gelu(x @ moe.up[2].T) @ moe.down[2].T
    close(moe(x).detach(), wanted.detach())


def test_weights_of_experts() -> None:
    """The definition, token by token."""
    for normalise in (True, False):
        torch.manual_seed(1)
        moe = MoE(HIDDEN, FFN, EXPERTS, 3, normalise=normalise).double()
        x = torch.randn(4, HIDDEN, dtype=torch.float64)
        for token, found in zip(x, moe(x), strict=True):
            probabilities = (moe.router.weight @ token).softmax(0)
            best = probabilities.topk(3)
            scale = best.values.sum() if normalise else 1.0
            wanted = torch.zeros(HIDDEN, dtype=torch.float64)
            for weight, expert in zip(best.values / scale, best.indices, strict=True):
                gate, up = (moe.up[expert] @ token).chunk(2)
                wanted += weight * (moe.down[expert] @ (torch.nn.functional.silu(gate) * up))
            close(found.detach(), wanted.detach())


def test_a_forward_needs_no_more_than_one_copy_of_its_rows_beside_what_it_keeps() -> None:
    """Rows are tokens times ``top_k``; a backward needs two such copies, so that it is the peak."""
    moe, x = MoE(64, 16, 4, 2), torch.randn(1, 256, 64, requires_grad=True)
    with counted(torch.device("cpu"), lambda: [*moe.parameters(), x]) as count:
        result = moe(x)
        kept, most = count.now_bytes, count.peak_bytes
        count.restart()
        result.sum().backward()
        back = count.peak_bytes
    rows = 2 * x.nbytes
    assert most - kept <= 1.01 * rows
    assert back - kept >= 2 * rows


def test_the_balancing_loss_is_a_mean_over_samples() -> None:
    torch.manual_seed(2)
    probabilities = torch.rand(5, SEQUENCE, EXPERTS, dtype=torch.float64).softmax(-1)
    chosen = probabilities.flatten(0, 1).topk(2).indices
    whole = balancing_loss(probabilities, chosen)
    parts = [
        balancing_loss(probabilities[a:b], chosen[a * SEQUENCE : b * SEQUENCE]) for a, b in ((0, 1), (1, 5))
    ]
    close(parts[0] / 5 + parts[1] * 4 / 5, whole)
    even = torch.full((1, EXPERTS, EXPERTS), 1 / EXPERTS, dtype=torch.float64)
    close(balancing_loss(even, torch.arange(EXPERTS)[:, None]), torch.ones((), dtype=torch.float64))


def test_alone_a_device_answers_from_what_it_holds() -> None:
    moe = Layout((1,), (1,), 1, 1).moe()
    cut(moe, Layout((1, 1), (1, 1), 2, 1), 1, 0)
    with experts_alone():
        assert moe(torch.ones(2, HIDDEN, dtype=torch.float64)).isfinite().all()


def test_what_a_moe_refuses() -> None:
    with pytest.raises(ModelError, match="top_k=5 of 4 experts; give 1 to 4"):
        MoE(2, 2, 4, 5)
    with pytest.raises(ModelError, match="'relu' is not known; known: swiglu, gelu"):
        MoE(2, 2, 4, 1, activation="relu")
    with pytest.raises(
        ModelError, match=r"one number, the mean over the samples of a block; got shape \(2,\)"
    ):
        add_loss(torch.zeros(2))
    with pytest.raises(ModelError, match="got float"):
        add_loss(1.0)  # type: ignore[arg-type]


def test_losses_are_collected_where_somebody_listens() -> None:
    add_loss(torch.ones(()))
    with extra_losses() as outer:
        add_loss(torch.ones(1))
        with extra_losses() as inner:
            add_loss(torch.zeros(()))
    assert [loss.item() for loss in outer] == [1.0]
    assert [loss.item() for loss in inner] == [0.0]
