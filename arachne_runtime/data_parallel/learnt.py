"""What a loader has learnt, shares and an adaptive batch, as plain values in its ``state_dict``."""

import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from ..batch import Balancer, BalancerState, ControllerState
from ..errors import UsageError
from .adaptive import Adaptation
from .link import Link

_SHARES, _ADAPTIVE = "balancer", "adaptive"

T = TypeVar("T")


def told_learnt(link: Link, adaptation: Adaptation | None) -> dict[str, Any]:
    """Numbers, names, lists and dictionaries of them; shares that the user decides are the user's to keep."""
    found: dict[str, Any] = {}
    if isinstance(link.sharing, Balancer):
        found[_SHARES] = msgspec.to_builtins(link.sharing.state)
    if adaptation is not None:
        found[_ADAPTIVE] = msgspec.to_builtins(adaptation.state)
    return found


def load_learnt(state: Mapping[str, Any], link: Link, adaptation: Adaptation | None) -> None:
    """Go on with what was learnt; what other ranks have learnt of their shares is left out, with a warning.

    Raises:
        UsageError: The batch was adaptive and is not now, or is out of bounds now, or a state that is none.

    """
    if _ADAPTIVE in state:
        if adaptation is None:
            raise UsageError(
                "the state is of a loader whose batch was adaptive; make this one with adaptive= as well, "
                "so that batch and learning rate go on where they were"
            )
        adaptation.resume(_converted(state, _ADAPTIVE, ControllerState))
    if _SHARES in state and isinstance(link.sharing, Balancer):
        balancer = _converted(state, _SHARES, BalancerState)
        if len(balancer.caps) == link.peers.num_ranks:
            link.sharing.resume(balancer)
        elif link.peers.rank == 0:
            warnings.warn(
                f"the state has the speeds of {len(balancer.caps)} ranks, now there are "
                f"{link.peers.num_ranks}: their shares start even and are learnt anew",
                stacklevel=3,
            )


def _converted(state: Mapping[str, Any], name: str, kind: type[T]) -> T:
    try:
        return msgspec.convert(state[name], kind)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"state[{name!r}] is not what state_dict() of this version gives: {error}"
        ) from error
