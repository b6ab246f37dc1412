"""Readers: every fault at once, each with its address; never anything but InvalidFileError."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from arachne_runtime import __version__
from arachne_runtime.errors import ExitCode, InvalidFileError
from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.document import Document
from arachne_runtime.plan.files import (
    MAX_FILE_BYTES,
    digest,
    encode,
    read,
    read_cluster,
    read_model,
    read_plan,
    read_profile,
    write,
    write_whole,
)
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.profile import Profile
from tests.documents import CLUSTER, CLUSTER_TOML, MODEL, PLAN, PROFILE, REMOVED, changed, written
from tests.strategies import clusters, models, settings_of_a_plan

KINDS = {
    "plan": (read_plan, PLAN, Plan),
    "model": (read_model, MODEL, ModelSpec),
    "profile": (read_profile, PROFILE, Profile),
}
in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def problems_of(path: Path, reader: Any = read_plan) -> dict[str, str]:
    with pytest.raises(InvalidFileError) as caught:
        reader(path)
    assert caught.value.source == str(path)
    assert caught.value.exit_code is ExitCode.INVALID_FILE
    return {problem.path: problem.message for problem in caught.value.problems}


# --- round trips


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_reads_writes_and_reads_the_same(kind, tmp_path):
    reader, raw, _ = KINDS[kind]
    first = reader(written(tmp_path, raw))
    write(first, tmp_path / "again.json")
    assert reader(tmp_path / "again.json") == first
    assert (tmp_path / "again.json").read_bytes() == encode(first)
    assert json.loads(encode(first))["format"] == f"arachne.{kind}/1"


def test_a_path_may_be_text(tmp_path):
    assert read_plan(str(written(tmp_path, PLAN))) == read_plan(written(tmp_path, PLAN))


def test_a_cluster_reads_from_toml(tmp_path):
    cluster = read_cluster(written(tmp_path, CLUSTER_TOML, "cluster.toml"))
    assert cluster == msgspec.convert(CLUSTER, Cluster)
    assert cluster.devices == ("a:0", "a:1", "a:2", "a:3", "v-0:0", "v-0:1", "v-1:0", "v-1:1")


@in_one_folder
@given(settings_of_a_plan())
def test_any_valid_plan_survives_the_file(tmp_path, setting):
    cluster, model, plan = setting
    write(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json", cluster=cluster, model=model) == plan


@in_one_folder
@given(clusters(), models(experts=True))
def test_clusters_and_models_survive_the_file(tmp_path, cluster, model):
    write(cluster, tmp_path / "cluster.json")
    write(model, tmp_path / "model.json")
    assert read_cluster(tmp_path / "cluster.json") == cluster
    assert read_model(tmp_path / "model.json") == model


def test_what_is_left_out_has_its_default(tmp_path):
    plan = read_plan(
        written(tmp_path, changed(PLAN, {"schedule": REMOVED, "predicted": REMOVED, "made_by": REMOVED}))
    )
    stage = plan.pipelines[1].stages[0]
    assert (plan.schedule, plan.predicted, plan.made_by) == ("1f1b", None, None)
    assert (stage.recompute, stage.zero, stage.expert_parallel, stage.expert_tensor) == (False, 0, 1, 1)


def test_the_digest_does_not_depend_on_the_order_of_keys(tmp_path):
    turned = changed(PLAN, {"predicted.peak_bytes": {"v-0:0": 1000, "a:0": 9.1e9}})
    assert digest(read_plan(written(tmp_path, PLAN))) == digest(read_plan(written(tmp_path, turned)))
    other = changed(PLAN, {"model": "small"})
    assert digest(read_plan(written(tmp_path, PLAN))) != digest(read_plan(written(tmp_path, other)))


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = written(tmp_path, "old")
    (tmp_path / "plan.json.part").mkdir()
    plan = msgspec.convert(changed(PLAN, {"predicted": REMOVED}), Plan)
    with pytest.raises(OSError):
        write(plan, path)
    assert path.read_text() == "old"


def test_a_byte_order_mark_is_no_fault(tmp_path):
    assert read_plan(written(tmp_path, b"\xef\xbb\xbf" + json.dumps(PLAN).encode())).model == "tiny"


# --- pass one: what is it?


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        (" \n\t", "is empty"),
        (b"\xff\xfe\x00", "is not UTF-8 text: byte 0 is 0xff"),
        ("{", "is not JSON: Expecting property name enclosed in double quotes at line 1, column 2"),
        ('{"format": "arachne.plan/1"} x', "is not JSON: Extra data"),
        ("[]", "expected an object, got a list of 0"),
        ("null", "expected an object, got null"),
        ('"arachne.plan/1"', "expected an object, got 'arachne.plan/1'"),
        ("[" * 100_000, "is nested too deep"),
        ('{"a":' * 100_000, "is nested too deep"),
        ("9" * 5000, "holds a number of thousands of digits"),
    ],
)
def test_what_is_no_document_is_one_problem(content, words, tmp_path):
    problems = problems_of(written(tmp_path, content))
    assert list(problems) == ["$"]
    assert words in problems["$"]


@pytest.mark.parametrize(
    "content", ["a = ", "a = 1\na = 2", "a = " + "[" * 100_000, "a = " + "9" * 5000, "\0"]
)
def test_broken_toml_is_one_problem(content, tmp_path):
    assert list(problems_of(written(tmp_path, content, "c.toml"), read_cluster)) == ["$"]


def test_files_that_cannot_be_read(tmp_path):
    assert problems_of(tmp_path / "none.json") == {"$": "no such file"}
    assert problems_of(tmp_path) == {"$": "is a directory; name the file inside it"}
    assert "cannot be read" in problems_of(Path("plan\0.json"))["$"]
    assert "is a pipe or a device" in problems_of(Path("/dev/zero"))["$"]
    os.mkfifo(tmp_path / "pipe")  # nobody writes: opening it would wait for ever
    assert "is a pipe or a device" in problems_of(tmp_path / "pipe")["$"]
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    assert "is larger than" in problems_of(tmp_path / "large")["$"]
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    assert "cannot be read" in problems_of(tmp_path / "loop.json")["$"]


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (REMOVED, 'missing; expected "arachne.plan/1"'),
        (None, 'missing; expected "arachne.plan/1"'),
        (7, "unknown format 7; expected arachne.plan/1"),
        ("plan", "unknown format 'plan'; expected arachne.plan/1"),
        ("arachne.plan/1\n", r"unknown format 'arachne.plan/1\n'; expected arachne.plan/1"),
        ("arachne.model/1", "is arachne.model/1, not a plan; expected arachne.plan/1"),
        ("arachne.plan/0", "arachne.plan/0 is no longer read; this version (0.1.0) reads arachne.plan/1"),
    ],
)
def test_the_format_comes_first(form, words, tmp_path):
    raw = changed(PLAN, {"format": form, "global_batch": "no number"})
    assert problems_of(written(tmp_path, raw)) == {"$.format": words}


def test_a_newer_format_names_the_version_to_install(tmp_path):
    raw = changed(PLAN, {"format": "arachne.plan/3", "made_by.version": "0.9.1", "something": "new"})
    assert problems_of(written(tmp_path, raw)) == {
        "$.format": "arachne.plan/3 is newer than this version (0.1.0), which reads arachne.plan/1; "
        "install it: pip install 'arachne-hetero>=0.9.1'"
    }
    for version in ("'; rm", __version__):  # this version cannot be the one that reads it
        raw = changed(PLAN, {"format": "arachne.plan/2", "made_by.version": version})
        assert "pip install 'arachne-hetero>0.1.0'" in problems_of(written(tmp_path, raw))["$.format"]


# --- pass two: fields and types

FAULTS: list[tuple[str, Any, str, str]] = [
    ("model", 3, "$.model", "expected text, got 3"),
    ("model", None, "$.model", "expected text, got null"),
    ("model", REMOVED, "$.model", "missing; expected text"),
    ("model", "\ud800", "$.model", r"'\ud800' holds half a surrogate pair, which is no letter"),
    ("global_batch", "32", "$.global_batch", "expected an integer, got '32'"),
    ("global_batch", 32.5, "$.global_batch", "expected an integer, got 32.5"),
    ("global_batch", True, "$.global_batch", "expected an integer, got true"),
    ("global_batch", float("nan"), "$.global_batch", "expected an integer, got nan"),
    ("global_batch", float("inf"), "$.global_batch", "expected an integer, got inf"),
    ("global_batch", 1e300, "$.global_batch", "expected an integer, got 1e+300"),
    (
        "global_batch",
        2**63,
        "$.global_batch",
        "expected an integer of at most 64 bits, got 9223372036854775808",
    ),
    (
        "global_batch",
        10**400,
        "$.global_batch",
        "expected an integer of at most 64 bits, got an integer beyond 64",
    ),
    ("global_batch", [[[]]], "$.global_batch", "expected an integer, got a list of 1"),
    (
        "schedule",
        "1fb1",
        "$.schedule",
        "'1fb1' is not allowed; allowed: gpipe, 1f1b, interleaved_1f1b, zero_bubble",
    ),
    ("schedule", 1, "$.schedule", "expected one of gpipe, 1f1b, interleaved_1f1b, zero_bubble, got 1"),
    ("pipelines", {}, "$.pipelines", "expected a list, got an object"),
    ("pipelines[1]", [], "$.pipelines[1]", "expected an object, got a list of 0"),
    (
        "pipelines[1].stages[0].layers",
        [0],
        "$.pipelines[1].stages[0].layers",
        "expected a list of 2, got a list of 1",
    ),
    (
        "pipelines[1].stages[0].layers",
        "05",
        "$.pipelines[1].stages[0].layers",
        "expected a list of 2, got '05'",
    ),
    ("pipelines[1].stages[0].layers", [0, "5"], "$.pipelines[1].stages[0].layers[1]", "an integer, got '5'"),
    (
        "pipelines[1].stages[0].recompute",
        1,
        "$.pipelines[1].stages[0].recompute",
        "expected true or false, got 1",
    ),
    ("pipelines[1].microbatch", 4, "$.pipelines[1].microbatch", "unknown field; did you mean 'micro_batch'?"),
    (
        "pipelines[1].colour",
        4,
        "$.pipelines[1].colour",
        "unknown field; known: micro_batches, micro_batch, stages",
    ),
    ("predicted.iteration_s", float("nan"), "$.predicted.iteration_s", "expected a finite number, got nan"),
    ("predicted.iteration_s", float("-inf"), "$.predicted.iteration_s", "expected a finite number, got -inf"),
    (
        "predicted.iteration_s",
        10**30,
        "$.predicted.iteration_s",
        "an integer beyond 64 bits; write it as a float",
    ),
    ("predicted.iteration_s", True, "$.predicted.iteration_s", "expected a number, got true"),
    ("predicted", [], "$.predicted", "expected an object, got a list of 0"),
    ('predicted.peak_bytes["a:0"]', "1", '$.predicted.peak_bytes["a:0"]', "expected an integer, got '1'"),
    ("predicted.peak_bytes", [1], "$.predicted.peak_bytes", "expected an object, got a list of 1"),
]


@pytest.mark.parametrize(("address", "value", "path", "words"), FAULTS, ids=map(str, range(len(FAULTS))))
def test_faults_of_type_have_their_address(address, value, path, words, tmp_path):
    problems = problems_of(written(tmp_path, changed(PLAN, {address: value})))
    assert list(problems) == [path]
    assert words in problems[path]


def test_all_faults_come_at_once(tmp_path):
    spoilt = copy.deepcopy(PLAN)
    expected = []
    for address, value, path, _ in FAULTS:
        if value is not REMOVED and address.split("[")[0].split(".")[0] not in {"pipelines", "predicted"}:
            spoilt = changed(spoilt, {address: value})
            expected.append(path)
    spoilt = changed(spoilt, {"pipelines[0].stages[1].layers": [1], "pipelines[1].colour": 1, "mod": 2})
    spoilt = changed(spoilt, {"pipelines[0].micro_batch": REMOVED})
    assert set(problems_of(written(tmp_path, spoilt))) == {
        *expected,
        "$.pipelines[0].stages[1].layers",
        "$.pipelines[0].micro_batch",
        "$.pipelines[1].colour",
        "$.mod",
    }


def test_keys_given_twice(tmp_path):
    text = (
        json.dumps(PLAN)
        .replace('"seed": 7', '"seed": 7, "seed": 8')
        .replace('"a:0": 9', '"a:0": 1, "a:0": 9')
    )
    assert problems_of(written(tmp_path, text)) == {
        "$.made_by.seed": "given more than once; keep one",
        '$.predicted.peak_bytes["a:0"]': "given more than once; keep one",
    }


def test_a_value_is_quoted_in_few_words_however_large(tmp_path):
    deep: Any = []
    for _ in range(400):
        deep = [deep]
    for value in ("x" * 10_000, deep, {"a": deep}, 10**4000):
        (message,) = problems_of(written(tmp_path, changed(PLAN, {"global_batch": value}))).values()
        assert len(message) < 150


def test_the_rules_come_last_and_all_at_once(tmp_path):
    raw = changed(PLAN, {"global_batch": 31, "pipelines[0].stages[1].layers": [3, 5]})
    with pytest.raises(InvalidFileError) as caught:
        read_plan(written(tmp_path, raw))
    assert str(caught.value) == (
        f"{tmp_path}/plan.json: 2 problems\n"
        "  $.pipelines[0].stages[1].layers  starts at block 3, but the previous stage stops at 2\n"
        "  $.global_batch                   is 31, but the micro-batches hold 4 x 6 + 2 x 4 = 32 samples"
    )


def test_any_record_can_be_read(tmp_path):
    class Note(Document, frozen=True, kw_only=True):
        text: str

    assert read(written(tmp_path, {"text": "x"}), Note) == Note(text="x")
    assert problems_of(written(tmp_path, {"txt": 1}), lambda path: read(path, Note)) == {
        "$.txt": "unknown field; did you mean 'text'?",
        "$.text": "missing; expected text",
    }


def test_a_pipe_is_written_to_and_never_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, b"{}")
        assert os.read(reader, 9) == b"{}"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert [file.name for file in tmp_path.iterdir()] == ["pipe"]
