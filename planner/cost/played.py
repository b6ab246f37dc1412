"""Peak bytes of a device by its own actions, where stages or halves of backwards take turns on it.

GPipe and 1F1B have formulas (``memory``); interleaved stages and split backwards are played.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from arachne_runtime.plan.limits import PENDING_SENDS
from arachne_runtime.plan.schedule import Action, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionBytes:
    """What one stage of a device holds, and what its actions need."""

    always: float
    """Weights and states of the optimizer."""
    gradients: float
    fresh: float
    """Of the gradients: what is not there before the first backward, as no buffer for sums holds it."""
    kept: float
    """By each micro-batch between forward and backward, its output included."""
    again: float
    """What a backward has computed again, of one micro-batch."""
    received: float
    """Of one micro-batch, over the boundary before the stage; 0 without one."""
    sent: float
    """Over the boundary behind it."""
    first: float
    """Most that the first backward holds beside what is kept; the gradients that it makes count."""
    later: float
    """The same of those behind."""
    owed: float | None = None
    """By each micro-batch between the halves of its backward; None: not measured, as are the four below."""
    owing: float = 0.0
    """``later`` of the first half."""
    paying: float = 0.0
    """Most that the second half holds beside what was owed."""
    first_paying: float = 0.0
    """The same of the first, the gradients that it makes counted."""
    owed_gradients: float = 0.0
    """Of the gradients: those that the second half makes."""
    temporaries: float = 0.0
    """Of the optimizer."""
    between: float = 0.0
    """Kept by the last micro-batch beside ``kept``: what enters pieces that are computed again."""
    late: float = 0.0
    """Messages of collectives that have ended, of which the transport has yet to let go."""
    inside: float = 0.0
    """Of a gradient that waits for the stage before, where that is on the same device."""

    def within(self) -> "ActionBytes":
        """Where the stages before and behind are on the same device: what enters it left the one before."""
        kept = self.kept - self.received
        return replace(self, kept=kept, received=0.0, sent=0.0, inside=self.received)


def played_peak(stages: dict[int, ActionBytes], actions: Sequence[Action]) -> float:
    """The most that a device holds which plays ``actions`` on its ``stages``."""
    last = max(action.micro_batch for action in actions)
    device = _Device(stages, last, any(action.work is Work.WEIGHT for action in actions))
    peak = 0.0
    for index, action in enumerate(actions):
        if action.work is not Work.FORWARD:
            peak = max(peak, device.during(action) + device.asked_for(islice(actions, index, None)))
        device.after(action)
    return max(peak, device.at_the_end())


class _Device:
    """What is held from action to action."""

    def __init__(self, stages: dict[int, ActionBytes], last: int, in_halves: bool) -> None:
        self._stages = stages
        self._last_micro_batch = last
        self._always = sum(s.always + s.gradients for s in stages.values())
        self._always += max(s.late for s in stages.values())
        self._missing = {
            (stage, half): s for stage, of in stages.items() for half, s in _made(of, in_halves).items()
        }
        """Gradients that are not there yet, by the stage and the half that makes them."""
        self._held = dict.fromkeys(stages, 0)
        self._pieces = dict.fromkeys(stages, 0.0)
        """What the last micro-batch keeps between pieces."""
        self._owed = dict.fromkeys(stages, 0)
        self._sends: deque[float] = deque(maxlen=PENDING_SENDS)
        self._begun: set[tuple[int, Work]] = set()
        self._waiting = dict.fromkeys(stages, 0)
        """Gradients that a stage has for the one before, on this device."""

    def during(self, action: Action) -> float:
        """The peak of a backward or of half of one, without messages that are asked for."""
        of, is_first = self._stages[action.stage], (action.stage, action.work) not in self._begun
        match action.work:
            case Work.BACKWARD:
                needed = of.again + (of.first - of.fresh if is_first else of.later)
            case Work.INPUT:
                made = of.gradients - of.owed_gradients if is_first else 0.0
                needed = of.again + of.owing + (made if not of.fresh else 0.0)
            case _:
                there = min(of.fresh, of.owed_gradients)  # counted, though only now made
                needed = of.first_paying - there if is_first else of.paying
        waiting = sum(
            (n - (stage == action.stage + 1)) * self._stages[stage].inside
            for stage, n in self._waiting.items()
        )
        return self._level(action) + needed + sum(self._sends) + waiting

    def _level(self, action: Action) -> float:
        """What is held anyway; gradients that the action makes are there."""
        missing = sum(bytes for key, bytes in self._missing.items() if key != (action.stage, action.work))
        kept = sum(n * self._stages[stage].kept for stage, n in self._held.items())
        owed = sum(n * (self._stages[stage].owed or 0.0) for stage, n in self._owed.items())
        return self._always - missing + kept + owed + sum(self._pieces.values())

    def asked_for(self, actions: Iterator[Action]) -> float:
        """Receives that are posted while the first of ``actions`` runs: up to the next one that sends."""
        found, sender = 0.0, next(actions)
        for action in actions:
            found += self._needs(action)
            if self._sent_by(sender) or self._sent_by(action):
                break
            sender = action
        return found

    def after(self, action: Action) -> None:
        """The action has ended."""
        stage, work = action.stage, action.work
        self._begun.add((stage, work))
        self._missing.pop((stage, work), None)
        if work is Work.FORWARD:
            self._held[stage] += 1
            if action.micro_batch == self._last_micro_batch:
                self._pieces[stage] = self._stages[stage].between
            return
        if work is Work.WEIGHT:
            self._owed[stage] -= 1
            return
        if action.micro_batch == self._last_micro_batch:
            self._pieces[stage] = 0.0
        self._waiting[stage] += 1
        if stage + 1 in self._waiting:
            self._waiting[stage + 1] -= 1
        self._held[stage] -= 1
        self._owed[stage] += work is Work.INPUT
        if self._sent_by(action):
            self._sends.append(self._stages[stage].received)

    def at_the_end(self) -> float:
        """While the optimizer steps."""
        return self._always + sum(s.temporaries for s in self._stages.values())

    def _needs(self, action: Action) -> float:
        of = self._stages[action.stage]
        if action.work is Work.FORWARD:
            return of.received
        return 0.0 if action.work is Work.WEIGHT else of.sent

    def _sent_by(self, action: Action) -> float:
        of = self._stages[action.stage]
        if action.work is Work.FORWARD:
            return of.sent
        return 0.0 if action.work is Work.WEIGHT else of.received


def _made(of: ActionBytes, in_halves: bool) -> dict[Work, float]:
    """Gradients that were not there before, by what makes them first."""
    if not in_halves:
        return {Work.BACKWARD: of.fresh}
    return {Work.INPUT: max(0.0, of.fresh - of.owed_gradients), Work.WEIGHT: min(of.fresh, of.owed_gradients)}
