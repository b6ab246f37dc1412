"""What a model costs, block by block, without a device: sizes, FLOPs, tied parameters."""

from typing import Literal

from ..units import Bytes
from .document import Document

MODEL_FORMAT: Literal["arachne.model/1"] = "arachne.model/1"


class BlockSpec(Document, frozen=True, kw_only=True):
    """One block: the smallest unit that a stage can own. Sizes are for one sample of the model's sequence."""

    kind: str
    """Blocks of one kind cost the same: ``embedding``, ``layer`` (in halves: ``attention`` and ``mlp``),
    ``moe-layer`` (``attention`` and ``moe``), ``head``, ..."""
    parameters: int
    """Number of parameters (elements), tied ones included."""
    activation_bytes: Bytes
    """Bytes a sample that the block keeps from forward to backward, its input included."""
    output_bytes: Bytes
    """Bytes a sample that cross the boundary behind this block; 0 for the last block."""
    flops: float
    """Floating-point operations of one forward, a sample."""
    experts: int = 0
    """Number of routed experts; 0 for a dense block."""
    expert_parameters: int = 0
    """Of ``parameters``, those of all routed experts together; a shared expert counts as dense."""
    expert_flops: float = 0.0
    """Of ``flops``, those of the routed experts."""
    experts_per_token: int = 0
    """Routed experts that work on each token (top-k); 0 where it is not told."""
    tp_collectives: int | None = None
    """All-reduces of the output in each direction under tensor parallelism; None: 2, and 1 for the first and
    the last block (Megatron-LM, arXiv 1909.08053, section 3)."""
    tied_to: int | None = None
    """Block that owns the parameters shared with this one (weight tying), or None."""
    tied_parameters: int = 0
    """How many of ``parameters`` are shared with block ``tied_to``."""


class ParameterBytes(Document, frozen=True, kw_only=True):
    """Bytes that one parameter takes on a device that holds it whole."""

    weight: int = 4
    gradient: int = 4
    optimizer: int = 8
    """Adam in fp32 keeps two moments: 8 bytes; beside 16-bit weights an fp32 copy of them too: 12."""

    @property
    def total(self) -> int:
        """Weight, gradient and optimizer states together."""
        return self.weight + self.gradient + self.optimizer


class ModelSpec(Document, frozen=True, kw_only=True):
    """A model as the planner sees it: blocks 0..L-1 in the order of execution."""

    format: Literal["arachne.model/1"] = MODEL_FORMAT
    name: str
    sequence: int
    """Tokens of a sample; 1 where samples are not sequences."""
    dtype: str = "float32"
    """Dtype of what crosses a boundary."""
    bytes_per_parameter: ParameterBytes = ParameterBytes()
    blocks: tuple[BlockSpec, ...]
