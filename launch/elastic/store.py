"""The c10d store of an elastic job, in a process of its own: it outlives every rank and the coordinator.

``python -m launch.elastic.store HOST`` prints its port and ends with its standard input. torch's store has no
authentication and listens on all interfaces by default; here on that of one address alone.
"""

import socket
import sys
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from arachne_runtime.units import Seconds

STORE_S: Seconds = 600.0
"""How long the store waits for a key that nobody sets; its clients have limits of their own."""


def bound_store(host: str) -> TCPStore:
    """A store that listens at ``host`` alone, on a free port, and waits for nobody."""
    family = socket.getaddrinfo(host, None)[0][0]
    listening = socket.create_server((host, 0), family=family, backlog=1024)
    return TCPStore(
        host,
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_S),
        master_listen_fd=listening.detach(),
    )


def main(host: str) -> None:
    """Serve until standard input closes, whoever ended."""
    store = bound_store(host)
    print(store.port, flush=True)
    while sys.stdin.buffer.read(4096):
        continue


if __name__ == "__main__":
    main(*sys.argv[1:])
