"""What sharing out a block costs: CPU time of a transformer layer on two tensor-parallel ranks against one.

Forward and backward of the example GPT's layer, (4, 128) tokens. Both ranks' CPU time is added up; the ideal
is that of the whole layer on one rank. What is above it is DTensor, the exchange, and what each rank computes
alike (norms, residuals).
"""

import time
from collections.abc import Iterator
from statistics import median

import torch
import torch.distributed as dist

from arachne_runtime.model import ModelParts, StageModule
from arachne_runtime.model.exchange import Peers
from arachne_runtime.model.sharing import ALONE, Sharing
from arachne_runtime.plan.shards import Position
from arachne_runtime.testing import run_ranks
from examples.gpt import GPT, Config

from .report import Options, Result, at_most, run_bench

WIDTHS = (192, 384)
BOUNDS = {192: 2.0, 384: 1.5}
"""Most of the ideal CPU time; a small layer is mostly overhead."""
CALLS, REPEATS = 3, 7


def measure(options: Options) -> Iterator[Result]:
    for width in WIDTHS:
        alone = run_ranks(1, cpu_of_layer, width)
        shared = run_ranks(2, cpu_of_layer, width)
        ratio = sum(shared) / alone[0]
        yield at_most(
            f"layer-{width}",
            ratio,
            "x",
            BOUNDS[width],
            alone_ms=alone[0] * 1e3,
            ranks_ms=[s * 1e3 for s in shared],
        )


def cpu_of_layer(width: int) -> float:
    """CPU seconds of this rank for one forward and backward, all ranks of the group sharing the layer."""
    parts = ModelParts.of(lambda: GPT(Config(width=width, heads=6, layers=1)))
    stage = parts.stage(range(1, 2), device=torch.device("cpu"), seed=0, sharing=_sharing())
    x = torch.randn(4, Config.sequence, width)
    _seconds(stage, x)
    return median(_seconds(stage, x) for _ in range(REPEATS))


def _sharing() -> Sharing:
    if dist.get_world_size() == 1:
        return ALONE
    from arachne_runtime.model.tensor_parallel import TensorGroup

    ranks = range(dist.get_world_size())
    peers = Peers.of(dist.new_group(list(ranks)), ranks)
    return Sharing(position=Position(tensor=(peers.here, len(peers))), tensor=TensorGroup(peers, "cpu"))


def _seconds(stage: StageModule, x: torch.Tensor) -> float:
    start = time.process_time()
    for _ in range(CALLS):
        (output,) = stage((x.clone().requires_grad_(),), {})
        output.sum().backward()
    return (time.process_time() - start) / CALLS


if __name__ == "__main__":
    raise SystemExit(run_bench("tensor_cost", measure))
