"""Folders that ranks will write into, tried before any rank starts."""

import tempfile
from pathlib import Path

from arachne_runtime.errors import UnsupportedEnvironmentError


def make_writable(folder: Path | None, option: str) -> None:
    """Make a folder and write a file there that vanishes; UnsupportedEnvironmentError names the option."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"arachne")
    except OSError as error:
        raise UnsupportedEnvironmentError(
            f"{option} {folder}: nothing can be written there ({error.strerror}); give another folder"
        ) from error
