"""An optimizer and a schedule in a step of an adaptive batch: larger rates, as many steps as it is worth."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from .adaptive import Adaptation

Method = Callable[..., Any]


@contextmanager
def replaced(actor: Any, names: Iterable[str], wrap: Callable[[Method], Method]) -> Iterator[None]:
    """Those methods of ``actor`` that it has are wrapped meanwhile."""
    held = {name: vars(actor).get(name) for name in names if callable(getattr(actor, name, None))}
    for name in held:
        setattr(actor, name, wrap(getattr(actor, name)))
    try:
        yield
    finally:
        for name, own in held.items():
            if own is None:
                delattr(actor, name)
            else:
                setattr(actor, name, own)


def paced(actor: Any, adaptation: Adaptation) -> AbstractContextManager[None]:
    """An optimizer steps with scaled rates, which are the user's own again after it; a schedule keeps pace.

    Of momentum nothing is rescaled: PyTorch's buffers are sums of gradients without a learning rate, so a new
    rate holds for all of them at once (Goyal et al., arXiv 1706.02677, remark 2). Adam's means of squares are
    those of the smaller batch for some steps, and so too large when a batch grows: its steps are too short.
    """
    if isinstance(actor, torch.optim.Optimizer):
        return replaced(actor, ["step"], partial(_scaled, actor, adaptation))
    if isinstance(actor, LRScheduler):
        return replaced(actor, ["step"], partial(_repeated, adaptation))
    return nullcontext()


def _scaled(optimizer: torch.optim.Optimizer, adaptation: Adaptation, method: Method) -> Method:
    @wraps(method)
    def called(*values: Any, **named: Any) -> Any:
        factor = adaptation.lr_factor
        if factor == 1:  # a rate that is a tensor stays the same one
            return method(*values, **named)
        groups = list(optimizer.param_groups)
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * factor
        try:
            return method(*values, **named)
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    return called


def _repeated(adaptation: Adaptation, method: Method) -> Method:
    """A schedule that is told nothing counts steps: those of the base batch."""

    @wraps(method)
    def called(*values: Any, **named: Any) -> Any:
        if values or named:
            return method(*values, **named)
        for _ in range(adaptation.num_schedule_steps):
            method()
        return None

    return called
