"""What each rank runs: enters its device of the lab, runs the user's script, and writes down how it failed.

``python -m launch.worker train.py ARGS`` or ``python -m launch.worker -m package.train ARGS``.
"""

import atexit
import ctypes
import json
import os
import runpy
import signal
import sys
import sysconfig
import threading
import time
import traceback
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from typing import Any, NoReturn

from arachne_runtime.errors import ArachneError

from .lab.place import take
from .lab.state import LAB_VARIABLE, read_state

DEVICE_VARIABLE = "ARACHNE_DEVICE"
"""Name of the rank's device in the plan, ``node:index``."""
OUT_VARIABLE = "ARACHNE_STDOUT"
ERR_VARIABLE = "ARACHNE_STDERR"
"""Files that take the rank's output, where it does not go where the launcher's goes."""
ERROR_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Where torch's agent looks for the error of a worker."""
EXIT_LIMIT_S = 10
"""Longest time from a rank's error to its end."""
LAST_WORK_S = 0.1
"""How long what a script made outlives it: gloo's thread lets go of the last tensors in this time.

It holds a lock of the process group meanwhile and waits for Python's, which a DDP model that is destroyed
holds while it waits for the group's: a demo hung at the end of its DDP training (torch 2.13)."""
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "failed to recv",
    "failed to send",
    "remote process exited",
    "timed out waiting",
    "recvvalue failed",
    "wait timeout",
)
"""Words of gloo, NCCL and TCPStore when another rank is gone (torch 2.13)."""
_OUR_FOLDERS = tuple(
    str(Path(__file__).parents[1] / name) for name in ("arachne_runtime", "planner", "launch")
)
_LIBRARY_FOLDERS = ("<", *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")))
_RUNNERS = (__file__, runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap>")


class _Owner(Enum):
    """Whose code a line of a traceback is."""

    USER = auto()
    OURS = auto()
    LIBRARY = auto()


def main() -> NoReturn:
    """Run the command line behind this module's name and exit as the script does."""
    _die_with_parent()
    _redirect()
    try:
        _enter_device()
        _run(sys.argv[1:])
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            _record(exit_)
            _end(_exit_code(exit_))
    except KeyboardInterrupt:
        _end(128 + signal.SIGINT)
    except BaseException as error:
        _record(error)
        _end(1)
    threading._shutdown()  # type: ignore[attr-defined]  # as Python does first: threads and pools come to their end
    _leave(0)


def _die_with_parent() -> None:
    """If the launcher is killed, nobody else would end this rank."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _exit_code(exit_: SystemExit) -> int:
    """As ``python`` does: a text goes to standard error and means 1."""
    if isinstance(exit_.code, int):
        return exit_.code
    print(exit_.code, file=sys.stderr)
    return 1


def _end(code: int) -> NoReturn:
    """Leave soon: a failed rank may hang in its last breath, and its peers wait for it."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(EXIT_LIMIT_S)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """Exit handlers, then out, without the end of the interpreter.

    In that, threads of gloo that still let go of a tensor abort the process, and lose its exit code: SIGABRT,
    "terminate called without an active exception", about once in 30 ranks on a slow device (torch 2.13).
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


def _redirect() -> None:
    for descriptor, variable in ((1, OUT_VARIABLE), (2, ERR_VARIABLE)):
        if path := os.environ.pop(variable, None):
            target = os.open(path, os.O_WRONLY)
            os.dup2(target, descriptor)
            os.close(target)


def _enter_device() -> None:
    lab, device = os.environ.get(LAB_VARIABLE), os.environ.get(DEVICE_VARIABLE)
    if not lab or not device:
        return
    import torch._dynamo  # noqa: F401 - at full speed: on a fifth of a core its import takes a quarter of a minute

    state = read_state(Path(lab))
    take(state.seat(device))
    os.environ.update(state.environment)


def _run(command: list[str]) -> None:
    """As ``python`` runs a script or module: same ``__main__``, ``sys.argv``, first entry of ``sys.path``."""
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path.insert(0, os.getcwd())
        held = runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
        held = runpy.run_path(command[0], run_name="__main__")
    time.sleep(LAST_WORK_S)
    del held


def _record(error: BaseException) -> None:
    """Write torch's error file, with what our launcher wants to know beyond it."""
    file = os.environ.get(ERROR_VARIABLE)
    if not file:
        traceback.print_exception(error)
        return
    whole = "".join(traceback.format_exception(error))
    with suppress(OSError):
        Path(file).with_name("traceback.txt").write_text(whole, encoding="utf-8", errors="backslashreplace")
    extra: dict[str, Any] = {
        "py_callstack": whole,
        "timestamp": str(int(time.time())),
        "time_s": time.time(),
        "kind": _kind(error),
        "text": str(error),
        "notes": list(getattr(error, "__notes__", ())),
        "causes": _causes(error),
        "lines": _lines(error),
        "lost_peer": _lost_peer(error),
    }
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    scratch = Path(file + ".part")
    try:
        scratch.write_text(json.dumps({"message": message}))
        scratch.replace(file)
    except OSError:  # a full disk, perhaps the error itself
        traceback.print_exception(error)


def _kind(error: BaseException) -> str:
    cls = type(error)
    if cls.__module__ in ("builtins", "__main__") or isinstance(error, ArachneError):
        return cls.__qualname__
    return f"{cls.__module__}.{cls.__qualname__}"


def _lines(error: BaseException) -> list[str]:
    """The traceback from the user's script on; without our lines where the fault lies in the user's."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in _RUNNERS]
    whose = [_owner(frame) for frame in frames]
    last = max((i for i, owner in enumerate(whose) if owner is not _Owner.LIBRARY), default=-1)
    ours_hidden = isinstance(error, ArachneError) or (last >= 0 and whose[last] is _Owner.USER)
    shown = [f for f, owner in zip(frames, whose, strict=True) if not (ours_hidden and owner is _Owner.OURS)]
    if isinstance(error, SyntaxError):
        return [line.rstrip() for line in traceback.format_exception_only(error)[:-1]]
    return [line for text in traceback.format_list(shown) for line in text.rstrip().splitlines()]


def _owner(frame: traceback.FrameSummary) -> _Owner:
    if frame.filename.startswith(_OUR_FOLDERS):
        return _Owner.OURS
    return _Owner.LIBRARY if frame.filename.startswith(_LIBRARY_FOLDERS) else _Owner.USER


def _causes(error: BaseException) -> list[str]:
    found: list[str] = []
    while (cause := error.__cause__) is not None and len(found) < 10:
        found.append(f"{_kind(cause)}: {cause}")
        error = cause
    return found


def _lost_peer(error: BaseException) -> bool:
    """Whether the error, or one behind it, only says that another rank is gone."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if any(words in str(current).lower() for words in _LOST_PEER):
            return True
        current = current.__cause__ or current.__context__
    return False


if __name__ == "__main__":
    main()
