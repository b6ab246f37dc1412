"""The lab as a person writes it in ``lab.toml``: devices by their share of a core, and their network."""

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Literal

from arachne_runtime.errors import Problem
from arachne_runtime.plan import cluster, files
from arachne_runtime.plan.document import Document

LAB_FORMAT: Literal["arachne.lab/1"] = "arachne.lab/1"

MIN_SHARE = 0.01
"""Least share of a core: below it the period of its quota would pass 100 ms, longer than most actions."""
LOOPBACK_GBPS = 2.0
"""Between two nodes of a lab without ``[network]``: gloo on loopback, messages of 64 MiB (measured on a busy
2-core machine: 1.9 to 2.7 at whole and half cores, 1.3 at a fifth)."""
LOOPBACK_LATENCY_US = 80.0
"""Half a gloo round trip of 8 bytes (measured on the same machine: 42 to 97)."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class LabDevice(Document, frozen=True, kw_only=True):
    """One ``[[device]]``: a rank that gets this share of one CPU core."""

    name: str
    """What reports call it; also the name of its node, where ``node`` is left out."""
    share: float
    """Share of one core, 0.01 to 1."""
    node: str | None = None

    @property
    def home(self) -> str:
        """Name of its node."""
        return self.node if self.node is not None else self.name

    @property
    def device_type(self) -> str:
        """``cpu`` for a whole core, else ``cpu-<share>``: a key of the catalog."""
        return "cpu" if self.share == 1 else f"cpu-{self.share:g}"


class LabNetwork(Document, frozen=True, kw_only=True):
    """What each node's network card can do."""

    rate_Mbps: float
    """1e6 bits a second, in each direction."""
    latency_ms: float = 0.0
    """One way, between two nodes."""


class Lab(Document, frozen=True, kw_only=True, dict=True):
    """Unequal devices on one machine."""

    format: Literal["arachne.lab/1"] = LAB_FORMAT
    device: tuple[LabDevice, ...]
    network: LabNetwork | None = None

    @cached_property
    def nodes(self) -> dict[str, tuple[LabDevice, ...]]:
        """Devices by node, in the order of the file."""
        names = dict.fromkeys(device.home for device in self.device)
        return {name: tuple(d for d in self.device if d.home == name) for name in names}

    @cached_property
    def devices(self) -> dict[str, LabDevice]:
        """Every device by its name in plans, ``node:index``."""
        return {f"{node}:{i}": d for node, held in self.nodes.items() for i, d in enumerate(held)}

    def cluster(self) -> cluster.Cluster:
        """The same devices as a planner sees them."""
        entries = tuple(
            cluster.NodeEntry(name=name, device=held[0].device_type, gpus=len(held))
            for name, held in self.nodes.items()
        )
        if self.network is None:
            network = cluster.Network(inter_GBps=LOOPBACK_GBPS, latency_us=LOOPBACK_LATENCY_US)
        else:
            delay_us = self.network.latency_ms * 1e3 or LOOPBACK_LATENCY_US
            network = cluster.Network(inter_GBps=self.network.rate_Mbps / 8e3, latency_us=delay_us)
        return cluster.Cluster(node=entries, network=network)


def read_lab(path: Path) -> Lab:
    """A lab from its TOML file; InvalidFileError with all problems."""
    return files.read(path, Lab, check_lab)


def check_lab(lab: Lab) -> tuple[Problem, ...]:
    """Every violated rule of a lab."""
    rules = (
        has_devices,
        names_are_words,
        names_differ,
        shares_are_of_a_core,
        a_node_has_one_share,
        network_has_a_rate,
    )
    return tuple(problem for rule in rules for problem in rule(lab))


def has_devices(lab: Lab) -> Iterator[Problem]:
    """A lab has at least one device."""
    if not lab.device:
        yield Problem("$.device", "is empty; add a [[device]] with a name and a share")


def names_are_words(lab: Lab) -> Iterator[Problem]:
    """Names of nodes end up in ``node:index`` and in paths."""
    for i, device in enumerate(lab.device):
        for field, name in (("name", device.name), ("node", device.home)):
            if not _NAME.fullmatch(name) and (field == "name" or device.node is not None):
                yield Problem(
                    f"$.device[{i}].{field}", f"{name!r} is no name; use letters, digits, '.', '_', '-'"
                )


def names_differ(lab: Lab) -> Iterator[Problem]:
    """Reports name a device by its name alone."""
    names = [device.name for device in lab.device]
    for i, name in enumerate(names):
        if name in names[:i]:
            yield Problem(
                f"$.device[{i}].name", f"{name!r} is also device[{names.index(name)}]; names must differ"
            )


def shares_are_of_a_core(lab: Lab) -> Iterator[Problem]:
    """A rank computes in one thread."""
    for i, device in enumerate(lab.device):
        if not MIN_SHARE <= device.share <= 1:
            yield Problem(
                f"$.device[{i}].share", f"is {device.share:g}; must be from {MIN_SHARE} to 1 (of a core)"
            )


def a_node_has_one_share(lab: Lab) -> Iterator[Problem]:
    """A node of a cluster has one device type."""
    for i, device in enumerate(lab.device):
        first = lab.nodes[device.home][0]
        if device.share != first.share:
            message = (
                f"is {device.share:g}, but {first.name!r} of the same node {device.home!r} has "
                f"{first.share:g}; the devices of a node are alike: give one of them a node of its own"
            )
            yield Problem(f"$.device[{i}].share", message)


def network_has_a_rate(lab: Lab) -> Iterator[Problem]:
    """A network card sends something, and nothing arrives before it was sent."""
    if lab.network is None:
        return
    if not 0.1 <= lab.network.rate_Mbps <= 1e6:
        yield Problem("$.network.rate_Mbps", f"is {lab.network.rate_Mbps:g}; must be from 0.1 to 1e6")
    if not 0 <= lab.network.latency_ms <= 1e4:
        yield Problem("$.network.latency_ms", f"is {lab.network.latency_ms:g}; must be from 0 to 1e4")
