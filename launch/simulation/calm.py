"""How long a plan may be expected to run, from how often the devices changed lately; pure arithmetic."""

from collections import deque
from dataclasses import dataclass, field

from arachne_runtime.units import Seconds

REMEMBERED = 8
"""Times between changes that count: enough for a mean, few enough to follow a burst. A guess."""


@dataclass(slots=True)
class Calm:
    """Mean time between changes of the devices: the last few, the one that is open, and a first guess."""

    guess_s: Seconds
    since_s: Seconds = 0.0
    """The newest change."""
    _between: deque[Seconds] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def see(self, at_s: Seconds) -> None:
        """Devices changed."""
        if at_s > self.since_s:
            self._between.append(at_s - self.since_s)
            self.since_s = at_s

    def expected_s(self, now_s: Seconds) -> Seconds:
        """Until the next change; it grows while nothing happens."""
        open_s = now_s - self.since_s
        return (self.guess_s + sum(self._between) + open_s) / (1 + len(self._between))
