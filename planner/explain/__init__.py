"""What a reader wants to know of a plan: how far it is from the ideal, and what takes the rest."""

from .ideal import Ideal
from .losses import Loss, Losses, LossKind, losses_of, share_of_ideal

__all__ = ["Ideal", "Loss", "LossKind", "Losses", "losses_of", "share_of_ideal"]
