"""A GPT layer's seconds by TP degree from microsoft/SuperScaler (Aceso), V100-32, computing only."""

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = "github.com/microsoft/SuperScaler, commit fa80ad0"
LICENCE = "MIT License, Copyright (c) Microsoft Corporation"
HIDDEN = {"1_3B": 2048, "6_7B": 4096, "13B": 5120}
SEQUENCE = 2048
"""Tokens: the attention operators of gpt_1_3B and their megabytes fit it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Forward and backward of one layer on each device of a tensor-parallel group, communication left out."""

    hidden: int
    tokens: int
    tp: int
    seconds: float


def layers(folder: Path) -> Iterator[Layer]:
    """Every size, micro-batch and degree; of two algorithms the first (Megatron's)."""
    for path in sorted((folder / "aceso").glob("gpt_*_algo0.csv")):
        name = re.fullmatch(r"gpt_(\w+)_mbs(\d+)_tp(\d+)_algo0", path.stem)
        assert name, path
        size, samples, tp = name[1], int(name[2]), int(name[3])
        with path.open() as file:
            rows = [row for row in csv.DictReader(file) if row["op_name"].startswith("enc-")]
        spent = sum(float(row["forward-compute"]) + float(row["backward-compute"]) for row in rows)
        yield Layer(hidden=HIDDEN[size], tokens=SEQUENCE * samples, tp=tp, seconds=spent / 1e6)
