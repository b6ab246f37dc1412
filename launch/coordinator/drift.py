"""Whether devices compute slower or faster than their profile says, from what each tells of its own steps.

One that departs from all others by more than noise, for several words in a row, is taken to be so from then
on: plans are asked for with it. Seconds of waiting are no part of it, so that a slow device is not confused
with those that wait for it.
"""

import math
from collections import deque
from collections.abc import Mapping
from statistics import median

from arachne_runtime.units import Seconds

NOISE = 0.2
"""Departures below it are noise: the lab's own speed drifts by 5 % within 40 s (docs/measuring.md),
and a price is within 6 % of the demonstration; with room for a machine that is not the lab's."""
NUM_WORDS = 3
"""In a row that must say so; a word is the median of the steps of 2 s or more."""


class Drift:
    """Of the running plan's devices. It knows no clock and no plan."""

    def __init__(self) -> None:
        self.slower: dict[str, float] = {}
        """By device that departed: how many times longer it computes than its profile says."""
        self.why = ""
        """What moved last, for a person."""
        self._expected: dict[str, Seconds] = {}
        self._heard: dict[str, deque[float]] = {}
        self._news = 0
        """Words since the last look."""

    def expect(self, compute_s: Mapping[str, Seconds]) -> None:
        """Another plan runs, or is priced anew: what each device computes in a step, `slower` counted in."""
        self._expected = {device: seconds for device, seconds in compute_s.items() if seconds > 0}
        self._heard = {device: deque(maxlen=NUM_WORDS) for device in self._expected}

    def hear(self, device: str, compute_s: Seconds) -> None:
        """A word of a device: seconds of a step that it computed."""
        if device in self._heard:
            self._heard[device].append(compute_s / self._expected[device])
            self._news += 1

    def moved(self) -> bool:
        """Whether any device departs now; then `slower` has it, and all are heard anew."""
        if not self._heard or self._news < len(self._heard):
            return False
        self._news = 0
        if any(len(words) < NUM_WORDS for words in self._heard.values()):
            return False
        middles = {device: median(words) for device, words in self._heard.items()}
        # of a profile that is off for all alike nothing follows for the plan
        usual = min(middles.values(), key=lambda ratio: abs(math.log(ratio)))
        gone = {d: middles[d] / usual for d, words in self._heard.items() if _departs(words, usual)}
        for device, ratio in gone.items():
            self._take(device, ratio)
        if gone:
            self.expect(self._expected)
        return bool(gone)

    def _take(self, device: str, ratio: float) -> None:
        self._expected[device] *= ratio
        factor = self.slower.pop(device, 1.0) * ratio
        if abs(math.log(factor)) <= math.log1p(NOISE):  # as the profile says, again
            self.why = f"{device} computes as its profile says again"
            return
        self.slower[device] = float(f"{factor:.3g}")
        self.why = f"{device} takes {factor:.3g} times as long as its profile says"


def _departs(words: "deque[float]", usual: float) -> bool:
    logs = [math.log(ratio / usual) for ratio in words]
    return min(logs) > math.log1p(NOISE) or max(logs) < -math.log1p(NOISE)
