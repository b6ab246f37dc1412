"""``arachne profile``: from a workload to the files of a planner."""

import json
import os
import re
import subprocess
import sys

import pytest
import typer
from hypothesis import given
from msgspec.structs import replace

from arachne_runtime.errors import UsageError
from arachne_runtime.plan.cluster import Cluster, Network, NetworkPair, NodeEntry
from arachne_runtime.plan.files import read_cluster, read_model, read_profile, write
from arachne_runtime.plan.model import BlockSpec, ModelSpec
from arachne_runtime.plan.profile import (
    BlockTiming,
    LinkPoint,
    LinkScope,
    LinkTiming,
    StepTiming,
    UpdateTiming,
)
from arachne_runtime.plan.rules import check_profile
from launch.cli import app
from launch.profiling.cluster_file import cluster_toml, write_cluster
from launch.profiling.job import RankResult
from launch.profiling.merge import Merged, extend, merge
from launch.profiling.this_machine import gpu_type
from launch.profiling.workload import load_workload, verify_blocks
from planner.request import Request
from tests.strategies import clusters

WORKLOADS = """
import torch
from arachne_runtime.model import Workload
from tests.models import GPT, next_token_loss

TINY = Workload(
    name="tiny", model=GPT, loss=next_token_loss, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
    batch=lambda n: torch.randint(31, (n, 8)), sequence=8,
)
NUMBER = 3
"""
MODEL = ModelSpec(
    name="m",
    sequence=1,
    blocks=(BlockSpec(kind="layer", parameters=4, activation_bytes=8, output_bytes=0, flops=1.0),),
)


def arachne(*words, cwd):
    found = subprocess.run(
        [sys.executable, "-m", "launch", *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
        timeout=100,
    )
    return found.returncode, found.stdout, found.stderr


def test_options_are_frozen():
    options = typer.main.get_command(app()).commands["profile"].params
    assert {word for option in options for word in option.opts} == {
        "workload", "--out", "--cluster", "--node", "--samples", "--json",
    }  # fmt: skip


def test_profile_of_a_tiny_model_on_two_ranks(tmp_path):
    (tmp_path / "jobs.py").write_text(WORKLOADS)
    devices = Cluster(node=(NodeEntry(name="a", device="cpu", gpus=2),), network=Network(inter_GBps=1.0))
    write_cluster(devices, tmp_path / "mine.toml")
    code, said, complaints = arachne(
        "profile", "jobs.py:TINY", "--cluster", "mine.toml", "--out", "found", "--samples", "1", "--json",
        cwd=tmp_path,
    )  # fmt: skip
    assert code == 0, complaints
    summary = json.loads(said)
    assert (summary["blocks"], summary["devices"], summary["timings"]) == (5, ["cpu"], 3)
    cluster = read_cluster(tmp_path / "found" / "cluster.toml")
    model = read_model(tmp_path / "found" / "model.json")
    profile = read_profile(tmp_path / "found" / "profile.json")
    assert cluster == devices
    assert profile.model == model.name == "tiny"
    assert profile.samples_range("layer", "cpu", 1) == (1, 1)
    assert profile.update("head", "cpu", 1) > 0
    assert 0 < profile.step("cpu") < 1
    assert [(x.between, x.scope) for x in profile.links] == [(("cpu", "cpu"), LinkScope.INTRA)]
    assert Request(cluster=cluster, model=model, profile=profile, global_batch=4).tables.not_measured == ()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["jobs:MISSING"], "jobs:MISSING does not exist; an arachne.Workload is needed (in jobs: TINY)"),
        (["jobs.py:NUMBER"], "jobs.py:NUMBER is a int"),
        (["jobs.py"], "not MODULE:NAME"),
        (["none.py:TINY"], "no file none.py"),
        (["nowhere:TINY"], "no module 'nowhere'"),
        (["jobs.py:TINY", "--samples", "4,2"], "--samples '4,2'"),
        (["jobs.py:TINY", "--cluster", "two.toml"], "has 2 nodes"),
        (["jobs.py:TINY", "--cluster", "two.toml", "--node", "c"], "no node 'c'"),
    ],
)
def test_what_cannot_be_profiled_is_refused_before_ranks_start(tmp_path, monkeypatch, words, complaint):
    (tmp_path / "jobs.py").write_text(WORKLOADS)
    entries = tuple(NodeEntry(name=name, device="cpu", gpus=1) for name in "ab")
    write_cluster(Cluster(node=entries, network=Network(inter_GBps=1.0)), tmp_path / "two.toml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "jobs", raising=False)
    options = typer.main.get_command(app()).commands["profile"]
    with pytest.raises(UsageError, match=re.escape(complaint)):
        options.main([*words, "--out", "found"], standalone_mode=False)


FORGETFUL = """
import torch
from torch import nn
import arachne_runtime as arachne

@arachne.pipelined(first="stem", blocks="layers", last="head")  # and the activation?
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.layers, self.head = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)]), nn.Linear(4, 1)
        self.activation = nn.ReLU()

    def forward(self, x):
        return self.head(self.activation(self.layers[0](self.stem(x))))

def refuse(x):
    raise RuntimeError("needs a GPU")

def workload_of(model, batch):
    return arachne.Workload(
        name="net", model=model, loss=lambda out, batch: out.mean(), batch=batch, sequence=1,
        optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
    )

WORKLOAD = workload_of(Net, lambda n: torch.ones(n, 4))
NO_BATCH = workload_of(Net, refuse)
"""


def test_a_model_that_its_blocks_do_not_compute_is_refused_before_ranks_start(tmp_path):
    (tmp_path / "net.py").write_text(FORGETFUL)
    words = [sys.executable, "-m", "launch", "profile", f"{tmp_path}/net.py:WORKLOAD", "--out", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert "Net.forward and its blocks in a row differ by up to" in done.stderr
    assert not (tmp_path / "profile.json").exists()


def test_a_model_that_cannot_run_on_this_machine_is_left_to_its_ranks(tmp_path):
    (tmp_path / "net.py").write_text(FORGETFUL)
    verify_blocks(load_workload(f"{tmp_path}/net.py:NO_BATCH"))


@given(clusters())
def test_a_written_cluster_reads_back(tmp_path_factory, cluster):
    file = tmp_path_factory.mktemp("cluster") / "cluster.toml"
    write_cluster(cluster, file)
    assert read_cluster(file) == cluster


def test_a_cluster_is_written_as_a_person_would():
    entries = (NodeEntry(name="a", device="A100-40", gpus=4, count=2, zone='z "1"'),)
    pair = NetworkPair(between=("a", "a"), inter_GBps=6.0)
    assert cluster_toml(Cluster(node=entries, network=Network(inter_GBps=12.5, pair=(pair,)))) == (
        'format = "arachne.cluster/1"\n\n'
        '[[node]]\nname = "a"\ndevice = "A100-40"\ngpus = 4\ncount = 2\nzone = "z \\"1\\""\n\n'
        "[network]\ninter_GBps = 12.5\n\n"
        '[[network.pair]]\nbetween = ["a", "a"]\ninter_GBps = 6.0\n'
    )


def result(device, forward_s, *, update_s=1.0, kept=8, step_s=0.5):
    timing = BlockTiming(
        kind="layer", device=device, samples=1, forward_s=forward_s, backward_s=2.0, activation_bytes=kept
    )
    link = LinkTiming(
        between=(device, device), scope=LinkScope.INTRA, points=(LinkPoint(bytes=1, seconds=1.0),)
    )
    update = UpdateTiming(kind="layer", device=device, update_s=update_s)
    model = replace(MODEL, blocks=(replace(MODEL.blocks[0], activation_bytes=kept),))
    return RankResult(
        device=device,
        model=model,
        timings=(timing,),
        updates=(update,),
        step=StepTiming(device=device, step_s=step_s),
        links=(link,),
        seconds=1.0,
    )


def test_devices_of_a_type_are_averaged():
    merged = merge(
        [
            result("x", 1.0, update_s=1.0, step_s=0.2),
            result("y", 9.0),
            result("x", 1.1, update_s=1.02, kept=12, step_s=0.4),
        ]
    )
    assert check_profile(merged.profile) == ()
    assert merged.profile.block("layer", "x", 1, 1).forward_s == pytest.approx(1.05)
    assert merged.profile.block("layer", "x", 1, 1).activation_bytes == 12
    assert merged.profile.block("layer", "y", 1, 1).forward_s == 9.0
    assert merged.profile.update("layer", "x", 1) == pytest.approx(1.01)
    assert [merged.profile.step(device) for device in "xyz"] == [pytest.approx(0.3), 0.5, 0.0]
    assert merged.model.blocks[0].activation_bytes == 12
    assert merged.notes == ()


def test_devices_of_a_type_that_differ_are_told():
    (note,) = merge([result("x", 1.0), result("x", 2.0), result("y", 1.0)]).notes
    assert note == (
        "the 2 devices of type x differ by more than 5% in 1 of 2 measurements, most in layer at 1 samples "
        "(29%); their mean is kept"
    )


def test_a_second_node_extends_the_profile(tmp_path):
    first, second = merge([result("x", 1.0)]), merge([result("y", 3.0)])
    assert extend(first, tmp_path) is first
    write(first.profile, tmp_path / "profile.json")
    both = extend(second, tmp_path).profile
    assert check_profile(both) == ()
    assert [both.block("layer", d, 1, 1).forward_s for d in "xy"] == [1.0, 3.0]
    assert [x.between for x in both.links] == [("x", "x"), ("y", "y")]
    assert [both.step(device) for device in "xy"] == [0.5, 0.5]
    again = extend(merge([result("x", 5.0, step_s=0.7)]), tmp_path).profile
    assert again.block("layer", "x", 1, 1).forward_s == 5.0
    assert again.step("x") == 0.7
    assert len(again.links) == 1


def test_a_profile_of_another_model_is_not_extended(tmp_path):
    old = merge([result("x", 1.0)]).profile
    write(replace(old, model="other"), tmp_path / "profile.json")
    new = merge([result("x", 1.0)])
    with pytest.raises(UsageError, match="use another --out"):
        extend(Merged(new.model, new.profile, ()), tmp_path)


@pytest.mark.parametrize(
    ("name", "memory", "expected"),
    [
        ("NVIDIA A100-SXM4-40GB", 40536 * 2**20, "A100-40"),
        ("Tesla V100-SXM2-16GB", 16160 * 2**20, "V100-16"),
        ("NVIDIA GeForce RTX 3090", 24260 * 2**20, "RTX3090-24"),
        ("NVIDIA H100 80GB HBM3", 81559 * 2**20, "H100-80"),
    ],
)
def test_a_gpu_is_named_by_model_and_memory(name, memory, expected):
    assert gpu_type(name, memory) == expected
