"""Profiles by the catalog: measured rows as they are, estimates that behave and say what they are."""

import time
from itertools import pairwise

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
        "beyond 8 samples, or fewer, analytic",
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
