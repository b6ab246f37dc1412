"""``arachne status``: what an elastic job does now, and why."""

import time
from collections.abc import Iterator
from typing import Annotated

import typer

from arachne_runtime.errors import UnsupportedEnvironmentError
from arachne_runtime.membership.client import CoordinatorLostError, ask_status
from arachne_runtime.membership.messages import Status
from arachne_runtime.units import Seconds

from ..elastic.job_file import JobFile, find_job
from ..options import AsJson
from ..report.tell_status import status_json, status_line, status_text

ANSWER_S: Seconds = 5.0
"""How long the coordinator may take to answer: one that was restarted is there again in less."""
WATCH_S: Seconds = 1.0
"""Between two looks; members tell of their progress about as often."""


def command(
    job: Annotated[
        str | None, typer.Argument(help="Its name; left out: the only one of this machine.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Go on, with a line for each change.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show members, plan, last change and speed of an elastic job.

    Exit code 5 where no job answers.
    """
    found = find_job(job)
    for number, status in enumerate(_statuses(found, watch)):
        if as_json:
            print(status_json(found.name, status), flush=True)
        else:
            print(status_line(status) if number else status_text(found.name, status), flush=True)


def _statuses(job: JobFile, watch: bool) -> Iterator[Status]:
    """Once, or each that is another than the last, until the job ends."""
    last = _asked(job)
    yield last
    while watch and job.runs():
        time.sleep(WATCH_S)
        try:
            status = _asked(job)
        except UnsupportedEnvironmentError:
            if job.runs():
                raise
            return
        if status != last:
            yield status
        last = status


def _asked(job: JobFile) -> Status:
    try:
        return ask_status(job.address, job.token, ANSWER_S)
    except (CoordinatorLostError, FileNotFoundError) as error:
        raise UnsupportedEnvironmentError(f"job {job.name} does not answer: {error}") from error
