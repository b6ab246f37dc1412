"""Profiles by the catalog: measured rows as they are, estimates that behave and say what they are."""

import time
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from arachne_runtime.errors import NotMeasuredError, UsageError
from arachne_runtime.plan.profile import Profile, Source, TpCommunication
from arachne_runtime.plan.rules import check_profile
from planner import catalog
from planner.catalog.analytic import Speed, rates

GPUS = catalog.device_names()[:-2]


def whole(profile: Profile, kind: str, device: str, tp: int, samples: int) -> float:
    cost = profile.block(kind, device, tp, samples)
    return cost.forward_s + cost.backward_s


def test_what_was_measured_stays_and_the_rest_is_marked():
    spec, measured = catalog.model("opt-350m"), catalog.profile("opt-350m")
    found = catalog.profile_for(spec, ["A100-40", "H100"])
    assert check_profile(found) == ()
    assert found.tp_communication is TpCommunication.INCLUDED
    mine = [t for t in measured.timings if t.device == "A100-40"]
    assert [t for t in found.timings if t.device == "A100-40" and t.source is Source.MEASURED] == mine
    assert {t.source for t in found.timings if t.device == "H100"} == {Source.ANALYTIC}
    assert {u.device for u in found.updates} == {"A100-40"}
    assert {x.between for x in found.links} == {("A100-40", "A100-40")}
    assert found.estimated(["A100-40", "H100"]) == (
        "seconds on A100-40: embedding at TP 8 analytic; layer at TP 8 analytic; head at TP 8 analytic; "
        "outside the measured samples (up to 8) analytic",
        "seconds on H100: analytic",
    )
    assert measured.estimated(["A100-40"]) == ()
    assert measured.estimated(["A100-40", "T4"]) == ()
    assert measured.estimated(["V100-16", "A100-40"]) == ("link A100-40 to V100-16: analytic",)


@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b", "bert-large"])
def test_estimates_grow_with_samples_and_shrink_with_tensor_parallelism(name):
    spec = catalog.model(name, dtype="float16")
    found = catalog.profile_for(spec, GPUS)
    assert check_profile(found) == ()
    assert {t.source for t in found.timings} == {Source.ANALYTIC}
    for kind in {b.kind for b in spec.blocks}:
        for device in GPUS:
            degrees = sorted({t.tp for t in found.timings if t.device == device})
            assert degrees == [d for d in (1, 2, 4, 8) if d <= catalog.device(device).node_size]
            for tp in degrees:
                low, high = found.samples_range(kind, device, tp)
                assert low == 1
                rows = [whole(found, kind, device, tp, 2**i) for i in range(high.bit_length())]
                assert all(a < b <= 2.001 * a for a, b in pairwise(rows))
            by_tp = [whole(found, kind, device, tp, 1) for tp in degrees]
            assert all(a / 2 < b < a for a, b in pairwise(by_tp))


def test_newer_devices_of_a_line_are_faster():
    spec = catalog.model("llama-3-8b", dtype="float16")
    found = catalog.profile_for(spec, GPUS)

    def layer(device: str) -> float:
        return whole(found, "layer", device, 1, 1)

    for line in (
        ("P100", "V100-16", "A100-40", "H100", "B200"),
        ("P40", "T4", "L4", "A6000", "L40S"),
        ("RTX-2080", "RTX-3090", "RTX-4090", "RTX-PRO-6000"),
        ("MI250X", "MI300X"),
    ):
        times = [layer(device) for device in line]
        assert times == sorted(times, reverse=True), line
    assert 1.5 < layer("A100-40") / layer("H100") < 3.5
    assert layer("H200") < layer("H100")


def test_a_dtype_that_a_device_lacks_is_computed_in_float32():
    v100 = catalog.device("V100-16")
    assert Speed.of(v100, "bfloat16") == Speed.of(v100, "float32")
    assert Speed.of(v100, "float16").peak == 125e12
    with pytest.raises(NotMeasuredError, match="'T4': no float64 rate"):
        Speed.of(catalog.device("T4"), "float64")


def test_the_estimate_is_as_good_as_it_says():
    """The shipped constants against the measurements that the wheel carries, one type at a time."""
    errors = rates().arithmetic["tfloat32"].errors
    assert errors.held_out_mean < 0.2
    measured = catalog.profile("opt-350m")
    spec = catalog.model("opt-350m")
    for device in ("A100-40", "A100-80", "GH200"):
        speed = Speed.of(catalog.device(device), "tfloat32")
        for samples in (1, 2, 4, 8):
            for i in (1, len(spec.blocks) - 1):
                forward, backward = speed.seconds(spec.blocks[i], samples, weight_bytes=4)
                told = whole(measured, spec.blocks[i].kind, device, 1, samples)
                assert forward + backward == pytest.approx(told, rel=0.25)


def test_four_types_take_no_time():
    spec = catalog.model("deepseek-v3-like")
    types = ["A100-40", "A6000", "H100", "V100-32"]
    catalog.profile_for(spec, types)
    start = time.process_time()
    found = catalog.profile_for(spec, types)
    assert time.process_time() - start < 0.05
    assert len(found.timings) > 200


def test_an_unknown_device_type_lists_the_known():
    with pytest.raises(UsageError, match=r"'H999'; known: .*B200"):
        catalog.profile_for(catalog.model("gpt2"), ["H999"])


def test_a_model_of_ones_own_is_estimated_by_its_blocks():
    spec = catalog.model_from_config(
        dict(catalog.config("opt-1.3b"), num_hidden_layers=3), sequence=128, name="x"
    )
    found = catalog.profile_for(spec, ["T4", "cpu-0.5"], tp_degrees=(1, 2), max_samples=8)
    assert (found.model, found.sequence, found.dtype) == ("x", 128, "bfloat16")
    assert {(t.device, t.tp) for t in found.timings} == {("T4", 1), ("T4", 2), ("cpu-0.5", 1)}
    assert found.samples_range("layer", "T4", 1) == (1, 8)


@pytest.mark.parametrize("name", catalog.measured_names())
def test_every_measured_name_loads_and_says_what_is_missing(name):
    entry = catalog.entry(name)
    assert entry.name == name
    assert "commit" in entry.source
    assert entry.licence.startswith("MIT")
    assert len(entry.notes) > 100
    assert len(entry.missing) > 20
    assert check_profile(catalog.profile(name)) == ()
    for packed in entry.profiles:
        assert check_profile(packed.unpack(name)) == ()
    spec = catalog.model(name)
    types = sorted({t.device for t in entry.profiles[0].timings})
    found = catalog.profile_for(spec, types)
    assert check_profile(found) == ()
    for device in types:
        for tp in (1, 2, 4):
            assert all(found.samples_range(b.kind, device, tp) for b in spec.blocks)


def test_llama_7b_is_what_zorse_measured():
    spec = catalog.model("llama-7b")
    assert (spec.sequence, spec.dtype) == (2048, "float16")
    found = catalog.profile_for(spec, ["A100-40", "H100-NVL", "A6000", "V100-16"])
    row = found.block("layer", "A100-40", 1, 4)
    assert (row.forward_s, row.backward_s, row.source) == (0.019799, 0.041677, Source.MEASURED)
    # measured at 512 and 4096 tokens, and at 512 and 1024
    assert found.block("layer", "H100-NVL", 1, 4).source is Source.INTERPOLATED
    assert found.block("layer", "A6000", 1, 4).source is Source.ANALYTIC
    assert found.block("head", "A100-40", 1, 4).source is Source.ANALYTIC
    assert found.tp_communication is TpCommunication.EXCLUDED
    assert "layer at TP 1 interpolated" in found.estimated(["H100-NVL"])[0]


def test_tensor_parallelism_of_llama_7b_is_as_efficient_as_acesos_layer():
    """GPT 6.7B, 2048 tokens: 0.845, 0.710, 0.527 of 1 / tp at TP 2, 4, 8 (data of SuperScaler fa80ad0)."""
    spec = catalog.model("llama-7b")
    found = catalog.profile_for(spec, ["A100-40"])
    one = whole(found, "layer", "A100-40", 1, 1)
    for tp, efficiency in ((2, 0.845), (4, 0.710), (8, 0.527)):
        assert one / tp / whole(found, "layer", "A100-40", tp, 1) == pytest.approx(efficiency, rel=0.15)


def test_a_sequence_between_two_measured_ones_lies_between_them():
    times = []
    for sequence in (512, 768, 1024):
        spec = catalog.model("llama-13b", sequence=sequence, dtype="float16")
        times.append(whole(catalog.profile_for(spec, ["A100-40"]), "layer", "A100-40", 1, 4))
    assert times[0] < times[1] < times[2]


def test_a_dtype_that_computes_alike_borrows_the_measured_ratio():
    half = catalog.profile_for(catalog.model("llama-7b"), ["A100-40"])
    brain = catalog.profile_for(catalog.model("llama-7b", dtype="bfloat16"), ["A100-40"])
    assert whole(brain, "layer", "A100-40", 1, 2) == pytest.approx(whole(half, "layer", "A100-40", 1, 2))
    assert brain.block("layer", "A100-40", 1, 2).source is Source.ANALYTIC


def test_half_layers_add_up_to_the_measured_layer():
    """A T4 that computes for long slows down: at 8 samples it takes 18 % more than its estimate."""
    spec = catalog.model("llama-7b", sequence=2048, dtype="float16", half_layers=True)
    found = catalog.profile_for(spec, ["T4"])
    halves = whole(found, "attention", "T4", 1, 8) + whole(found, "mlp", "T4", 1, 8)
    layer = whole(catalog.profile("llama-7b"), "layer", "T4", 1, 8)
    assert halves == pytest.approx(layer, rel=0.03)
    assert found.block("mlp", "T4", 1, 8).source is Source.ANALYTIC


def test_communication_is_within_the_seconds_where_the_measured_ones_hold_it():
    """Two all-reduces of 8.4 MB on four T4 over 12 GB/s: 6 messages of a quarter each, 10 us apart."""
    spec = catalog.model("opt-350m")
    within = catalog.profile_for(spec, ["T4"])
    without = catalog.profile_for(msgspec.structs.replace(spec, name="mine"), ["T4"])
    assert without.tp_communication is TpCommunication.EXCLUDED
    for kind, count in (("layer", 2), ("embedding", 1), ("head", 1)):
        a, b = (p.block(kind, "T4", 4, 1).forward_s for p in (within, without))
        assert a - b == pytest.approx(count * 6 * (10e-6 + 2048 * 1024 * 4 / 4 / 12e9), rel=1e-6)


def test_faults_of_the_sources_are_handled():
    neo = catalog.entry("gpt-neo-2.7b").profiles[0]
    assert {t.kind for t in neo.timings} == {"embedding", "layer"}  # its last layer is a norm only
    assert not [u for u in neo.updates if u.device == "A100-80"]  # zeros there
    for name in ("llama-7b", "llama-13b", "llama-33b"):
        for packed in catalog.entry(name).profiles:
            for t in packed.timings:
                assert list(t.forward_s) == sorted(t.forward_s)
                assert list(t.backward_s) == sorted(t.backward_s)
                if packed.sequence == 4096 and t.device == "H100-NVL":
                    assert 2 not in t.samples  # typed in
    built = catalog.entry("llama-3-8b").model.unpack()
    assert built.sequence == 8192  # as its kept bytes say
    assert built.blocks[1].parameters == pytest.approx(268_496_896, rel=3e-4)  # less biases and norms


def test_llama_3_8b_in_fp32_follows_what_was_measured_of_its_relative():
    spec = catalog.model("llama-3-8b", sequence=8192, dtype="float32")
    assert sum(b.parameters for b in spec.blocks) == 8_030_261_248
    relative = catalog.entry("llama-3-8b").model.unpack()
    measured = catalog.profile("llama-3-8b")
    assert (measured.model, measured.sequence) == (relative.name, 8192)
    found = catalog.profile_for(spec, ["A100-40", "GH200", "V100-16"])
    for device in ("A100-40", "GH200", "V100-16"):
        scale = spec.blocks[1].flops / relative.blocks[1].flops
        told, seen = (whole(p, "layer", device, 4, 1) for p in (found, measured))
        assert told == pytest.approx(scale * seen, rel=0.1)
        assert found.block("layer", device, 4, 1).source is Source.ANALYTIC


def test_the_data_of_the_wheel_is_small():
    folder = Path(catalog.__file__).parent
    files = [f for f in folder.rglob("*") if f.suffix in (".json", ".toml")]
    assert len(files) == len(catalog.measured_names()) + 3
    assert sum(f.stat().st_size for f in files) < 300_000
