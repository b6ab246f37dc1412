"""Holds a raw document (what a JSON or TOML parser gives) against record types and finds every fault.

msgspec stops at its first fault; this goes on, and gives each its address. It knows no document by name.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from typing import Any

from msgspec import inspect

from ..errors import Problem

MAX_INTEGER = 2**63 - 1
"""Larger integers do not survive other JSON readers, nor NumPy."""
_LARGEST_EXACT_FLOAT = 2**53
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class RawObject(dict[str, Any]):
    """A JSON object that remembers which keys came twice."""

    repeated: tuple[str, ...] = ()

    @classmethod
    def from_pairs(cls, pairs: list[tuple[str, Any]]) -> "RawObject":
        """Hook for ``json.loads(object_pairs_hook=...)``."""
        raw = cls(pairs)
        if len(raw) < len(pairs):
            times = Counter(key for key, _ in pairs)
            raw.repeated = tuple(key for key in raw if times[key] > 1)
        return raw


def walk(raw: Any, kind: type) -> tuple[Any, tuple[Problem, ...]]:
    """``raw`` made ready for ``msgspec.convert(..., kind)``, and every fault found in it.

    Whole floats become integers where integers are wanted (``9.1e9`` bytes). Only without faults is the first
    result of use.
    """
    walker = _Walker()
    ready = walker.visit(raw, inspect.type_info(kind), "$")
    return ready, tuple(walker.problems)


def child(path: str, key: str | int) -> str:
    """Address of a member: ``$.pipelines``, ``$.pipelines[0]``, ``$.peak_bytes["a-0:0"]``."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if _PLAIN_KEY.fullmatch(key) else f"{path}[{json.dumps(key)}]"


def said(value: object) -> str:
    """A raw value in a few words, however large or deep it is."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > 64:
        return "an integer beyond 64 bits"
    if isinstance(value, int | float):
        return f"{value}"
    if isinstance(value, str):
        return ascii(value) if len(value) <= 40 else f"{value[:40]!a}..."
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, Mapping):
        return "an object"
    if value is None:
        return "null"
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"


def did_you_mean(name: str, known: list[str]) -> str:
    """``did you mean 'share'?`` where a known name is near, else all known names."""
    from difflib import get_close_matches  # only a faulty document pays for it

    near = get_close_matches(name[:80], known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


class _Walker:
    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def fault(self, path: str, message: str) -> None:
        self.problems.append(Problem(path, message))

    def wrong(self, path: str, wanted: str, value: object) -> None:
        self.fault(path, f"expected {wanted}, got {said(value)}")

    def visit(self, value: Any, kind: inspect.Type, path: str) -> Any:
        """Dispatch on the wanted type."""
        match kind:
            case inspect.StructType():
                return self.struct(value, kind, path)
            case inspect.DictType():
                return self.mapping(value, kind, path)
            case inspect.VarTupleType() | inspect.ListType():
                return self.sequence(value, kind.item_type, path)
            case inspect.TupleType():
                return self.row(value, kind, path)
            case inspect.UnionType():
                return self.union(value, kind, path)
            case inspect.LiteralType() | inspect.EnumType():
                return self.choice(value, kind, path)
            case inspect.FloatType():
                return self.number(value, path)
            case inspect.IntType():
                return self.integer(value, path)
            case inspect.StrType():
                return self.text(value, path)
            case inspect.BoolType():
                return self.boolean(value, path)
        raise AssertionError(f"no document may hold a {type(kind).__name__}")

    def struct(self, value: Any, kind: inspect.StructType, path: str) -> Any:
        if not isinstance(value, Mapping):
            return self.wrong(path, "an object", value)
        self.repeats(value, path)
        fields = {field.encode_name: field for field in kind.fields}
        for key in value:
            if key not in fields:
                self.fault(child(path, key), f"unknown field; {did_you_mean(key, list(fields))}")
        ready = {}
        for name, field in fields.items():
            if name in value:
                ready[name] = self.visit(value[name], field.type, child(path, name))
            elif field.required:
                self.fault(child(path, name), f"missing; expected {wanted(field.type)}")
        return ready

    def mapping(self, value: Any, kind: inspect.DictType, path: str) -> Any:
        if not isinstance(value, Mapping):
            return self.wrong(path, "an object", value)
        self.repeats(value, path)
        for key in value:
            self.text(key, child(path, key))
        return {key: self.visit(item, kind.value_type, child(path, key)) for key, item in value.items()}

    def repeats(self, value: Mapping[str, Any], path: str) -> None:
        for key in value.repeated if isinstance(value, RawObject) else ():
            self.fault(child(path, key), "given more than once; keep one")

    def sequence(self, value: Any, kind: inspect.Type, path: str) -> Any:
        if not isinstance(value, list):
            return self.wrong(path, "a list", value)
        return [self.visit(item, kind, child(path, i)) for i, item in enumerate(value)]

    def row(self, value: Any, kind: inspect.TupleType, path: str) -> Any:
        if not isinstance(value, list) or len(value) != len(kind.item_types):
            return self.wrong(path, wanted(kind), value)
        pairs = zip(value, kind.item_types, strict=True)
        return [self.visit(item, item_kind, child(path, i)) for i, (item, item_kind) in enumerate(pairs)]

    def union(self, value: Any, kind: inspect.UnionType, path: str) -> Any:
        """Documents only ever say "this, or nothing"."""
        if value is None and kind.includes_none:
            return None
        (only,) = (t for t in kind.types if not isinstance(t, inspect.NoneType))
        return self.visit(value, only, path)

    def choice(self, value: Any, kind: inspect.LiteralType | inspect.EnumType, path: str) -> Any:
        allowed = choices(kind)
        if not isinstance(value, str):
            return self.wrong(path, wanted(kind), value)
        if value not in allowed:
            self.fault(path, f"{said(value)} is not allowed; allowed: {', '.join(allowed)}")
        return value

    def number(self, value: Any, path: str) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return self.wrong(path, "a number", value)
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            return self.fault(path, f"{said(value)}; write it as a float, or in a larger unit")
        if not math.isfinite(value):
            return self.fault(path, f"expected a finite number, got {said(value)}")
        return float(value)

    def integer(self, value: Any, path: str) -> Any:
        if isinstance(value, float) and value.is_integer() and abs(value) <= _LARGEST_EXACT_FLOAT:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            return self.wrong(path, "an integer", value)
        if abs(value) > MAX_INTEGER:
            return self.fault(path, f"expected an integer of at most 64 bits, got {said(value)}")
        return value

    def text(self, value: Any, path: str) -> Any:
        if not isinstance(value, str):
            return self.wrong(path, "text", value)
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            return self.fault(path, f"{said(value)} holds half a surrogate pair, which is no letter")
        return value

    def boolean(self, value: Any, path: str) -> Any:
        return value if isinstance(value, bool) else self.wrong(path, "true or false", value)


def choices(kind: inspect.LiteralType | inspect.EnumType) -> list[str]:
    """The texts that a closed set of values allows."""
    values = kind.values if isinstance(kind, inspect.LiteralType) else list(kind.cls)
    return [str(v.value if isinstance(v, Enum) else v) for v in values]


def wanted(kind: inspect.Type) -> str:
    """What a type asks for, in words."""
    match kind:
        case inspect.LiteralType() | inspect.EnumType():
            return f"one of {', '.join(choices(kind))}"
        case inspect.UnionType():
            return wanted(next(t for t in kind.types if not isinstance(t, inspect.NoneType)))
        case inspect.TupleType():
            return f"a list of {len(kind.item_types)}"
        case inspect.VarTupleType() | inspect.ListType():
            return "a list"
        case inspect.IntType():
            return "an integer"
        case inspect.FloatType():
            return "a number"
        case inspect.StrType():
            return "text"
        case inspect.BoolType():
            return "true or false"
    return "an object"
