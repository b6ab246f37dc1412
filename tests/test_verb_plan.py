"""``arachne plan`` and ``arachne compare`` as a person runs them: files, exit codes, text, JSON, progress."""

import json
import os
import pty
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from arachne_runtime import __version__
from arachne_runtime.errors import ExitCode
from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.files import digest, read_cluster, read_model, read_plan, read_profile, write
from arachne_runtime.plan.model import BlockSpec, ModelSpec
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.profile import BlockTiming, Profile
from planner.cost import price
from planner.peers import PEERS
from planner.request import Request
from planner.search import find_plan, signed

OPTIONS = {
    "plan": {
        "--cluster",
        "--model",
        "--global-batch",
        "--sequence",
        "--objective",
        "--out",
        "--time-budget",
        "--json",
    },
    "compare": {"--cluster", "--model", "--profile", "--run", "--trace", "--json"},
}
CLUSTER = """
format = "arachne.cluster/1"
[[node]]
name = "quick"
device = "cpu"
gpus = 2
memory_GiB = {memory}
[[node]]
name = "slow"
device = "cpu-0.25"
gpus = 2
memory_GiB = {memory}
[network]
inter_GBps = 1.0
"""
SLOWNESS = {"cpu": 1.0, "cpu-0.25": 4.0}
KINDS = ("embedding", "layer", "layer", "layer", "head")
WORK = {"embedding": 0.2, "layer": 1.0, "head": 0.6}


def model() -> ModelSpec:
    blocks = [
        BlockSpec(kind=k, parameters=500_000, activation_bytes=100_000, output_bytes=40_000, flops=1e9)
        for k in KINDS
    ]
    blocks[-1] = BlockSpec(kind="head", parameters=500_000, activation_bytes=9_000, output_bytes=0, flops=1e9)
    return ModelSpec(name="small", sequence=64, blocks=tuple(blocks))


def profile() -> Profile:
    timings = tuple(
        BlockTiming(kind=k, device=d, samples=n, forward_s=0.01 * w * s * n, backward_s=0.02 * w * s * n)
        for k, w in WORK.items()
        for d, s in SLOWNESS.items()
        for n in (1, 2, 4, 8)
    )
    return Profile(model="small", sequence=64, timings=timings)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cluster.toml").write_text(CLUSTER.format(memory=2))
    (tmp_path / "tight.toml").write_text(CLUSTER.format(memory=0.38))
    write(model(), tmp_path / "model.json")
    write(profile(), tmp_path / "profile.json")
    return tmp_path


def arachne(folder: Path, *arguments: object, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "launch", *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "Traceback" not in done.stderr
    return done


def plan_it(folder: Path, *more: object, **how: str) -> subprocess.CompletedProcess[str]:
    files = ("--cluster", "cluster.toml", "--model", "model.json", "--profile", "profile.json")
    return arachne(folder, "plan", *files, "--global-batch", "12", "--time-budget", "60", *more, **how)


@pytest.mark.parametrize("verb", OPTIONS)
def test_options_are_frozen(verb, tmp_path):
    told = re.findall(r"^ +(--[a-z-]+)", arachne(tmp_path, verb, "--help").stdout, re.MULTILINE)
    assert set(told) - {"--help"} == OPTIONS[verb]


def test_a_plan_is_written_signed_and_told(folder):
    done = plan_it(folder, "--out", "plan.json", "--sequence", "64")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    cluster = read_cluster(folder / "cluster.toml")
    spec, measured = read_model(folder / "model.json"), read_profile(folder / "profile.json")
    plan = read_plan(folder / "plan.json", cluster=cluster, model=spec)
    outcome = price(plan, Request(cluster=cluster, model=spec, profile=measured, global_batch=12))
    assert plan.predicted.iteration_s == outcome.iteration_s
    assert plan.predicted.peak_bytes == outcome.peak_bytes
    made = plan.made_by
    assert (made.solver, made.version) == ("arachne", __version__)
    assert (made.cluster, made.model, made.profile) == (digest(cluster), digest(spec), digest(measured))
    for words in (
        "plan of small",
        "an iteration",
        " % of the ideal\n  ideal ",
        "limited by:",
        "figures: cpu measured, cpu-0.25 measured; in float32\n",
        "not measured: optimizer step",
        "one more cpu device: ",
        "one more cpu-0.25 device: ",
        "rivals:",
        "  even",
        "  uniform",
        "runners-up",
    ):
        assert words in done.stdout
    assert "no plan is faster (proven)" in done.stdout
    assert "written to plan.json" in done.stdout


def test_json_says_the_same(folder):
    answer: dict[str, Any] = json.loads(plan_it(folder, "--json").stdout)
    assert answer["file"] is None
    assert answer["search"]["proven"] is True
    assert answer["plan"]["predicted"]["iteration_s"] == answer["price"]["iteration_s"]
    assert [r["name"] for r in answer["rivals"]] == [peer.name for peer in PEERS]
    assert all(r["iteration_s"] >= answer["price"]["iteration_s"] for r in answer["rivals"])
    assert all(r["iteration_s"] >= answer["price"]["iteration_s"] for r in answer["runners_up"])
    assert all(r["reason"] for r in answer["rivals"] + answer["runners_up"])
    losses = answer["price"]["losses"]
    total = losses["ideal_s"] + sum(part["seconds"] for part in losses["parts"])
    assert total == pytest.approx(answer["price"]["iteration_s"])
    assert [gain["device"] for gain in answer["one_more"]] == ["cpu", "cpu-0.25"]
    quick, slow = (gain["gain"] for gain in answer["one_more"])
    assert quick > slow >= 0


def test_the_same_plan_under_every_hash_seed(folder):
    for hash_seed in ("0", "7"):
        assert plan_it(folder, "--out", f"{hash_seed}.json", hash_seed=hash_seed).returncode == 0
    assert (folder / "0.json").read_bytes() == (folder / "7.json").read_bytes()


def test_nothing_fits_is_4_and_says_what_binds(folder):
    done = plan_it(folder, "--cluster", "tight.toml", "--out", "plan.json")
    assert done.returncode == ExitCode.NO_FEASIBLE_PLAN
    assert "any of these would do: " in done.stderr
    assert done.stderr.endswith(" more memory a device\n")
    assert not (folder / "plan.json").exists()


@pytest.mark.parametrize(
    ("wrong", "code", "words"),
    [
        (("--time-budget", "nan"), ExitCode.USAGE, "--time-budget nan is not a number of seconds above 0"),
        (("--time-budget", "inf"), ExitCode.USAGE, "--time-budget inf is not a number of seconds above 0"),
        (("--time-budget", "0"), ExitCode.USAGE, "--time-budget 0 is not a number of seconds above 0"),
        (("--global-batch", str(10**24)), ExitCode.USAGE, "is above 65536; plan for a part of it"),
        (("--global-batch", "65537"), ExitCode.USAGE, "is above 65536; plan for a part of it"),
        (("--sequence", "0"), ExitCode.USAGE, "--sequence 0 is below 1"),
        (("--out", "."), ExitCode.ENVIRONMENT, "--out .: is a folder; name a file in it"),
        (
            ("--out", "none/plan.json"),
            ExitCode.ENVIRONMENT,
            "--out none/plan.json: no file can be written in none (No such file or directory)",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_the_search(folder, wrong, code, words):
    done = plan_it(folder, *wrong)
    assert done.returncode == code, done.stderr
    assert words in done.stderr


@pytest.mark.parametrize("option", ["--html", "--trace"])
def test_show_names_the_option_that_cannot_be_written(folder, option):
    assert plan_it(folder, "--out", "plan.json").returncode == 0
    files = ("--cluster", "cluster.toml", "--model", "model.json", "--profile", "profile.json")
    done = arachne(folder, "show", "plan.json", *files, option, "none/page")
    assert done.returncode == ExitCode.ENVIRONMENT
    assert f"{option} none/page: no file can be written in none (" in done.stderr


def test_nothing_fits_as_json(folder):
    done = plan_it(folder, "--cluster", "tight.toml", "--json")
    assert (done.returncode, done.stderr) == (ExitCode.NO_FEASIBLE_PLAN, "")
    answer = json.loads(done.stdout)
    assert answer["reason"] == answer["missing"]["text"]
    assert answer["missing"]["over_bytes"] > 0
    assert answer["missing"]["changes"][-1]["kind"] == "more memory"


def test_cheaper_is_not_faster(folder):
    priced = CLUSTER.format(memory=2).replace('device = "cpu"', 'device = "cpu"\nprice_per_hour = 9.0')
    priced = priced.replace('device = "cpu-0.25"', 'device = "cpu-0.25"\nprice_per_hour = 1.0')
    (folder / "priced.toml").write_text(priced)
    answers = {}
    for goal in ("throughput", "cost", "throughput@12"):
        done = plan_it(folder, "--cluster", "priced.toml", "--objective", goal, "--json")
        assert done.returncode == 0, done.stderr
        answers[goal] = json.loads(done.stdout)
    fast, cheap, capped = (answers[goal]["price"] for goal in ("throughput", "cost", "throughput@12"))
    assert cheap["cost_per_sample"] < fast["cost_per_sample"]
    assert fast["price_per_hour"] > 12 >= capped["price_per_hour"]
    assert fast["iteration_s"] < capped["iteration_s"]
    assert answers["cost"]["one_more"] == []
    done = plan_it(folder, "--cluster", "priced.toml", "--objective", "throughput@0.5")
    assert done.returncode == ExitCode.NO_FEASIBLE_PLAN
    assert "the price limit of 0.5 USD an hour: the nearest plan costs 1 with its traffic" in done.stderr
    (folder / "priced.toml").write_text(priced.replace("[[node]]", 'currency = "EUR"\n[[node]]', 1))
    done = plan_it(folder, "--cluster", "priced.toml", "--objective", "cost")
    assert re.search(
        r"^  costs: [0-9.]+ EUR an hour, [0-9.,]+ EUR a million samples$", done.stdout, re.MULTILINE
    )


def test_a_folder_of_measurements_needs_no_profile(folder):
    done = arachne(folder, "plan", "--cluster", "cluster.toml", "--model", ".", "--global-batch", "4")
    assert done.returncode == 0, done.stderr
    assert "plan of small" in done.stdout


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--objective", "speed"), "--objective 'speed' is not throughput, cost"),
        (("--objective", "cost"), "no price in USD is known for node 'quick'"),
        (("--sequence", "32"), "samples of 64 tokens"),
        (("--time-budget", "0"), "--time-budget 0"),
        (("--model", "no-such-model", "--profile", "profile.json"), "no model named"),
        (("--global-batch", "0"), "global batch 0"),
    ],
)
def test_wrong_usage_is_2(folder, more, words):
    done = plan_it(folder, *more)
    assert done.returncode == ExitCode.USAGE
    assert words in done.stderr


def test_a_model_file_needs_a_profile(folder):
    done = arachne(
        folder, "plan", "--cluster", "cluster.toml", "--model", "model.json", "--global-batch", "4"
    )
    assert done.returncode == ExitCode.USAGE
    assert "--profile" in done.stderr


GPUS = """
format = "arachne.cluster/1"
[[node]]
name = "a"
device = "A100-40"
gpus = 2
[network]
inter_GBps = 12.5
"""
LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}


def test_a_config_json_and_a_name_need_no_profile(tmp_path):
    (tmp_path / "cluster.toml").write_text(GPUS)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(LLAMA))
    arguments = ("plan", "--cluster", "cluster.toml", "--global-batch", "8", "--time-budget", "0.5")
    done = arachne(
        tmp_path, *arguments, "--model", "tiny/config.json", "--sequence", "256", "--out", "p.json"
    )
    assert done.returncode == 0, done.stderr
    assert "plan of tiny\n  global batch  8 samples of 256 tokens\n" in done.stdout
    assert "figures: A100-40 analytic; in bfloat16\n" in done.stdout
    assert "  dtype: bfloat16, since tiny/config.json states none\n" in done.stdout
    assert read_plan(tmp_path / "p.json").num_blocks == 5
    done = arachne(tmp_path, *arguments, "--model", "tiny/config.json")
    assert (done.returncode, "give --sequence" in done.stderr) == (ExitCode.USAGE, True)
    done = arachne(tmp_path, *arguments, "--model", "gpt2", "--sequence", "512", "--out", "g.json")
    assert done.returncode == 0, done.stderr
    assert "plan of gpt2\n  global batch  8 samples of 512 tokens\n" in done.stdout
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(LLAMA | {"torch_dtype": "float32"}))
    done = arachne(tmp_path, *arguments, "--model", "tiny", "--sequence", "256", "--out", "folder.json")
    assert done.returncode == 0, done.stderr
    assert "figures: A100-40 analytic; in float32\n" in done.stdout
    assert "  dtype: float32, as tiny/config.json states it\n" in done.stdout
    assert read_plan(tmp_path / "folder.json").num_blocks == 5
    for verb in ("show", "simulate"):
        done = arachne(tmp_path, verb, "g.json", "--cluster", "cluster.toml", "--model", "gpt2")
        assert done.returncode == 0, done.stderr
        assert "figures: A100-40 analytic" in done.stdout


def test_a_model_that_is_none_says_what_could_be_there(tmp_path):
    (tmp_path / "cluster.toml").write_text(GPUS)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "bare").mkdir()
    arguments = ("plan", "--cluster", "cluster.toml", "--global-batch", "8", "--model")
    done = arachne(tmp_path, *arguments, "config.json")
    assert done.returncode == ExitCode.INVALID_FILE
    assert "has no format, as a model.json has, and no model_type, as a config.json has" in done.stderr
    done = arachne(tmp_path, *arguments, "bare")
    assert done.returncode == ExitCode.INVALID_FILE
    assert "bare: 1 problem\n  $  holds no model.json, which `arachne profile` writes, and no " in done.stderr


def test_a_bar_is_drawn_on_a_terminal_only(folder):
    ours, theirs = pty.openpty()
    files = ("--cluster", "cluster.toml", "--model", "model.json", "--profile", "profile.json")
    done = subprocess.Popen(
        [sys.executable, "-m", "launch", "plan", *files, "--global-batch", "12"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    stdout, _ = done.communicate(timeout=100)
    os.close(theirs)
    drawn = os.read(ours, 65536).decode()
    os.close(ours)
    assert done.returncode == 0
    assert "plans, best" in drawn or "searching" in drawn
    assert b"plan of small" in stdout


# --- compare


@cache
def planned(global_batch: int) -> Plan:
    """A plan of the small model, made and signed in this process."""
    request = Request(
        cluster=msgspec.toml.decode(CLUSTER.format(memory=2), type=Cluster),
        model=model(),
        profile=profile(),
        global_batch=global_batch,
    )
    return signed(find_plan(request, evaluations=40, peers=()), request, version=__version__)


def test_compare_prices_plans_beside_the_rivals(folder):
    plan = planned(12)
    for name in ("plan.json", "again.json"):
        write(plan, folder / name)
    files = ("--cluster", "cluster.toml", "--model", "model.json", "--profile", "profile.json")
    done = arachne(folder, "compare", "plan.json", "again.json", *files)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["plan", "iteration", "samples/s", "ratio", "devices", "memory"]
    assert [line.split()[0] for line in lines[1:3]] == ["plan.json", "again.json"]
    assert {line.split()[0] for line in lines[3 : 3 + len(PEERS)]} == {peer.name for peer in PEERS}
    assert "1.000x" in lines[1]
    assert "again.json: limited by:" in done.stdout
    rows = json.loads(arachne(folder, "compare", "plan.json", *files, "--json").stdout)
    assert rows[0]["iteration_s"] == plan.predicted.iteration_s
    assert {row["plan"] for row in rows} == {"plan.json", *(peer.name for peer in PEERS)}


def test_compare_says_what_does_not_fit(folder):
    write(planned(12), folder / "plan.json")
    files = ("--cluster", "tight.toml", "--model", "model.json", "--profile", "profile.json")
    done = arachne(folder, "compare", "plan.json", *files)
    assert done.returncode == ExitCode.NO_FEASIBLE_PLAN
    assert "plan.json: does not fit: device" in done.stdout


def test_compare_refuses_two_batches(folder):
    for batch in (4, 8):
        write(planned(batch), folder / f"{batch}.json")
    files = ("--cluster", "cluster.toml", "--model", "model.json", "--profile", "profile.json")
    done = arachne(folder, "compare", "4.json", "8.json", *files)
    assert done.returncode == ExitCode.USAGE
    assert "global batches 4, 8" in done.stderr


# --- a plan is running


def test_a_running_plan_is_kept_changed_or_left(folder):
    write(planned(12), folder / "plan.json")
    shortly = ("--time-budget", "1")
    kept = plan_it(folder, "plan.json", *shortly)
    assert kept.returncode == 0, kept.stderr
    assert "  the running plan is kept: no change pays within 1 h\n" in kept.stdout

    (folder / "one.toml").write_text(CLUSTER.format(memory=2).replace("gpus = 2", "gpus = 1"))
    left = plan_it(folder, "plan.json", "--cluster", "one.toml", "--out", "small.json", *shortly)
    assert left.returncode == 0, left.stderr
    assert "  change of the running plan: training stands still for 20" in left.stdout
    assert "; the running plan cannot go on: quick:1 and 1 more are not in the cluster\n" in left.stdout

    change = json.loads(plan_it(folder, "small.json", "--json", *shortly).stdout)["change"]
    assert (change["is_kept"], change["reason"]) == (False, "")
    assert change["standstill_s"] == pytest.approx(20, abs=0.1)
    assert change["standstill_s"] < change["pays_after_s"] < change["horizon_s"]


def test_a_running_plan_of_another_batch_or_model_is_refused(folder):
    plan = planned(4)
    write(plan, folder / "plan.json")
    done = plan_it(folder, "plan.json")
    assert done.returncode == ExitCode.USAGE
    assert "the running plan has a global batch of 4, asked is one of 12; no plan changes it" in done.stderr
    write(msgspec.structs.replace(plan, model="another"), folder / "plan.json")
    done = plan_it(folder, "plan.json", "--global-batch", "4")
    assert done.returncode == ExitCode.USAGE
    assert "the running plan is one of another with 5 blocks, asked is a plan of small with 5" in done.stderr
