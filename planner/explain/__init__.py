"""What a reader wants to know of a plan: its share of the ideal, what takes the rest, what binds it."""

from .assume import with_network
from .binding import Binding, BindingKind, what_binds
from .change import PlanChange, change_of
from .idle import Idle, idle_devices
from .losses import Loss, Losses, LossKind, losses_of, share_of_ideal
from .one_more import Gain, one_more
from .repair import Repair, repairs
from .sources import Figures, figures_of

__all__ = [
    "Binding",
    "BindingKind",
    "Figures",
    "Gain",
    "Idle",
    "Loss",
    "LossKind",
    "Losses",
    "PlanChange",
    "Repair",
    "change_of",
    "figures_of",
    "idle_devices",
    "losses_of",
    "one_more",
    "repairs",
    "share_of_ideal",
    "what_binds",
    "with_network",
]
