"""What a batch of token sequences holds, in the forms that are common: mapping, pair, or tokens alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...data.batch import default_inputs
from ...errors import ModelError

IGNORED = -100
"""Label of a token that is no target, as in transformers and torch's cross entropy."""
_UNKNOWN = ("inputs_embeds", "token_type_ids", "encoder_hidden_states", "decoder_input_ids", "shift_labels")
"""Keys that the original models read, and the blocks here do not."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Rows of tokens; a missing part is None."""

    input_ids: Tensor
    """(B, S)"""
    attention_mask: Tensor | None = None
    """(B, S), 0 where a token is padding."""
    position_ids: Tensor | None = None
    """(B, S)"""
    labels: Tensor | None = None
    """(B, S), each token's own id or IGNORED; the shift by one is the loss's."""

    @classmethod
    def of(cls, batch: Any) -> "TokenBatch":
        """Of a mapping with Hugging Face's keys, a pair (tokens, labels), or tokens.

        Raises:
            ModelError: Another batch, or a mapping with keys that only the original model would read.

        """
        (input_ids,) = default_inputs(batch)
        if isinstance(batch, Mapping):
            if unknown := [key for key in _UNKNOWN if batch.get(key) is not None]:
                raise ModelError(
                    f"the batch has {', '.join(unknown)}, which the blocks of a Hugging Face model do "
                    "not read; they read input_ids, attention_mask, position_ids and labels"
                )
            return cls(input_ids, *(batch.get(key) for key in ("attention_mask", "position_ids", "labels")))
        labels = batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None
        return cls(input_ids, labels=labels)

    def targets(self) -> Tensor:
        """(B, S): the next token's label, IGNORED behind the last; without labels the tokens themselves."""
        labels = self.labels
        if labels is None:
            labels = self.input_ids.long()
            if self.attention_mask is not None:
                labels = labels.masked_fill(self.attention_mask == 0, IGNORED)
        targets = labels.new_full(labels.shape, IGNORED)
        targets[:, :-1] = labels[:, 1:]
        return targets
