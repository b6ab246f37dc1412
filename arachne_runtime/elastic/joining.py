"""Takes this process into an elastic job: the line to the coordinator, the store of its groups, SIGTERM."""

import os
import signal
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from ..making import EngineMaker
from ..membership.client import (
    CoordinatorLostError,
    JobDoneError,
    JobEndedError,
    MemberClient,
    RefusedError,
    Stop,
)
from ..membership.watch import Watch, break_group
from ..state.buddy import Snapshots
from ..state.feeds import Feeds
from ..state.keeper import Checkpoints
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
    make = replace(make, follows_plans=True)
    entering = Entering(client.member, store, watch, make, feeds, snapshots, timeout_s)
    survivor = Survivor(client, watch, patience, entering)
    until.callback(survivor.close)
    return survivor


def _tell_agent(descriptor: int | None, incarnation: str) -> None:
    """The agent must name this process when it tells of its end."""
    if descriptor is not None:
        with os.fdopen(descriptor, "w") as pipe:
            pipe.write(f"{incarnation}\n")


def finish(survivor: Survivor, checkpoints: Checkpoints | None) -> None:
    """The script has come to its end; SystemExit as `end`."""
    try:
        survivor.finish()
    except Exception as error:
        end(error, survivor, checkpoints)
        raise


def end(error: BaseException, survivor: Survivor | None, checkpoints: Checkpoints | None) -> None:
    """An error leaves the session: save what is left of a job that cannot go on; SystemExit where it is none.

    That is for a process that the job does without, or after the job.
    """
    if survivor is not None and checkpoints is not None and _ends_job(error):
        survivor.settle()
        print(_saved(checkpoints), file=sys.stderr, flush=True)
    if isinstance(error, RefusedError):
        print(error, file=sys.stderr, flush=True)
        raise SystemExit(LEFT_OUT_CODE) from error
    if isinstance(error, JobDoneError):
        raise SystemExit(0) from error


def _ends_job(error: BaseException) -> bool:
    is_over = isinstance(error, JobEndedError | CoordinatorLostError)
    return is_over and not isinstance(error, JobDoneError)


def _saved(checkpoints: Checkpoints) -> str:
    """Each process writes what it holds, and waits a minute for the others' files; what came of it."""
    try:
        is_there = checkpoints.save_alone()
    except Exception as error:  # the job's own error is the one to leave with
        return f"the job ends, and this process could not save its state: {type(error).__name__}: {error}"
    if is_there:
        return "the job ends; the state of now is its newest checkpoint"
    return "the job ends; those that are left do not hold all of its state, so no checkpoint came of it"
