"""Writes a cluster as a person would: the TOML that ``read_cluster`` reads."""

import json
from pathlib import Path

import msgspec

from arachne_runtime.plan.cluster import Cluster
from arachne_runtime.plan.document import Document
from arachne_runtime.plan.files import write_whole


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Write ``cluster.toml``, whole or not at all."""
    write_whole(path, cluster_toml(cluster).encode())


def cluster_toml(cluster: Cluster) -> str:
    """The text of ``cluster.toml``; fields at their defaults are left out."""
    parts = [f"format = {_value(cluster.format)}\n"]
    parts += [_table("[[node]]", entry) for entry in cluster.node]
    parts.append(_table("[network]", cluster.network, leave_out=("pair",)))
    parts += [_table("[[network.pair]]", pair) for pair in cluster.network.pair]
    return "\n".join(parts)


def _table(header: str, row: Document, leave_out: tuple[str, ...] = ()) -> str:
    fields = msgspec.to_builtins(row)
    lines = [f"{name} = {_value(value)}" for name, value in fields.items() if name not in leave_out]
    return "\n".join([header, *lines, ""])


def _value(value: object) -> str:
    """Strings, numbers and lists of them are written in TOML as in JSON."""
    return json.dumps(value, ensure_ascii=False)
