"""A recorded run beside the price of its plan."""

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from arachne_runtime.errors import InvalidFileError, UsageError
from arachne_runtime.plan import files
from arachne_runtime.plan.cluster import Cluster, Network, NodeEntry
from arachne_runtime.plan.files import digest
from arachne_runtime.plan.model import BlockSpec, ModelSpec
from arachne_runtime.plan.plan import Pipeline, Plan, Predicted, Replica, Stage
from arachne_runtime.plan.profile import BlockTiming, Profile, UpdateTiming
from arachne_runtime.plan.records import Record, RecordKind
from launch.cli import app
from launch.profiling.cluster_file import write_cluster
from launch.report.run_table import told
from launch.report.runs import REST, report_run
from planner.cost.estimate import Span

A, R, U, S = RecordKind.ACTION, RecordKind.REDUCE, RecordKind.UPDATE, RecordKind.STEP


def two_stages(predicted_s=None):
    stages = tuple(
        Stage(layers=layers, replicas=(Replica(devices=(device,), share=1),))
        for layers, device in (((0, 2), "a:0"), ((2, 4), "b:0"))
    )
    predicted = Predicted(iteration_s=predicted_s, samples_per_s=2 / predicted_s) if predicted_s else None
    pipeline = Pipeline(micro_batches=2, micro_batch=1, stages=stages)
    return Plan(model="m", global_batch=2, sequence=1, pipelines=(pipeline,), predicted=predicted)


def step_of(rank, step, plan, slow=1.0, step_s=10.0):
    """Two forwards of 1 s, two backwards of 2 s (on rank 1 ``slow`` times that), a reduction, an update."""
    forward, backward = 1.0, 2.0 * (slow if rank else 1.0)

    def record(kind, name, start_s, **times):
        return Record(kind=kind, name=name, rank=rank, step=step, plan=digest(plan), start_s=start_s, **times)

    return [
        record(A, f"{rank}F0", 0.0, compute_s=forward, transfer_s=0.1),
        record(A, f"{rank}B0", 1.1, compute_s=backward, wait_s=0.5),
        record(A, f"{rank}F1", 4.0, compute_s=forward, transfer_s=0.1),
        record(A, f"{rank}B1", 5.0, compute_s=backward),
        record(R, "0:2", 7.0, wait_s=0.3 if rank else 0.8),
        record(U, "update", 8.0, compute_s=0.4),
        record(S, "step", 0.0, compute_s=step_s),
    ]


def write(folder: Path, records):
    for rank in {record.rank for record in records}:
        lines = [msgspec.json.encode(r) for r in records if r.rank == rank]
        (folder / f"rank-{rank}.jsonl").write_bytes(b"\n".join(lines) + b"\n")


TIMELINE = {
    device: (
        Span(A, f"{s}F0", 0.0, 1.0), Span(A, f"{s}B0", 1.0, 3.0), Span(A, f"{s}F1", 3.0, 4.0),
        Span(A, f"{s}B1", 4.0, 6.0), Span(R, "0:2", 6.0, 6.2), Span(U, "update", 6.2, 6.6),
    )
    for s, device in enumerate(("a:0", "b:0"))
}  # fmt: skip


def pieces(report):
    return {(p.rank, p.sort): p for p in report.pieces}


def test_a_run_is_laid_beside_its_price(tmp_path):
    plan = two_stages()
    write(tmp_path, [r for step in range(6) for rank in (0, 1) for r in step_of(rank, step, plan)])
    report = report_run(plan, tmp_path, timeline=TIMELINE, predicted_s=8.0)
    assert (report.steps, report.warm_up_steps) == (4, 2)
    assert report.measured_s == 10.0
    assert report.error == pytest.approx(-0.2)
    forward, backward = pieces(report)[0, "forward"], pieces(report)[1, "backward"]
    assert (forward.count, forward.compute_s, forward.transfer_s) == (2, 2.0, 0.2)
    assert forward.predicted_s == 2.0
    assert (backward.compute_s, backward.wait_s, backward.predicted_s) == (4.0, 0.5, 4.0)
    assert pieces(report)[1, "update"].predicted_s == pytest.approx(0.4)


def test_the_slow_piece_is_named(tmp_path):
    plan = two_stages(predicted_s=8.0)
    write(tmp_path, [r for step in range(4) for rank in (0, 1) for r in step_of(rank, step, plan, slow=1.5)])
    report = report_run(plan, tmp_path, timeline=TIMELINE)
    assert report.because == (
        "backward on b:0 (pipeline 0, stage 1): measured 6 s a step, predicted 4 s: "
        "+2 s of a difference of +2 s"
    )


def test_waiting_for_the_last_rank_is_no_work_of_a_reduction(tmp_path):
    plan = two_stages()
    write(tmp_path, [r for rank in (0, 1) for r in step_of(rank, 0, plan)])
    found = pieces(report_run(plan, tmp_path, timeline=TIMELINE, predicted_s=8.0))
    assert [found[r, "reduce 0:2"].compute_s for r in (0, 1)] == [0.3, 0.3]
    assert [found[r, "reduce 0:2"].wait_s for r in (0, 1)] == pytest.approx([0.5, 0.0])


def test_what_no_piece_explains_is_the_rest(tmp_path):
    plan = two_stages()
    write(tmp_path, [r for rank in (0, 1) for r in step_of(rank, 0, plan)])
    found = pieces(report_run(plan, tmp_path))
    told_s = 1.1 + 2.5 + 1.1 + 2.0 + 0.4
    assert found[0, REST].compute_s + found[0, REST].wait_s == pytest.approx(10 - told_s - 0.8)
    assert found[1, REST].wait_s == pytest.approx(0.5)
    assert found[0, REST].wait_s == 0


def test_the_rest_is_laid_beside_what_a_price_puts_before_the_update(tmp_path):
    """The device that comes last has only the commit word there; another also waits for it."""
    plan = two_stages()
    write(tmp_path, [r for rank in (0, 1) for r in step_of(rank, 0, plan)])
    timeline = {
        "a:0": (Span(R, "0:2", 6.0, 6.2), Span(U, "update", 7.0, 7.4)),
        "b:0": (Span(R, "0:2", 6.0, 6.75), Span(U, "update", 7.0, 7.4)),
    }
    found = pieces(report_run(plan, tmp_path, timeline=timeline, predicted_s=8.0))
    assert [found[rank, REST].predicted_s for rank in (0, 1)] == pytest.approx([0.25, 0.25])
    assert report_run(plan, tmp_path).pieces[-1].predicted_s is None


def test_unreadable_lines_are_named_and_left_out(tmp_path):
    plan = two_stages()
    write(tmp_path, [r for step in range(3) for rank in (0, 1) for r in step_of(rank, step, plan)])
    whole = report_run(plan, tmp_path, timeline=TIMELINE, predicted_s=8.0)
    file = tmp_path / "rank-1.jsonl"
    strange = json.loads(file.read_bytes().splitlines()[0]) | {"name": "warm-up"}
    file.write_bytes(
        file.read_bytes() + b"{nonsense\n\xff\xfe\n\n" + json.dumps(strange).encode() + b"\n[1, 2\n"
    )
    damaged = report_run(plan, tmp_path, timeline=TIMELINE, predicted_s=8.0)
    assert damaged.pieces == whole.pieces
    assert [fault.partition(": ")[0] for fault in damaged.faults] == [
        f"rank-1.jsonl:{line}" for line in (22, 23, 25, 26)
    ]
    assert "no action in 'warm-up'" in damaged.faults[2]


def test_only_the_last_run_of_this_plan_counts(tmp_path):
    plan, other = two_stages(), two_stages(predicted_s=3.0)
    first = [r for step in range(3) for r in step_of(0, step, plan, step_s=90.0)]
    second = [r for step in range(2) for r in step_of(0, step, plan)]
    write(tmp_path, [*step_of(0, 0, other), *first, *second])
    report = report_run(plan, tmp_path)
    assert (report.measured_s, report.earlier_runs) == (10.0, 1)
    assert report.other_plans == (digest(other),)


def test_records_of_another_plan_are_refused(tmp_path):
    write(tmp_path, step_of(0, 0, two_stages(predicted_s=3.0)))
    with pytest.raises(InvalidFileError, match="none of this plan"):
        report_run(two_stages(), tmp_path)


def test_a_folder_without_records_says_how_to_get_some(tmp_path):
    with pytest.raises(UsageError, match="--trace"):
        report_run(two_stages(), tmp_path)


def test_without_a_prediction_the_measured_half_is_told(tmp_path):
    plan = two_stages()
    write(tmp_path, step_of(0, 0, plan))
    report = report_run(plan, tmp_path)
    assert (report.error, report.predicted_s, report.warm_up_steps) == (None, None, 0)
    assert "no prediction" in report.because


def test_the_table_names_step_error_and_faults(tmp_path, capsys):
    from rich.console import Console

    plan = two_stages()
    write(tmp_path, [r for step in range(6) for rank in (0, 1) for r in step_of(rank, step, plan)])
    with (tmp_path / "rank-0.jsonl").open("ab") as file:
        file.write(b"{half a li\n")
    Console(width=120).print(told(report_run(plan, tmp_path, timeline=TIMELINE, predicted_s=8.0)))
    said = capsys.readouterr().out
    assert "step: measured 10 s, predicted 8 s: error -20.0%" in said
    assert "left out: 1 lines that are no records" in said
    assert "rank-0.jsonl:43" in said


def compare(*words):
    found = CliRunner().invoke(app(), ["compare", *map(str, words)])
    return found.exit_code, found.output, found.exception


def test_arachne_compare_tells_a_run(tmp_path):
    plan = two_stages(predicted_s=8.0)
    plan_file = tmp_path / "plan.json"
    files.write(plan, plan_file)
    write(tmp_path, [r for step in range(4) for rank in (0, 1) for r in step_of(rank, step, plan)])
    code, said, _ = compare(plan_file, "--run", tmp_path)
    assert code == 0
    assert "error -20.0%" in said
    code, said, _ = compare(plan_file, "--run", tmp_path, "--json")
    assert json.loads(said)["error"] == pytest.approx(-0.2)


def test_arachne_compare_prices_a_run_anew_where_it_can(tmp_path):
    plan = two_stages(predicted_s=8.0)
    files.write(plan, tmp_path / "plan.json")
    blocks = (BlockSpec(kind="layer", parameters=4, activation_bytes=8, output_bytes=8, flops=1.0),) * 4
    files.write(ModelSpec(name="m", sequence=1, blocks=blocks), tmp_path / "model.json")
    timing = BlockTiming(kind="layer", device="cpu", samples=1, forward_s=0.5, backward_s=1.0)
    update = UpdateTiming(kind="layer", device="cpu", update_s=0.2)
    profile = Profile(model="m", sequence=1, timings=(timing,), updates=(update,))
    files.write(profile, tmp_path / "profile.json")
    nodes = tuple(NodeEntry(name=name, device="cpu", gpus=1) for name in "ab")
    write_cluster(Cluster(node=nodes, network=Network(inter_GBps=1.0)), tmp_path / "cluster.toml")
    write(tmp_path, [r for step in range(4) for rank in (0, 1) for r in step_of(rank, step, plan)])
    inputs = [
        word for name in ("cluster.toml", "model.json", "profile.json")
        for word in (f"--{name.partition('.')[0]}", tmp_path / name)
    ]  # fmt: skip
    code, said, _ = compare(tmp_path / "plan.json", "--run", tmp_path, *inputs, "--json")
    assert code == 0
    report = json.loads(said)
    assert report["predicted_s"] == pytest.approx(9.4, abs=0.01)  # fill 1, two times 3, drain 2, update 0.4
    [update] = [p for p in report["pieces"] if p["sort"] == "update" and p["rank"] == 0]
    assert update["predicted_s"] == pytest.approx(0.4)


def test_arachne_compare_takes_one_plan_with_a_run(tmp_path):
    files.write(two_stages(), tmp_path / "plan.json")
    _, _, error = compare(tmp_path / "plan.json", tmp_path / "plan.json", "--run", tmp_path)
    assert isinstance(error, UsageError)
    assert "2 plans" in str(error)
