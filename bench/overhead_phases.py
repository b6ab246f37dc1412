"""Where the CPU time of a rank's step goes, by what the engine does; nested phases count apart.

A phase is what the rank's own thread spends in it. The threads of gloo run beside any phase, so they are told
on their own.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from arachne_runtime.engine import Engine
from arachne_runtime.engine.courier import Courier
from arachne_runtime.engine.gradients import Gradients
from arachne_runtime.engine.player import Player
from arachne_runtime.model import StageModule

PHASES: dict[str, list[tuple[Any, tuple[str, ...]]]] = {
    "courier": [(Courier, ("advance", "look_ahead", "take", "give", "passed", "finish"))],
    "player": [(Player, ("play",))],
    "blocks, forward": [(StageModule, ("forward",))],
    "autograd": [(torch.autograd, ("backward",))],
    "buckets": [(Gradients, ("begin", "settle", "start", "finish", "squared_norm", "clip"))],
    "commit word": [(Engine, ("_agree",))],
    "the rest": [(Engine, ("step",))],
}

COMMUNICATION = "gloo's threads"


class Ledger:
    """CPU seconds by phase."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self._open: list[str] = []
        self._since = self._others_since = 0.0

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time told to ``phase`` but for what it spends in others."""

        def run(*args: Any, **options: Any) -> Any:
            self._turn()
            self._open.append(phase)
            try:
                return function(*args, **options)
            finally:
                self._turn()
                self._open.pop()

        return run

    def _turn(self) -> None:
        now = time.thread_time()
        others = time.process_time() - now
        if self._open:
            self.spent[self._open[-1]] += now - self._since
            self.spent[COMMUNICATION] += others - self._others_since
        self._since, self._others_since = now, others


@contextmanager
def phases(optimizer: type[Optimizer]) -> Iterator[Ledger]:
    """Count inside; the engine's methods are as they were afterwards."""
    ledger = Ledger()
    kept: list[tuple[Any, str, Any]] = []
    for phase, places in {**PHASES, "optimizer": [(optimizer, ("step",))]}.items():
        for owner, names in places:
            for name in names:
                kept.append((owner, name, getattr(owner, name)))
                setattr(owner, name, ledger.timed(phase, kept[-1][2]))
    try:
        yield ledger
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)


def table(spent: Counter[str]) -> str:
    """Percent of a step by phase, the largest first."""
    whole = sum(spent.values())
    return "\n".join(f"  {phase:16} {seconds / whole:6.1%}" for phase, seconds in spent.most_common())
