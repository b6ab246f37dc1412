"""What the recorder writes beside actions: collectives of groups, the commit word, peaks of memory."""

import gc
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from arachne_runtime.measure.collectives import collective, recording
from arachne_runtime.measure.live import peak_of
from arachne_runtime.measure.recorder import Recorder, Silence, is_weighed
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.plan.records import Record, RecordKind
from arachne_runtime.testing import run_ranks

CPU = torch.device("cpu")
KILO = 256
"""Numbers of four bytes in a kibibyte."""


def lone_plan():
    stage = Stage(layers=(0, 1), replicas=(Replica(devices=("n:0",), share=2),))
    return Plan(
        model="m", global_batch=2, sequence=1,
        pipelines=(Pipeline(micro_batches=1, micro_batch=2, stages=(stage,)),),
    )  # fmt: skip


def read(folder: Path, rank: int = 0) -> list[Record]:
    lines = (folder / f"rank-{rank}.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Record) for line in lines]


def nothing():
    return ()


def test_the_peak_is_of_what_is_alive_at_once():
    with peak_of(CPU, nothing) as peak:
        first = torch.zeros(4 * KILO)
        second = first + 1  # 8 KiB
        del first
        third = torch.cat((second, second))  # 4 + 8 KiB
        del second
        third.view(-1).add_(1)  # no memory of its own
    assert peak.bytes == 12 * 1024


def test_what_was_there_before_counts_once():
    held = torch.zeros(4 * KILO)
    with peak_of(CPU, lambda: (held, held[:1], held.view(2, -1))) as peak:
        torch.zeros(KILO)
    assert peak.bytes == 5 * 1024


def test_what_only_autograd_holds_is_alive():
    """Its tensors have no name in Python; the storage must not be forgotten before the graph goes."""
    x = torch.ones(4 * KILO, requires_grad=True)
    with peak_of(CPU, lambda: (x,)) as peak:
        y = x.exp().exp().exp().sum()  # the graph keeps three results
        gc.collect()
        before = torch.zeros(16 * KILO)
        del before
        y.backward()
    assert 4 + 3 * 4 + 16 <= peak.bytes / 1024 <= 4 + 3 * 4 + 16 + 1


def test_a_module_needs_weights_activations_and_gradients():
    layer = nn.Linear(64, 64, bias=False)
    with peak_of(CPU, layer.parameters) as peak:
        layer(torch.ones(64, 64)).sum().backward()
    in_out_and_its_gradient, weight_and_its_gradient = 3 * 64 * 64 * 4, 2 * 64 * 64 * 4
    assert peak.bytes <= in_out_and_its_gradient + weight_and_its_gradient
    assert peak.bytes >= in_out_and_its_gradient + weight_and_its_gradient - 2 * 64 * 64 * 4


def peak_of_sharded_layer():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    layer = nn.Linear(64, 256, bias=False)
    parallelize_module(layer, init_device_mesh("cpu", (2,)), ColwiseParallel())
    with peak_of(CPU, lambda: [p.to_local() for p in layer.parameters()]) as peak:
        layer(torch.ones(1, 64)).sum().backward()
    return peak.bytes


def test_a_sharded_tensor_counts_as_what_is_local():
    half = 64 * 128 * 4
    assert all(2 * half < peak < 2 * half + 8 * 1024 for peak in run_ranks(2, peak_of_sharded_layer))


def test_an_error_inside_ends_the_counting():
    with pytest.raises(ZeroDivisionError), peak_of(CPU, nothing):
        raise ZeroDivisionError
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_a_collective_belongs_to_its_action(tmp_path):
    with Recorder(tmp_path, rank=0, plan=lone_plan()) as recorder:
        with recorder.step(3, samples=2, held=nothing):
            start = recorder.mark()
            with collective("experts all_to_all", sent_bytes=5):
                pass
            with collective("tensor all_reduce", sent_bytes=7):
                pass
            marks = (start, start, recorder.mark(), recorder.mark())
            recorder.add(RecordKind.ACTION, "0F0", marks, samples=2)
            with recorder.timed(RecordKind.COMMIT, "commit", sent_bytes=48):
                pass
        assert recording() is None
        with collective("experts all_to_all", sent_bytes=9):
            pass  # outside of a step: not written
    one, two, action, commit, step = read(tmp_path)
    assert [(r.kind, r.name, r.within, r.sent_bytes) for r in (one, two)] == [
        (RecordKind.COLLECTIVE, "experts all_to_all", "0F0", 5),
        (RecordKind.COLLECTIVE, "tensor all_reduce", "0F0", 7),
    ]
    assert action.start_s <= one.start_s <= one.start_s + one.wait_s <= two.start_s
    assert two.start_s + two.wait_s <= action.start_s + action.compute_s
    assert (commit.kind, commit.within, commit.sent_bytes) == (RecordKind.COMMIT, "", 48)
    assert (step.kind, step.samples) == (RecordKind.STEP, 2)


def fail(recorder):
    recorder.add(RecordKind.UPDATE, "update", (0.0, 0.0, 1.0))
    raise ZeroDivisionError


def test_a_step_that_fails_leaves_no_record(tmp_path):
    with Recorder(tmp_path, rank=0, plan=lone_plan()) as recorder:
        with pytest.raises(ZeroDivisionError), recorder.step(0, samples=2, held=nothing):
            fail(recorder)
        with recorder.step(0, samples=2, held=nothing):
            pass
    assert [r.kind for r in read(tmp_path)] == [RecordKind.MEMORY, RecordKind.STEP]


def test_memory_is_weighed_on_few_steps_of_a_cpu(tmp_path):
    assert [step for step in range(1030) if is_weighed(step)] == [0, 1, 16, 64, 256, 1024]
    with Recorder(tmp_path, rank=0, plan=lone_plan()) as recorder:
        for step in range(3):
            with recorder.step(step, samples=2, held=nothing):
                torch.zeros(KILO)
    peaks = [(r.step, r.peak_bytes) for r in read(tmp_path) if r.kind is RecordKind.MEMORY]
    assert peaks == [(0, 1024), (1, 1024)]


def test_silence_costs_no_context_of_its_own():
    silence = Silence()
    with silence.step(0, samples=2, held=nothing), silence.timed(RecordKind.COMMIT, "commit"):
        assert recording() is None
