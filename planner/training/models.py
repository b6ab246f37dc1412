"""Random models: dense ones and mixtures of experts of any size, of families that the catalog counts."""

import random
from collections.abc import Callable, Mapping
from math import exp, log

from arachne_runtime.plan.model import ModelSpec

from ..catalog import config, model, model_from_config, model_names, named_model

HELD_OUT_FAMILY = "deepseek_v3"
"""``model_type`` that no training problem has: latent attention, shared experts, leading dense layers.
What is drawn for training has one kind of layer, plain attention and no expert that sees every token."""

_KIN = frozenset({HELD_OUT_FAMILY, "deepseek_v2"})
"""Families counted alike."""

SEQUENCES = (512, 1024, 2048, 4096, 8192)
"""Tokens."""
DTYPES = {"bfloat16": 0.75, "float16": 0.15, "float32": 0.1}
"""With how often each is drawn."""
VOCABULARIES = (32_000, 50_304, 65_536, 100_352, 128_256, 151_936)
"""Entries, about those of published models."""
HEAD_DIMS = (64, 128)

FEWEST_LAYERS, MOST_LAYERS = 4, 128
NARROWEST, STEEPEST = 24, 160
"""Hidden width over layers: BERT to GPT-3 lie between 30 and 130 (catalog), with some room."""

FROM_CATALOG = 0.2
"""Part of the models that are the catalog's own, where one is near the wanted size."""
NEAR = 1.5
"""Factor of the wanted size up to which a model of the catalog is near."""
SPARSE = 8
"""A mixture has the layers of a dense model of so many times fewer parameters: in the catalog's, 4 to 18
times as many stand by as work on a token."""
HALVES = 0.1
"""Part of the models whose attention and MLP are blocks of their own."""
MOST_HALVED = 48
"""Layers up to which they may be: more make more than a hundred blocks."""
FULL_HEADS = 0.4
"""Part of the models without grouped-query attention."""

Fields = dict[str, int | bool | str]
"""Of a config.json."""


def log_uniform(rng: random.Random, low: float, high: float) -> float:
    """Between both, every factor as likely as every other; three digits, so that any platform agrees."""
    return float(f"{exp(rng.uniform(log(low), log(high))):.3g}")


def draw_model(rng: random.Random, parameters: float, *, held_out: bool) -> ModelSpec:
    """A model of about so many parameters; ``held_out``: of the held-out family."""
    sequence = rng.choice(SEQUENCES)
    dtype = rng.choices(list(DTYPES), list(DTYPES.values()))[0]
    halves = rng.random() < HALVES
    from_catalog = rng.random() < FROM_CATALOG
    near = [] if held_out or not from_catalog else _near(parameters)
    if near:
        name = rng.choice(near)
        longest = _longest(config(name))
        return model(name, sequence=min(sequence, longest), dtype=dtype, half_layers=halves)
    family = HELD_OUT_FAMILY if held_out else rng.choice(list(_FAMILIES))
    layers = _layers(rng, parameters / (1 if family in _DENSE else SPARSE))
    fields = (_latent if held_out else _FAMILIES[family])(rng, layers, parameters)
    return model_from_config(
        {"model_type": family, **fields},
        sequence=sequence,
        dtype=dtype,
        half_layers=halves and layers <= MOST_HALVED,
        name=f"drawn-{family}",
    )


def num_parameters(spec: ModelSpec) -> int:
    """Of the whole model, tied ones once."""
    return sum(block.parameters - block.tied_parameters for block in spec.blocks)


def _near(parameters: float) -> list[str]:
    """Published models of about that size, without those of the held-out family."""
    found = []
    for name in model_names():
        published = _published(name)
        if published / NEAR <= parameters <= published * NEAR:
            found.append(name)
    return found


def _published(name: str) -> float:
    named = named_model(name)
    if named.published is None or named.config["model_type"] in _KIN:
        return 0.0
    return float(named.published)


def _longest(fields: Mapping[str, object]) -> int:
    """Tokens that its learned positions reach; a rotary model takes any sequence drawn here."""
    learned = fields.get("n_positions", fields.get("max_position_embeddings"))
    return learned if isinstance(learned, int) else SEQUENCES[-1]


def _layers(rng: random.Random, parameters: float) -> int:
    """From 12 layers hidden^2 parameters and a hidden width in proportion to the layers."""
    steepness = log_uniform(rng, NARROWEST, STEEPEST)
    layers = float((parameters / 12 / steepness**2) ** (1 / 3))
    return round(min(MOST_LAYERS, max(FEWEST_LAYERS, layers)))


def _hidden(parameters: float, layers: int, each: float, vocabulary: int, head_dim: int) -> int:
    """The width at which layers of ``each`` times its square, embedding and head make so many parameters."""
    hidden = 0.0
    for _ in range(8):  # converges: the ends take less than half after the first rounds
        body = max(parameters / 4, parameters - 2 * vocabulary * hidden)
        hidden = (body / (layers * each)) ** 0.5
    return max(4, round(hidden / head_dim)) * head_dim


def _ends(rng: random.Random) -> tuple[int, int]:
    """Vocabulary and head dimension."""
    return rng.choice(VOCABULARIES), rng.choice(HEAD_DIMS)


def _kv_heads(rng: random.Random, heads: int) -> int:
    """All heads, or a divisor of them that leaves groups of up to eight."""
    if rng.random() < FULL_HEADS:
        return heads
    return rng.choice([n for n in range(1, heads + 1) if heads % n == 0 and heads <= 8 * n])


def _plain(rng: random.Random, layers: int, parameters: float) -> Fields:
    """GPT-2's: LayerNorm, biases, an MLP of two matrices, learned positions, tied ends."""
    vocabulary, head_dim = _ends(rng)
    wide = rng.uniform(3.0, 5.0)
    hidden = _hidden(parameters, layers, 4 + 2 * wide, vocabulary // 2, head_dim)
    return {
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": hidden // head_dim,
        "n_inner": _rounded(wide * hidden),
        "n_positions": SEQUENCES[-1],
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
    }


def _gated(rng: random.Random, layers: int, parameters: float) -> Fields:
    """Llama's and Qwen's: RMSNorm, rotary positions, a gated MLP, often grouped queries."""
    vocabulary, head_dim = _ends(rng)
    wide = rng.uniform(2.2, 4.5)
    hidden = _hidden(parameters, layers, 3 + 3 * wide, vocabulary, head_dim)
    return {
        **_rotary(rng, layers, hidden, vocabulary, head_dim),
        "intermediate_size": _rounded(wide * hidden),
        "tie_word_embeddings": rng.random() < 0.3,
    }


def _few_experts(rng: random.Random, layers: int, parameters: float) -> Fields:
    """Mixtral's: 4 to 16 experts as wide as a dense MLP."""
    vocabulary, head_dim = _ends(rng)
    experts, wide = rng.choice((4, 8, 16)), rng.uniform(1.5, 3.5)
    hidden = _hidden(parameters, layers, 3 + 3 * wide * experts, vocabulary, head_dim)
    return {
        **_rotary(rng, layers, hidden, vocabulary, head_dim),
        "intermediate_size": _rounded(wide * hidden),
        "num_local_experts": experts,
        "num_experts_per_tok": rng.choice((1, 2, 2, 4)),
    }


def _many_experts(rng: random.Random, layers: int, parameters: float) -> Fields:
    """Qwen3-MoE's: 32 to 128 narrow experts."""
    vocabulary, head_dim = _ends(rng)
    experts, wide = rng.choice((32, 64, 128)), rng.uniform(0.25, 0.6)
    hidden = _hidden(parameters, layers, 3 + 3 * wide * experts, vocabulary, head_dim)
    return {
        **_rotary(rng, layers, hidden, vocabulary, head_dim),
        "intermediate_size": 3 * hidden,
        "moe_intermediate_size": _rounded(wide * hidden),
        "num_experts": experts,
        "num_experts_per_tok": rng.choice((2, 4, 8)),
    }


def _latent(rng: random.Random, layers: int, parameters: float) -> Fields:
    """DeepSeek-V3's: latent attention, a shared expert, first layers without experts."""
    vocabulary, _ = _ends(rng)
    experts, wide = rng.choice((32, 64, 128)), rng.uniform(0.25, 0.5)
    hidden = _hidden(parameters, layers, 3 + 3 * wide * (experts + 1), vocabulary, 128)
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "q_lora_rank": _rounded(hidden / 4.7),
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": vocabulary,
        "intermediate_size": _rounded(2.6 * hidden),
        "moe_intermediate_size": _rounded(wide * hidden),
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": rng.choice((4, 8)),
        "first_k_dense_replace": rng.randint(1, max(1, layers // 10)),
    }


def _rotary(rng: random.Random, layers: int, hidden: int, vocabulary: int, head_dim: int) -> Fields:
    heads = hidden // head_dim
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(rng, heads),
        "head_dim": head_dim,
        "vocab_size": vocabulary,
    }


def _rounded(width: float) -> int:
    """To a multiple of 64, which is what matrix units like."""
    return max(1, round(width / 64)) * 64


_FAMILIES: dict[str, Callable[[random.Random, int, float], Fields]] = {
    "gpt2": _plain,
    "llama": _gated,
    "qwen3": _gated,
    "mixtral": _few_experts,
    "qwen3_moe": _many_experts,
}
"""By ``model_type``: what training draws."""

_DENSE = frozenset({"gpt2", "llama", "qwen3"})
