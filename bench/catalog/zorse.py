"""Layer latencies from benson-guo/zorse: one layer, TP 1, by device, sequence, dtype and samples."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

SOURCE = "github.com/benson-guo/zorse, commit 2fd6330"
LICENCE = "MIT License, Copyright (c) 2026 Benson Guo"
DEVICES = {
    "a100x40": "A100-40",
    "a100x80": "A100-80",
    "a10g": "A10G",
    "a6000": "A6000",
    "h100-nvl": "H100-NVL",
    "l4": "L4",
    "l40s": "L40S",
    "p100": "P100",
    "p40": "P40",
    "rtx3090": "RTX-3090",
    "t4": "T4",
    "v100x16": "V100-16",
    "v100x32": "V100-32",
}
"""The source's names and ours; v100-pciex16 has no type of its own here."""


def _llama(hidden: int, width: int, heads: int) -> Mapping[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "vocab_size": 32000,
    }


def _gpt(hidden: int) -> Mapping[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": 1,
        "n_head": 32,
        "n_positions": 4096,
        "vocab_size": 50257,
    }


def _bert(hidden: int, heads: int) -> Mapping[str, Any]:
    return {
        "model_type": "bert",
        "hidden_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": 4096,
        "vocab_size": 30522,
    }


CONFIGS = {
    "deepspeedllama_tiny": _llama(2048, 5632, 32),
    "deepspeedllama_3b": _llama(3200, 8640, 32),
    "deepspeedllama_7b": _llama(4096, 11008, 32),
    "deepspeedllama_13b": _llama(5120, 13824, 40),
    "deepspeedllama_33b": _llama(6656, 17920, 52),
    "deepspeedllama_65b": _llama(8192, 22016, 64),
    "deepspeedgpt_1.3b": _gpt(2048),
    "deepspeedgpt_2.7b": _gpt(2560),
    "deepspeedgpt_6.7b": _gpt(4096),
    "deepspeedbert_large": _bert(1024, 16),
    "deepspeedbert_xlarge": _bert(1536, 24),
}
"""Dimensions by the source's names (model_stats.json gives hidden size and parameters of a layer)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One layer on one device type, by samples."""

    model: str
    device: str
    sequence: int
    dtype: str
    samples: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]


def series(folder: Path) -> Iterator[Series]:
    """Every series with samples of its own; those of a fitted line alone are left out.

    Figures that look typed in are left out: h100-nvl and a100x80 at sequence 4096 with 2 samples.
    """
    table = msgspec.json.decode((folder / "zorse" / "layer_latencies.json").read_bytes())
    for model, by_device in table.items():
        for theirs, ours in DEVICES.items():
            for sequence, by_dtype in by_device.get(theirs, {}).items():
                for dtype, figures in by_dtype.items():
                    if not isinstance(figures, list) or len(figures) < 4 or not isinstance(figures[2], list):
                        continue
                    rows = [
                        (n, forward, backward)
                        for n, (forward, backward) in enumerate(zip(*figures[2:4], strict=True), start=1)
                        if not _typed_in(forward, backward)
                    ]
                    samples, forward_ms, backward_ms = zip(*rows, strict=True)
                    yield Series(
                        model=model,
                        device=ours,
                        sequence=int(sequence),
                        dtype=dtype,
                        samples=samples,
                        forward_s=tuple(_seconds(ms) for ms in forward_ms),
                        backward_s=tuple(_seconds(ms) for ms in backward_ms),
                    )


def _typed_in(forward_ms: float, backward_ms: float) -> bool:
    """A measurement to a nanosecond does not end in two zeros of a millisecond."""
    return any(value == round(value, 1) for value in (forward_ms, backward_ms))


def _seconds(ms: float) -> float:
    return float(f"{ms / 1e3:.5g}")
