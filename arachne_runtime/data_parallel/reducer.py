"""Sums the gradients of all ranks while the backward runs, in one order of messages on every rank.

Not torch's reducer, for two reasons: a rank that ran out of memory in the middle of a backward can join
what is left of the step with zeros, so that nobody hangs; and each message tells when it was ready and how
long it took.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from ..batch import NoiseReading, Tails
from ..errors import UsageError
from .accumulation import Accumulation
from .bucket import Bucket, cut
from .clock import Mark, clock_of
from .likeness import refuse_unlike_values
from .link import Failure, Link
from .memory import MemoryWatch
from .noise import NoiseMeter
from .norm import Channel, norms_of
from .passage import Passage, num_numbers, reading_of
from .peers import Place, Table
from .space import Space

_WAY_OUT = (
    "put the body of the loop inside `with loader.step(optimizer):`, which repeats the step with a smaller "
    "share there, or lower global_batch"
)


class Reducer:
    """The buckets of one model and the state of one backward."""

    def __init__(self, module: nn.Module, link: Link) -> None:
        """Take over the gradients of all parameters that take one."""
        self._link, self._peers = link, link.peers
        self._space: Space | None = None
        """In which noise is measured; None: it is not."""
        self._meters = (NoiseMeter(0), NoiseMeter(0))
        """Of the last sum, and of the one under way."""
        self._tails = Tails()
        self._is_apart = False
        """Whether the gradient of this backward is measured on its way to others that it is added to."""
        self.noise: tuple[NoiseReading, ...] = ()
        """Of the sum before the last one, by parameter group."""
        self._norms = list(norms_of(module)) if link.peers.num_ranks > 1 else []
        self._channel = Channel(link) if self._norms else None
        for norm in self._norms:
            norm.channel = self._channel
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self._accumulation = Accumulation(self._parameters)
        self._factor = self._accumulation.factor
        """Of this rank's gradients in the sum to come."""
        self._order: list[int] | None = None
        """Places of parameters in the order in which their gradients became ready; None: it is settled."""
        self._build(range(len(self._parameters) - 1, -1, -1))
        self._order = [] if self._peers.num_ranks > 1 else None
        self.device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._clock = clock_of(self.device)
        self.memory = MemoryWatch.of(self.device)
        """Tells how many samples fit; None where no allocator says."""
        self._last_end: Mark = self._clock.mark()
        self._finished: Passage | None = None
        self._passage: Passage | None = None
        self._works: list[dist.Work | None] = []
        self._told: Table | None = None
        """On its way to all ranks."""
        self._next = 0
        self._sync, self._begun, self._hidden = True, False, False
        self._first_step = -1
        """Of the loader, whose gradients are the first of the sum to come."""
        for place, parameter in enumerate(self._parameters):
            hook = partial(self._on_gradient, place)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        link.join(self)

    # --- what the model calls

    def arm(self, *, sync: bool) -> None:
        """A forward begins whose backward ends in a sum (or, without ``sync``, leaves it to a later one)."""
        if self._begun:
            self._end_broken()
        turn = self._link.turn
        self._hidden = turn is not None and not turn.is_last
        if self._hidden and not self._link.repeats:
            raise UsageError(
                f"rank {self._peers.rank} takes {turn.rows if turn else 0} samples at once, more in a "
                "step, so its step comes in several batches: put the body of the loop inside "
                "`with loader.step(optimizer):`, which acts once for all of them"
            )
        self._sync = sync and not self._hidden

    def watch(self, outputs: Iterator[Tensor]) -> None:
        """Learn from these outputs of a forward when its backward begins."""
        for output in outputs:
            if output.requires_grad:
                output.register_hook(self._on_output)  # type: ignore[no-untyped-call]

    def restart_clock(self) -> None:
        """What is to come does not follow the last sum."""
        self._last_end = self._clock.mark()

    @property
    def measures_noise(self) -> bool:
        """Whether the noise of gradients is measured."""
        return self._space is not None

    def measure_noise(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        """Measure the noise of gradients from now on, in the space of ``optimizers``."""
        if self._space is None:
            for place, parameter in enumerate(self._parameters):
                parameter.register_hook(partial(self._on_own, place))  # type: ignore[no-untyped-call]
        elif self._space.is_of(optimizers):
            return
        self._space = Space.of(self._parameters, optimizers)
        self._meters, self._tails = (self._new_meter(), self._new_meter()), Tails()

    # --- the backward

    def _on_output(self, _: Tensor) -> None:
        if not self._begun:
            self._begin()

    @torch.no_grad()
    def _on_own(self, place: int, gradient: Tensor) -> None:
        """The gradient of this backward alone, before it is added to what the parameter has.

        Also called by ``torch.autograd.grad``, which is no backward of ours.
        """
        if self._begun and self._is_apart and self._space is not None and gradient.layout is torch.strided:
            self._meters[1].add(self._space.squared_norms([place], [gradient]))

    def _on_gradient(self, place: int, _: Tensor) -> None:
        """A parameter has its gradient."""
        if not self._begun:
            self._begin()
        if not self._sync:
            return
        if self._order is not None:
            self._order.append(place)
        index, within = self._home[place]
        bucket = self._buckets[index]
        bucket.take(within, self._accumulation.source(place), self._factor)
        if not bucket.num_waiting:
            assert self._passage is not None
            self._passage.ready[index] = self._clock.mark()
            self._send_ready()

    def _begin(self) -> None:
        self._begun = True
        Variable._execution_engine.queue_callback(self._end)
        if self._accumulation.is_empty:
            self._first_step = self._step()
        self._is_apart = not self._sync or not self._accumulation.is_empty
        weight = self._link.weight()
        self._meters[1].open(self._link.turn, weight, is_weighed=not self._is_apart)
        self._accumulation.begin(weight)
        self._factor = self._accumulation.factor
        if self._sync:
            self._open()

    def _open(self) -> None:
        turn = self._link.turn
        for bucket in self._buckets:
            bucket.open()
        self._next, self._works = 0, []
        self._passage = Passage(
            turn.rows if turn else 0, self._last_end, self._clock.mark(), [None] * len(self._buckets)
        )
        if self._order is not None:
            self._order = []
        if self._peers.host_waits and self._peers.num_ranks > 1:  # else what it tells of may not be over yet
            self._tell()

    def _send_ready(self) -> None:
        """Send what is complete, but for the last message: it tells whether all went well to the end."""
        while self._next < len(self._buckets) - 1 and not self._buckets[self._next].num_waiting:
            self._send(self._pack)

    @torch.no_grad()
    def _send(self, fill: Callable[[int], None]) -> None:
        """Send the next bucket, when ``fill`` has filled it."""
        k = self._next
        self._next += 1
        fill(k)
        work = self._buckets[k].start(self._peers.group)
        self._works.append(work)
        if self._passage is not None and work is not None:
            self._passage.sent.append(self._clock.mark())
            self._passage.arrived.append(self._clock.when_done(work))

    def _pack(self, k: int) -> None:
        bucket = self._buckets[k]
        for index, place in enumerate(self._places[k]):
            if not bucket.given[index]:  # nothing in this backward, but perhaps in an earlier one
                bucket.take(index, self._accumulation.source(place), self._factor)
        bucket.close()
        if not self._is_apart:
            self._meters[1].add(self._squared_norms(k))

    def _squared_norms(self, k: int) -> Iterator[tuple[int, Tensor]]:
        """Of what is in a bucket now, by parameter group; nothing where noise is not measured."""
        if self._space is None:
            return
        bucket = self._buckets[k]
        if self._space.is_plain:
            yield 0, bucket.squared_norm()
        else:
            yield from self._space.squared_norms(self._places[k], bucket.views)

    def _new_meter(self) -> NoiseMeter:
        return NoiseMeter(self._space.num_groups if self._space is not None else 0)

    def _end(self) -> None:
        """The backward has ended on this rank: send what is left, wait for all, hear how it went."""
        self._begun = False
        if not self._sync:
            self._accumulation.end(hidden=self._hidden)
            if self._hidden:
                self.restart_clock()  # times are those of the last round alone, as shares are of one round
            return
        assert self._passage is not None
        self._passage.ended = self._clock.mark()
        self._refuse_thawed()
        while self._next < len(self._buckets):
            self._send(self._pack)
        self._settle(None)

    # --- the end of a sum

    def abandon(self, cap: int) -> None:
        """Join what is left of this sum with zeros: this rank has failed, and expects ``cap`` to fit."""
        if not self._begun or not self._sync:
            self._first_step = self._step() if self._accumulation.is_empty else self._first_step
            self._open()
        self._begun = False
        self._passage = None
        if self._channel is not None:
            self._channel.join_rest(self.device)
        while self._next < len(self._buckets):
            self._send(lambda k: self._buckets[k].give_nothing())
        self._settle(cap)

    def _settle(self, cap: int | None) -> None:
        """Wait for every message; ``cap``: this rank has failed.

        Raises:
            WorkerFailedError: Some rank has failed, and nothing here repeats the step.

        """
        failures = self._outcome(cap)
        self._accumulation.clear()
        self._end_norms(kept=not failures)
        if failures:
            self._fail(failures)
            return
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.finish()
            for k in range(len(self._buckets)):
                self._meters[1].summed.extend(self._squared_norms(k))
            self._meters = (self._meters[1], self._new_meter())
        if self.memory is not None and self._link.turn is not None:
            self.memory.observe(self._link.turn.rows)
        self._link.num_sums += 1
        if self._link.adaptation is not None:
            self._link.adaptation.summed()
        self._last_end = self._clock.mark()
        self._finished, self._passage = self._passage, None
        if self._order is not None:
            self._reorder()

    def _end_norms(self, *, kept: bool) -> None:
        if self._channel is not None and kept:
            self._channel.end()
        for norm in self._norms:
            norm.keep() if kept else norm.take_back()

    def _tell(self) -> None:
        """Tell all ranks what the sum before took; where the host waits, early, so that nobody waits."""
        told = self._finished.numbers(self._clock) if self._finished is not None else None
        times = told or [0.0] * num_numbers(len(self._buckets))
        cap = self.memory.cap() if self.memory is not None else None
        numbers = [*times, *self._meters[0].told(), float(cap or 0)]
        self._told = self._peers.table(Place.STEP, numbers, self._step())

    def _hear(self) -> None:
        """What ``_tell`` has told on all ranks."""
        assert self._told is not None
        found, self._told = self._told.rows(), None
        self._link.caps = [round(numbers[-1]) for numbers in found]
        num_times = num_numbers(len(self._buckets))
        self.noise = self._meters[0].readings([numbers[num_times:-1] for numbers in found], self._tails)
        self._link.noise = self.noise
        if all(numbers[2] > 0 for numbers in found):
            self._link.hear([reading_of(numbers, len(self._buckets)) for numbers in found])

    def _outcome(self, cap: int | None) -> Sequence[Failure]:
        """Which ranks have failed, once every message has arrived.

        The last message tells whether any has; where the host does not wait for it, one of its own does.
        """
        mine = Failure(self._peers.rank, self._link.turn.rows if self._link.turn else 0, cap or 0)
        if self._peers.num_ranks == 1:
            return () if cap is None else (mine,)
        if self._told is None:
            self._tell()
        word = (
            None if self._peers.host_waits else self._peers.table(Place.END_OF_STEP, [float(cap is not None)])
        )
        self._hear()
        for work in self._works:
            if work is not None:
                work.wait()
        if not (word.total() if word is not None else self._buckets[-1].num_failed()):
            return ()
        told = self._peers.table(Place.FAILURE, [float(cap is not None), float(mine.rows), float(mine.cap)])
        return [
            Failure(rank, round(rows), round(fitting))
            for rank, (failed, rows, fitting) in enumerate(told.rows())
            if failed
        ]

    def _fail(self, failures: Sequence[Failure]) -> None:
        self._finished = self._passage = None
        self._meters = self._new_meter(), self._new_meter()
        for parameter in self._parameters:
            parameter.grad = None
        self._link.failures = failures
        if not self._link.repeats or self._first_step != self._step():
            raise failures[0].error(_WAY_OUT)

    def _step(self) -> int:
        return self._link.turn.step if self._link.turn else -1

    def _end_broken(self) -> None:
        """The last backward began and never ended: an error left it that the script has caught."""
        self._begun = False
        self._accumulation.clear()
        if self._peers.num_ranks > 1:
            self._begun = self._sync
            self.abandon(0)

    # --- the order of messages

    def _build(self, order: Sequence[int]) -> None:
        """Make the buckets anew, in this order of parameters."""
        place_of = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        groups = list(cut(self._parameters[place] for place in order))
        self._buckets = [Bucket.of(group) for group in groups]
        self._places = [[place_of[id(parameter)] for parameter in group] for group in groups]
        self._home = {
            place: (index, within)
            for index, places in enumerate(self._places)
            for within, place in enumerate(places)
        }
        """Bucket of each parameter, and its place there."""

    def _reorder(self) -> None:
        """Order the buckets as gradients became ready on the first rank, in the first backward."""
        refuse_unlike_values(self._parameters, self._peers)
        ready = list(dict.fromkeys(self._order or ()))
        rest = sorted(set(range(len(self._parameters))) - set(ready), reverse=True)
        order = torch.tensor([*ready, *rest], dtype=torch.int64)
        self._peers.broadcast(order)
        self._order = None
        self._finished = None
        self._build(order.tolist())

    def _refuse_thawed(self) -> None:
        if thawed := [tuple(p.shape) for p in self._frozen if p.requires_grad]:
            raise UsageError(
                f"a parameter of shape {thawed[0]} was frozen when HeteroDDP was made, so no rank sums its "
                "gradient; wrap the model while it is trainable and freeze it afterwards, or wrap it anew"
            )
