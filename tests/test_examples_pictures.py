"""The ResNet and the ViT of examples/: cut over unequal ranks they train as in one process."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from arachne_runtime.data.batch import as_step_batch
from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.measure.blocks import measure_blocks
from arachne_runtime.measure.timing import Effort
from arachne_runtime.model import ModelParts
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.testing import run_ranks
from launch.profiling.workload import load_workload, verify_blocks

EXAMPLES = Path(__file__).parents[1] / "examples"
ROWS, STEPS = 7, 3


@pytest.fixture(autouse=True)
def modules_as_before():
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules & {"shapes", "resnet", "vit"}:
        del sys.modules[name]


def small(name: str) -> Any:
    """(module, factory of a small model)."""
    load_workload(f"{EXAMPLES / name}.py:workload")
    module = sys.modules[name]
    if name == "resnet":
        return module, lambda: module.ResNet(module.Config(width=8, groups=2, depths=(1, 1)))
    return module, lambda: module.ViT(module.Config(patch=8, width=16, heads=2, layers=2))


def cross_entropy(scores: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(scores, batch[1])


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    samples = [sys.modules["shapes"].Shapes()[step * ROWS + row] for row in range(ROWS)]
    return torch.stack([x for x, _ in samples]).double(), torch.tensor([y for _, y in samples])


def unequal_plan() -> Plan:
    """A stage of two replicas with shares 3 and 1, then a longer one; a last micro-batch that is short."""
    first = Stage(
        layers=(0, 1), replicas=(Replica(devices=("a:0",), share=3), Replica(devices=("a:1",), share=1))
    )
    second = Stage(layers=(1, 4), recompute=True, replicas=(Replica(devices=("b:0",), share=4),))
    pipeline = Pipeline(micro_batches=2, micro_batch=4, stages=(first, second))
    return Plan(model="pictures", global_batch=8, sequence=1, pipelines=(pipeline,))


def train(name: str) -> tuple[list[float], list[float]]:
    """Losses and gradient norms on one rank of the plan."""
    _, factory = small(name)
    recipe = Recipe(
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=cross_entropy, dtype=torch.float64, seed=1
    )
    engine = Engine(unequal_plan(), ModelParts.of(factory), recipe)
    reports = [engine.step(batch(step)) for step in range(STEPS)]
    engine.close()
    return [r.loss for r in reports], [r.grad_norm for r in reports]


@pytest.mark.parametrize("name", ["resnet", "vit"])
def test_pictures_train_as_in_one_process(name) -> None:
    _, factory = small(name)
    parts = ModelParts.of(factory)
    assert parts.num_blocks == 4
    model = parts.whole(seed=1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch(step)[0]), batch(step)[1])
        loss.backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        losses.append(loss.item())
        optimizer.step()
    for found_losses, found_norms in run_ranks(3, train, name):
        assert found_losses == pytest.approx(losses, abs=1e-9)
        assert found_norms == pytest.approx(norms, abs=1e-9)


@pytest.mark.parametrize(("name", "kinds"), [("resnet", 7), ("vit", 3)])
def test_the_workloads_can_be_profiled(name, kinds) -> None:
    workload = load_workload(f"{EXAMPLES / name}.py:workload")
    verify_blocks(workload)
    measured = measure_blocks(
        workload,
        device=torch.device("cpu"),
        device_type="cpu",
        samples=(1,),
        effort=Effort(batch_s=0.001, rounds=1),
    )
    assert len(measured.timings) == kinds
    assert all(timing.forward_s > 0 and timing.backward_s > 0 for timing in measured.timings)
    assert as_step_batch(workload.batch(3)).num_rows == 3


def test_every_kind_of_shape_is_another_picture_and_the_same_each_time() -> None:
    small("vit")
    shapes = sys.modules["shapes"]
    data = shapes.Shapes(num_samples=10, noise=0.0)
    assert {data[i][1] for i in range(10)} == set(range(len(shapes.KINDS)))
    assert all(torch.equal(data[i][0], data[i][0]) for i in range(10))
    drawn = [shapes.draw(kind, 16, 16, 8, 0.3) for kind in range(len(shapes.KINDS))]
    assert all(10 < picture.sum() < 300 for picture in drawn)
    assert len({picture.numpy().tobytes() for picture in drawn}) == len(shapes.KINDS)
    with pytest.raises(IndexError):
        _ = data[10]
