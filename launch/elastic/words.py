"""What the command of an elastic job and the island of a node tell each other: records as lines of JSON.

The command writes to the island's standard input, the island marks its lines on standard error, so that they
pass through ssh beside what ranks print.
"""

import os
from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from arachne_runtime.plan.document import Document
from arachne_runtime.units import Seconds

from ..failure import Failure

WORD_MARK = "\x1earachne-island "
"""Starts a line of standard error that carries one `Told`."""
LEFT_OUT_CODE = os.EX_TEMPFAIL
"""A process exits with it that was declared dead or left out of a plan: another may take its place."""
NOTICE_S: Seconds = 30.0
"""How long a node trains on after SIGTERM: what Slurm (KillWait) and Kubernetes give before they kill."""

Address: TypeAlias = tuple[str, int]
"""Host and port."""


class Orders(Document, frozen=True, kw_only=True):
    """First line to an island: what it runs."""

    node: str
    ranks: dict[str, int]
    """By device of this node: its place among all devices of the job, which names it in reports."""
    command: tuple[str, ...]
    """``train.py ARGS`` or ``-m module ARGS``."""
    coordinator: Address
    store: Address
    token: str
    run: str
    """In the environment of every process of this island: tells them from all others."""
    environment: Mapping[str, str] = {}
    address: str | None = None
    """By which other nodes reach this one; None: they are on the same machine."""
    log_dir: str | None = None
    is_again: bool = False
    """An island of this job was there before it on the node: what is in the log folder stays."""
    notice_s: Seconds = NOTICE_S


class _Word(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Its tag is the name of its class."""


class Again(_Word, frozen=True, kw_only=True):
    """Start a fresh process for a device whose last one has ended."""

    device: str
    after_s: Seconds = 0.0


class Dismiss(_Word, frozen=True, kw_only=True):
    """End the process of a device, which waited for a place; nobody waits for it."""

    device: str


class Gone(_Word, frozen=True, kw_only=True):
    """The process of a device has ended."""

    device: str
    incarnation: str | None = None
    """None: it had not registered yet."""
    code: int
    failure: Failure | None = None
    """None: it was left out, or its script has ended."""


class Noticed(_Word, frozen=True, kw_only=True):
    """The island was asked to leave (SIGTERM), and so were its processes."""

    node: str


Order: TypeAlias = Again | Dismiss
Told: TypeAlias = Gone | Noticed

_ORDERS = msgspec.json.Decoder(Orders)
_ORDER = msgspec.json.Decoder(Order)
_TOLD = msgspec.json.Decoder(Told)


def line(word: Orders | Order | Told) -> bytes:
    """One line, its end included."""
    return msgspec.json.encode(word) + b"\n"


def read_orders(text: bytes) -> Orders:
    """From the first line to an island."""
    return _ORDERS.decode(text)


def read_order(text: bytes) -> Order:
    """From a later one."""
    return _ORDER.decode(text)


def read_told(text: bytes) -> Told:
    """From a marked line, without its mark."""
    return _TOLD.decode(text)
