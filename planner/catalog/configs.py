"""A Hugging Face ``config.json`` as an ``Architecture``; families by their ``model_type``."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from arachne_runtime.errors import UsageError

from .architecture import Architecture, Attention, Experts, FeedForward, LatentAttention

MOST_LAYERS = 1024
"""The deepest published transformer has 1,000 (DeepNet, arXiv 2203.00555); more is a slip of the pen."""


class Config:
    """The fields of one config.json; a missing one is an error that names it."""

    def __init__(self, name: str, fields: Mapping[str, Any]) -> None:
        self.name = name
        self._fields = fields

    def count(self, field: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer from ``least`` on; ``default`` where the field is missing or null."""
        value = self._fields.get(field)
        value = default if value is None else value
        if value is None:
            raise UsageError(
                f"config of {self.name}: has no {field!r}, which model_type {self.family!r} needs"
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(f"config of {self.name}: {field} is {value!r}, not an integer from {least} on")
        return value

    def flag(self, field: str, default: bool) -> bool:
        """A truth value."""
        value = self._fields.get(field)
        return default if value is None else bool(value)

    def numbers(self, field: str) -> tuple[int, ...]:
        """A list of integers, empty where there is none."""
        return tuple(self._fields.get(field) or ())

    def has(self, field: str) -> bool:
        """Whether the field has a value other than null."""
        return self._fields.get(field) is not None

    @property
    def family(self) -> str:
        """The ``model_type``."""
        return str(self._fields.get("model_type"))


def architecture(name: str, fields: Mapping[str, Any]) -> Architecture:
    """The dimensions that a config.json states; UsageError for a family or a field that is not known."""
    config = Config(name, fields)
    if config.family not in _FAMILIES:
        raise UsageError(
            f"config of {name}: model_type {config.family!r} is not known; known: "
            f"{', '.join(sorted(_FAMILIES))}; or measure the model with `arachne profile`"
        )
    found = _FAMILIES[config.family](config)
    if found.layers > MOST_LAYERS:
        raise UsageError(f"config of {name}: {found.layers} layers; at most {MOST_LAYERS} can be planned")
    return found


def _opt(c: Config) -> Architecture:
    hidden, width = c.count("hidden_size"), c.count("word_embed_proj_dim", c.count("hidden_size"))
    longest = c.count("max_position_embeddings")
    plain = _with_positions(
        c, hidden, longest, layers="num_hidden_layers", heads="num_attention_heads", width=c.count("ffn_dim")
    )
    return replace(
        plain,
        final_norm=c.flag("do_layer_norm_before", True),
        embedding_width=None if width == hidden else width,
        positions=longest + 2,  # OPT's table starts at 2
    )


def _gpt_neo(c: Config) -> Architecture:
    hidden, longest = c.count("hidden_size"), c.count("max_position_embeddings")
    width = c.count("intermediate_size", 4 * hidden)
    return _with_positions(
        c, hidden, longest, layers="num_layers", heads="num_heads", width=width, bias_in=False
    )


def _gpt2(c: Config) -> Architecture:
    hidden, longest = c.count("n_embd"), c.count("n_positions")
    width = c.count("n_inner", 4 * hidden)
    return _with_positions(c, hidden, longest, layers="n_layer", heads="n_head", width=width)


def _bert(c: Config) -> Architecture:
    hidden, longest = c.count("hidden_size"), c.count("max_position_embeddings")
    width = c.count("intermediate_size")
    plain = _with_positions(
        c, hidden, longest, layers="num_hidden_layers", heads="num_attention_heads", width=width
    )
    return replace(
        plain,
        final_norm=False,
        embedding_norm=True,
        token_types=c.count("type_vocab_size", 2),
        head_transform=True,
    )


def _with_positions(
    c: Config, hidden: int, longest: int, *, layers: str, heads: str, width: int, bias_in: bool = True
) -> Architecture:
    """Learned positions, LayerNorm, an MLP of two matrices and biases; ``layers``, ``heads``: the fields."""
    return Architecture(
        name=c.name,
        layers=c.count(layers),
        hidden=hidden,
        vocabulary=c.count("vocab_size"),
        attention=_heads(c, hidden, heads, bias_in=bias_in, bias_out=True),
        mlp=FeedForward(width=width, gated=False, bias=True),
        norm_vectors=2,
        positions=longest,
        longest=longest,
        tied=c.flag("tie_word_embeddings", True),
    )


def _llama(c: Config) -> Architecture:
    bias = c.flag("attention_bias", False)
    return _rotary(c, bias_in=bias, bias_out=bias, norm_heads=False)


def _qwen2(c: Config) -> Architecture:
    return _rotary(c, bias_in=True, bias_out=False, norm_heads=False)


def _qwen3(c: Config) -> Architecture:
    bias = c.flag("attention_bias", False)
    return _rotary(c, bias_in=bias, bias_out=bias, norm_heads=True)


def _mixtral(c: Config) -> Architecture:
    experts = Experts(
        count=c.count("num_local_experts"),
        per_token=c.count("num_experts_per_tok"),
        expert=FeedForward(width=c.count("intermediate_size"), gated=True),
    )
    return _rotary(c, bias_in=False, bias_out=False, norm_heads=False, experts=experts)


def _qwen3_moe(c: Config) -> Architecture:
    bias, layers = c.flag("attention_bias", False), c.count("num_hidden_layers")
    experts = Experts(
        count=c.count("num_experts"),
        per_token=c.count("num_experts_per_tok"),
        expert=FeedForward(width=c.count("moe_intermediate_size"), gated=True),
    )
    step = c.count("decoder_sparse_step", 1)
    dense = {i for i in range(layers) if (i + 1) % step} | set(c.numbers("mlp_only_layers"))
    return _rotary(c, bias_in=bias, bias_out=bias, norm_heads=True, experts=experts, dense=frozenset(dense))


def _deepseek(c: Config) -> Architecture:
    expert = c.count("moe_intermediate_size")
    experts = Experts(
        count=c.count("n_routed_experts"),
        per_token=c.count("num_experts_per_tok"),
        expert=FeedForward(width=expert, gated=True),
        shared=FeedForward(width=expert * c.count("n_shared_experts"), gated=True)
        if c.has("n_shared_experts")
        else None,
        router_bias=c.family == "deepseek_v3",
    )
    layers, first, step = (
        c.count("num_hidden_layers"),
        c.count("first_k_dense_replace", 0, least=0),
        c.count("moe_layer_freq", 1),
    )
    return Architecture(
        name=c.name,
        layers=layers,
        hidden=c.count("hidden_size"),
        vocabulary=c.count("vocab_size"),
        attention=LatentAttention(
            heads=c.count("num_attention_heads"),
            query_rank=c.count("q_lora_rank") if c.has("q_lora_rank") else 0,
            kv_rank=c.count("kv_lora_rank"),
            plain_dim=c.count("qk_nope_head_dim"),
            rotary_dim=c.count("qk_rope_head_dim"),
            value_dim=c.count("v_head_dim"),
        ),
        mlp=FeedForward(width=c.count("intermediate_size"), gated=True),
        experts=experts,
        dense_layers=frozenset(i for i in range(layers) if i < first or i % step),
        norm_vectors=1,
        tied=c.flag("tie_word_embeddings", False),
    )


def _rotary(
    c: Config,
    *,
    bias_in: bool,
    bias_out: bool,
    norm_heads: bool,
    experts: Experts | None = None,
    dense: frozenset[int] = frozenset(),
) -> Architecture:
    hidden, heads = c.count("hidden_size"), c.count("num_attention_heads")
    return Architecture(
        name=c.name,
        layers=c.count("num_hidden_layers"),
        hidden=hidden,
        vocabulary=c.count("vocab_size"),
        attention=Attention(
            heads=heads,
            kv_heads=c.count("num_key_value_heads", heads),
            head_dim=c.count("head_dim", hidden // heads),
            bias_in=bias_in,
            bias_out=bias_out,
            norm_heads=norm_heads,
        ),
        mlp=FeedForward(width=c.count("intermediate_size"), gated=True, bias=c.flag("mlp_bias", False)),
        experts=experts,
        dense_layers=dense,
        norm_vectors=1,
        tied=c.flag("tie_word_embeddings", False),
    )


def _heads(c: Config, hidden: int, field: str, *, bias_in: bool, bias_out: bool) -> Attention:
    """Full multi-head attention."""
    heads = c.count(field)
    return Attention(
        heads=heads, kv_heads=heads, head_dim=hidden // heads, bias_in=bias_in, bias_out=bias_out
    )


_FAMILIES: dict[str, Callable[[Config], Architecture]] = {
    "bert": _bert,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt2": _gpt2,
    "gpt_neo": _gpt_neo,
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _mixtral,
    "opt": _opt,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
