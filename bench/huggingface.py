"""Tiny models of every Hugging Face family, trained two ways: by the original module, and by a plan."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.model import ModelParts
from arachne_runtime.model.huggingface import (
    HuggingFaceModel,
    causal_lm_loss,
    causal_lm_tokens,
    huggingface,
)
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage

transformers.logging.disable_progress_bar()  # each has a thread
transformers.logging.set_verbosity_error()

VOCABULARY, SEQUENCE, WIDTH, LAYERS, HEADS = 61, 9, 32, 3, 4
ROWS = 7
SEED = 3
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_ROTARY = {
    **_SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2,
    "experts_implementation": "eager",
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "sliding_window": None}


def configs() -> dict[str, Any]:
    """By family; small windows, tied heads, projected embeddings and dense layers among experts included."""
    t = transformers
    return {
        "llama": t.LlamaConfig(**_ROTARY, tie_word_embeddings=True),
        "qwen3": t.Qwen3Config(**_ROTARY, use_sliding_window=True, sliding_window=4, max_window_layers=1),
        "mistral": t.MistralConfig(**_ROTARY, sliding_window=4),
        "gpt2": t.GPT2Config(
            **_SIZES, n_positions=16, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0, initializer_range=0.2
        ),
        "opt": t.OPTConfig(
            **_SIZES, word_embed_proj_dim=16, ffn_dim=48, max_position_embeddings=16, dropout=0, init_std=0.2
        ),
        "mixtral": t.MixtralConfig(**_ROTARY, **_EXPERTS, num_local_experts=4),
        "qwen3_moe": t.Qwen3MoeConfig(
            **_ROTARY, **_EXPERTS, num_experts=4, moe_intermediate_size=24, mlp_only_layers=[1]
        ),
    }  # fmt: skip


def batch_of(step: int, *, padded: bool = True, rows: int = ROWS) -> dict[str, Tensor]:
    """Tokens, some of them padding on either side, some of the others no target."""
    random = torch.Generator().manual_seed(step)
    tokens = torch.randint(3, VOCABULARY, (rows, SEQUENCE), generator=random)
    if not padded:
        return {"input_ids": tokens, "labels": tokens}
    mask = torch.ones_like(tokens)
    for row in range(rows):
        mask[row, SEQUENCE - row % 5 :] = 0
    mask[1, :2] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    labels[0, : step + 3] = -100
    return {"input_ids": tokens.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels}


def unequal_plan(num_blocks: int = LAYERS + 2) -> Plan:
    """Three ranks: a first stage of two replicas with shares 1 and 2, then a longer second stage."""
    first = Stage(
        layers=(0, 2),
        recompute=True,
        replicas=(Replica(devices=("a:0",), share=1), Replica(devices=("b:0",), share=2)),
    )
    second = Stage(layers=(2, num_blocks), replicas=(Replica(devices=("a:1",), share=3),))
    pipeline = Pipeline(micro_batches=2, micro_batch=3, stages=(first, second))
    return Plan(model="hf", global_batch=6, sequence=SEQUENCE, pipelines=(pipeline,))


def three_stages(num_blocks: int = LAYERS + 2) -> Plan:
    """Three unequal stages, seven micro-batches of one row."""
    cuts = ((0, 1), (1, 3), (3, num_blocks))
    stages = [
        Stage(layers=layers, replicas=(Replica(devices=(f"a:{rank}",), share=1),))
        for rank, layers in enumerate(cuts)
    ]
    pipeline = Pipeline(micro_batches=ROWS, micro_batch=1, stages=tuple(stages))
    return Plan(model="hf", global_batch=ROWS, sequence=SEQUENCE, pipelines=(pipeline,))


def two_pipelines(num_blocks: int = LAYERS + 2) -> Plan:
    """Two stages with two micro-batches of 2 rows, beside a rank that holds the whole model and takes 3."""
    stages = tuple(
        Stage(layers=layers, replicas=(Replica(devices=(f"a:{rank}",), share=2),))
        for rank, layers in enumerate(((0, 3), (3, num_blocks)))
    )
    alone = Stage(layers=(0, num_blocks), replicas=(Replica(devices=("b:0",), share=3),))
    return Plan(
        model="hf",
        global_batch=ROWS,
        sequence=SEQUENCE,
        pipelines=(
            Pipeline(micro_batches=2, micro_batch=2, stages=stages),
            Pipeline(micro_batches=1, micro_batch=3, stages=(alone,)),
        ),
    )


def unequal_degrees(num_blocks: int = LAYERS + 2) -> Plan:
    """A stage of TP 2 beside a replica of TP 1, then a longer stage of TP 2: five ranks."""
    first = Stage(
        layers=(0, 2),
        replicas=(Replica(devices=("a:0", "a:1"), share=2), Replica(devices=("a:2",), share=1)),
    )
    second = Stage(layers=(2, num_blocks), replicas=(Replica(devices=("b:0", "b:1"), share=3),))
    pipeline = Pipeline(micro_batches=2, micro_batch=3, stages=(first, second))
    return Plan(model="hf", global_batch=6, sequence=SEQUENCE, pipelines=(pipeline,))


def more_devices_than_heads(num_blocks: int = LAYERS + 2) -> Plan:
    """TP 4, and two heads of k and v."""
    replica = Replica(devices=("a:0", "a:1", "a:2", "a:3"), share=3)
    stage = Stage(layers=(0, num_blocks), replicas=(replica,))
    pipeline = Pipeline(micro_batches=2, micro_batch=3, stages=(stage,))
    return Plan(model="hf", global_batch=6, sequence=SEQUENCE, pipelines=(pipeline,))


def shared_experts(num_blocks: int = LAYERS + 2) -> Plan:
    """EP 2 over two replicas, then EP 1 with parts of each expert in a replica of TP 2."""
    first = Stage(
        layers=(0, 3),
        expert_parallel=2,
        replicas=(Replica(devices=("a:0",), share=2), Replica(devices=("a:1",), share=1)),
    )
    second = Stage(
        layers=(3, num_blocks), expert_tensor=2, replicas=(Replica(devices=("b:0", "b:1"), share=3),)
    )
    pipeline = Pipeline(micro_batches=2, micro_batch=3, stages=(first, second))
    return Plan(model="hf", global_batch=6, sequence=SEQUENCE, pipelines=(pipeline,))


@dataclass(frozen=True, kw_only=True)
class Training:
    """One way to train a model."""

    family: str
    plan: Plan
    padded: bool = True
    dtype: torch.dtype = torch.float64
    steps: int = 3
    adam: bool = True
    clip_norm: float | None = None
    balance: float = 0.0
    rows: int | None = None
    """Of each batch; None: as many as the plan's."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2) if self.adam else torch.optim.SGD(parameters, lr=0.3)

    def batch(self, step: int) -> dict[str, Tensor]:
        return batch_of(step, padded=self.padded, rows=self.rows or self.plan.global_batch)


@dataclass
class Trained:
    """What training gave."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    """Those of this rank at the end, by their names in the original model."""


def train_by_plan(training: Training) -> Trained:
    """On the ranks of the default process group; runs on each of them."""
    recipe = Recipe(
        optimizer=training.optimizer,
        loss=causal_lm_loss,
        num_items=causal_lm_tokens,
        clip_norm=training.clip_norm,
        dtype=training.dtype,
        seed=SEED,
    )
    model = huggingface(configs()[training.family], balance=training.balance)
    engine = Engine(training.plan, ModelParts.of(model), recipe)
    found = Trained()
    for step in range(training.steps):
        report = engine.step(training.batch(step))
        found.losses.append(report.loss)
        found.norms.append(report.grad_norm)
    names = original_names(model)
    found.parameters = {names[name]: p.detach().clone() for name, p in engine.named_parameters()}
    engine.close()
    return found


def original_names(model: HuggingFaceModel) -> dict[str, str]:
    """Names in the blocks → names in the original model."""
    return {
        f"blocks.{index}.{name}": parameter.names[0]
        for index, block in enumerate(model.blocks())
        for name, parameter in block.items()
    }


def train_all_by_plan(trainings: list[Training]) -> list[Trained]:
    """One after the other, on the same ranks."""
    return [train_by_plan(training) for training in trainings]


def original(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """The module of transformers, as its own library makes it, with the values that a plan starts from."""
    drawn: Any = ModelParts.of(huggingface(configs()[family])).whole(seed=SEED)
    model = transformers.AutoModelForCausalLM.from_config(configs()[family])
    model.load_state_dict(drawn.original.state_dict())
    return model.to(dtype).train()


def train_originally(training: Training) -> Trained:
    """The plain loop of one process: the original module, and the loss that it returns itself."""
    model = original(training.family, training.dtype)
    optimizer = training.optimizer(model.parameters())
    found = Trained()
    for step in range(training.steps):
        optimizer.zero_grad()
        loss = model(**training.batch(step), use_cache=False).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm or float("inf"))
        optimizer.step()
        found.losses.append(loss.item())
        found.norms.append(norm.item())
    found.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return found


@dataclass(frozen=True)
class Gap:
    """Largest differences between two trainings."""

    loss: float
    """Relative, as is ``norm``."""
    norm: float
    parameter: float
    """Absolute; of SGD only, since Adam makes steps of the whole learning rate out of rounding."""


def gap(found: Trained, wanted: Trained, *, adam: bool) -> Gap:
    """How far one rank is from the original."""

    def largest(a: list[float], b: list[float]) -> float:
        return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))

    both = [(p, wanted.parameters[name]) for name, p in found.parameters.items()]
    apart = [(a - b).abs().max().item() for a, b in both if a.shape == b.shape]  # the others are shards
    return Gap(
        loss=largest(found.losses, wanted.losses),
        norm=largest(found.norms, wanted.norms),
        parameter=0.0 if adam else max(apart),
    )
