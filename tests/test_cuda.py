"""What only a GPU can show; each test says why it is skipped where there is none."""

import os

import pytest
import torch

import arachne_runtime as arachne
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.testing import run_ranks
from launch.agent import free_port
from tests.models import GPT, next_token_loss

GPUS = torch.cuda.device_count()
one_gpu = pytest.mark.skipif(GPUS < 1, reason="no CUDA device: the engine on a GPU runs only on one")
two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"{GPUS} CUDA devices: ranks that speak NCCL need two")
VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


def tokens(num_rows):
    return torch.randint(31, (num_rows, 8), generator=torch.Generator().manual_seed(1))


def train(device, plan=None, **options):
    """Losses over the batches that a session loads, and of an evaluation."""
    with arachne.Session(plan, device=device) as session:
        engine = session.engine(
            lambda: GPT(width=32, tied=True),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.05),
            loss=next_token_loss,
            clip_norm=1.0,
            **options,
        )
        losses = [engine.step(batch).loss for batch in session.batches(tokens(20), 8, num_workers=1)]
        evaluated = engine.evaluate(session.batches(tokens(12), 8, shuffle=False)).loss
        where = {p.device for _, p in engine.named_parameters()}
    return [*losses, evaluated], where


@one_gpu
@pytest.mark.parametrize(
    "options", [{}, {"precision": "bf16"}, {"precision": "fp16"}, {"compile": "aot_eager"}]
)
def test_a_gpu_trains_as_the_cpu_does(options):
    found, where = train("cuda:0", **options)
    wanted, _ = train("cpu", **options)
    assert where == {torch.device("cuda:0")}
    assert found == pytest.approx(wanted, rel=2e-2 if "precision" in options else 1e-4)


def in_two_stages(port):
    rank = torch.distributed.get_rank()
    torch.distributed.destroy_process_group()
    os.environ.update(zip(VARIABLES, ("127.0.0.1", str(port), str(rank), "2"), strict=True))
    stages = tuple(
        Stage(layers=layers, replicas=(Replica(devices=(f"a:{i}",), share=2),))
        for i, layers in enumerate(((0, 2), (2, 5)))
    )
    pipeline = Pipeline(micro_batches=4, micro_batch=2, stages=stages)
    try:
        return train(None, Plan(model="gpt", global_batch=8, sequence=8, pipelines=(pipeline,)))
    finally:
        for name in VARIABLES:
            os.environ.pop(name, None)


@two_gpus
def test_two_gpus_speak_nccl_at_the_plans_indices():
    wanted, _ = train("cpu")
    for rank, (found, where) in enumerate(run_ranks(2, in_two_stages, free_port())):
        assert where == {torch.device("cuda", rank)}
        assert found == pytest.approx(wanted, rel=1e-4)


def test_the_same_script_runs_on_the_cpu():
    """Else a mistake of these tests would show on a GPU only."""
    losses, where = train("cpu")
    assert where == {torch.device("cpu")}
    assert losses[2] < losses[0]
