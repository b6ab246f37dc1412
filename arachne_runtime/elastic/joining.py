"""Takes this process into an elastic job: the line to the coordinator, the store of its groups, SIGTERM."""

import os
import signal
import sys
import threading
from contextlib import ExitStack
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from ..making import EngineMaker
from ..membership.client import JobDoneError, MemberClient, RefusedError, Stop
from ..membership.watch import Watch, break_group
from ..state.buddy import Snapshots
from ..state.feeds import Feeds
from ..surroundings import LEFT_OUT_CODE, Elastic
from ..units import Seconds
from .entering import Entering
from .patience import Patience
from .survivor import Survivor

SNAPSHOT_STEPS = 100
"""From one snapshot to the next: twice as many steps are done again at most, where a last holder is lost."""
STORE_S: Seconds = 30.0
"""How long the store of the job may take to answer."""


def survivor_of(
    elastic: Elastic, make: EngineMaker, feeds: Feeds, *, timeout_s: Seconds, until: ExitStack
) -> Survivor:
    """Register this process; ``until`` ends when it leaves the job.

    A process that gets SIGTERM asks to be planned without and trains on, until it is left out.
    """
    limit = timedelta(seconds=STORE_S)
    host, port = elastic.store
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    watch = until.enter_context(Watch())
    patience = Patience()

    def on_stop(stop: Stop) -> None:
        watch.on_stop(stop)
        patience.on_stop(stop)

    client = MemberClient(elastic.coordinator, elastic.token, elastic.device, on_stop)
    until.callback(client.close)
    _tell_agent(elastic.member_descriptor, client.member.incarnation)
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, lambda number, frame: client.leaving())
        until.callback(signal.signal, signal.SIGTERM, before)
    feeds.keeps_batches = True
    snapshots = Snapshots(SNAPSHOT_STEPS, break_group)
    entering = Entering(client.member, store, watch, make, feeds, snapshots, timeout_s)
    survivor = Survivor(client, watch, patience, entering)
    until.callback(survivor.close)
    return survivor


def _tell_agent(descriptor: int | None, incarnation: str) -> None:
    """The agent must name this process when it tells of its end."""
    if descriptor is not None:
        with os.fdopen(descriptor, "w") as pipe:
            pipe.write(f"{incarnation}\n")


def finish(survivor: Survivor) -> None:
    """The script has come to its end; SystemExit as `end_with_code`."""
    try:
        survivor.finish()
    except Exception as error:
        end_with_code(error)
        raise


def end_with_code(error: BaseException) -> None:
    """SystemExit for a process that the job does without, or after the job; else the error is one."""
    if isinstance(error, RefusedError):
        print(error, file=sys.stderr, flush=True)
        raise SystemExit(LEFT_OUT_CODE) from error
    if isinstance(error, JobDoneError):
        raise SystemExit(0) from error
