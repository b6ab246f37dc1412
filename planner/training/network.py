"""The policy's own network over tensors: what is trained here is what plans there."""

import torch
from torch import Tensor

from ..policy.network import logits
from .examples import Examples, Kind
from .learner import Learner


def log_chances(learner: Learner, kind: Kind, examples: Examples) -> Tensor:
    """``[N, C]``: logarithms of the probabilities; of options that are not allowed 0 stands there instead."""
    mask = torch.from_numpy(examples.mask)
    found = logits(
        learner.tensors,
        kind.head,
        torch.from_numpy(examples.pools),
        torch.from_numpy(examples.overall),
        torch.from_numpy(examples.options),
        mask,
        torch.from_numpy(examples.chosen_pool),
        torch,
        torch.from_numpy(examples.there),
    )
    return torch.where(mask, torch.log_softmax(found, dim=1), torch.zeros(()))
