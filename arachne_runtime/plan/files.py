"""Documents to and from files: JSON that programs write, TOML that people write."""

import hashlib
from pathlib import Path

import msgspec

from .document import Document


def encode(document: Document) -> bytes:
    """Canonical JSON of a document: the same document gives the same bytes on every machine."""
    return msgspec.json.format(msgspec.json.encode(document, order="deterministic"), indent=2) + b"\n"


def digest(document: Document) -> str:
    """``sha256:`` and the hash of the document's canonical JSON."""
    return "sha256:" + hashlib.sha256(msgspec.json.encode(document, order="deterministic")).hexdigest()


def write(document: Document, path: Path) -> None:
    """Write a document as JSON, whole or not at all."""
    scratch = path.with_name(path.name + ".part")
    scratch.write_bytes(encode(document))
    scratch.replace(path)
