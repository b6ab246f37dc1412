"""Hugging Face models in replicas of several devices: tensor parallel by transformers' own plan."""

import pytest
import transformers

from arachne_runtime.engine.refusals import refuse_sharing
from arachne_runtime.errors import UnsupportedPlanError
from arachne_runtime.model import ModelParts
from arachne_runtime.model.huggingface import huggingface
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.testing import run_ranks
from bench.huggingface import (
    Training,
    configs,
    gap,
    more_devices_than_heads,
    train_all_by_plan,
    train_originally,
    unequal_degrees,
)

BOUND = 1e-6
"""Relative: the originals round norms, softmax and loss to float32."""


@pytest.mark.parametrize("plan", [unequal_degrees(), more_devices_than_heads()])
def test_every_family_trains_as_the_original_whatever_the_degrees(plan) -> None:
    trainings = [
        Training(family=family, plan=plan, padded=index % 2 == 0, adam=index % 3 == 0, clip_norm=0.5, steps=2)
        for index, family in enumerate(configs())
    ]
    ranks = run_ranks(len(plan.devices), train_all_by_plan, trainings, timeout_s=100)
    for index, training in enumerate(trainings):
        wanted = train_originally(training)
        for rank in ranks:
            apart = gap(rank[index], wanted, adam=training.adam)
            assert max(apart.loss, apart.norm, apart.parameter) < BOUND, training.family


@pytest.mark.parametrize("family", configs())
def test_a_rank_holds_its_part(family) -> None:
    parts = ModelParts.of(huggingface(configs()[family]))
    cut = [
        info.name for block in range(parts.num_blocks) for info in parts.parameters_of(block) if info.splits
    ]
    layers = [name for name in cut if name.startswith("blocks.2.")]
    if family in ("gpt2", "opt"):
        assert len(layers) == {"gpt2": 6, "opt": 10}[family]  # weights, and biases of what is cut by columns
    else:
        norms = 2 if family.startswith("qwen3") else 0
        dense = 0 if family == "mixtral" or (family == "qwen3_moe" and 2 not in dense_blocks()) else 3
        assert len(layers) == 4 + dense
        partial = [info.name for info in parts.parameters_of(2) if info.partial]
        assert len(partial) == norms
    assert any(name.startswith("blocks.0.") for name in cut)


def dense_blocks() -> list[int]:
    """Of Qwen3-MoE: layer 1 is block 2."""
    return [layer + 1 for layer in configs()["qwen3_moe"].mlp_only_layers]


REFUSED = {
    "llama": (
        lambda: configs()["llama"],
        r"blocks.1.layer.self_attn.num_heads is 4, which 3 ranks cannot share",
    ),
    "opt": (lambda: configs()["opt"], r"blocks.1.layer.self_attn.num_heads is 4, which 3 ranks cannot share"),
    "gpt2": (
        lambda: transformers.GPT2Config(
            **{**configs()["gpt2"].to_diff_dict(), "n_inner": 50, "n_head": 3, "n_embd": 33}
        ),
        r"blocks.1.layer.mlp.inner is 50, which 3 ranks cannot share",
    ),
}


@pytest.mark.parametrize("family", REFUSED)
def test_degrees_that_do_not_divide_are_refused(family) -> None:
    make, message = REFUSED[family]
    replica = Replica(devices=("a:0", "a:1", "a:2"), share=1)
    stage = Stage(layers=(0, 5), replicas=(replica,))
    plan = Plan(
        model="hf",
        global_batch=1,
        sequence=9,
        pipelines=(Pipeline(micro_batches=1, micro_batch=1, stages=(stage,)),),
    )
    with pytest.raises(UnsupportedPlanError, match=message):
        refuse_sharing(plan, ModelParts.of(huggingface(make())))
