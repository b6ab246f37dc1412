"""Parameters, FLOPs and bytes of an architecture, block by block (docs/catalog.md has the formulas).

FLOPs count a multiply and an add as two, and attention scores of all pairs of tokens, causal or not.
Activations follow Korthikanti et al. (arXiv 2205.05198, section 4), kept by operator: 16-bit dtypes with
flash attention, which keeps no scores; float32 and float64 with the scores kept once, as OPT-350M was
measured. Nothing is recomputed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from arachne_runtime.errors import UsageError
from arachne_runtime.plan.model import BlockSpec, ModelSpec, ParameterBytes
from arachne_runtime.plan.rules.model import DTYPES
from arachne_runtime.units import Bytes

from .architecture import Architecture, Attention, Experts, FeedForward

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
IDENTIFIER_BYTES = 8
"""A token's number, int64."""
FP32 = 4
"""Bytes; norms, the softmax of the loss and the router compute in fp32 beside 16-bit activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Half:
    """What half a layer, or an end of the model, costs; FLOPs and bytes a sample."""

    parameters: int
    flops: float
    kept: Bytes
    """Bytes kept for the backward, its input included."""
    experts: int = 0
    expert_parameters: int = 0
    expert_flops: float = 0.0
    experts_per_token: int = 0


def count(
    architecture: Architecture, *, sequence: int, dtype: str = "bfloat16", half_layers: bool = False
) -> ModelSpec:
    """The spec of a model for samples of ``sequence`` tokens.

    UsageError for a sequence that its learned positions do not reach, or an unknown dtype.
    """
    return _Counter(architecture, sequence, dtype).spec(half_layers)


class _Counter:
    def __init__(self, model: Architecture, sequence: int, dtype: str) -> None:
        if dtype not in ELEMENT_BYTES:
            raise UsageError(f"{model.name}: dtype {dtype!r} is not known; known: {', '.join(DTYPES)}")
        if sequence < 1 or (model.longest is not None and sequence > model.longest):
            longest = f" to {model.longest}" if model.longest else " on"
            raise UsageError(f"{model.name}: a sequence of {sequence} tokens; it takes from 1{longest}")
        self.model = model
        self.sequence = sequence
        self.dtype = dtype
        self.element = ELEMENT_BYTES[dtype]

    def spec(self, half_layers: bool) -> ModelSpec:
        """All blocks in their order."""
        blocks = [self._block("embedding", self._embedding())]
        attention, mlp, moe = self._attention(), self._mlp(), self._moe()
        for layer in range(self.model.layers):
            second, halves, whole = (
                (moe, "moe", "moe-layer") if moe and self.model.has_experts(layer) else (mlp, "mlp", "layer")
            )
            if half_layers:
                blocks += [self._block("attention", attention, 1), self._block(halves, second, 1)]
            else:
                blocks.append(self._block(whole, _together(attention, second)))
        return ModelSpec(
            name=self.model.name,
            sequence=self.sequence,
            dtype=self.dtype,
            bytes_per_parameter=ParameterBytes(weight=2, gradient=2, optimizer=12)
            if self.element == 2
            else ParameterBytes(weight=self.element, gradient=self.element, optimizer=2 * self.element),
            blocks=(*blocks, self._head()),
        )

    def _block(self, kind: str, half: _Half, tp_collectives: int | None = None) -> BlockSpec:
        return BlockSpec(
            kind=kind,
            parameters=half.parameters,
            activation_bytes=half.kept,
            output_bytes=self.sequence * self.model.hidden * self.element,
            flops=half.flops,
            experts=half.experts,
            expert_parameters=half.expert_parameters,
            expert_flops=half.expert_flops,
            experts_per_token=half.experts_per_token,
            tp_collectives=tp_collectives,
        )

    def _embedding(self) -> _Half:
        m = self.model
        width = m.embedding_width or m.hidden
        projection = m.embedding_width * m.hidden if m.embedding_width else 0
        rows = (m.positions + m.token_types) * m.hidden
        norm = m.norm_vectors * m.hidden if m.embedding_norm else 0
        kept = self._norm() if m.embedding_norm else m.hidden * self.element
        kept += width * self.element if projection else 0
        return _Half(
            parameters=m.vocabulary * width + projection + rows + norm,
            flops=self._matmul(projection),
            kept=self.sequence * (IDENTIFIER_BYTES + kept),
        )

    def _attention(self) -> _Half:
        m, attention = self.model, self.model.attention
        matrices = attention.matrices(m.hidden)
        scores = 2.0 * self.sequence**2 * attention.heads * attention.scores_dim
        kept = self._norm() + attention.kept * self.element
        if self.element == 2:
            kept += attention.heads * FP32  # the log-sum-exp of each row
        else:
            kept += attention.heads * self.sequence * self.element
        if isinstance(attention, Attention) and attention.norm_heads:
            kept += (attention.query + attention.kv_heads * attention.head_dim) * self.element
        return _Half(
            parameters=matrices + attention.vectors(m.hidden) + m.norm_vectors * m.hidden,
            flops=self._matmul(matrices) + scores,
            kept=self.sequence * kept,
        )

    def _mlp(self) -> _Half:
        m = self.model
        matrices = m.mlp.matrices(m.hidden)
        return _Half(
            parameters=matrices + m.mlp.vectors(m.hidden) + m.norm_vectors * m.hidden,
            flops=self._matmul(matrices),
            kept=self.sequence * (self._norm() + m.mlp.kept * self.element),
        )

    def _moe(self) -> _Half | None:
        m, moe = self.model, self.model.experts
        if moe is None:
            return None
        each = moe.expert.matrices(m.hidden) + moe.expert.vectors(m.hidden)
        used = self._matmul(moe.per_token * moe.expert.matrices(m.hidden))
        dense = list(_dense_parts(moe, m.hidden))
        return _Half(
            parameters=moe.count * each + sum(p for p, _ in dense) + m.norm_vectors * m.hidden,
            flops=used + self._matmul(sum(matrices for _, matrices in dense)),
            kept=self.sequence * self._moe_kept(moe),
            experts=moe.count,
            expert_parameters=moe.count * each,
            expert_flops=used,
            experts_per_token=moe.per_token,
        )

    def _moe_kept(self, moe: Experts) -> Bytes:
        """A token's input and output are copied for each of its experts; the router keeps its softmax."""
        routed = moe.per_token * (2 * self.model.hidden + moe.expert.kept)
        shared = moe.shared.kept + self.model.hidden if moe.shared else 0
        return self._norm() + (routed + shared) * self.element + 2 * moe.count * FP32

    def _head(self) -> BlockSpec:
        m = self.model
        width = m.embedding_width or m.hidden
        matrix = m.vocabulary * width
        projection = m.hidden * width if m.embedding_width else 0
        transform = m.hidden**2 if m.head_transform else 0
        vectors = m.norm_vectors * m.hidden if m.final_norm else 0
        if m.head_transform:
            vectors += m.hidden + m.norm_vectors * m.hidden + m.vocabulary
        kept = self._norm() + m.vocabulary * self._logits()
        kept += (width if projection else 0) * self.element + (
            2 * m.hidden * self.element if transform else 0
        )
        return BlockSpec(
            kind="head",
            parameters=matrix + projection + transform + vectors,
            activation_bytes=self.sequence * kept,
            output_bytes=0,
            flops=self._matmul(matrix + projection + transform),
            tied_to=0 if m.tied else None,
            tied_parameters=matrix if m.tied else 0,
        )

    def _matmul(self, elements: int) -> float:
        return 2.0 * elements * self.sequence

    def _norm(self) -> Bytes:
        """Bytes a token of a norm: its input and output; where they are 16-bit, the input in fp32 too."""
        return self.model.hidden * (2 * self.element + (FP32 if self.element == 2 else 0))

    def _logits(self) -> Bytes:
        """Bytes an entry of the logits at the peak: the logits, their log-softmax, and in 16 bits its
        gradient.
        """
        return 2 * self.element if self.element > 2 else self.element + 2 * FP32


def _dense_parts(moe: Experts, hidden: int) -> Iterator[tuple[int, int]]:
    """Parameters, and those in matrices, of the router and the shared experts."""
    router = hidden * moe.count
    yield router + moe.count * moe.router_bias, router
    if moe.shared is not None:
        shared: FeedForward = moe.shared
        yield shared.matrices(hidden) + shared.vectors(hidden), shared.matrices(hidden)
    if moe.shared_gate:
        yield hidden, hidden


def _together(a: _Half, b: _Half) -> _Half:
    return _Half(
        parameters=a.parameters + b.parameters,
        flops=a.flops + b.flops,
        kept=a.kept + b.kept,
        experts=a.experts + b.experts,
        expert_parameters=a.expert_parameters + b.expert_parameters,
        expert_flops=a.expert_flops + b.expert_flops,
        experts_per_token=a.experts_per_token + b.experts_per_token,
    )
