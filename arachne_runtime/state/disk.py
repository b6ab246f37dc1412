"""Files of a checkpoint: written whole or not at all, read with their checksums; nothing is unpickled."""

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import torch
from torch import Tensor

from ..errors import InvalidFileError, Problem, UnsupportedEnvironmentError
from ..plan.document import Document
from ..units import Bytes

T = TypeVar("T", bound=Document)

ATTEMPT = ".part-"
"""How the names of what is no checkpoint yet, or no more, begin."""
_HEADER_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, little-endian."""


class Signed(Document, frozen=True, kw_only=True):
    """What a JSON file of a checkpoint holds: its form, and a body with its checksum."""

    format: Literal["arachne.checkpoint/1"] = "arachne.checkpoint/1"
    sha256: str
    """Of the body's bytes."""
    body: msgspec.Raw


class TensorFile(Document, frozen=True, kw_only=True):
    """A safetensors file."""

    name: str
    num_bytes: Bytes
    header_sha256: str
    """Of its header; tensors have checksums of their own."""


def write_document(document: Document, path: Path) -> None:
    """Write JSON under its checksum, so that a reader sees all of it or nothing, also after a power cut."""
    body = msgspec.json.encode(document)
    signed = Signed(sha256=hashlib.sha256(body).hexdigest(), body=msgspec.Raw(body))
    form = {"format": signed.format, "sha256": signed.sha256, "body": signed.body}
    part = path.with_name(path.name + ".part")
    part.write_bytes(msgspec.json.encode(form))
    sync(part)
    part.replace(path)
    sync(path.parent)


def read_document(path: Path, kind: type[T]) -> T:
    """InvalidFileError for a file that is missing, altered, cut short or none of ours."""
    try:
        signed = msgspec.json.decode(path.read_bytes(), type=Signed)
        if hashlib.sha256(signed.body).hexdigest() != signed.sha256:
            raise damaged(path, "does not match its checksum: it was altered")
        return msgspec.json.decode(signed.body, type=kind)
    except OSError as error:
        raise damaged(path, f"cannot be read: {error}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise damaged(path, f"is no document of a checkpoint: {error}") from error


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> TensorFile:
    """Write tensors of the host, and wait until they are on the disk."""
    _safetensors("safetensors.torch").save_file(dict(tensors), path)
    sync(path)
    return TensorFile(name=path.name, num_bytes=path.stat().st_size, header_sha256=_header_checksum(path))


def refuse_size(folder: Path, file: TensorFile) -> None:
    """InvalidFileError for a file that is missing, or shorter or longer than it was written."""
    path = folder / file.name
    found = path.stat().st_size if path.is_file() else None
    if found != file.num_bytes:
        told = "is missing" if found is None else f"has {found} bytes, and was written with {file.num_bytes}"
        raise damaged(path, told)


@contextmanager
def opened(folder: Path, file: TensorFile) -> Iterator[Any]:
    """A handle of safetensors on a file whose header is as it was written."""
    path = folder / file.name
    refuse_size(folder, file)
    if _header_checksum(path) != file.header_sha256:
        raise damaged(path, "does not match the checksum of its header: it was altered")
    library = _safetensors("safetensors")
    try:
        with library.safe_open(path, framework="pt") as handle:
            yield handle
    except (library.SafetensorError, OSError) as error:
        raise damaged(path, f"cannot be read: {error}") from error


def checksum(tensor: Tensor) -> str:
    """Of its bytes, row by row."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()


def damaged(path: Path, fault: str) -> InvalidFileError:
    """An error that names a file, with the way out."""
    way_out = "remove its folder to go on from the checkpoint before"
    return InvalidFileError(str(path), [Problem("$", f"{fault}; {way_out}")])


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(folder: Path) -> None:
    """Remove a folder; a crash in the middle of it leaves one that no reader takes for a checkpoint."""
    gone = folder.with_name(f"{ATTEMPT}removed-{folder.name}")
    folder.replace(gone)
    shutil.rmtree(gone)


def remove_attempts(folder: Path) -> None:
    """What saves left behind that did not come to their end."""
    for path in folder.glob(f"{ATTEMPT}*"):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def refuse_no_safetensors() -> None:
    """UnsupportedEnvironmentError where the library that writes tensors is not installed."""
    _safetensors("safetensors.torch")


def _header_checksum(path: Path) -> str:
    with path.open("rb") as file:
        length = file.read(_HEADER_LENGTH_BYTES)
        size = min(int.from_bytes(length, "little"), path.stat().st_size)
        return hashlib.sha256(length + file.read(size)).hexdigest()


def _safetensors(module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise UnsupportedEnvironmentError(
            "checkpoints need safetensors, which is not installed: pip install 'arachne-hetero[checkpoints]'"
        ) from error
