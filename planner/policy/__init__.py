"""The learned policy: proposes shapes of pipelines for any devices and model; NumPy only.

``site`` is a problem as the policy sees it, from figures of ``measured``; ``roll`` the loop in which
templates arise (``point`` and ``progress``: where it stands), one ``decision`` after the other, with
``masks`` and ``memory`` for what can be built, ``features`` and ``options`` for what is
seen. ``network`` scores options, ``choosers`` and ``beam`` take them, ``policy`` reads and writes weights,
``sources`` propose to the search.
"""

from .choosers import Network, Sampler, Uniform, forced
from .decision import MOST_RUNS, MOST_STAGES, MOST_TEMPLATES, WIDTHS, Chooser, Decision, Head
from .features import FEATURES_VERSION
from .network import initial_parameters, logits
from .policy import Architecture, Meta, Policy
from .roll import Rollouts, roll
from .site import Site
from .sources import Learned, UniformRandom

__all__ = [
    "FEATURES_VERSION",
    "MOST_RUNS",
    "MOST_STAGES",
    "MOST_TEMPLATES",
    "WIDTHS",
    "Architecture",
    "Chooser",
    "Decision",
    "Head",
    "Learned",
    "Meta",
    "Network",
    "Policy",
    "Rollouts",
    "Sampler",
    "Site",
    "Uniform",
    "UniformRandom",
    "forced",
    "initial_parameters",
    "logits",
    "roll",
]
