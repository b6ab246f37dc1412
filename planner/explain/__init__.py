"""What a reader wants to know of a plan: its share of the ideal, what takes the rest, what binds it."""

from .assume import with_network
from .binding import Binding, BindingKind, what_binds
from .ideal import Ideal
from .idle import Idle, idle_devices
from .leanest import Leanest
from .losses import Loss, Losses, LossKind, losses_of, share_of_ideal
from .missing import Change, ChangeKind, Missing, what_is_missing
from .one_more import Gain, enlarged, one_more
from .repair import Repair, repairs
from .sources import Figures, figures_of

__all__ = [
    "Binding",
    "BindingKind",
    "Change",
    "ChangeKind",
    "Figures",
    "Gain",
    "Ideal",
    "Idle",
    "Leanest",
    "Loss",
    "LossKind",
    "Losses",
    "Missing",
    "Repair",
    "enlarged",
    "figures_of",
    "idle_devices",
    "losses_of",
    "one_more",
    "repairs",
    "share_of_ideal",
    "what_binds",
    "what_is_missing",
    "with_network",
]
