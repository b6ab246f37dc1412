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
    """``[A, 2 H]`` for either hidden layer of the heads, or None without FiLM."""

    def take(self, rows: Any) -> "Encoded":
        """Some of them, as often as they are named."""
        film = None if self.film is None else tuple(layer[rows] for layer in self.film)
        return Encoded(self.pools[rows], self.context[rows], film)


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
    film: Any = [None] * len(MODULATED)
    if "film.weight" in parameters:
        of_site = _dense(parameters, "film", overall).clip(0.0)
        film = [_dense(parameters, f"film.{layer}", of_site) for layer in MODULATED]
    hidden = _modulated(_dense(parameters, "pool.1", pools), film[0])
    hidden = _modulated(_dense(parameters, "pool.2", hidden), film[1])
    if there is None:
        mean = hidden.mean(1)
    else:
        hidden = hidden * there[:, :, None]  # nothing is below 0 here, so that padding can't be the maximum
        mean = hidden.sum(1) / there.sum(1)[:, None]
    together = xp.concatenate((mean, xp.amax(hidden, 1), overall), 1)
    context = _modulated(_dense(parameters, "context", together), film[2])
    return Encoded(hidden, context, None if film[3] is None else (film[3], film[4]))


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
    first, second = encoded.film or (None, None)
    hidden = _modulated(hidden, first)
    hidden = _modulated(_dense(parameters, f"{head}.hidden", hidden), second)
    return xp.where(mask, _dense(parameters, f"{head}.score", hidden)[:, :, 0], FORBIDDEN)


def _dense(parameters: Mapping[str, Any], name: str, x: Any) -> Any:
    """A stack of small products is a third slower than one large one, but NumPy's library starts no threads.

    On two busy cores threads made 64 rollouts take 870 ms instead of 60.
    """
    return x @ parameters[f"{name}.weight"] + parameters[f"{name}.bias"]


def _modulated(x: Any, film: Any) -> Any:
    """A hidden layer's output; ``film`` is ``[A, 2 H]``, or None."""
    if film is not None:
        film = film.reshape((len(film), *([1] * (len(x.shape) - 2)), -1))
        size = x.shape[-1]
        x = x * (1.0 + film[..., :size]) + film[..., size:]
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
        found["film"] = (NUM_OVERALL_FEATURES, hidden)
        found.update({f"film.{layer}": (hidden, 2 * hidden) for layer in MODULATED})
    return found


def initial_parameters(seed: int, *, hidden: int = 64, film: bool = True) -> dict[str, Floats]:
    """Random weights of a new network (He et al., arXiv 1502.01852); biases are 0."""
    rng = np.random.default_rng(seed)
    found: dict[str, Floats] = {}
    for name, (inputs, outputs) in sizes(hidden, film=film).items():
        scale = (2 / inputs) ** 0.5
        if name.endswith(".score") or name.startswith("film."):
            scale *= FIRST_OUTPUT
        found[f"{name}.weight"] = (scale * rng.standard_normal((inputs, outputs))).astype(np.float32)
        found[f"{name}.bias"] = np.zeros(outputs, np.float32)
    return found
