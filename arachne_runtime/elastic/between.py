"""What ranks do between two steps, so that one that was cut short there is repeated by all or by none.

An evaluation ends on no rank before all are at its end. So of two ranks one may be a single evaluation ahead:
it has the result, and the other takes it over.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ..data.loader import LoadedRows
from ..engine import Engine, EvaluationReport
from ..errors import UsageError
from ..measure.together import Together
from ..membership.client import RefusedError
from ..state.feeds import Feeds


class Standing(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one rank tells the others of a new generation."""

    done: int
    """Evaluations since the last step."""
    evaluates: bool
    """Whether it is in another one."""
    joins: bool
    """Whether its script has just begun."""
    ended: bool
    """Whether its script has come to its end."""
    last: tuple[float, int, int, int, float] | None
    """Result of the last one."""


_DECODER = msgspec.msgpack.Decoder(Standing)


@dataclass(slots=True)
class Between:
    """The evaluations of one rank since its last step."""

    results: list[EvaluationReport] = field(default_factory=list)
    evaluates: bool = False
    joins: bool = False
    """Whether this process has joined a job in training and has not trained yet."""
    meets_joiners: bool = False
    """Whether any process has, of this generation."""
    ended: bool = False
    """Whether the script has come to its end."""

    def stepped(self) -> None:
        """A step is done."""
        self.results.clear()
        self.joins = self.meets_joiners = False

    def meet(self, together: Together, *, went_back: bool) -> None:
        """Hear where the others of a new generation are; all of them call it.

        ``went_back``: they do some steps again before they are there, in which no script ends or evaluates.

        Raises:
            RefusedError: On a process that joined, where the others repeat an evaluation: they cannot wait
                for its script to come there.

        """
        last = self.results[-1] if self.results else None
        told = _told(last) if last is not None else None
        mine = Standing(len(self.results), self.evaluates, self.joins, self.ended, told)
        every = [_DECODER.decode(word) for word in together.gather(msgspec.msgpack.encode(mine))]
        trained = [word for word in every if not word.joins]
        self.meets_joiners = len(trained) < len(every)
        most = max((word.done for word in trained), default=0)
        if self.joins:
            repeats = any(word.evaluates and word.done == most for word in trained)
            if repeats or (went_back and any(word.done or word.evaluates or word.ended for word in trained)):
                raise RefusedError(
                    "the other ranks repeat an evaluation, which no process can join; start it anew"
                )
            return
        if len(self.results) < most:
            assert len(self.results) == most - 1, "two evaluations apart"
            heard = next(word.last for word in trained if word.done == most)
            assert heard is not None
            self.results.append(_heard(heard))

    def refuse_joined(self) -> None:
        """UsageError where the others are elsewhere."""
        if self.joins:
            raise UsageError(
                "this process joined a running job, whose other ranks do not evaluate now; in an elastic job "
                "evaluate in the loop over session.batches(...), behind a step"
            )


def _told(report: EvaluationReport) -> tuple[float, int, int, int, float]:
    return report.loss, report.num_samples, report.num_items, report.num_batches, report.seconds


def _heard(told: Sequence[Any]) -> EvaluationReport:
    loss, num_samples, num_items, num_batches, seconds = told
    return EvaluationReport(
        loss=loss, num_samples=num_samples, num_items=num_items, num_batches=num_batches, seconds=seconds
    )


def again(seen: list[Any], rest: Iterator[Any], feeds: Feeds, engine: Engine) -> Iterable[Any]:
    """Batches that were given before, with the rows of the plan of now, and those that follow.

    ``seen`` gets these; of what can be loaded again only which it was.
    """
    for batch in tuple(seen):
        yield feeds.reload(batch, engine)
    for batch in rest:
        known = isinstance(batch, LoadedRows) and batch.feed is not None
        seen.append(replace(batch, pieces=()) if known else batch)
        yield batch
