"""The price against the real runs of bench/data: errors of seconds and bytes, order, and the reader."""

import json
from statistics import fmean, median

import pytest

from arachne_runtime.errors import UsageError
from bench.measured_runs import CARRIED, carried_runs, measured_run, runs_in
from bench.price import compare, measure
from bench.report import Options

OPTIONS = Options(quick=True, out=None)


@pytest.fixture(scope="module")
def compared():
    return [compare(run) for run in carried_runs()]


@pytest.mark.parametrize(("family", "count", "bound"), [("GH200", 13, 0.035), ("RTX", 3, 0.03)])
def test_seconds_of_real_runs(compared, family, count, bound):
    errors = [abs(c.error) for c in compared if c.run.family == family and not c.run.is_apart]
    assert len(errors) == count
    assert fmean(errors) <= bound


def test_peaks_of_real_runs_are_never_predicted_low_and_seldom_high(compared):
    errors = [c.memory_error for c in compared]
    assert min(errors) >= -0.03
    assert median(errors) <= 0.05


def test_the_order_of_real_runs_and_the_bounds_of_the_benchmark(capsys):
    results = list(measure(OPTIONS, carried_runs()))
    assert {r.name: r.holds for r in results} == {r.name: True for r in results}
    assert "price-leave-one-out-GH200" in {r.name for r in results}
    assert "ranked wrong" not in capsys.readouterr().out


def test_a_run_that_is_twice_as_slow_is_found_out(capsys):
    """The benchmark can fail."""
    runs = json.loads(CARRIED.read_text())["runs"]
    slow = {
        name: doc | {"real": 2 * doc["real"], "max_mem": 2 * doc["max_mem"]} for name, doc in runs.items()
    }
    slow["gh200_opt350_N16_D16"]["real"] *= 2
    results = list(measure(OPTIONS, [measured_run(name, doc) for name, doc in slow.items()]))
    assert {r.name for r in results if not r.holds} >= {
        "price-error-GH200", "price-error-RTX", "memory-lowest-GH200", "price-ranked-wrong-GH200",
    }  # fmt: skip
    assert "ranked wrong: gh200_opt350_N16_D16" in capsys.readouterr().out


def test_runs_are_read_from_any_folder(tmp_path):
    runs = json.loads(CARRIED.read_text())["runs"]
    (tmp_path / "one.json").write_text(json.dumps(runs["rtx_opt350_N2_D2"]))
    (run,) = runs_in(tmp_path)
    assert (run.name, run.family, run.iteration_s, run.is_apart) == ("one", "RTX", 91.78, False)
    assert [s.devices for p in run.plan.pipelines for s in p.stages] == [("n0:0", "n0:1"), ("n1:0", "n1:1")]
    assert [p.micro_batches for p in run.plan.pipelines] == [64, 64]
    with pytest.raises(UsageError, match="holds no"):
        runs_in(tmp_path / "nothing")


def test_a_run_of_an_unknown_model_is_told():
    document = json.loads(CARRIED.read_text())["runs"]["rtx_opt350_N2_D2"]
    document["pipeline_list"][0]["layers_per_stage"] = [[0, 1, 2]]
    with pytest.raises(UsageError, match="odd: no known model has 3 blocks; known: 26"):
        measured_run("odd", document)


def test_a_run_that_was_not_profiled_is_named_and_left_out(capsys):
    runs = json.loads(CARRIED.read_text())["runs"]
    odd = runs["rtx_opt350_N2_D2"] | {"mbs": 64, "gbs": 256}
    found = list(measure(OPTIONS, [measured_run("fine", runs["rtx_opt350_N2_D1"]), measured_run("odd", odd)]))
    assert {r.name for r in found} >= {"price-error-RTX", "memory-median"}
    assert "odd: not compared: " in capsys.readouterr().out


def test_groups_smaller_than_their_node_share_it():
    document = json.loads(CARRIED.read_text())["runs"]["gh200_opt350_N2_D1"]
    stages = document["pipeline_list"][0]["tmp_per_stage"]
    document["pipeline_list"][0]["tmp_per_stage"] = [[[kinds, 2] for kinds, _ in stage] for stage in stages]
    run = measured_run("halves", document)
    assert [s.devices for s in run.plan.pipelines[0].stages] == [("n0:0", "n0:1"), ("n0:2", "n0:3")]
