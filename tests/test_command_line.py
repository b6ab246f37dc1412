"""The command line: its verbs, options and exit codes, frozen here; mistakes are told without a traceback."""

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from arachne_runtime import __version__
from arachne_runtime.errors import ArachneError, ExitCode
from launch.cli import VERBS
from tests.documents import CLUSTER_TOML, MODEL, PLAN, REMOVED, changed, written

EXIT_CODES = {
    "FINE": 0,
    "WORKER_FAILED": 1,
    "USAGE": 2,
    "INVALID_FILE": 3,
    "NO_FEASIBLE_PLAN": 4,
    "ENVIRONMENT": 5,
}
OPTIONS = {
    "check": {"--cluster", "--model", "--json"},
    "show": {"--cluster", "--model", "--profile", "--grid", "--html", "--trace", "--json"},
}
"""By verb; the verbs of other modules are frozen beside their own tests."""
MOST_OPTIONS = 8


def arachne(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "Traceback" not in done.stderr
    return done


def options_of(verb: str) -> set[str]:
    words = arachne(verb, "--help").stdout.split()
    return {word.rstrip(",") for word in words if word.startswith("--") and word != "--"} - {"--help"}


# --- the frozen surface


def test_exit_codes_are_frozen():
    assert {code.name: code.value for code in ExitCode} == EXIT_CODES


def test_every_error_has_one_of_these_codes():
    def family(kind: type[ArachneError]) -> list[type[ArachneError]]:
        return [kind, *(k for below in kind.__subclasses__() for k in family(below))]

    assert {
        kind.__name__: int(kind.exit_code) for kind in family(ArachneError) if "Error" in kind.__name__
    }.items() >= {
        "UsageError": 2,
        "InvalidFileError": 3,
        "UnsupportedPlanError": 3,
        "ModelError": 2,
        "NotMeasuredError": 3,
        "NoFeasiblePlanError": 4,
        "UnsupportedEnvironmentError": 5,
        "WorkerFailedError": 1,
    }.items()


@pytest.mark.parametrize("verb", OPTIONS)
def test_options_are_frozen(verb):
    assert options_of(verb) == OPTIONS[verb]


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_has_few_options_and_a_sentence_of_help(verb):
    assert len(options_of(verb)) <= MOST_OPTIONS
    assert f"  {verb} " in arachne("--help").stdout


def test_every_summary_is_whole_on_a_narrow_terminal():
    told = arachne("--help").stdout
    assert "..." not in told.partition("Commands:")[2]
    assert max(map(len, told.splitlines())) <= 80


def cpu_seconds_of(*arguments: object) -> float:
    """Of the command and its imports; a busy machine makes it wait, but not work, longer."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    arachne(*arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def test_help_takes_less_than_half_a_second():
    assert min(cpu_seconds_of("--help") for _ in range(3)) < 0.5


def test_version():
    done = arachne("--version")
    assert (done.returncode, done.stdout) == (0, f"arachne {__version__}\n")


@pytest.mark.parametrize(
    "arguments", [(), ("chek",), ("check",), ("check", "--colour"), ("--colour",), ("show", "a", "b")]
)
def test_wrong_usage_is_2(arguments):
    done = arachne(*arguments)
    assert done.returncode == ExitCode.USAGE
    assert "Usage: arachne" in done.stdout + done.stderr


def test_what_cannot_be_written_is_5_without_a_traceback(tmp_path):
    command = [sys.executable, "-m", "launch", "check", str(written(tmp_path, PLAN))]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (5, "arachne: [Errno 28] No space left on device\n")


# --- arachne check

STAGE = "pipelines[0].stages[0]"
INVALID: dict[str, tuple[Any, list[str]]] = {
    "an empty file": ("", ["$  is empty"]),
    "broken JSON": ('{"format": ', ["$  is not JSON: Expecting value at line 1, column 12"]),
    "a newer version": (
        changed(PLAN, {"format": "arachne.plan/2", "made_by.version": "0.4.0"}),
        ["$.format  arachne.plan/2 is newer than this version", "pip install 'arachne-hetero>=0.4.0'"],
    ),
    "unknown fields": (
        changed(PLAN, {"modle": "x", f"{STAGE}.replicas[0].shares": 1}),
        [
            "$.modle",
            "did you mean 'model'?",
            "$.pipelines[0].stages[0].replicas[0].shares",
            "did you mean 'share'?",
        ],
    ),
    "NaN": (
        changed(PLAN, {"predicted.iteration_s": float("nan"), "global_batch": float("nan")}),
        [
            "$.predicted.iteration_s",
            "expected a finite number, got nan",
            "$.global_batch",
            "an integer, got nan",
        ],
    ),
    "a missing field": (changed(PLAN, {"sequence": REMOVED}), ["$.sequence  missing; expected an integer"]),
    "overlapping stages": (
        changed(PLAN, {"pipelines[0].stages[1].layers": [1, 5]}),
        ["$.pipelines[0].stages[1].layers  starts at block 1, but the previous stage stops at 2"],
    ),
    "a device twice": (
        changed(PLAN, {f"{STAGE}.replicas[1].devices": ["v-0:0"]}),
        ["$.pipelines[0].stages[0].replicas[1].devices[0]  v-0:0 is already in pipeline 0, stage 0"],
    ),
    "shares that do not add up": (
        changed(PLAN, {f"{STAGE}.replicas[0].share": 5}),
        ["$.pipelines[0].stages[0].replicas  shares add up to 7, but micro_batch is 6"],
    ),
    "a stage with no block": (
        changed(PLAN, {f"{STAGE}.layers": [0, 0], "pipelines[0].stages[1].layers": [0, 5]}),
        ["$.pipelines[0].stages[0].layers  holds no block: [0, 0] is half-open"],
    ),
    "a tensor-parallel group over two nodes": (
        changed(PLAN, {"pipelines[1].stages[0].replicas[0].devices": ["v-1:0", "v-2:0"]}),
        ["$.pipelines[1].stages[0].replicas[0]  devices v-1:0 and v-2:0 are in different nodes"],
    ),
}


@pytest.mark.parametrize("verb", ["check", "show"])
@pytest.mark.parametrize("fault", INVALID)
def test_an_invalid_plan_is_3_with_every_problem(verb, fault, tmp_path):
    content, wanted = INVALID[fault]
    path = written(tmp_path, content)
    done = arachne(verb, path)
    assert done.returncode == ExitCode.INVALID_FILE
    assert done.stdout == ""
    assert done.stderr.startswith(
        f"{path}: {'1 problem' if len(wanted) == 1 or fault == 'a newer version' else ''}"
    )
    for words in wanted:
        assert words in done.stderr


def test_all_kinds_of_rules_at_once(tmp_path):
    changes = {f"{STAGE}.replicas[1].devices": ["v-0:0"], f"{STAGE}.replicas[0].share": 5, "global_batch": 1}
    done = arachne("check", written(tmp_path, changed(PLAN, changes)))
    assert done.returncode == ExitCode.INVALID_FILE
    assert done.stderr.splitlines()[0].endswith("plan.json: 3 problems")
    assert len(done.stderr.splitlines()) == 4


def test_a_missing_file_and_a_folder(tmp_path):
    done = arachne("check", tmp_path / "none.json")
    assert (done.returncode, done.stderr) == (3, f"{tmp_path}/none.json: 1 problem\n  $  no such file\n")
    assert arachne("check", tmp_path).returncode == ExitCode.INVALID_FILE
    assert arachne("check", written(tmp_path, PLAN), "--cluster", tmp_path / "no.toml").returncode == 3


def inputs(folder: Path) -> tuple[Path, Path, Path]:
    cluster = written(folder, CLUSTER_TOML, "cluster.toml")
    return written(folder, PLAN), cluster, written(folder, MODEL, "model.json")


def test_check_of_a_valid_plan(tmp_path):
    plan, cluster, model = inputs(tmp_path)
    done = arachne("check", plan, "--cluster", cluster, "--model", model)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{plan}: valid (2 pipelines, 3 stages, 6 devices, 5 blocks)\n"


def test_check_against_another_cluster_and_model(tmp_path):
    plan, _, model = inputs(tmp_path)
    cluster = written(tmp_path, CLUSTER_TOML.replace("gpus = 4", "gpus = 1"), "small.toml")
    done = arachne("check", plan, "--cluster", cluster, "--model", model)
    assert done.returncode == ExitCode.INVALID_FILE
    assert (
        "$.pipelines[0].stages[1].replicas[0].devices[1]  node a has 1 devices, so no index 1" in done.stderr
    )
    done = arachne("check", plan, "--model", "opt-350m")
    assert done.returncode == ExitCode.INVALID_FILE
    assert "$.model" in done.stderr
    assert "stops at block 5, but the model has 26 blocks" in done.stderr


def test_check_as_json(tmp_path):
    plan, _, _ = inputs(tmp_path)
    done = arachne("check", plan, "--json")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer.pop("obstacles")) == (0, [])
    assert answer == {"file": str(plan), "valid": True, "problems": []}
    done = arachne("check", written(tmp_path, changed(PLAN, {"global_batch": 1, "model": ""})), "--json")
    answer = json.loads(done.stdout)
    assert (done.returncode, done.stderr, answer["valid"]) == (3, "", False)
    assert [problem["path"] for problem in answer["problems"]] == ["$.model", "$.global_batch"]


def test_check_says_what_cannot_be_run_yet(tmp_path):
    path = written(tmp_path, changed(PLAN, {"pipelines[0].stages[0].zero": 3}))
    done = arachne("check", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\n  arachne run cannot run it: $.pipelines[0].stages[0].zero is 3" in done.stdout
    obstacles = json.loads(arachne("check", path, "--json").stdout)["obstacles"]
    assert any("$.pipelines[0].stages[0].zero is 3" in obstacle for obstacle in obstacles)


# --- arachne show


def test_show_a_plan(tmp_path):
    plan, cluster, _ = inputs(tmp_path)
    done = arachne("show", plan, "--cluster", cluster, "--grid")
    assert (done.returncode, done.stderr) == (0, "")
    assert "plan of tiny\n  global batch  32 samples of 16 tokens\n" in done.stdout
    assert "    v-0:0         V100-16  4 samples  peak 1000 B\n" in done.stdout
    assert "\npipeline 1\nv-1:0  0F0 0B0 0F1 0B1\n" in done.stdout


def test_show_as_json(tmp_path):
    plan, cluster, _ = inputs(tmp_path)
    answer = json.loads(arachne("show", plan, "--cluster", cluster, "--json").stdout)
    assert answer["plan"]["format"] == "arachne.plan/1"
    assert answer["device_types"]["a:0"] == "A100-40"
    assert answer["price"] is answer["infeasible"] is None


OPT = changed(
    PLAN,
    {
        "model": "opt-350m",
        "sequence": 2048,
        "global_batch": 16,
        "pipelines": [
            {
                "micro_batches": 8,
                "micro_batch": 2,
                "stages": [
                    {"layers": [0, 7], "replicas": [{"devices": [f"v-0:{i}"], "share": 1} for i in range(2)]},
                    {"layers": [7, 26], "replicas": [{"devices": ["a:0", "a:1"], "share": 2}]},
                ],
            }
        ],
    },
)


def priced(folder: Path, plan: dict[str, Any], *more: str) -> subprocess.CompletedProcess[str]:
    _, cluster, _ = inputs(folder)
    path = written(folder, plan, "opt.json")
    return arachne("show", path, "--cluster", cluster, "--model", "opt-350m", "--profile", "opt-350m", *more)


def test_show_prices_a_plan(tmp_path):
    done = priced(tmp_path, OPT)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nprice: " in done.stdout
    assert "  limited by: " in done.stdout
    assert "  device   memory " in done.stdout
    assert "\n  v-0:0-1  " in done.stdout
    price = json.loads(priced(tmp_path, OPT, "--json").stdout)["price"]
    assert set(price["peak_bytes"]) == {"v-0:0", "v-0:1", "a:0", "a:1"}
    for parts in price["breakdown"].values():
        assert sum(parts.values()) == pytest.approx(price["iteration_s"])


def test_show_draws_a_page_and_a_trace(tmp_path):
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    done = priced(tmp_path, OPT, "--html", str(page), "--trace", str(trace))
    assert (done.returncode, done.stderr) == (0, "")
    assert page.read_text().startswith("<!doctype html>")
    assert {event["name"] for event in json.loads(trace.read_text())["traceEvents"]} >= {
        "0F0",
        "1B7",
        "update",
    }


def test_show_says_when_a_plan_does_not_fit(tmp_path):
    large = changed(OPT, {"global_batch": 64, "pipelines[0].micro_batch": 8})
    for i in range(2):
        large = changed(large, {f"pipelines[0].stages[0].replicas[{i}].share": 4})
    large = changed(large, {"pipelines[0].stages[1].replicas[0].share": 8})
    done = priced(tmp_path, large)
    assert done.returncode == ExitCode.NO_FEASIBLE_PLAN
    assert "does not fit: device v-0:0" in done.stdout
    assert "  would fit with recomputation in stage 0 of pipeline 0: " in done.stdout
    page = tmp_path / "page.html"
    answer = json.loads(priced(tmp_path, large, "--json", "--html", str(page)).stdout)
    assert answer["infeasible"]["device"] == "v-0:0"
    assert not page.exists()


def test_a_price_needs_all_its_inputs(tmp_path):
    plan, cluster, _ = inputs(tmp_path)
    for option in ("--profile", "--html", "--trace"):
        done = arachne("show", plan, option, "x")
        assert (done.returncode, done.stderr) == (
            2,
            f"{option} prices the plan, which also needs --cluster\n",
        )
        done = arachne("show", plan, "--cluster", cluster, option, "x")
        assert (done.returncode, done.stderr) == (2, f"{option} prices the plan, which also needs --model\n")
    done = arachne("show", plan, "--model", "nobody")
    assert done.returncode == ExitCode.USAGE
    assert "the catalog has no model named 'nobody'; known: " in done.stderr
