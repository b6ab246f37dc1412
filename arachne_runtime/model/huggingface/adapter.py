"""``arachne.huggingface``: what makes a model of transformers, cut into blocks, on every rank."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...errors import UsageError
from ..construct import construct
from ..layout import Layout, ValueFunction, find_blocks, give_layout, layout_of
from .blocks import CausalLM
from .checkpoint import Checkpoint, Wanted
from .families import family_of
from .library import optional
from .saving import Trained, save_folder
from .sharing import styles_of


def huggingface(
    source: Any, *, weights: Path | str | None = None, balance: float = 0.0
) -> "HuggingFaceModel":
    """A causal language model of transformers for ``session.engine``: embedding, layers, norm with head.

        engine = session.engine(
            arachne.huggingface("llama-folder"),
            loss=arachne.causal_lm_loss,
            num_items=arachne.causal_lm_tokens,
            optimizer=lambda p: torch.optim.AdamW(p, lr=1e-5),
        )

    Families: Llama, Qwen3, Mistral, GPT-2, OPT, Mixtral, Qwen3-MoE. Nothing is downloaded. Batches are
    mappings with ``input_ids`` and, if need be, ``attention_mask``, ``position_ids`` and ``labels``; pairs
    (tokens, labels); or tokens. A folder's parameters have the dtype that its config states; pass ``dtype=``
    to ``session.engine`` for another. Dropout that the config asks for is refused as any other: set its
    probabilities (``attn_pdrop``, ``attention_dropout``, ...) to 0.

    Args:
        source: A config of transformers (first values are drawn as the original class draws them, block by
            block), or a folder with ``config.json`` and safetensors files, of which each rank reads those of
            its own blocks.
        weights: Folder of the safetensors files where ``source`` is a config.
        balance: Factor of a load-balancing loss of experts, of each layer and sample by itself (see
            ``arachne.MoE``); transformers' own, of all layers and samples together, depends on the split.

    Raises:
        ModelError: A model of another family, or with settings that a plan cannot keep.
        UsageError: A folder without these files.
        UnsupportedEnvironmentError: transformers or safetensors is not installed.

    """
    transformers = optional("transformers")
    if isinstance(source, str | Path):
        folder = Path(source)
        if not (folder / "config.json").is_file():
            raise UsageError(
                f"{folder} is no folder with a config.json; nothing is downloaded: give a folder on this "
                "machine, or a config such as transformers.LlamaConfig(...)"
            )
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        weights = folder if weights is None else weights
    elif isinstance(source, transformers.PreTrainedConfig):
        config = copy.deepcopy(source)
    else:
        raise UsageError(
            f"a Hugging Face model is made from a config or the name of a folder, not {type(source).__name__}"
        )
    family = family_of(config)
    if balance and not family.has_experts:
        raise UsageError(f"balance={balance}, but a model of type {config.model_type} has no experts")
    files = None
    if weights is not None:
        prefix = family.decoder.partition(".")[0] + "."
        files = Checkpoint.open(Path(weights), model_type=config.model_type, prefix=prefix)
    return HuggingFaceModel(config, files, balance)


@dataclass(frozen=True, slots=True)
class HuggingFaceModel:
    """Constructs the model; ``session.engine`` calls it with the parameters on the meta device."""

    config: Any
    """Of transformers."""
    weights: Checkpoint | None = None
    """Where first values come from; None: they are drawn."""
    balance: float = 0.0
    """Factor of the load-balancing loss."""

    def __call__(self) -> nn.Module:
        """The original model with a layout that names its blocks."""
        family = family_of(self.config)
        original = optional("transformers").AutoModelForCausalLM.from_config(copy.deepcopy(self.config))
        model = CausalLM(original, family, balance=self.balance)
        decoder = original.get_submodule(family.decoder)
        ends = [name for name in family.last if getattr(decoder, name) is not None]
        styles, divides = styles_of(self.config, model.layers)
        layout = Layout(
            first=("embedding",),
            blocks=("layers",),
            last=(*(f"original.{family.decoder}.{name}" for name in ends), "original.lm_head"),
            context="context",
            init=lambda module, _: _initialise(module, original),
            tensor_parallel=styles,
            divides=divides,
        )
        if self.weights is not None:
            layout = replace(layout, values=_reader(self.weights, _named(model, layout)))
        give_layout(model, layout)
        return model

    def save(self, engine: Trained, folder: Path | str) -> None:
        """Write what an engine trained as a folder for ``from_pretrained``; all ranks call it.

        Each stage of the first pipeline writes its own parameters, under the names and in the dtype of the
        engine; every rank must see the folder.

        Raises:
            UnsupportedPlanError: A rank holds only a part of a parameter (TP or experts).

        """
        config = copy.deepcopy(self.config)
        config.dtype = next(engine.stages[0].parameters()).dtype
        save_folder(engine, Path(folder), config, self.blocks())

    def blocks(self) -> tuple[Mapping[str, Wanted], ...]:
        """For each block, by name in it, what its parameters are in the original model."""
        model = construct(self).model
        layout = layout_of(model)
        assert layout is not None
        assert isinstance(model, CausalLM)
        return _named(model, layout)


def _initialise(module: nn.Module, original: Any) -> None:
    """Each submodule as the original class does it, innermost first."""
    module.apply(original._init_weights)


def _named(model: CausalLM, layout: Layout) -> tuple[Mapping[str, Wanted], ...]:
    """For each block, by name in it, what its parameters are in the original model."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.original.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(
        {name: Wanted(tuple(names[id(p)]), tuple(p.shape), p.dtype) for name, p in block.parameters().items()}
        for block in find_blocks(model, layout)
    )


def _reader(weights: Checkpoint, blocks: Sequence[Mapping[str, Wanted]]) -> ValueFunction:
    """Reads parameters of a block; ModelError at once for those that no file holds."""
    weights.refuse_missing([parameter for block in blocks for parameter in block.values()])

    def read(block: int, names: Sequence[str]) -> Mapping[str, Tensor]:
        return weights.read({name: blocks[block][name] for name in names})

    return read
