"""Measured costs correct the profile: recorded runs, a robust regression, marks of how sure a figure is.

What each module knows: ``run`` the steps of a run; ``observe`` which figures its seconds are sums of;
``prior`` how errors of figures hang together; ``regression`` the arithmetic; ``factors`` what comes out;
``between`` steps and links; ``apply`` the corrected profile; ``errors`` prices before and after; ``correct``
all of it in turn.
"""

from .between import LinkFactor, StepFactor
from .correct import Correction, correct
from .errors import Priced, PriceError
from .factors import Factor
from .observe import Figure, Part
from .run import Run

__all__ = [
    "Correction",
    "Factor",
    "Figure",
    "LinkFactor",
    "Part",
    "PriceError",
    "Priced",
    "Run",
    "StepFactor",
    "correct",
]
