"""Hugging Face models shared out among devices: tensor parallel, and experts."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from arachne_runtime import extra_losses
from arachne_runtime.engine.refusals import refuse_missing_experts, refuse_sharing
from arachne_runtime.errors import ModelError, UnsupportedPlanError, UsageError
from arachne_runtime.model import ModelParts
from arachne_runtime.model.huggingface import huggingface
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.testing import run_ranks
from bench.huggingface import (
    Training,
    batch_of,
    configs,
    gap,
    more_devices_than_heads,
    shared_experts,
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


def test_experts_train_as_the_original_however_they_are_shared_out() -> None:
    """Also where the last batch is so short that a replica has no rows."""
    trainings = [
        Training(family=family, plan=shared_experts(), adam=False, rows=rows)
        for family, rows in (("mixtral", None), ("qwen3_moe", None), ("mixtral", 2))
    ]
    ranks = run_ranks(4, train_all_by_plan, trainings, timeout_s=100)
    for index, training in enumerate(trainings):
        wanted = train_originally(training)
        for rank in ranks:
            apart = gap(rank[index], wanted, adam=False)
            assert max(apart.loss, apart.norm, apart.parameter) < BOUND, training.family
    balanced = [
        Training(family="mixtral", plan=plan, adam=False, balance=0.5) for plan in (shared_experts(), whole())
    ]
    (shared, *_), (alone,) = (
        run_ranks(len(training.plan.devices), train_all_by_plan, [training]) for training in balanced
    )
    assert shared[0].losses == pytest.approx(alone[0].losses, rel=BOUND)
    assert alone[0].losses[0] > train_originally(balanced[1]).losses[0] + 0.4


def whole() -> Plan:
    """One device holds all."""
    stage = Stage(layers=(0, 5), replicas=(Replica(devices=("a:0",), share=6),))
    pipeline = Pipeline(micro_batches=1, micro_batch=6, stages=(stage,))
    return Plan(model="hf", global_batch=6, sequence=9, pipelines=(pipeline,))


def test_the_balance_of_one_sample_and_layer_is_the_originals() -> None:
    """Theirs counts each of a token's experts as a whole."""
    config = configs()["mixtral"]
    config.num_hidden_layers = 1
    parts, batch = ModelParts.of(huggingface(config, balance=0.5)), batch_of(0, padded=False, rows=1)
    stage = parts.stage(range(3), device=torch.device("cpu"), seed=0)
    assert parts.context is not None
    with extra_losses() as added:
        stage((batch["input_ids"],), parts.context(batch))
    theirs = parts.whole(seed=0).original(**batch, output_router_logits=True, use_cache=False).aux_loss
    assert [loss.item() for loss in added] == pytest.approx([0.5 * theirs.item() / 2], rel=1e-5)


def test_experts_of_another_activation_are_not_shared_out() -> None:
    config = configs()["mixtral"]
    config.hidden_act = "gelu"
    with pytest.raises(UnsupportedPlanError, match="hold no experts"):
        refuse_missing_experts(shared_experts(), ModelParts.of(huggingface(config)))


def test_a_balance_that_no_block_would_keep_is_refused() -> None:
    with pytest.raises(UsageError, match="a model of type llama has no experts"):
        huggingface(configs()["llama"], balance=0.1)
    config = configs()["mixtral"]
    config.hidden_act = "gelu"
    with pytest.raises(ModelError, match="for experts with the activation silu"):
        ModelParts.of(huggingface(config, balance=0.1))


@pytest.mark.parametrize("plan", [unequal_degrees(), shared_experts()])
def test_a_folder_is_not_written_from_parts(plan, tmp_path) -> None:
    model = huggingface(configs()["mixtral"])
    engine = SimpleNamespace(
        plan=plan, places=(), stages=ModelParts.of(model).stages([range(1)], device="cpu", seed=0)
    )
    with pytest.raises(UnsupportedPlanError, match=r"stages\[0\] holds parameters in parts"):
        model.save(engine, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


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
        experts = 2 if "gate_up_proj" in " ".join(layers) else 0
        assert experts == (2 if family == "mixtral" else 0)
        assert len(layers) == 4 + dense + experts
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
