"""Turns a lab on and off: quotas, namespaces and the state file, and nothing of them left behind."""

import os
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from arachne_runtime.errors import UnsupportedEnvironmentError, UsageError
from arachne_runtime.plan import files

from . import cgroup, duty, network
from .document import Lab, read_lab
from .state import LAB_VARIABLE, STATE_FILE, LabState, Seat, is_alive, labs_folder, read_state, start_ticks

GROUP_NOTE = "cgroup"
"""File of a lab's folder that names its control group, written before the group is made."""


IN_NAMESPACES = {"GLOO_SOCKET_IFNAME": network.INTERFACE, "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Variables in a lab with a network: gloo must not look for a host name, nor torch warn of its lack."""


class Enforcement(StrEnum):
    """How devices are held to their shares."""

    AUTO = "auto"
    """By quota where the machine allows it, else by duty cycle."""
    QUOTA = "quota"
    """CPU quotas of control groups."""
    DUTY_CYCLE = "duty-cycle"
    """A supervisor that stops and continues ranks; needs no root."""


@dataclass(frozen=True, slots=True)
class Active:
    """A lab that is on."""

    state_file: Path
    state: LabState
    notes: tuple[str, ...]
    """What is enforced and how, and what is not: one line each."""


@contextmanager
def active(lab: Lab | Path, *, enforcement: Enforcement = Enforcement.AUTO) -> Iterator[Active]:
    """Hold a lab's devices: ranks started inside the block run in them.

    Sets ``ARACHNE_LAB`` meanwhile. With ``[network]`` the calling thread (and what it starts) is in the lab's
    hub namespace until the end of the block.
    """
    lab = lab if isinstance(lab, Lab) else read_lab(lab)
    if running := os.environ.get(LAB_VARIABLE):
        raise UsageError(f"a lab is on already ({LAB_VARIABLE}={running}); labs do not nest")
    sweep()
    folder = labs_folder() / f"{os.getpid()}-{secrets.token_hex(4)}"
    with ExitStack() as held:
        held.enter_context(_unwound_by_signals())
        folder.mkdir(mode=0o700)
        held.callback(shutil.rmtree, folder, ignore_errors=True)
        on = _switch_on(lab, enforcement, folder, held)
        held.enter_context(_variables({**on.state.environment, LAB_VARIABLE: str(on.state_file)}))
        yield on


def sweep() -> tuple[Path, ...]:
    """Remove what labs of this user left that died without cleaning up; returns their folders."""
    swept = []
    for folder in labs_folder().glob("*/"):
        if not _is_dead(folder):
            continue
        if (note := folder / GROUP_NOTE).exists():
            top = Path(note.read_text())
            cgroup.remove([*top.glob("*/"), top])
        for roster in folder.glob("roster-*/"):
            duty.free(roster)
        shutil.rmtree(folder, ignore_errors=True)
        swept.append(folder)
    return tuple(swept)


def _is_dead(folder: Path) -> bool:
    try:
        return not is_alive(read_state(folder / STATE_FILE))
    except UsageError:  # it died, or has not come, before it wrote its state
        owner = folder.name.partition("-")[0]
        return owner.isdigit() and start_ticks(int(owner)) is None


def _switch_on(lab: Lab, enforcement: Enforcement, folder: Path, held: ExitStack) -> Active:
    notes = list(_core_notes(lab))
    groups, said = _quotas(lab, enforcement, folder, held)
    rosters = {} if groups else _rosters(lab, folder, held)
    notes.append(said)
    spaces, said_network = _namespaces(lab, held)
    notes += said_network
    seats = tuple(
        Seat(
            device=name,
            share=device.share,
            cgroup=str(groups[i]) if groups else None,
            roster=str(rosters[name]) if rosters else None,
            network=spaces.file_of(device.home) if spaces else None,
        )
        for i, (name, device) in enumerate(lab.devices.items())
    )
    started = start_ticks(os.getpid())
    assert started is not None
    state = LabState(
        owner=os.getpid(),
        started=started,
        seats=seats,
        cluster=lab.cluster(),
        environment=IN_NAMESPACES if spaces else {},
        address=network.HUB_ADDRESS if spaces else "127.0.0.1",
    )
    files.write(state, folder / STATE_FILE)
    return Active(folder / STATE_FILE, state, tuple(notes))


def _core_notes(lab: Lab) -> Iterator[str]:
    cores = len(os.sched_getaffinity(0))
    wanted = sum(device.share for device in lab.device)
    if wanted > cores + 1e-9:
        yield (
            f"warning: the shares add up to {wanted:g} cores, but this process may use {cores}; "
            f"devices will be slower than their shares: lower them in proportion"
        )


def _quotas(
    lab: Lab, enforcement: Enforcement, folder: Path, held: ExitStack
) -> tuple[tuple[Path, ...], str]:
    """The group of every device (none where a duty cycle must do) and a line that says so."""
    if enforcement is Enforcement.DUTY_CYCLE:
        return (), "shares: by stopping and continuing ranks, as asked"
    try:
        hierarchy = cgroup.own_hierarchy()
        shares = [device.share for device in lab.device]
        (folder / GROUP_NOTE).write_text(str(hierarchy.folder / f"arachne-lab-{folder.name}"))
        groups = cgroup.create(hierarchy, f"arachne-lab-{folder.name}", shares)
    except UnsupportedEnvironmentError as error:
        if enforcement is Enforcement.QUOTA:
            raise
        return (), f"shares: by stopping and continuing ranks, coarser than a quota ({error})"
    held.callback(cgroup.remove, (*groups, groups[0].parent))
    return groups, f"shares: by CPU quota (control groups v{hierarchy.version})"


def _rosters(lab: Lab, folder: Path, held: ExitStack) -> dict[str, Path]:
    rosters = {name: folder / f"roster-{i}" for i, name in enumerate(lab.devices)}
    for roster in rosters.values():
        roster.mkdir()
        held.callback(duty.free, roster)
    supervisor = duty.Supervisor({rosters[name]: device.share for name, device in lab.devices.items()})
    held.callback(supervisor.close)
    return rosters


def _namespaces(lab: Lab, held: ExitStack) -> tuple[network.Namespaces | None, list[str]]:
    """The namespaces, entered, and lines that say what their network does; None where there are none."""
    if lab.network is None:
        return None, []
    try:
        spaces = network.create(list(lab.nodes), lab.network)
    except UnsupportedEnvironmentError as error:
        return None, [f"network: not limited ({error})"]
    held.callback(spaces.close)
    home = network.own()
    held.callback(os.close, home)
    network.enter(f"/proc/self/fd/{spaces.hub}")
    held.callback(network.enter, f"/proc/self/fd/{home}")
    notes = [
        f"network: a namespace for each of {len(lab.nodes)} nodes; {', '.join(spaces.enforced) or 'no limit'}"
    ]
    return spaces, notes + [f"network: NOT enforced: {missing}" for missing in spaces.shortfalls]


@contextmanager
def _unwound_by_signals() -> Iterator[None]:
    """A signal that would end this process at once lets it clean up first (main thread only)."""
    taken = []
    if threading.current_thread() is threading.main_thread():
        taken = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def current(environment: Mapping[str, str] | None = None) -> LabState | None:
    """The lab that this process was started in, or None; UsageError where that lab has ended."""
    path = (os.environ if environment is None else environment).get(LAB_VARIABLE)
    if not path:
        return None
    state = read_state(Path(path))
    if not is_alive(state):
        raise UsageError(f"the lab of {LAB_VARIABLE}={path} has ended; start it again: arachne lab")
    return state
