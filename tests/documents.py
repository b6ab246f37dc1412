"""One valid document of each kind in raw form, and a way to spoil it: for tests of readers and rules."""

import copy
import json
import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from arachne_runtime.plan.walk import walk

T = TypeVar("T")

PLAN: dict[str, Any] = {
    "format": "arachne.plan/1",
    "model": "tiny",
    "global_batch": 32,
    "sequence": 16,
    "schedule": "1f1b",
    "pipelines": [
        {
            "micro_batches": 4,
            "micro_batch": 6,
            "stages": [
                {
                    "layers": [0, 2],
                    "recompute": True,
                    "zero": 1,
                    "replicas": [{"devices": ["v-0:0"], "share": 4}, {"devices": ["v-0:1"], "share": 2}],
                },
                {"layers": [2, 5], "replicas": [{"devices": ["a:0", "a:1"], "share": 6}]},
            ],
        },
        {
            "micro_batches": 2,
            "micro_batch": 4,
            "stages": [{"layers": [0, 5], "replicas": [{"devices": ["v-1:0", "v-1:1"], "share": 4}]}],
        },
    ],
    "predicted": {"iteration_s": 0.5, "samples_per_s": 64.0, "peak_bytes": {"a:0": 9.1e9, "v-0:0": 1000}},
    "made_by": {
        "solver": "arachne",
        "seed": 7,
        "version": "0.1.0",
        "cluster": "sha256:1",
        "model": "sha256:2",
        "profile": "sha256:3",
    },
}

CLUSTER: dict[str, Any] = {
    "format": "arachne.cluster/1",
    "node": [
        {"name": "a", "device": "A100-40", "gpus": 4, "intra_GBps": 200.0, "memory_GiB": 40, "zone": "z1"},
        {"name": "v", "device": "V100-16", "gpus": 2, "count": 2, "price_per_hour": 0.5, "zone": "z2"},
    ],
    "network": {
        "inter_GBps": 12.5,
        "latency_us": 10,
        "pair": [
            {"between": ["a", "v"], "inter_GBps": 6.0, "latency_us": 20, "price_per_GB": 0.01},
            {"between": ["v", "v"], "inter_GBps": 8.0},
        ],
    },
}

CLUSTER_TOML = """
format = "arachne.cluster/1"
[[node]]
name = "a"
device = "A100-40"
gpus = 4
intra_GBps = 200.0
memory_GiB = 40
zone = "z1"
[[node]]
name = "v"
device = "V100-16"
gpus = 2
count = 2
price_per_hour = 0.5
zone = "z2"
[network]
inter_GBps = 12.5
latency_us = 10
[[network.pair]]
between = ["a", "v"]
inter_GBps = 6.0
latency_us = 20
price_per_GB = 0.01
[[network.pair]]
between = ["v", "v"]
inter_GBps = 8.0
"""

_LAYER = {
    "kind": "layer",
    "parameters": 50,
    "activation_bytes": 70,
    "output_bytes": 20,
    "flops": 1e3,
    "experts": 4,
    "expert_parameters": 40,
    "expert_flops": 500.0,
    "experts_per_token": 2,
}
MODEL: dict[str, Any] = {
    "format": "arachne.model/1",
    "name": "tiny",
    "sequence": 16,
    "dtype": "bfloat16",
    "bytes_per_parameter": {"weight": 2, "gradient": 2, "optimizer": 12},
    "blocks": [
        {"kind": "embedding", "parameters": 100, "activation_bytes": 0, "output_bytes": 20, "flops": 0},
        dict(_LAYER),
        dict(_LAYER),
        dict(_LAYER),
        {
            "kind": "head",
            "parameters": 110,
            "activation_bytes": 30,
            "output_bytes": 0,
            "flops": 2e3,
            "tied_to": 0,
            "tied_parameters": 100,
        },
    ],
}

PROFILE: dict[str, Any] = {
    "format": "arachne.profile/1",
    "model": "tiny",
    "sequence": 16,
    "dtype": "bfloat16",
    "tp_communication": "excluded",
    "timings": [
        {"kind": "layer", "device": "A100-40", "samples": 1, "forward_s": 0.1, "backward_s": 0.2},
        {
            "kind": "layer",
            "device": "A100-40",
            "tp": 2,
            "samples": 1,
            "forward_s": 0.06,
            "backward_s": 0.12,
            "activation_bytes": 700,
            "source": "analytic",
        },
    ],
    "updates": [
        {"kind": "layer", "device": "A100-40", "update_s": 0.01},
        {"kind": "layer", "device": "A100-40", "tp": 2, "update_s": 0.005},
    ],
    "links": [
        {
            "between": ["A100-40", "V100-16"],
            "scope": "inter",
            "points": [{"bytes": 0, "seconds": 1e-5}, {"bytes": 1000, "seconds": 2e-5}],
        },
        {"between": ["A100-40", "A100-40"], "scope": "intra", "points": [{"bytes": 1000, "seconds": 1e-5}]},
    ],
    "steps": [{"device": "A100-40", "step_s": 0.002}, {"device": "V100-16", "step_s": 0.003}],
    "step_s": 0.001,
}

_STEP = re.compile(r"\.?([A-Za-z_]+)|\[(\d+)\]|\[\"([^\"]*)\"\]")
REMOVED: Any = object()
"""As a value for ``changed``: take the member away."""


def changed(document: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy with the members at the given addresses (``pipelines[0].micro_batch``) replaced."""
    fresh = copy.deepcopy(document)
    for address, value in changes.items():
        *steps, last = [_key(match) for match in _STEP.finditer(address)]
        place: Any = fresh
        for step in steps:
            place = place[step]
        if value is REMOVED:
            del place[last]
        elif isinstance(place, list) and last == len(place):
            place.append(copy.deepcopy(value))
        else:
            place[last] = copy.deepcopy(value)
    return fresh


def read(raw: dict[str, Any], kind: type[T]) -> T:
    """The document that a valid raw form stands for."""
    ready, faults = walk(raw, kind)
    assert faults == ()
    return msgspec.convert(ready, kind)


def written(folder: Path, content: Any, name: str = "plan.json") -> Path:
    """A file with bytes, text, or JSON of anything else."""
    path = folder / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def _key(match: re.Match[str]) -> str | int:
    name, index, quoted = match.groups()
    return int(index) if index is not None else name or quoted
