"""The catalog: names, figures, sources."""

from pathlib import Path

import pytest

from arachne_runtime.errors import UsageError
from arachne_runtime.plan.profile import LinkScope, Source
from planner import catalog


@pytest.mark.parametrize(
    ("ask", "name", "near"),
    [
        (catalog.device, "A100", "A100-40, A100-80"),
        (catalog.device, "h100-nvl", "H100-NVL"),
        (catalog.model, "Llama-3-8B", "llama-3-8b"),
        (catalog.model, "lama-3-8b", "llama-3-8b"),
        (catalog.profile, "OPT-350M", "opt-350m"),
    ],
)
def test_an_unknown_name_recalls_the_nearest_ones(ask, name, near):
    with pytest.raises(UsageError, match=rf"named '{name}'; did you mean {near}\b.*(known|measured): "):
        ask(name)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(UsageError, match=r"'H999'; known: P100, .*A100-40, .*MI300X, cpu, cpu-<share>"):
        catalog.device("H999")
    with pytest.raises(UsageError, match=r"'gpt-9'.*known: gpt2, .*opt-350m.*deepseek-v3-like"):
        catalog.model("gpt-9")
    with pytest.raises(
        UsageError, match=r"model named '../opt-350m'; did you mean opt-350m\? measured: .*, opt-350m$"
    ):
        catalog.profile("../opt-350m")


@pytest.mark.parametrize("name", ["cpu-", "cpu-x", "cpu-0", "cpu--1", "cpu-nan", "CPU"])
def test_a_cpu_share_is_a_positive_number(name):
    with pytest.raises(UsageError):
        catalog.device(name)


def test_a_cpu_share_scales_what_a_core_does():
    whole, part = catalog.device("cpu"), catalog.device("cpu-0.25")
    assert part.intra_GBps == pytest.approx(whole.intra_GBps / 4)
    assert part.memory_bytes == whole.memory_bytes


def test_every_figure_names_its_source():
    for name in catalog.device_names()[:-1]:
        device = catalog.device(name)
        assert len(device.source) > 40
        assert bool(device.price_source) == (device.price_per_hour is not None)
    notice = (Path(__file__).parents[1] / "NOTICE").read_text()
    for name in catalog.measured_names():
        entry = catalog.entry(name)
        repository, _ = entry.source.split(": ")
        assert repository in notice
        assert entry.licence.removeprefix("MIT License, ") in notice
    assert "github.com/microsoft/SuperScaler, commit fa80ad0" in notice  # in efficiency.toml


def test_the_readme_counts_what_the_catalog_knows():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    types, models = len(catalog.device_names()) - 2, len(catalog.model_names())
    assert f"{types} GPU types (and CPUs) and {models} models" in readme


def test_figures_of_devices_can_be():
    """Peaks grow from wide to narrow dtypes, a link is slower than memory, a node is a power of two."""
    for name in catalog.device_names()[:-2]:
        device = catalog.device(name)
        rates = [device.flops[d] for d in ("float32", "tfloat32", "float16") if d in device.flops]
        assert rates == sorted(rates)
        assert device.flops.get("bfloat16", device.flops["float16"]) == device.flops["float16"]
        assert 8e12 <= device.flops["float32"] <= 2e14
        assert device.memory_GBps is not None
        assert device.intra_GBps < device.memory_GBps
        assert device.node_size in (4, 8)
        assert 10e9 < device.memory_bytes < 256e9


def test_opt_350m_is_what_was_measured():
    model, profile = catalog.model("opt-350m"), catalog.profile("opt-350m")
    assert (len(model.blocks), model.sequence) == (26, 2048)
    assert sum(b.parameters for b in model.blocks) == 407_431_168
    layer = profile.block("layer", "V100-16", 1, 4)
    assert (layer.forward_s, layer.backward_s) == (0.028839, 0.071714)
    assert profile.samples_range("head", "A100-40", 4) == (1, 8)


def test_measured_links_are_ascending_and_faster_inside_a_node():
    links = catalog.profile("opt-350m").links
    types = {"A100-40", "A100-80", "GH200", "RTX-2080", "RTX-3090", "Titan-RTX", "V100-16"}
    assert {k.between[0] for k in links if k.between[0] == k.between[1]} == types
    for link in links:
        seconds = [p.seconds for p in link.points]
        assert seconds == sorted(seconds)
        assert (link.source is Source.MEASURED) == (link.between[0] == link.between[1])
    at_64_mb = {(k.between, k.scope, k.senders): k.points[6].seconds for k in links}
    pair = ("A100-40", "A100-40")
    assert at_64_mb[pair, LinkScope.INTRA, 1] * 10 < at_64_mb[pair, LinkScope.INTER, 1]
    assert at_64_mb[pair, LinkScope.INTER, 1] < at_64_mb[pair, LinkScope.INTER, 4]
