"""The entries of LLaMA 7B, 13B and 33B as benson-guo/zorse measured one layer of each."""

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from arachne_runtime.plan.profile import TpCommunication
from planner.catalog.packed import Entry, PackedProfile, Timings

from . import zorse

NAMES = {
    "llama-7b": "deepspeedllama_7b",
    "llama-13b": "deepspeedllama_13b",
    "llama-33b": "deepspeedllama_33b",
}
"""Ours and the source's."""
FIRST = (2048, "float16")
"""What is meant where neither sequence nor dtype is given."""
NOTES = (
    "Real GPUs, one transformer layer (4 h^2 + 3 h f parameters, as published), TP 1, fp16 mixed precision "
    "under DeepSpeed, and fp32 without TF32; kind `layer`. Where noise made a larger number of samples "
    "faster (P40, H100-NVL), the slower figure counts for both. Left out: figures at sequence 4096 with 2 "
    "samples on H100-NVL and A100-80, round numbers that look typed in; the source's fitted lines, some of "
    "whose intercepts are negative (T4, P40, L4); v100-pciex16. The backward of one sample holds a fixed "
    "part of some milliseconds, which is kept: it is there at every number of samples. P40 and P100 compute "
    "fp16 at the fp32 rate."
)
MISSING = (
    "embedding and head; every TP degree above 1 (estimated with the efficiency of Aceso's GPT layers on "
    "V100-32, marked analytic); kept bytes (counted); sequences that a device type was not measured at "
    "(interpolated between its own two neighbours, else analytic); the optimizer step; links."
)


def llamas(folder: Path) -> Iterator[Entry]:
    """One entry for each size."""
    for ours, theirs in NAMES.items():
        yield Entry(
            name=ours,
            source=f"{zorse.SOURCE}: layer_latencies ({theirs})",
            licence=zorse.LICENCE,
            notes=NOTES,
            missing=MISSING,
            profiles=tuple(_profiles(folder, theirs)),
        )


def _profiles(folder: Path, model: str) -> Iterator[PackedProfile]:
    found: dict[tuple[int, str], list[Timings]] = {}
    for s in zorse.series(folder):
        if s.model == model:
            found.setdefault((s.sequence, s.dtype), []).append(
                Timings(
                    kind="layer",
                    device=s.device,
                    samples=s.samples,
                    forward_s=tuple(accumulate(s.forward_s, max)),
                    backward_s=tuple(accumulate(s.backward_s, max)),
                )
            )
    for key in sorted(found, key=lambda k: (k != FIRST, k[1], k[0])):
        sequence, dtype = key
        yield PackedProfile(
            sequence=sequence,
            dtype=dtype,
            tp_communication=TpCommunication.EXCLUDED,
            timings=tuple(found[key]),
        )
