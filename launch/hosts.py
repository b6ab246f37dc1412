"""Where the nodes of a plan are reached, as a person writes it in ``hosts.toml``."""

import fcntl
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from arachne_runtime.errors import Problem, UnsupportedEnvironmentError
from arachne_runtime.plan import files
from arachne_runtime.plan.document import Document

HOSTS_FORMAT: Literal["arachne.hosts/1"] = "arachne.hosts/1"
DEFAULT_PORT = 29400
"""torchrun's own default for its rendezvous."""
_SIOCGIFADDR = 0x8915  # the IPv4 address of an interface, netdevice(7)
_ADDRESS = re.compile(r"[A-Za-z0-9:][A-Za-z0-9.:_%-]*")


class Host(Document, frozen=True, kw_only=True):
    """One ``[node.NAME]``: a machine that holds the devices of one node."""

    address: str
    """Name or IP address by which the other nodes reach it."""
    port: int = DEFAULT_PORT
    """Where it listens for the others if it is the first node of the plan."""
    ssh: str | None = None
    """What ``ssh`` is given to reach it (``user@name``, an alias of ~/.ssh/config); left out: the address."""


class Hosts(Document, frozen=True, kw_only=True):
    """The machines of a cluster, by the names of their nodes."""

    format: Literal["arachne.hosts/1"] = HOSTS_FORMAT
    node: dict[str, Host]


def read_hosts(path: Path) -> Hosts:
    """Hosts from their TOML file; InvalidFileError with all problems."""
    return files.read(path, Hosts, check_hosts)


def check_hosts(hosts: Hosts) -> tuple[Problem, ...]:
    """Every violated rule of a hosts file."""
    return tuple(problem for name, host in hosts.node.items() for problem in _check(f"$.node.{name}", host))


def _check(path: str, host: Host) -> Iterator[Problem]:
    if not _ADDRESS.fullmatch(host.address):
        yield Problem(f"{path}.address", f"{host.address!r} is no host name or IP address")
    if not 1 <= host.port <= 65535:
        yield Problem(f"{path}.port", f"is {host.port}; must be from 1 to 65535")
    if host.ssh is not None and (not host.ssh or host.ssh.startswith("-")):
        yield Problem(f"{path}.ssh", f"{host.ssh!r} is no ssh destination; write user@name or an alias")


def own_address(towards: str) -> str:
    """By which address another machine reaches this one: that of the interface to it. Nothing is sent.

    UnsupportedEnvironmentError where there is no way.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(towards, DEFAULT_PORT, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UnsupportedEnvironmentError(f"no way to {towards} ({error}); is the address right?") from error


def is_local(address: str) -> bool:
    """Whether an address is one of this machine: only then can a socket be bound to it."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, place) for family, _, _, _, place in found)


def interface_of(address: str) -> str | None:
    """Name of this machine's network card with an IPv4 address; None where none has it."""
    try:
        wanted = socket.gethostbyname(address)
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:  # a card without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == wanted:
                return name
    return None


def _can_bind(family: int, place: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True
