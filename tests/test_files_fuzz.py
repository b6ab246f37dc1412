"""Whatever a file holds, a reader gives a document or raises InvalidFileError, and nothing else."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachne_runtime.errors import InvalidFileError
from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.files import encode, read_cluster, read_plan
from tests.documents import CLUSTER, CLUSTER_TOML, PLAN, written
from tests.test_files import KINDS, in_one_folder

JUNK: list[Any] = [
    None, True, 0, -1, 1, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "a:0",
    "x:y:z", "\ud800", "\0", [], [0], [1, 2], ["a"], {}, {"a": 1}, [[[[]]]],
]  # fmt: skip


def mutated(raw: Any, rng: random.Random) -> Any:
    """A copy with one member somewhere replaced, removed, renamed, repeated or swapped."""
    fresh = copy.deepcopy(raw)
    places = list(_containers(fresh))
    place = rng.choice(places)
    keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
    if not keys:
        return fresh
    key = rng.choice(keys)
    match rng.randrange(5):
        case 0:
            place[key] = rng.choice(JUNK)
        case 1:
            del place[key]
        case 2 if isinstance(place, dict):
            place[rng.choice(["name", "stages", "x", "", "\ud800", "a b", key + "s"])] = place.pop(key)
        case 2:
            place.append(copy.deepcopy(place[key]))
        case 3:
            place[key] = copy.deepcopy(rng.choice(places))
        case 4:
            other = rng.choice(keys)
            place[key], place[other] = place[other], place[key]
    return fresh


def _containers(value: Any) -> Any:
    if isinstance(value, dict | list):
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from _containers(item)


def survives(reader: Any, path: Path) -> bool:
    """Whether the document was refused in our words; anything else than a refusal is raised."""
    try:
        document = reader(path)
    except InvalidFileError as error:
        refused = error
    else:
        encode(document)
        return True
    assert refused.problems
    for problem in refused.problems:
        assert problem.path.startswith("$")
        assert problem.message
    assert str(refused).encode(errors="backslashreplace")
    return False


@pytest.mark.parametrize("kind", [*KINDS, "cluster"])
def test_mutated_documents_end_in_invalid_file_error_or_are_valid(kind, tmp_path):
    reader, raw, _ = (read_cluster, CLUSTER, Cluster) if kind == "cluster" else KINDS[kind]
    rng = random.Random(kind)
    outcomes = set()
    for _ in range(600):
        spoilt = raw
        for _ in range(rng.choice((1, 1, 2, 5))):
            spoilt = mutated(spoilt, rng)
        outcomes.add(survives(reader, written(tmp_path, spoilt)))
    assert outcomes == {True, False}


@pytest.mark.parametrize(("name", "text", "reader"), [
    ("plan.json", json.dumps(PLAN), read_plan), ("cluster.toml", CLUSTER_TOML, read_cluster),
])  # fmt: skip
def test_mutated_bytes_end_in_invalid_file_error_or_are_valid(name, text, reader, tmp_path):
    rng = random.Random(name)
    for _ in range(600):
        content = bytearray(text.encode())
        for _ in range(rng.choice((1, 2, 8))):
            at = rng.randrange(len(content))
            match rng.randrange(3):
                case 0:
                    content[at] = rng.randrange(256)
                case 1:
                    del content[at : at + rng.randrange(20)]
                case 2:
                    content[at:at] = content[at : at + rng.randrange(40)]
        survives(reader, written(tmp_path, bytes(content), name))


@settings(in_one_folder, max_examples=50)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: (
    st.lists(inner) | st.dictionaries(st.text(), inner)
)))  # fmt: skip
def test_any_json_at_all(tmp_path, value):
    assert not survives(read_plan, written(tmp_path, json.dumps(value)))
    assert not survives(read_plan, written(tmp_path, {"format": "arachne.plan/1", "pipelines": value}))


@in_one_folder
@given(st.binary(max_size=200))
def test_any_bytes_at_all(tmp_path, content):
    assert not survives(read_plan, written(tmp_path, content))
    assert not survives(read_cluster, written(tmp_path, content, "cluster.toml"))
