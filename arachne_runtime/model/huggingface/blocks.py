"""A model of transformers seen as blocks: embedding, decoder layers, final norm and head."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .batch import TokenBatch
from .families import Attention, Family
from .library import optional
from .routed import with_routed_experts
from .sharing import follow_shares, note_numbers


class DecoderLayer(nn.Module):
    """One layer of the original model, told by keywords what it needs: (B, S, D) → (B, S, D)."""

    def __init__(self, layer: nn.Module, attention: Attention) -> None:
        super().__init__()
        self.layer = layer
        self.attention = attention

    def forward(
        self,
        hidden_BSD: Tensor,
        *,
        position_ids: Tensor,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        full_attention: Tensor | None = None,
        sliding_attention: Tensor | None = None,
    ) -> Tensor:
        """Run the layer with the mask of its kind of attention; None means causal."""
        mask = full_attention if self.attention is Attention.FULL else sliding_attention
        rotary = {} if cos is None else {"position_embeddings": (cos, sin)}
        follow_shares(self.layer)
        output: Tensor = self.layer(hidden_BSD, attention_mask=mask, position_ids=position_ids, **rotary)
        return output


class CausalLM(nn.Module):
    """The original model beside its blocks, which are its own submodules."""

    like: Tensor
    """Empty; has the dtype of the stage."""

    def __init__(self, original: Any, family: Family, *, balance: float = 0.0) -> None:
        super().__init__()
        self.original = original
        decoder = original.get_submodule(family.decoder)
        self.embedding = family.embedding(decoder)
        layers = getattr(decoder, family.layers)
        attentions = [family.attention(original.config, index) for index in range(len(layers))]
        for layer in layers:
            note_numbers(layer, original.config)
        routed = [with_routed_experts(layer, original.config, balance) for layer in layers]
        self.layers = nn.ModuleList(map(DecoderLayer, routed, attentions))
        dtype = next(p.dtype for p in original.parameters())
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)
        rotary = getattr(decoder, "rotary_emb", None)
        self._rotary = None if rotary is None else (copy.deepcopy(rotary),)
        """No submodule: a cast of the model to 16 bits would round its frequencies."""
        self._family, self._config = family, original.config
        self._attentions = sorted(set(attentions))

    def forward(self, *inputs: Tensor, **keywords: Any) -> Tensor:
        """Logits (B, S, V) of the original model."""
        logits: Tensor = self.original(*inputs, **keywords, use_cache=False).logits
        return logits

    def context(self, batch: Any) -> Mapping[str, Tensor]:
        """Position ids, rotary tables and masks of some samples, as the original's forward computes them."""
        tokens = TokenBatch.of(batch)
        given = tokens.position_ids
        positions_BS = self._positions(tokens) if given is None else given
        found = {"position_ids": positions_BS}
        if self._rotary is not None:
            rotary = self._rotary[0].to(positions_BS.device)
            found["cos"], found["sin"] = rotary(self.like.to(positions_BS.device), position_ids=positions_BS)
        return {**found, **self._masks(tokens, positions_BS)}

    def _positions(self, tokens: TokenBatch) -> Tensor:
        """(1, S), or (B, S) where padding is left out."""
        mask = tokens.attention_mask
        if self._family.positions_by_mask and mask is not None:
            return (mask.cumsum(1) * mask - 1).long()
        return torch.arange(tokens.input_ids.shape[1], device=tokens.input_ids.device)[None]

    def _masks(self, tokens: TokenBatch, positions_BS: Tensor) -> Mapping[str, Tensor]:
        """By kind of attention, for the kinds of this model; left out where causal attention needs none."""
        library = optional("transformers.masking_utils")
        makers = {
            Attention.FULL: library.create_causal_mask,
            Attention.SLIDING: library.create_sliding_window_causal_mask,
        }
        shape_only = self.like.new_empty((1, 1, 1), device=positions_BS.device)
        made: dict[str, Tensor | None] = {
            kind.value: makers[kind](
                config=self._config,
                inputs_embeds=shape_only.expand(*tokens.input_ids.shape, 1),
                attention_mask=tokens.attention_mask,
                cache=None,
                position_ids=positions_BS if self._family.masks_by_position else None,
            )
            for kind in self._attentions
        }
        return {kind: mask for kind, mask in made.items() if mask is not None}
