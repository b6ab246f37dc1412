"""Tensor-parallel rules of each family: transformers' own plan where there is one, with heads kept whole."""

from typing import Any

from torch import nn

from ..styles import Colwise, Divides, Partial, Rowwise, Style, Styles, Vocabulary

_NAMED: dict[str, Style] = {
    "colwise": Colwise(),
    "rowwise": Rowwise(),
    "replicated_with_grad_allreduce": Partial(),
}
"""Styles of ``config.base_model_tp_plan``; those of experts are left to the experts' own groups."""
_LAYERS = "layers.*."
_GPT2: Styles = {
    "tokens": Vocabulary(),
    "lm_head": Vocabulary(),
    "layer.attn.c_attn": Colwise(parts=3, heads="num_heads", transposed=True),
    "layer.attn.c_proj": Rowwise(transposed=True),
    "layer.mlp.c_fc": Colwise(transposed=True),
    "layer.mlp.c_proj": Rowwise(transposed=True),
}
_OPT: Styles = {
    "tokens": Vocabulary(),
    "lm_head": Vocabulary(),
    "layer.self_attn.[qkv]_proj": Colwise(heads="num_heads"),
    "layer.self_attn.out_proj": Rowwise(),
    "layer.fc1": Colwise(),
    "layer.fc2": Rowwise(),
}


_ATTENTION = "layer.self_attn"


def styles_of(config: Any, layers: nn.ModuleList) -> tuple[Styles, Divides]:
    """How the modules of the blocks are shared out in a replica of several devices, and what they divide."""
    if config.model_type == "gpt2":
        return _GPT2, {"layer.attn": ("num_heads", "split_size"), "layer.mlp": ("inner",)}
    if config.model_type == "opt":
        return _OPT, {_ATTENTION: ("num_heads",)}
    styles: dict[str, str | Style] = {"embedding": Vocabulary(), "lm_head": Vocabulary()}
    there = {name for layer in layers for name, _ in layer.named_modules()}
    for pattern, style in config.base_model_tp_plan.items():
        name = f"layer.{pattern.removeprefix(_LAYERS)}"
        if style in _NAMED and name in there:
            styles[name] = _NAMED[style]
    styles[f"{_ATTENTION}.q_proj"] = Colwise(heads=config.num_attention_heads)
    styles[f"{_ATTENTION}.[kv]_proj"] = Colwise(heads=config.num_key_value_heads, repeat=True)
    return styles, {_ATTENTION: ("num_heads",)}


def note_numbers(layer: Any, config: Any) -> None:
    """Put on a layer's modules the numbers that a degree must divide, where the modules do not have them."""
    if config.model_type == "gpt2":
        layer.mlp.inner = layer.mlp.c_fc.nf
    else:
        layer.self_attn.num_heads = config.num_attention_heads


def follow_shares(layer: Any) -> None:
    """Let attention repeat each head of k and v as often as this rank's heads of q need it."""
    attention: Any = getattr(layer, "self_attn", None)
    if hasattr(attention, "num_key_value_groups"):
        groups = attention.q_proj.weight.shape[0] // attention.k_proj.weight.shape[0]
        if attention.num_key_value_groups != groups:
            attention.num_key_value_groups = groups
