"""Which gradients come back over a boundary: where a neighbour used an output for nothing there is none.

A parameter with a gradient of zeros is stepped (weight decay, momentum), and one without is left alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

Link = tuple[int, int]
"""(the rank at the other end, the stage whose gradients are sent)."""


@dataclass(slots=True)
class Answers:
    """One rank's notes before messages of gradients, in one step.

    Zeros stand in for a gradient that is not there, so that all messages have one form, and a note says so.
    Messages of a link begin with one until all gradients were there once: most often the first alone.
    """

    device: torch.device
    _told: set[Link] = field(default_factory=set, init=False)
    """To which no more notes go."""
    _known: set[Link] = field(default_factory=set, init=False)
    """From which no more notes come."""
    _coming: dict[Link, tuple[Tensor, dist.Work]] = field(default_factory=dict, init=False)
    """The last note of each, if it was not read: until then nobody knows whether the next message has one."""

    def note(self, link: Link, there: Sequence[bool]) -> Tensor | None:
        """What goes before the next message to a link; None: nothing, and nothing is expected."""
        if link in self._told or not there:
            return None
        if all(there):
            self._told.add(link)
        return torch.tensor(there, dtype=torch.uint8, device=self.device)

    def is_open(self, link: Link) -> bool:
        """Whether a note is on its way, so that ``buffer`` may wait."""
        return link in self._coming

    def buffer(self, link: Link, num_gradients: int) -> Tensor | None:
        """For the note before the next message of a link; None: it has none."""
        if link in self._coming:
            self._read(link)
        if link in self._known or not num_gradients:
            return None
        return torch.empty(num_gradients, dtype=torch.uint8, device=self.device)

    def expect(self, link: Link, note: Tensor, work: dist.Work) -> None:
        """The note is being received."""
        self._coming[link] = (note, work)

    def there(self, notes: Mapping[Link, Tensor | None], num_gradients: int) -> tuple[bool, ...]:
        """Which gradients are in any of the messages that make up one input."""
        for link, note in notes.items():
            if link in self._coming and self._coming[link][0] is note:
                self._read(link)
        given = [note for note in notes.values() if note is not None]
        if len(given) < len(notes) or not given:
            return (True,) * num_gradients
        return tuple(bool(there) for there in torch.stack(given).amax(0).tolist())

    def _read(self, link: Link) -> None:
        note, work = self._coming.pop(link)
        work.wait()
        if bool(note.all()):
            self._known.add(link)
