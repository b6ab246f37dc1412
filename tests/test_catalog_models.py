"""Models of the catalog: parameters against published counts, and what counting must keep true."""

import json

import pytest

from arachne_runtime.errors import InvalidFileError, UsageError
from arachne_runtime.plan.model import ModelSpec
from arachne_runtime.plan.rules import check_model
from planner import catalog

MOE = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3-like")


def parameters(spec: ModelSpec) -> int:
    """Tied ones once."""
    return sum(b.parameters - b.tied_parameters for b in spec.blocks)


def active(spec: ModelSpec) -> float:
    """Parameters that work on a token."""
    idle = (b.expert_parameters * (1 - b.experts_per_token / b.experts) for b in spec.blocks if b.experts)
    return parameters(spec) - sum(idle)


def counted(name: str, **fields) -> ModelSpec:
    return catalog.model(name, **{"sequence": 512, "dtype": "bfloat16", **fields})


@pytest.mark.parametrize("name", catalog.model_names())
def test_parameters_equal_the_published_count(name):
    named = catalog.named_model(name)
    spec = counted(name)
    assert check_model(spec) == ()
    assert len(named.source) > 15
    if named.published is None:
        assert name == "qwen3-64b"
    else:
        assert parameters(spec) == pytest.approx(named.published, rel=0.005)
    if named.active is not None:
        assert active(spec) == pytest.approx(named.active, rel=0.02)


def test_every_family_of_the_issue_is_there():
    families = {catalog.config(name)["model_type"] for name in catalog.model_names()}
    assert families == {
        "bert", "deepseek_v3", "gpt2", "gpt_neo", "llama", "mixtral", "opt", "qwen3", "qwen3_moe",
    }  # fmt: skip


def test_the_64_billion_model_doubles_the_layers_of_32b():
    small, large = counted("qwen3-32b"), counted("qwen3-64b")
    assert (len(small.blocks), len(large.blocks)) == (66, 130)
    assert parameters(large) == pytest.approx(64e9, rel=0.005)
    assert large.blocks[1] == small.blocks[1]


@pytest.mark.parametrize("name", ["gpt2", "bert-base", "opt-350m", "llama-3-8b", "qwen3-8b", *MOE])
def test_half_layers_are_the_whole_in_two(name):
    whole, halves = counted(name), counted(name, half_layers=True)
    assert check_model(halves) == ()
    assert len(halves.blocks) == 2 * len(whole.blocks) - 2
    for field in ("parameters", "flops", "activation_bytes", "expert_parameters", "expert_flops"):
        total = sum(getattr(b, field) for b in whole.blocks)
        assert sum(getattr(b, field) for b in halves.blocks) == pytest.approx(total, rel=1e-12)
    kinds = {b.kind for b in halves.blocks}
    assert kinds <= {"embedding", "attention", "mlp", "moe", "head"}
    assert {b.tp_collectives for b in halves.blocks[1:-1]} == {1}


def test_flops_are_two_for_each_multiply_and_add():
    """Llama-7B: 2 x tokens x matrices, and the scores of all pairs twice (QK, and weights times V)."""
    layer = counted("llama-7b", sequence=2048).blocks[1]
    matrices = 4 * 4096**2 + 3 * 4096 * 11008
    assert layer.flops == 2 * 2048 * matrices + 4 * 2048**2 * 4096
    assert counted("llama-7b", sequence=2048).blocks[-1].flops == 2 * 2048 * 4096 * 32000


def test_activations_cover_the_formula_of_korthikanti_without_scores():
    """34 s h bytes a layer (arXiv 2205.05198, equation 2, flash attention), for an MLP four times as wide."""
    layer = counted("gpt2-xl", sequence=1024).blocks[1]
    formula = 34 * 1024 * 1600
    assert 0.8 * formula < layer.activation_bytes < 1.2 * formula


def test_activations_in_fp32_are_not_below_what_was_measured():
    """OPT-350 on a GPU (the catalog's entry): a layer keeps 360.7 MB a sample, its input left out."""
    built = catalog.model("opt-350m")
    published = catalog.model("opt-350m", dtype="float32", half_layers=True)
    attention, mlp = published.blocks[1:3]
    measured = built.blocks[1].activation_bytes
    assert measured <= attention.activation_bytes + mlp.activation_bytes <= 1.15 * measured
    assert published.blocks[-1].activation_bytes == pytest.approx(built.blocks[-1].activation_bytes, rel=0.05)


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "deepseek-v3-like"])
def test_a_longer_sequence_costs_more_and_a_narrower_dtype_less(name):
    short, long = counted(name, sequence=256), counted(name, sequence=512)
    wide = counted(name, sequence=256, dtype="float32")
    for a, b, c in zip(short.blocks, long.blocks, wide.blocks, strict=True):
        assert 2 * a.flops <= b.flops <= 4 * a.flops
        assert a.activation_bytes * 2 <= b.activation_bytes
        assert (
            a.activation_bytes <= c.activation_bytes or a.kind == "head"
        )  # its softmax is in fp32 either way
        assert (2 * a.output_bytes, 2 * a.output_bytes) == (b.output_bytes, c.output_bytes)
    assert wide.bytes_per_parameter.optimizer == 8
    assert short.bytes_per_parameter.optimizer == 12


def test_experts_are_told_apart_from_what_every_token_meets():
    layer = counted("deepseek-v3-like").blocks[4]
    expert = 3 * 7168 * 2048
    assert (layer.kind, layer.experts, layer.experts_per_token) == ("moe-layer", 256, 8)
    assert layer.expert_parameters == 256 * expert
    assert layer.expert_flops == 2 * 512 * 8 * expert
    assert layer.parameters - layer.expert_parameters > expert  # the shared expert is dense
    assert [b.kind for b in counted("deepseek-v3-like").blocks[:5]] == [
        "embedding", "layer", "layer", "layer", "moe-layer",
    ]  # fmt: skip


def test_a_tied_head_owns_nothing_of_its_matrix():
    head = counted("gpt2").blocks[-1]
    assert (head.tied_to, head.tied_parameters) == (0, 50257 * 768)
    assert counted("llama-3-8b").blocks[-1].tied_to is None


def test_a_config_file_is_counted_like_its_name(tmp_path):
    config = dict(catalog.config("qwen3-8b"), architectures=["Qwen3ForCausalLM"], torch_dtype="bfloat16")
    path = tmp_path / "Qwen3-8B" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(config))
    spec = catalog.model_from_config(path, sequence=512)
    assert spec.name == "Qwen3-8B"
    assert spec.blocks == counted("qwen3-8b").blocks
    assert catalog.model_from_config(config, sequence=512, name="mine", half_layers=True).name == "mine"


def test_a_config_file_states_its_dtype():
    config = dict(catalog.config("llama-7b"))
    assert catalog.model_from_config(config, sequence=512).dtype == "bfloat16"
    for stated, dtype in (
        ({"torch_dtype": "float32"}, "float32"),
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": None, "torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "auto"}, "bfloat16"),
    ):
        assert catalog.model_from_config(config | stated, sequence=512).dtype == dtype
    given = catalog.model_from_config(config | {"torch_dtype": "float32"}, sequence=512, dtype="float16")
    assert given.dtype == "float16"
    with pytest.raises(
        UsageError, match=r"its torch_dtype 'int8' is not known; known: .*bfloat16.*; change it"
    ):
        catalog.model_from_config(config | {"torch_dtype": "int8"}, sequence=512)


def test_a_bad_config_says_what_is_wrong(tmp_path):
    with pytest.raises(UsageError, match=r"model_type 'mamba' is not known; known: bert, .*; or measure"):
        catalog.model_from_config({"model_type": "mamba"}, sequence=8)
    with pytest.raises(UsageError, match="has no 'hidden_size', which model_type 'llama' needs"):
        catalog.model_from_config({"model_type": "llama"}, sequence=8)
    config = dict(catalog.config("llama-7b"), num_hidden_layers="many")
    with pytest.raises(UsageError, match="num_hidden_layers is 'many', not an integer from 1 on"):
        catalog.model_from_config(config, sequence=8)
    config = dict(catalog.config("llama-7b"), num_hidden_layers=10**9)
    with pytest.raises(UsageError, match="1000000000 layers; at most 1024 can be planned"):
        catalog.model_from_config(config, sequence=8)
    with pytest.raises(UsageError, match="a sequence of 4096 tokens; it takes from 1 to 1024"):
        counted("gpt2", sequence=4096)
    with pytest.raises(UsageError, match="dtype 'int8' is not known"):
        counted("gpt2", dtype="int8")
    path = tmp_path / "config.json"
    path.write_text("[1]")
    with pytest.raises(InvalidFileError, match=r"config\.json"):
        catalog.model_from_config(path, sequence=8)
    with pytest.raises(UsageError, match="No such file"):
        catalog.model_from_config(tmp_path / "none.json", sequence=8)


def test_a_measured_name_means_its_source_where_nothing_else_is_asked():
    built = catalog.model("opt-350m")
    assert (built.sequence, built.dtype) == (2048, "float32")
    assert catalog.model("opt-350m", sequence=2048, dtype="float32") == built
    assert parameters(catalog.model("opt-350m", dtype="bfloat16")) == 331_196_416
