"""A training script as users write it under `arachne run --elastic`: a rank is killed, nothing is lost."""

import json
import os
import signal
import subprocess
import sys

import pytest

from arachne_runtime import surroundings
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from launch.elastic import words as island_words

from .test_elastic_run import PATIENCE_S, ROOT, arachne, job

NEVER = 10**9


def pipeline(first: str, last: str) -> Pipeline:
    """Two stages of the five blocks of tests.models.GPT, six rows a step."""
    stages = tuple(
        Stage(layers=layers, replicas=(Replica(devices=(device,), share=2),))
        for layers, device in (((0, 2), first), ((2, 5), last))
    )
    return Pipeline(micro_batches=3, micro_batch=2, stages=stages)


PLAN = Plan(
    model="gpt", global_batch=12, sequence=8, pipelines=(pipeline("a:0", "a:1"), pipeline("b:0", "b:1"))
)


def losses_alone(folder, num_steps: int) -> list[float]:
    """Of one process."""
    alone = folder / "alone"
    alone.mkdir()
    (alone / "end").write_text(str(num_steps))
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "tests.elastic_gpt", str(alone), "0"]
    subprocess.run(words, env=variables, check=True, timeout=100)
    return [json.loads(line)["loss"] for line in (alone / "told-alone").read_text().splitlines()]


def test_both_sides_know_the_same_code_of_a_process_that_was_left_out():
    assert island_words.LEFT_OUT_CODE == surroundings.LEFT_OUT_CODE  # the launcher's side loads no torch


@pytest.mark.timeout(240)
def test_a_killed_rank_is_replaced_in_a_job_whose_script_knows_nothing_of_it(tmp_path, monkeypatch):
    (tmp_path / "end").write_text(str(NEVER))
    script = ("-m", "tests.elastic_gpt", str(tmp_path), "0.05")
    with job(tmp_path, monkeypatch, PLAN, *script) as running:
        running.await_(lambda: len(running.told("a:1")) >= 5, "five steps")
        os.kill(running.told("a:1")[-1]["pid"], signal.SIGKILL)
        running.await_members("b:0", "b:1", after=1)
        running.await_members(*PLAN.devices, after=2)
        status = json.loads(arachne("status", "--json").stdout)
        end = running.told("b:0")[-1]["step"] + 40  # all will read it before they are there
        (tmp_path / "end.new").write_text(str(end))
        (tmp_path / "end.new").replace(tmp_path / "end")
        assert running.process.wait(PATIENCE_S) == 0, running.log
        print(running.log)
    assert status["generation"] == 3
    assert status["plan"] == "2 pipelines of 2 stages, 4 devices"
    expected = losses_alone(tmp_path, end)
    assert {one["step"] for one in running.told("b:0")} == set(range(1, end + 1))
    for device in PLAN.devices:
        for one in running.told(device):
            assert one["loss"] == pytest.approx(expected[one["step"] - 1], rel=1e-5), (device, one)
