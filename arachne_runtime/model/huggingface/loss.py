"""The loss of a causal language model, as transformers computes it, in a form that adds up over any split."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from .batch import IGNORED, TokenBatch


def causal_lm_loss(logits_BSV: Tensor, batch: Any) -> Tensor:
    """Cross entropy of the next token, *summed* over the targets; give the engine ``causal_lm_tokens`` too.

        session.engine(model, loss=arachne.causal_lm_loss, num_items=arachne.causal_lm_tokens, ...)

    Divided by their number in the global batch it is the ``loss`` that the original model returns: labels are
    shifted by one, -100 is ignored, logits of 16 bits are taken to float32. A batch is a mapping with
    ``input_ids`` and ``labels``, a pair of both, or tokens, which are then their own labels where
    ``attention_mask`` is not 0.
    """
    if logits_BSV.dtype in (torch.float16, torch.bfloat16):
        logits_BSV = logits_BSV.float()
    targets = TokenBatch.of(batch).targets()
    return cross_entropy(logits_BSV.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def causal_lm_tokens(batch: Any) -> int:
    """Targets of some samples: the ``num_items`` of ``causal_lm_loss``."""
    return int((TokenBatch.of(batch).targets() != IGNORED).sum())
