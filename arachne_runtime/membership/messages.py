"""What agents, workers and the coordinator tell each other: tagged records, and their form as bytes."""

from typing import TypeAlias, TypeVar

import msgspec

from ..errors import ArachneError
from ..plan.plan import Plan
from ..units import Bytes
from .decision import Decision, Report

MAX_INBOUND_BYTES: Bytes = 64 * 2**10
"""Of a message to the coordinator; the longest is the names of a node's devices."""
MAX_OUTBOUND_BYTES: Bytes = 16 * 2**20
"""Of a message from it; a plan of 4,096 devices has 0.5 MB."""


class MessageError(ArachneError, ValueError):
    """Bytes that are no message; says what is wrong with them."""


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """What one message says; its tag is the name of its class."""


class Member(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One process of a generation."""

    device: str
    incarnation: str
    """Random, chosen by the process as it starts: another process on the device is another member."""


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the holders have when a generation is published: the parts of the last one that was completed."""

    generation: int
    plan: Plan
    holders: tuple[Member, ...]
    """Those of its members that live, in the order of its devices; at least one."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What makes a generation: published once, after it is journalled."""

    generation: int
    """Counts from 1."""
    members: tuple[Member, ...]
    """Those that the plan uses, in the order of its devices."""
    plan: Plan
    source: Source | None = None
    """None: nobody holds anything, the state is a checkpoint's or new."""
    decision: Decision | None = None
    """About the step that was open, for the holders; None: nobody holds one."""
    why: str
    """What changed, for a person."""

    @property
    def holders(self) -> tuple[Member, ...]:
        """Who holds state as it is published."""
        return self.source.holders if self.source is not None else ()


class AgentHello(Message, frozen=True, kw_only=True):
    """First word of a node's agent."""

    node: str


class Beat(Message, frozen=True, kw_only=True):
    """The agent lives."""


class Exited(Message, frozen=True, kw_only=True):
    """A process of the agent's node has ended."""

    device: str
    incarnation: str
    code: int


class Stopped(Message, frozen=True, kw_only=True):
    """A process of the agent's node has been in state T (SIGSTOP) for a second."""

    device: str
    incarnation: str


class MemberHello(Message, frozen=True, kw_only=True):
    """First word of a device's process, after each reconnection too."""

    device: str
    incarnation: str
    generation: int = 0
    """The newest record that it has seen and is in; 0: none."""


class Failed(Message, frozen=True, kw_only=True):
    """A collective of this generation has failed here."""

    generation: int
    why: str


class Frozen(Message, frozen=True, kw_only=True):
    """The groups of this generation are left and (3) is finished: nothing changes until the next record."""

    generation: int
    report: Report | None
    """None: it holds no state yet."""


class Ready(Message, frozen=True, kw_only=True):
    """All that this generation's plan gives to the device is there, beside what it held before."""

    generation: int


class Leaving(Message, frozen=True, kw_only=True):
    """The process will be ended soon (SIGTERM): plan without it."""


class Progress(Message, frozen=True, kw_only=True):
    """From the first member of a generation, about once a second."""

    generation: int
    step: int
    """The last one applied."""
    samples_per_s: float


class Costs(Message, frozen=True, kw_only=True):
    """What a member computed in its last steps, every few seconds."""

    generation: int
    compute_s: float
    """Of a step, the median: forwards, backwards and the update, without any wait for others."""


class Done(Message, frozen=True, kw_only=True):
    """The process's script has come to its end: that it goes now is no loss."""


class AskStatus(Message, frozen=True, kw_only=True):
    """Whoever has the token may look."""


class Published(Message, frozen=True, kw_only=True):
    """The newest record."""

    record: Record


class Completed(Message, frozen=True, kw_only=True):
    """Every member is ready: training goes on in this generation, what was held before may be freed."""

    generation: int


class Freeze(Message, frozen=True, kw_only=True):
    """Leave the groups of this generation, finish (3) if in it, and report."""

    generation: int
    why: str


class ChangeWanted(Message, frozen=True, kw_only=True):
    """Raise the flag in (2), so that all stop at the end of the same step, and report."""

    generation: int
    why: str


class Refused(Message, frozen=True, kw_only=True):
    """A registration that cannot be; the process must start anew."""

    why: str


class Ended(Message, frozen=True, kw_only=True):
    """The job is over: save a checkpoint and end."""

    why: str
    is_done: bool = False
    """Whether its script came to its end; else the job cannot go on."""


class Status(Message, frozen=True, kw_only=True):
    """What a person sees of the job."""

    phase: str
    generation: int
    members: tuple[str, ...]
    idle: tuple[str, ...]
    """Devices that are there and not in the plan."""
    suspected: tuple[str, ...]
    """Nodes that have been silent too long."""
    why: str
    """The last change, and its cause."""
    plan: str = ""
    """The newest, in a few words."""
    step: int = 0
    """The last one that the first member of this generation told of."""
    samples_per_s: float = 0.0
    """Likewise; 0: it has told nothing yet."""


Inbound: TypeAlias = (
    AgentHello
    | Beat
    | Exited
    | Stopped
    | MemberHello
    | Failed
    | Frozen
    | Ready
    | Leaving
    | Progress
    | Costs
    | Done
    | AskStatus
)
Outbound: TypeAlias = Published | Completed | Freeze | ChangeWanted | Refused | Ended | Status


class _In(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message to the coordinator and its number on this connection, from 1."""

    number: int
    message: Inbound


class _Out(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    number: int
    message: Outbound


class _Numbered(msgspec.Struct, frozen=True, array_like=True):
    number: int
    message: msgspec.Raw


_E = TypeVar("_E", _In, _Out)
_ENCODER = msgspec.msgpack.Encoder()
_INBOUND = msgspec.msgpack.Decoder(_In)
_OUTBOUND = msgspec.msgpack.Decoder(_Out)


def encode_inbound(number: int, message: Inbound) -> bytes:
    """Bytes of a message to the coordinator."""
    return _ENCODER.encode(_In(number, message))


def encode_outbound(number: int, message: Outbound) -> bytes:
    """Bytes of a message from the coordinator."""
    return number_outbound(number, encode_message(message))


def encode_message(message: Outbound) -> bytes:
    """A message that many are told, for `number_outbound`: a plan is long, and is encoded once."""
    return _ENCODER.encode(message)


def number_outbound(number: int, message: bytes) -> bytes:
    """Bytes of an encoded message from the coordinator, as the ``number``-th on a connection."""
    return _ENCODER.encode(_Numbered(number, msgspec.Raw(message)))


def decode_inbound(content: bytes, after: int) -> tuple[int, Inbound]:
    """A message to the coordinator and its number; MessageError if it is malformed or not after ``after``."""
    envelope = _decoded(_INBOUND, content, after)
    return envelope.number, envelope.message


def decode_outbound(content: bytes, after: int) -> tuple[int, Outbound]:
    """A message from the coordinator, likewise."""
    envelope = _decoded(_OUTBOUND, content, after)
    return envelope.number, envelope.message


def _decoded(decoder: "msgspec.msgpack.Decoder[_E]", content: bytes, after: int) -> _E:
    try:
        envelope = decoder.decode(content)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MessageError(f"malformed message of {len(content)} bytes: {error}") from error
    if envelope.number <= after:
        raise MessageError(f"message {envelope.number} after message {after}: it is replayed")
    return envelope
