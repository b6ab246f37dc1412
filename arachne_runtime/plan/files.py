"""Documents to and from files: JSON that programs write, TOML that people write.

Reading takes three passes, and each lists all it finds: ``format``, then fields and types, then the rules.
"""

import hashlib
import json
import re
import stat
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from .. import __version__
from ..errors import InvalidFileError, Problem
from .cluster import Cluster
from .document import Document
from .model import ModelSpec
from .plan import Plan
from .profile import Profile
from .rules import check_cluster, check_model, check_plan, check_profile
from .walk import RawObject, choices, said, walk

D = TypeVar("D", bound=Document)

MAX_FILE_BYTES = 256 * 2**20
"""No document comes near (a plan of 4,096 devices has 0.5 MB)."""
_FORMAT = re.compile(r"arachne\.([a-z_]+)/([0-9]{1,6})")
_VERSION = re.compile(r"[0-9]+(\.[0-9]+)*[a-z0-9.+]*")


def read_plan(path: Path | str, *, cluster: Cluster | None = None, model: ModelSpec | None = None) -> Plan:
    """A plan from its JSON file; rules on devices and blocks need ``cluster`` and ``model``.

    Raises InvalidFileError with all problems, as all readers here do.
    """
    return read(path, Plan, lambda plan: check_plan(plan, cluster=cluster, model=model))


def read_cluster(path: Path | str) -> Cluster:
    """A cluster from its TOML file."""
    return read(path, Cluster, check_cluster)


def read_model(path: Path | str) -> ModelSpec:
    """A model from its JSON file."""
    return read(path, ModelSpec, check_model)


def read_profile(path: Path | str) -> Profile:
    """A profile from its JSON file."""
    return read(path, Profile, check_profile)


def read(path: Path | str, kind: type[D], check: Callable[[D], Iterable[Problem]] = lambda document: ()) -> D:
    """A document of any kind: TOML where the file's name ends so, else JSON; ``check`` gives its rules."""
    path, source = Path(path), str(path)
    text = _text(path)
    raw = _parse_toml(source, text) if path.suffix == ".toml" else _parse_json(source, text)
    _refuse(source, _format_problems(raw, kind))
    ready, faults = walk(raw, kind)
    _refuse(source, faults)
    try:
        document = msgspec.convert(ready, kind)
    except msgspec.ValidationError as error:  # a type the walk does not know yet: still no traceback
        raise InvalidFileError(source, [Problem("$", str(error))]) from error
    _refuse(source, check(document))
    return document


def encode(document: Document) -> bytes:
    """Canonical JSON of a document: the same document gives the same bytes on every machine."""
    return msgspec.json.format(_canonical(document), indent=2) + b"\n"


def digest(document: Document) -> str:
    """``sha256:`` and the hash of the document's canonical JSON."""
    return "sha256:" + hashlib.sha256(_canonical(document)).hexdigest()


def write(document: Document, path: Path) -> None:
    """Write a document as JSON, whole or not at all."""
    write_whole(path, encode(document))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that a reader sees as it was or as it will be, never in between.

    A pipe or a device is written to: replaced, ``/dev/null`` would be a file from then on, for everyone.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    scratch = path.with_name(path.name + ".part")
    scratch.write_bytes(content)
    scratch.replace(path)


def _canonical(document: Document) -> bytes:
    """Defaults are left out, except ``format``: a reader needs it before all else."""
    fields = msgspec.to_builtins(document, order="deterministic")
    form = getattr(document, "format", None)
    return msgspec.json.encode({"format": form, **fields} if form else fields)


def _refuse(source: str, problems: Iterable[Problem]) -> None:
    if found := tuple(problems):
        raise InvalidFileError(source, found)


def _text(path: Path) -> str:
    source, content = str(path), _content(path)
    if len(content) > MAX_FILE_BYTES:
        raise InvalidFileError(
            source, [Problem("$", f"is larger than {MAX_FILE_BYTES} bytes; not a document")]
        )
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at = f"is not UTF-8 text: byte {error.start} is 0x{content[error.start]:02x}"
        raise InvalidFileError(source, [Problem("$", at)]) from None
    if not text.strip():
        raise InvalidFileError(source, [Problem("$", "is empty")])
    return text


def _content(path: Path) -> bytes:
    """Its bytes, one more than the most at most; a pipe, which would be waited on for ever, is refused."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            with path.open("rb") as file:
                return file.read(MAX_FILE_BYTES + 1)
        folder = stat.S_ISDIR(mode)
        fault = "is a directory; name the file inside it" if folder else "is a pipe or a device, not a file"
    except FileNotFoundError:
        fault = "no such file"
    except (OSError, ValueError) as error:
        fault = f"cannot be read: {error}"
    raise InvalidFileError(str(path), [Problem("$", fault)])


def _parse_json(source: str, text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=RawObject.from_pairs)
    except json.JSONDecodeError as error:
        problem = f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
    except RecursionError:
        problem = "is nested too deep to be a document"
    except ValueError:
        problem = "is not JSON: holds a number of thousands of digits"
    raise InvalidFileError(source, [Problem("$", problem)])


def _parse_toml(source: str, text: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        problem = f"is not TOML: {error}"
    except RecursionError:
        problem = "is nested too deep to be a document"
    except ValueError:
        problem = "is not TOML: holds a number of thousands of digits, or no date"
    raise InvalidFileError(source, [Problem("$", problem)])


def _format_problems(raw: Any, kind: type[Document]) -> tuple[Problem, ...]:
    """Pass one: is this the document asked for, in a version that this release reads?"""
    expected = _format_of(kind)
    if not isinstance(raw, dict):
        return (Problem("$", f"expected an object, got {said(raw)}"),)
    if expected is None:
        return ()
    form = raw.get("format")
    if form == expected:
        return ()
    return (Problem("$.format", _format_fault(form, expected, raw)),)


def _format_of(kind: type[Document]) -> str | None:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        if field.name == "format" and isinstance(field.type, inspect.LiteralType):
            return choices(field.type)[0]
    return None


def _format_fault(form: Any, expected: str, raw: dict[str, Any]) -> str:
    if form is None:
        return f'missing; expected "{expected}"'
    found, wanted = _FORMAT.fullmatch(form) if isinstance(form, str) else None, _FORMAT.fullmatch(expected)
    if found is None or wanted is None:
        return f"unknown format {said(form)}; expected {expected}"
    if found[1] != wanted[1]:
        return f"is {form}, not a {wanted[1]}; expected {expected}"
    if int(found[2]) < int(wanted[2]):
        return f"{form} is no longer read; this version ({__version__}) reads {expected}"
    return (
        f"{form} is newer than this version ({__version__}), which reads {expected}; "
        f"install it: pip install '{_requirement(raw)}'"
    )


def _requirement(raw: dict[str, Any]) -> str:
    """What to install to read a newer document: the release that wrote it, where it says so."""
    made_by = raw.get("made_by")
    version = made_by.get("version") if isinstance(made_by, dict) else None
    if isinstance(version, str) and _VERSION.fullmatch(version) and version != __version__:
        return f"arachne-hetero>={version}"
    return f"arachne-hetero>{__version__}"
