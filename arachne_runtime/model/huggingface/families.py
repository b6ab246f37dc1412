"""What is known of each family of models: where its decoder keeps its parts, and what its layers see."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import Tensor, nn

from ...errors import ModelError


class Attention(StrEnum):
    """Which mask a layer takes, by the words of ``config.layer_types``."""

    FULL = "full_attention"
    SLIDING = "sliding_attention"


class SummedEmbedding(nn.Module):
    """GPT-2: embeddings of tokens and positions, (B, S) and (1 or B, S) → (B, S, D)."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.tokens, self.positions, self.drop = decoder.wte, decoder.wpe, decoder.drop

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Look up and add."""
        embedded: Tensor = self.drop(self.tokens(input_ids) + self.positions(position_ids))
        return embedded


class ProjectedEmbedding(nn.Module):
    """OPT: token embeddings, projected where they are narrower, and embeddings of shifted positions."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.tokens, self.positions = decoder.embed_tokens, decoder.embed_positions
        self.project = decoder.project_in

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Look up, project and add."""
        embedded: Tensor = self.tokens(input_ids)
        if self.project is not None:
            embedded = self.project(embedded)
        shifted: Tensor = self.positions(None, position_ids=position_ids)
        return embedded + shifted


def _tokens_alone(decoder: Any) -> nn.Module:
    embedding: nn.Module = decoder.embed_tokens
    return embedding


def _by_type(config: Any, layer: int) -> Attention:
    return Attention(config.layer_types[layer])


def _by_window(config: Any, _: int) -> Attention:
    return Attention.FULL if config.sliding_window is None else Attention.SLIDING


def _always_full(_: Any, __: int) -> Attention:
    return Attention.FULL


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Where the parts of one family's models are, as dotted names."""

    decoder: str = "model"
    """Inside the model with the head."""
    layers: str = "layers"
    """Inside the decoder, as are the next ones."""
    last: tuple[str, ...] = ("norm",)
    """What runs before the head; one that is None is left out."""
    embedding: Callable[[Any], nn.Module] = _tokens_alone
    """The first block, of the decoder."""
    attention: Callable[[Any, int], Attention] = _always_full
    """What a layer sees, by config and number."""
    masks_by_position: bool = True
    """Whether positions that start anew separate sequences that are packed into one row."""
    positions_by_mask: bool = False
    """Whether positions count the tokens that are no padding."""
    has_experts: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "qwen3": Family(attention=_by_type),
    "mistral": Family(attention=_by_window),
    "mixtral": Family(attention=_by_window, has_experts=True),
    "qwen3_moe": Family(attention=_by_window, has_experts=True),
    "gpt2": Family(decoder="transformer", layers="h", last=("ln_f",), embedding=SummedEmbedding),
    "opt": Family(
        decoder="model.decoder",
        last=("final_layer_norm", "project_out"),
        embedding=ProjectedEmbedding,
        masks_by_position=False,
        positions_by_mask=True,
    ),
}
"""By ``config.model_type``."""

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary tables that depend on positions alone; "dynamic" and "longrope" follow the lengths seen so far."""


_SETTINGS: Mapping[str, str] = {
    "output_router_logits": "adds a loss over all layers and the whole batch at once, which would depend on "
    "how a plan splits it; set it to False, and arachne.huggingface(..., balance=) for one of each sample",
    "router_jitter_noise": "draws noise for each token; set it to 0",
    "layerdrop": "leaves out layers at random; set it to 0",
    "add_cross_attention": "needs an encoder; set it to False",
    "quantization_config": "is for inference; give weights that can be trained",
}
"""Settings that, when they are on, make the blocks another model: why, and the way out."""


def family_of(config: Any) -> Family:
    """The family of a config; ModelError for one that is not known, or with settings that cannot be kept."""
    kind = str(getattr(config, "model_type", None))
    if kind not in FAMILIES:
        raise ModelError(
            f"{type(config).__name__} (model_type {kind!r}) is of no family that can be cut; known: "
            f"{', '.join(FAMILIES)}; for another, mark a class of yours with @arachne.pipelined"
        )
    for fault in _faults(config):
        raise ModelError(f"{type(config).__name__}: {fault}")
    return FAMILIES[kind]


def _faults(config: Any) -> Iterator[str]:
    for name, why in _SETTINGS.items():
        if value := getattr(config, name, None):
            yield f"{name}={value!r} {why}"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _ROPE_TYPES:
        known = ", ".join(_ROPE_TYPES)
        yield f"rope_type={rope!r} depends on the lengths of earlier batches; known: {known}"
    if getattr(config, "_attn_implementation", None) == "flex_attention":
        yield 'the masks of flex_attention are no tensors; set attn_implementation="sdpa"'
