"""Settings that live in Python objects (a schedule, a parameter group) as JSON, and back as they were."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..errors import UsageError

_NUMBER, _PAIRS = "$number", "$pairs"


def as_json(value: Any, where: str) -> Any:
    """Numbers, texts, lists and mappings of such; UsageError for what is none of them, naming ``where``."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {_NUMBER: str(value)}
        case Tensor() if value.dim() == 0:
            return as_json(value.item(), where)
        case Mapping():
            return {_PAIRS: [[as_json(k, where), as_json(v, f"{where}.{k}")] for k, v in value.items()]}
        case Sequence():
            return [as_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise UsageError(
        f"{where} is of type {type(value).__name__}, which a checkpoint cannot hold without pickle; keep "
        "numbers, texts, lists and mappings of them"
    )


def from_json(value: Any, like: Any = None) -> Any:
    """What ``as_json`` was given; tuples, mappings of their own classes and tensors after their ``like``."""
    if isinstance(value, dict):
        if _NUMBER in value:
            return float(value[_NUMBER])
        known = like if isinstance(like, Mapping) else {}
        found = {from_json(k): from_json(v, known.get(from_json(k))) for k, v in value[_PAIRS]}
        return type(like)(found) if isinstance(like, dict) else found
    if isinstance(value, list):
        known_items = list(like) if isinstance(like, list | tuple) else []
        items = [from_json(v, known_items[i] if i < len(known_items) else None) for i, v in enumerate(value)]
        return tuple(items) if isinstance(like, tuple) else items
    return like.new_tensor(value) if isinstance(like, Tensor) else value
