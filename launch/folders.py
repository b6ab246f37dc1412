"""Folders and files that will be written, tried before any work is done for them."""

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


def check_writable(file: Path | None, option: str) -> None:
    """Nothing is made that stays; UnsupportedEnvironmentError names the option where no such file can be."""
    if file is None:
        return
    if file.is_dir():
        raise UnsupportedEnvironmentError(f"{option} {file}: is a folder; name a file in it")
    if file.exists() and not file.is_file():  # a pipe or a device is written as it is
        return
    try:
        with tempfile.TemporaryFile(dir=file.parent):
            return
    except OSError as error:
        raise UnsupportedEnvironmentError(
            f"{option} {file}: no file can be written in {file.parent} ({error.strerror}); "
            f"make that folder, or give another"
        ) from error
