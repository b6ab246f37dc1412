"""Hugging Face models: blocks compute what the original module does, under any plan and from any source."""

import copy
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import transformers
from safetensors.torch import load_file, save_file

from arachne_runtime.data.batch import slice_rows
from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.errors import ModelError, UnsupportedEnvironmentError, UnsupportedPlanError, UsageError
from arachne_runtime.measure.blocks import measure_blocks
from arachne_runtime.measure.timing import Effort
from arachne_runtime.model import ModelParts, Workload
from arachne_runtime.model.huggingface import causal_lm_loss, causal_lm_tokens, huggingface
from arachne_runtime.surroundings import lone_plan
from arachne_runtime.testing import run_ranks
from bench.huggingface import (
    LAYERS,
    SEED,
    SEQUENCE,
    VOCABULARY,
    Training,
    batch_of,
    configs,
    gap,
    original,
    three_stages,
    train_all_by_plan,
    train_originally,
    two_pipelines,
    unequal_plan,
)
from launch.profiling.workload import verify_blocks

BOUND = 1e-6
"""Relative, of parameters absolute. The originals round norms, softmax and loss to float32 in any dtype."""
CPU = torch.device("cpu")
FAMILIES = tuple(configs())


@pytest.mark.parametrize("plan", [unequal_plan(), three_stages(), two_pipelines()])
def test_every_family_trains_as_the_original_module(plan) -> None:
    trainings = [
        Training(family=family, plan=plan, padded=index % 3 != 0, adam=index % 2 == 0, clip_norm=0.5)
        for index, family in enumerate(FAMILIES)
    ]
    found = run_ranks(3, train_all_by_plan, trainings)
    for index, training in enumerate(trainings):
        wanted = train_originally(training)
        for rank in range(3):
            apart = gap(found[rank][index], wanted, adam=training.adam)
            assert max(apart.loss, apart.norm, apart.parameter) < BOUND, training.family


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_in_a_row_are_the_original(family) -> None:
    parts = ModelParts.of(huggingface(configs()[family]))
    parts.verify(batch_of(0, padded=False))
    stage, model = parts.stage(range(LAYERS + 2), device=CPU, seed=SEED), original(family)
    assert parts.context is not None
    for batch in (batch_of(1), packed_batch()):
        if family == "opt" and "position_ids" in batch:
            continue  # it has no masks between packed sequences
        (logits,) = stage((batch["input_ids"],), parts.context(batch))
        assert torch.allclose(logits, model(**batch, use_cache=False).logits, rtol=1e-5, atol=1e-6)


def packed_batch() -> dict[str, torch.Tensor]:
    """Two sequences in each row, told apart by their positions."""
    batch = batch_of(2, padded=False)
    batch["position_ids"] = torch.cat((torch.arange(4), torch.arange(SEQUENCE - 4))).expand(7, -1)
    return batch


def test_packed_sequences_do_not_see_each_other() -> None:
    parts, batch = ModelParts.of(huggingface(configs()["llama"])), packed_batch()
    stage = parts.stage(range(LAYERS + 2), device=CPU, seed=SEED)
    assert parts.context is not None
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][:, :4] = 5
    (a,), (b,) = (stage((x["input_ids"],), parts.context(x)) for x in (batch, other))
    assert torch.equal(a[:, 4:], b[:, 4:])
    assert not torch.equal(a[:, :4], b[:, :4])


def test_a_cast_to_16_bits_rounds_no_frequencies() -> None:
    parts, batch = ModelParts.of(huggingface(configs()["llama"])), batch_of(0)
    batch["position_ids"] = 321 * torch.arange(SEQUENCE)[None].expand(7, -1)
    single, half = (parts.context_on(CPU, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert single is not None
    assert half is not None
    assert torch.equal(half(batch)["cos"], single(batch)["cos"].bfloat16())
    assert half(batch)["full_attention"].shape[-2:] == (SEQUENCE, SEQUENCE)


def test_a_workload_can_be_profiled() -> None:
    workload = Workload(
        name="qwen3",
        model=huggingface(configs()["qwen3"]),
        loss=causal_lm_loss,
        optimizer=torch.optim.AdamW,
        batch=lambda rows: torch.randint(VOCABULARY, (rows, SEQUENCE)),
        sequence=SEQUENCE,
    )
    verify_blocks(workload)
    effort = Effort(batch_s=0.001, rounds=1)
    measured = measure_blocks(workload, device=CPU, device_type="cpu", samples=(1, 2), effort=effort)
    assert {timing.kind for timing in measured.timings} == {"embedding", "layer", "layer-2", "head"}
    assert [block.kind for block in measured.model.blocks][1:4] == ["layer", "layer-2", "layer-2"]
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in original("qwen3").model.layers]
    assert [block.parameters for block in measured.model.blocks][1:4] == sizes


def test_first_values_are_drawn_by_block_as_the_original_class_draws_them() -> None:
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=500, initializer_range=0.5)
    parts = ModelParts.of(huggingface(config))
    (layer,) = (parts.stage(range(2, 3), device=CPU, seed=SEED),)
    values = dict(layer.named_parameters())
    assert values["blocks.2.layer.mlp.c_fc.weight"].std().item() == pytest.approx(0.5, rel=0.05)
    scaled = 0.5 / (2 * config.n_layer) ** 0.5
    assert values["blocks.2.layer.mlp.c_proj.weight"].std().item() == pytest.approx(scaled, rel=0.05)
    assert not values["blocks.2.layer.attn.c_attn.bias"].any()
    whole = dict(parts.stage(range(4), device=CPU, seed=SEED).named_parameters())
    assert all(torch.equal(value, whole[name]) for name, value in values.items())
    padded = ModelParts.of(huggingface(configs()["llama"])).stage(range(1), device=CPU, seed=SEED)
    table = next(padded.parameters())
    assert not table[0].any()
    assert table[1:].any(1).all()


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """Names of the tensors that are read from files, each behind a file that was opened for it."""
    names: list[str] = []
    usual = safetensors.safe_open

    class Watched:
        def __init__(self, path: Path, *args: Any, **keywords: Any) -> None:
            self._file = usual(path, *args, **keywords)
            names.append(str(path.name))

        def __enter__(self) -> "Watched":
            self._file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._file.__exit__(*error)

        def keys(self) -> Any:
            return self._file.keys()

        def get_tensor(self, name: str) -> torch.Tensor:
            names.append(name)
            return self._file.get_tensor(name)

    monkeypatch.setattr(safetensors, "safe_open", Watched)
    return names


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_rank_reads_only_the_tensors_of_its_blocks(family, sharded, tmp_path, opened) -> None:
    model = original(family)
    model.save_pretrained(tmp_path, **({"max_shard_size": "20KB"} if sharded else {}))
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    parts = ModelParts.of(huggingface(tmp_path))
    sizes, read = stored_bytes(tmp_path), list[str]()
    for start, stop in pairwise([0, 1, 3, LAYERS + 2]):
        assert all(name not in sizes for name in opened)
        opened.clear()
        stage = parts.stage(range(start, stop), device=CPU, seed=99)
        names = [name for name in opened if name in sizes]
        assert sum(sizes[name] for name in names) == sum(p.nbytes for p in stage.parameters())
        files = [load_file(tmp_path / name) for name in opened if name not in sizes]
        assert all(any(name in names for name in file) for file in files)
        read += names
        opened.clear()
    ties = sum(len(tie.blocks) - 1 for tie in parts.ties)
    assert len(read) - len(set(read)) == ties
    assert set(read) == set(stored_bytes(tmp_path))
    loaded = parts.whole().original.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


def stored_bytes(folder) -> dict[str, int]:
    return {
        name: tensor.nbytes
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def test_files_of_a_bare_decoder_are_read_too(tmp_path) -> None:
    model = original("gpt2")
    model.transformer.save_pretrained(tmp_path)
    assert "wte.weight" in stored_bytes(tmp_path)
    whole: Any = ModelParts.of(huggingface(configs()["gpt2"], weights=tmp_path)).whole()
    assert torch.equal(whole.original.lm_head.weight, model.lm_head.weight)


def test_a_folder_is_trained_and_saved_by_three_ranks(tmp_path) -> None:
    for family in ("mixtral", "gpt2"):
        start, end = tmp_path / family, tmp_path / f"{family}-trained"
        original(family).save_pretrained(start)
        run_ranks(3, train_and_save, str(start), str(end))
        trained = transformers.AutoModelForCausalLM.from_pretrained(end)
        wanted = transformers.AutoModelForCausalLM.from_pretrained(start)
        batch = batch_of(0, rows=three_stages().global_batch)
        wanted(**batch, use_cache=False).loss.backward()
        torch.optim.SGD(wanted.parameters(), lr=0.3).step()
        assert not end.joinpath("model.safetensors").exists()
        assert set(stored_bytes(end)) == set(stored_bytes(start))
        for (name, a), b in zip(trained.named_parameters(), wanted.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=0, atol=2e-6), name


def train_and_save(start: str, end: str) -> None:
    model = huggingface(start)
    recipe = Recipe(
        optimizer=lambda p: torch.optim.SGD(p, lr=0.3), loss=causal_lm_loss, num_items=causal_lm_tokens
    )
    engine = Engine(three_stages(), ModelParts.of(model), recipe)
    engine.step(batch_of(0, rows=engine.plan.global_batch))
    model.save(engine, end)
    engine.close()


def test_the_loss_is_the_originals() -> None:
    model, batch = original("llama"), batch_of(4)
    found = model(**batch, use_cache=False)
    loss = causal_lm_loss(found.logits, batch) / causal_lm_tokens(batch)
    assert loss.item() == pytest.approx(found.loss.item(), rel=1e-6)
    alone = {key: batch[key] for key in ("input_ids", "attention_mask")}
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    assert torch.equal(
        causal_lm_loss(found.logits, alone), causal_lm_loss(found.logits, {**alone, "labels": labels})
    )
    pair = (batch["input_ids"], batch["labels"])
    assert torch.equal(causal_lm_loss(found.logits, pair), causal_lm_loss(found.logits, batch))
    halves = [slice_rows(batch, rows, 7) for rows in (range(3), range(3, 7))]
    assert sum(map(causal_lm_tokens, halves)) == causal_lm_tokens(batch)


REFUSED = {
    "gemma": (lambda: transformers.GemmaConfig(), "of no family that can be cut; known: llama, qwen3"),
    "router": (
        lambda: transformers.MixtralConfig(output_router_logits=True),
        "output_router_logits=True adds a loss over all layers",
    ),
    "jitter": (lambda: transformers.MixtralConfig(router_jitter_noise=0.1), "router_jitter_noise=0.1 draws"),
    "layerdrop": (lambda: transformers.OPTConfig(layerdrop=0.1), "layerdrop=0.1 leaves out layers"),
    "rope": (
        lambda: transformers.LlamaConfig(
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        ),
        "rope_type='dynamic' depends on the lengths",
    ),
    "cross": (lambda: transformers.GPT2Config(add_cross_attention=True), "add_cross_attention=True needs"),
    "flex": (
        lambda: transformers.LlamaConfig(attn_implementation="flex_attention"), "masks of flex_attention"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_blocks_cannot_keep_is_refused(name) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ModelError, match=message):
        huggingface(make())


def test_folders_that_do_not_fit_are_refused(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"no folder with a config.json; nothing is downloaded"):
        huggingface("gpt2")
    with pytest.raises(UsageError, match="a config or the name of a folder, not int"):
        huggingface(3)
    config = configs()["llama"]
    config.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"has neither model.safetensors nor"):
        huggingface(tmp_path)
    original("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if "q_proj" not in k}, tmp_path / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"does not hold model.layers.0.self_attn.q_proj.weight, .*another model"
    ):
        ModelParts.of(huggingface(tmp_path))
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 32)
    save_file(tensors, tmp_path / "model.safetensors")
    parts = ModelParts.of(huggingface(tmp_path))
    parts.stage(range(2), device=CPU, seed=0)
    with pytest.raises(ModelError, match=r"up_proj.weight has shape \(3, 32\), and \(48, 32\) by the config"):
        parts.stage(range(2, 3), device=CPU, seed=0)


def test_keys_that_only_the_original_reads_are_refused() -> None:
    batch = {**batch_of(0), "token_type_ids": torch.zeros(7, SEQUENCE)}
    with pytest.raises(ModelError, match="the batch has token_type_ids, which the blocks"):
        causal_lm_tokens(batch)


@pytest.mark.parametrize("package", ["transformers", "safetensors"])
def test_without_the_extra_the_error_says_how_to_install_it(package, monkeypatch, tmp_path) -> None:
    config = configs()["gpt2"]
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        UnsupportedEnvironmentError, match=rf"need {package}, .*arachne-hetero\[huggingface\]"
    ):
        huggingface(tmp_path if package == "safetensors" else config)


def test_dropout_is_refused_by_name_or_when_it_draws() -> None:
    gpt = transformers.GPT2Config(**{**configs()["gpt2"].to_diff_dict(), "attn_pdrop": 0.1})
    opt = copy.deepcopy(configs()["opt"])
    opt.dropout = 0.1
    recipe = Recipe(
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=causal_lm_loss, num_items=causal_lm_tokens
    )
    for config in (gpt, opt):
        parts = ModelParts.of(huggingface(config))
        with pytest.raises(UnsupportedPlanError, match=r"(drew|draws) random numbers"):
            Engine(lone_plan(parts.num_blocks), parts, recipe).step(batch_of(0))
