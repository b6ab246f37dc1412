"""What a tensor-parallel group sums over its devices: how often for each block, how many bytes, how long."""

from collections.abc import Callable

from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.units import Bytes, Seconds


def num_collectives(model: ModelSpec, block: int) -> int:
    """All-reduces of a block in each direction: the model's own count where it has one.

    Else two (Megatron-LM, arXiv 1909.08053 §3: after attention and after the MLP), and one for the first and
    the last block, which hold one sharded matrix.
    """
    stated = model.blocks[block].tp_collectives
    if stated is not None:
        return stated
    return 1 if block in (0, len(model.blocks) - 1) else 2


def summed_bytes(model: ModelSpec, block: int) -> Bytes:
    """Bytes a sample of each of them: the block's output, and of the last block its input."""
    last = len(model.blocks) - 1
    if block < last:
        return model.blocks[block].output_bytes
    return model.blocks[last - 1].output_bytes if last else model.blocks[0].activation_bytes


def ring_seconds(message_s: Callable[[float], Seconds], size: float, members: int) -> Seconds:
    """Ring all-reduce of ``size`` bytes: 2 (n - 1) messages of size / n, ``message_s`` each."""
    return 2 * (members - 1) * message_s(size / members) if members > 1 else 0.0
