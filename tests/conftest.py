"""A test that leaves something behind fails: a process, a thread, a variable, a namespace, a quota ..."""

import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

MARK = "ARACHNE_TEST"
"""In the environment of every process that a test starts, whatever its parent or session."""
WARM = (b"multiprocessing.forkserver", b"multiprocessing.resource_tracker")
"""Kept between tests on purpose: the pool of `run_ranks`, and Python's own helper."""
PATIENCE_S = 2.0


def pytest_configure() -> None:
    """A background job of a shell ignores Ctrl-C, and so would every process that a test interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    token = secrets.token_hex(8)
    environment, threads, spaces = dict(os.environ), set(threading.enumerate()), open_namespaces()
    groups, home = quota_groups(), os.readlink("/proc/thread-self/ns/net")
    os.environ[MARK] = token
    try:
        yield
    finally:
        os.environ.pop(MARK, None)
        if MARK in environment:  # these tests run inside a test
            os.environ[MARK] = environment[MARK]
        faults = [
            *left_processes(f"{MARK}={token}".encode()),
            *left_threads(threads),
            *left_process_group(),
            *left_variables(environment),
            *(f"the open namespace {name}" for name in open_namespaces() - spaces),
            *(f"the control group {name}" for name in quota_groups() - groups),
        ]
        if os.readlink("/proc/thread-self/ns/net") != home:
            faults.append("the test's thread in another network namespace")
    if faults:
        pytest.fail("the test left behind: " + "; ".join(faults))


def left_processes(mark: bytes) -> list[str]:
    end = time.monotonic() + PATIENCE_S
    # twice: while the first pass reads, a process may start another and end
    while (found := marked_processes(mark) or marked_processes(mark)) and time.monotonic() < end:
        time.sleep(0.02)
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return [f"the process {pid} ({words})" for pid, words in found.items()]


def marked_processes(mark: bytes) -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            if mark not in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                continue
            words = Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            continue
        if not any(warm in words for warm in WARM):
            found[int(name)] = words.replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def left_threads(before: set[threading.Thread]) -> list[str]:
    end = time.monotonic() + PATIENCE_S
    while (found := set(threading.enumerate()) - before) and time.monotonic() < end:
        time.sleep(0.02)
    return [f"the thread {thread.name}" for thread in found]


def left_process_group() -> list[str]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return []
    distributed.destroy_process_group()
    return ["the default process group"]


def left_variables(before: dict[str, str]) -> list[str]:
    now = dict(os.environ)
    names = {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
    # pytest's own, and torch's at the first import of its compiler
    names -= {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
    for name in names:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return [f"the environment variable {name}" for name in sorted(names)]


def open_namespaces() -> set[str]:
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if target.startswith("net:"):
            found.add(target)
    return found


def quota_groups() -> set[str]:
    """Groups of labs whose process is gone, or is this one; a lab may run beside the tests."""
    folders = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
    groups = [group for folder in folders for group in folder.glob("arachne-lab-*")]
    return {str(g) for g in groups if g.name.split("-")[2] == str(os.getpid()) or not owner_lives(g.name)}


def owner_lives(group: str) -> bool:
    return Path(f"/proc/{group.split('-')[2]}").exists()
