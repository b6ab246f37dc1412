"""The network as one pure function of parameters and arrays, for NumPy and for torch alike.

Pools pass through one shared net and are pooled by mean and maximum, so that their order and number don't
matter; each head scores each option with the option's own features. A small net turns the state of the site
into a scale and a shift of every hidden layer (FiLM, arXiv 1709.07871); it may be left out.

``xp`` is either namespace: only operations that both have under one name are used, so that what is trained
and what is run can't drift apart. Arrays are ``Any``: they are NumPy's or torch's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .decision import Floats, Head
from .features import NUM_OVERALL_FEATURES, NUM_POOL_FEATURES
from .options import NUM_OPTION_FEATURES

FORBIDDEN = -1e9
"""Logit of an option that is not allowed."""

MODULATED = ("pool.1", "pool.2", "context", "head.1", "head.2")
"""Hidden layers with a scale and a shift; those of the heads share theirs."""

FIRST_OUTPUT = 0.1
"""Weights of a new network's last layers, over the usual size: it begins near uniform choice."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """What the decisions between two runs share."""

    pools: Any
    """``[A, P, H]``"""
    context: Any
    """``[A, H]``"""
    film: Any
    """``[A, 2 × layers × H]``, or None without FiLM."""


def logits(
    parameters: Mapping[str, Any],
    head: Head,
    pools: Any,
    overall: Any,
    options: Any,
    mask: Any,
    chosen_pool: Any,
    xp: Any,
    there: Any = None,
) -> Any:
    """``[A, C]``: scores of the options of one decision (arrays as in ``Decision``); ``FORBIDDEN`` by mask.

    ``there``: ``[A, P]``, which pools are no padding; None: all. Padding has no effect.
    """
    encoded = encode(parameters, pools, overall, xp, there)
    return scores(parameters, head, encoded, options, mask, chosen_pool, xp)


def encode(parameters: Mapping[str, Any], pools: Any, overall: Any, xp: Any, there: Any = None) -> Encoded:
    """Pools, and the site as a whole."""
    film = None
    if "film.1.weight" in parameters:
        film = _dense(parameters, "film.2", _dense(parameters, "film.1", overall).clip(0.0))
    hidden = pools
    for name in ("pool.1", "pool.2"):
        hidden = _modulated(film, name, _dense(parameters, name, hidden))
    if there is None:
        mean = hidden.mean(1)
    else:
        hidden = hidden * there[:, :, None]  # nothing is below 0 here, so that padding can't be the maximum
        mean = hidden.sum(1) / there.sum(1)[:, None]
    together = xp.concatenate((mean, xp.amax(hidden, 1), overall), 1)
    return Encoded(hidden, _modulated(film, "context", _dense(parameters, "context", together)), film)


def scores(
    parameters: Mapping[str, Any],
    head: Head,
    encoded: Encoded,
    options: Any,
    mask: Any,
    chosen_pool: Any,
    xp: Any,
) -> Any:
    """``[A, C]``: logits of options whose rollouts are encoded."""
    chosen = chosen_pool[:, None] == xp.arange(encoded.pools.shape[1])
    own = (encoded.pools * chosen[:, :, None]).sum(1)
    state = _dense(parameters, f"{head}.state", xp.concatenate((encoded.context, own), 1))
    hidden = _dense(parameters, f"{head}.option", options) + state[:, None]
    if head is Head.POOL:
        hidden = hidden + _dense(parameters, "pool.encoded", encoded.pools)
    hidden = _modulated(encoded.film, "head.1", hidden)
    hidden = _modulated(encoded.film, "head.2", _dense(parameters, f"{head}.hidden", hidden))
    return xp.where(mask, _dense(parameters, f"{head}.score", hidden)[:, :, 0], FORBIDDEN)


def _dense(parameters: Mapping[str, Any], name: str, x: Any) -> Any:
    """As one product of matrices: a product of stacks of them is slower."""
    weight = parameters[f"{name}.weight"]
    flat = x.reshape((-1, x.shape[-1])) @ weight + parameters[f"{name}.bias"]
    return flat.reshape((*x.shape[:-1], weight.shape[1]))


def _modulated(film: Any, layer: str, x: Any) -> Any:
    """A hidden layer's output, with FiLM where there is any."""
    if film is not None:
        size, at = x.shape[-1], 2 * MODULATED.index(layer) * x.shape[-1]
        between = (slice(None), *([None] * (len(x.shape) - 2)))
        x = x * (1.0 + film[:, at : at + size][between]) + film[:, at + size : at + 2 * size][between]
    return x.clip(0.0)


def sizes(hidden: int, *, film: bool) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each layer."""
    found = {
        "pool.1": (NUM_POOL_FEATURES, hidden),
        "pool.2": (hidden, hidden),
        "context": (2 * hidden + NUM_OVERALL_FEATURES, hidden),
        "pool.encoded": (hidden, hidden),
    }
    for head in Head:
        found[f"{head}.state"] = (2 * hidden, hidden)
        found[f"{head}.option"] = (NUM_OPTION_FEATURES[head], hidden)
        found[f"{head}.hidden"] = (hidden, hidden)
        found[f"{head}.score"] = (hidden, 1)
    if film:
        found["film.1"] = (NUM_OVERALL_FEATURES, hidden)
        found["film.2"] = (hidden, 2 * len(MODULATED) * hidden)
    return found


def first_parameters(hidden: int, *, film: bool, seed: int) -> dict[str, Floats]:
    """Random weights of a new network (He et al., arXiv 1502.01852); biases are 0."""
    rng = np.random.default_rng(seed)
    found: dict[str, Floats] = {}
    for name, (inputs, outputs) in sizes(hidden, film=film).items():
        scale = (2 / inputs) ** 0.5
        if name.endswith(".score") or name == "film.2":
            scale *= FIRST_OUTPUT
        found[f"{name}.weight"] = (scale * rng.standard_normal((inputs, outputs))).astype(np.float32)
        found[f"{name}.bias"] = np.zeros(outputs, np.float32)
    return found
