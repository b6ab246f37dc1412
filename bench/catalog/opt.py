"""The entry of OPT-350M as eth-easl/sailor built and measured it."""

from pathlib import Path

from arachne_runtime.plan.model import BlockSpec
from arachne_runtime.plan.profile import TpCommunication
from planner.catalog.packed import BlockRun, Entry, PackedModel, PackedProfile

from . import sailor

LAYERS = 24
HIDDEN, VOCABULARY, SEQUENCE = 1024, 50272, 2048
KINDS = {"embedding": ("0",), "layer": ("2",), "head": ("25",)}
NOTES = (
    "Real GPUs, fp32 (TF32 on the tensor cores of Ampere and Hopper), sequence 2048, Adam; tensor- "
    "parallel communication is inside the seconds. Kind `layer` is layer 2 (layer 1 holds a first-call "
    "overhead). The embedding's backward is a few microseconds in the source. Links: the source fits "
    "GB/s = a x^2 + b x + c, x = log2(bytes / 1e6), capped at the measured maximum; here read off at 1 "
    "MB to 1.024 GB, seconds kept ascending; with n senders the source's figure is the node's total, "
    "here each sender's own. Inside a node: the figure of two devices. Links of unlike pairs were not "
    "measured: they hold the slower side, marked analytic. RTX-3090's link between nodes is 1 Gbit/s "
    "Ethernet. GH200 is the source's GH-96. FLOPs are counted (multiply and add, attention scores of "
    "all pairs), hidden 1024, vocabulary 50272; the head is not tied, so the model has 407 million "
    "parameters where the published OPT-350M, tied and with embeddings of 512, has 331."
)
MISSING = (
    "A100-80, GH200: TP 8; A100-40: TP 8 and more than 8 samples; links inside a node under several senders; "
    "links between unlike device types; the fixed cost of a step."
)


def opt_350m(folder: Path) -> Entry:
    """Seconds, bytes and links of all seven device types."""
    profile = PackedProfile(
        sequence=SEQUENCE,
        dtype="float32",
        arithmetic="tfloat32",
        tp_communication=TpCommunication.INCLUDED,
        timings=tuple(sailor.timings(folder, "OPT-350", KINDS)),
        updates=tuple(sailor.updates(folder, "OPT-350", KINDS)),
        links=tuple(sailor.links(folder)),
    )
    return Entry(
        name="opt-350m",
        source=f"{sailor.SOURCE}: layer_times, layer_memory, network_coefficients (OPT-350)",
        licence=sailor.LICENCE,
        notes=NOTES,
        missing=MISSING,
        model=_model(folder),
        profiles=(profile,),
    )


def _model(folder: Path) -> PackedModel:
    memory = sailor.load(folder, "layer_memory")["OPT-350"]["1"]
    matmul = 2.0 * SEQUENCE
    flops = {
        "embedding": 0.0,
        "layer": matmul * 12 * HIDDEN**2 + 4.0 * SEQUENCE**2 * HIDDEN,
        "head": matmul * HIDDEN * VOCABULARY,
    }
    runs = [
        BlockRun(
            count=LAYERS if kind == "layer" else 1,
            block=BlockSpec(
                kind=kind,
                parameters=memory[layer]["params_floats"],
                activation_bytes=memory[layer]["act_mem_bytes"],
                output_bytes=0 if kind == "head" else memory[layer]["act_output_bytes"],
                flops=flops[kind],
            ),
        )
        for kind, (layer,) in KINDS.items()
    ]
    return PackedModel(name="opt-350m", sequence=SEQUENCE, dtype="float32", runs=tuple(runs))
