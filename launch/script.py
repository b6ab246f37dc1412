"""What the words behind ``--`` mean: a training script, or a module, with its arguments."""

from collections.abc import Sequence
from pathlib import Path

from arachne_runtime.errors import UsageError


def script_command(command: Sequence[str]) -> tuple[str, ...]:
    """``train.py ARGS`` or ``-m module ARGS``; a ``python`` in front is dropped."""
    words = list(command)
    if words and Path(words[0]).name.startswith("python"):
        words = words[1:]
    if not words or (words[0] == "-m" and len(words) == 1):
        raise UsageError("no script to run; give it behind --: train.py ARGS, or -m package.module ARGS")
    if words[0] != "-m" and not Path(words[0]).is_file():
        raise UsageError(f"no script {words[0]!r}; give a Python file, or -m package.module")
    return tuple(words)
