"""Who may register: a process that is new, or known and not declared dead, or of the newest generation."""

from collections.abc import Set

from arachne_runtime.membership.messages import Member, MemberHello
from arachne_runtime.plan.cluster import node_of

from .history import History


def why_not(
    hello: MemberHello, history: History, dead: Set[str], here: Set[Member] = frozenset()
) -> str | None:
    """Why a process is refused; None where it may come.

    ``dead``: incarnations that were declared so; ``here``: those with a seat, idle ones too.
    """
    if not (node_of(hello.device) and hello.device.rpartition(":")[2].isdecimal()):
        return f"{hello.device!r} is no device; write node:index"
    if hello.incarnation in dead:
        return "this process was declared dead; its state is of no use, start another"
    if hello.generation > history.generation:
        return f"generation {hello.generation} is not in this coordinator's journal: it is another job's"
    member = Member(device=hello.device, incarnation=hello.incarnation)
    if hello.generation and member not in here and not history.involves(member):
        return f"generation {history.generation} went on without it; start another process"
    return None
