"""The devices of this machine, where no cluster file and no lab names them."""

import re
import socket

from arachne_runtime.errors import UsageError
from arachne_runtime.plan.cluster import Cluster, Network, NodeEntry

INTER_GBPS = 1.0
"""Stated for a network that a single machine does not have; a person edits it before adding nodes."""


def this_machine() -> Cluster:
    """One node with the CUDA devices of this machine, or with one CPU device."""
    import torch

    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()) or "here"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kinds = sorted({gpu_type(*_gpu(index)) for index in range(count)})
    if len(kinds) > 1:
        raise UsageError(
            f"this machine has CUDA devices of types {', '.join(kinds)}; a node has one type: write a "
            f"cluster.toml with a node for each, and give it with --cluster"
        )
    entry = NodeEntry(name=name, device=kinds[0] if kinds else "cpu", gpus=count or 1)
    return Cluster(node=(entry,), network=Network(inter_GBps=INTER_GBPS))


def gpu_type(name: str, memory_bytes: int) -> str:
    """``("NVIDIA A100-SXM4-40GB", 42.5e9)`` → ``A100-40``: the model, and its memory in GiB."""
    words = [w for w in re.split(r"[\s-]+", name) if w.upper() not in ("NVIDIA", "TESLA", "GEFORCE")]
    model = words[0] if words else "GPU"
    if model.upper() == "RTX" and len(words) > 1:
        model = "RTX" + words[1]
    return f"{model}-{round(memory_bytes / 2**30)}"


def _gpu(index: int) -> tuple[str, int]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return properties.name, properties.total_memory
