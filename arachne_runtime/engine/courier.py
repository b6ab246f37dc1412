"""Issues a rank's messages and reductions of one step in the total order, and waits where one is needed."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ModelError, UsageError
from ..mesh import Transport
from ..plan.limits import PENDING_SENDS
from ..plan.order import Communication, Inside, Reduction, Transfer
from ..plan.schedule import Action, Work
from .answers import Answers, Link
from .signature import HEADER_LENGTH, MAX_TENSORS, Signature, decode, encode, gradients_of, signature_of


class Reducer(Protocol):
    """What sums gradients."""

    def passed(self, blocks: range) -> None:
        """The gradients of ``blocks`` are complete on this rank."""
        ...

    def start(self, reduction: Reduction) -> bool:
        """Start the sum, or say that its gradients are not complete yet."""
        ...

    def finish(self, reduction: Reduction) -> None:
        """Wait for the sum."""
        ...


@dataclass(slots=True)
class _Arrival:
    """The input of one action, on its way."""

    tensors: tuple[Tensor | None, ...]
    """None: a gradient of what the next stage, on this rank, used for nothing."""
    works: list[dist.Work] = field(default_factory=list)
    notes: dict[Link, Tensor | None] = field(default_factory=dict)
    """Of each message of gradients, the note before it."""


class Courier:
    """One rank's communications of one step.

    They are issued strictly in order. Only where messages carry tags, the receives of the next action may be
    posted ahead of their turn. With ``blocking`` each communication ends before the next is issued, as on a
    device that executes one at a time: a wrong order then hangs, where gloo would hide it.

    What goes from one stage of this rank to another stays where it is.
    """

    def __init__(
        self,
        sequence: Sequence[Communication],
        rows: Sequence[range],
        *,
        rank: int,
        device: torch.device,
        transport: Transport,
        reducer: Reducer,
        num_rows: int,
        within: Collection[int] = (),
        blocking: bool = False,
        looks_ahead: bool = True,
        forward_only: bool = False,
    ) -> None:
        """Hold the rank's ``sequence`` and its own ``rows`` of each micro-batch, out of ``num_rows``.

        ``within`` are those stages of the rank whose next stage is the same rank's.
        """
        self._sequence = sequence
        self._rows = rows
        self._rank = rank
        self._device = device
        self._transport = transport
        self._reducer = reducer
        self._num_rows = num_rows
        self._within = within
        self._forward_only = forward_only
        self._blocking = blocking
        self._looks_ahead = looks_ahead and not blocking
        self._next = 0
        self._early: set[int] = set()
        self._receives = _receives_by_action(sequence, rank)
        self._outbox: dict[Action, tuple[Tensor, ...]] = {}
        self._inbox: dict[Action, _Arrival] = {}
        self._unsent = _sends_by_action(sequence, rank)
        self._sends: dict[Action, list[tuple[dist.Work, Tensor]]] = {}
        self._known: set[tuple[int, int]] = set()
        """(sender, its stage) whose header has come."""
        self._told: set[tuple[int, int]] = set()
        """(receiver, stage here) that had a header."""
        self._outgoing: dict[int, Signature] = {}
        """What leaves a stage, by stage: of this rank, or of another that sends to it."""
        self._answers = Answers(device)
        self._there: dict[Action, tuple[bool, ...]] = {}
        """Which gradients of those that wait to be sent are there."""
        self._played: set[Action] = set()
        self._passed: set[int] = set()
        """Blocks that the last backward has passed."""
        self.sent_bytes = 0

    def advance(self) -> None:
        """Issue all that may go, in order; stop at the first that waits for a computation of this rank."""
        while self._next < len(self._sequence) and self._issue(self._next):
            self._next += 1

    def look_ahead(self, action: Action) -> None:
        """Post the receives of ``action`` before their turn, where tags allow it and their form is known."""
        if not self._looks_ahead or self._transport.matches_in_order:
            return
        for index in self._receives.get(action, ()):
            transfer = self._sequence[index]
            assert isinstance(transfer, Transfer)
            if index >= self._next and index not in self._early and self._form_is_known(transfer):
                self._receive(transfer)
                self._early.add(index)

    def take(self, action: Action) -> tuple[Tensor | None, ...]:
        """The input of ``action``: received outputs, or received gradients of what was sent.

        None stands for the gradient of an output that the next stage used for nothing.
        """
        self.advance()
        arrival = self._inbox.pop(action, _Arrival(()))
        assert all(i < self._next or i in self._early for i in self._receives.get(action, ())), (
            f"{action} came too early"
        )
        for work in arrival.works:
            work.wait()
        if action.work is not Work.FORWARD:  # the gradients answer outputs, so these have arrived
            self._end_sends(Action(action.stage, Work.FORWARD, action.micro_batch))
        if not arrival.notes:
            return arrival.tensors
        there = self._answers.there(arrival.notes, len(arrival.tensors))
        return tuple(tensor if had else None for tensor, had in zip(arrival.tensors, there, strict=True))

    def give(self, action: Action, tensors: tuple[Tensor | None, ...]) -> None:
        """Send what ``action`` computed: the outputs of a forward, or gradients of what was received."""
        forward = action.work is Work.FORWARD
        if forward:
            self._check_outputs(action, tuple(tensor for tensor in tensors if tensor is not None))
        step = 1 if forward else -1
        if self.stays(action):
            self._inbox[Action(action.stage + step, action.work, action.micro_batch)] = _Arrival(tensors)
        elif self._unsent[action]:  # of a replica of several ranks, some send nothing
            self._there[action] = tuple(tensor is not None for tensor in tensors)
            self._outbox[action] = self._filled(action, tensors)
        self.advance()
        unanswered = [s for s in self._sends if self._forward_only or s.work is not Work.FORWARD]
        for source in unanswered[:-PENDING_SENDS]:
            self._end_sends(source)

    def _filled(self, action: Action, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
        """What is sent: zeros for gradients that are not there."""
        found = tuple(tensor.detach() for tensor in tensors if tensor is not None)
        if len(found) == len(tensors):
            return found
        form = gradients_of(self._outgoing[action.stage - 1])
        zeros = (b.zero_() for b in _buffers(form, len(self._rows[action.micro_batch]), self._device))
        return tuple(z if t is None else t.detach() for t, z in zip(tensors, zeros, strict=True))

    def stays(self, action: Action) -> bool:
        """Whether the result of ``action`` goes to another stage of this rank."""
        forward = action.work is Work.FORWARD
        return (action.stage if forward else action.stage - 1) in self._within

    def played(self, action: Action) -> None:
        """An action has been computed, and with it all that ranks exchange inside it."""
        self._played.add(action)

    def passed(self, blocks: range) -> None:
        """The last backward of the step has passed ``blocks``: sums of their gradients may start."""
        self._passed.update(blocks)
        self._reducer.passed(blocks)
        self.advance()

    def finish(self) -> None:
        """Issue what is left and wait for every send."""
        self.advance()
        assert self._next == len(self._sequence), f"{self._sequence[self._next]} was never issued"
        for source in list(self._sends):
            self._end_sends(source)

    def needs_grad(self, stage: int) -> tuple[bool, ...]:
        """Which of the tensors that come from the stage before get a gradient back."""
        return tuple(form.requires_grad for form in self._outgoing[stage - 1])

    def shares_memory(self, stage: int) -> tuple[bool, ...]:
        """Which of them shared memory with another where they came from, and no longer do."""
        if stage - 1 in self._within:
            return ()
        return tuple(form.shares_memory for form in self._outgoing[stage - 1])

    def _form_is_known(self, transfer: Transfer) -> bool:
        backward = transfer.target.work is not Work.FORWARD
        if backward:
            link = (transfer.sender, transfer.source.stage)
            return transfer.target.stage in self._outgoing and not self._answers.is_open(link)
        return (transfer.sender, transfer.source.stage) in self._known

    def _issue(self, index: int) -> bool:
        item = self._sequence[index]
        if isinstance(item, Inside):
            return item.action in self._played or item.block in self._passed
        if isinstance(item, Reduction):
            started = self._reducer.start(item)
            if started and self._blocking:
                self._reducer.finish(item)
            return started
        assert isinstance(item, Transfer)
        if item.sender == self._rank:
            return self._send(item)
        if index not in self._early:
            self._receive(item)
        self._early.discard(index)
        return True

    def _send(self, transfer: Transfer) -> bool:
        tensors = self._outbox.get(transfer.source)
        if tensors is None:
            return False
        stage = transfer.source.stage
        if transfer.source.work is Work.FORWARD and (transfer.receiver, stage) not in self._told:
            self._told.add((transfer.receiver, stage))
            header = encode(self._outgoing[stage], self._num_rows).to(self._device)
            self._post(header, transfer, self._tag(transfer.source))
        elif transfer.source.work is not Work.FORWARD:
            note = self._answers.note((transfer.receiver, stage), self._there[transfer.source])
            if note is not None:
                self._post(note, transfer, self._tag(transfer.source))
        start = self._rows[transfer.source.micro_batch].start
        for index, tensor in enumerate(tensors):
            part = tensor[transfer.rows.start - start : transfer.rows.stop - start]
            if part.numel():
                self._post(part.contiguous(), transfer, self._tag(transfer.source, 1 + index))
        self._unsent[transfer.source] -= 1
        if not self._unsent[transfer.source]:
            del self._outbox[transfer.source], self._there[transfer.source]
        return True

    def _post(self, tensor: Tensor, transfer: Transfer, tag: int) -> None:
        self.sent_bytes += tensor.nbytes
        work = self._transport.send(tensor, transfer.receiver, tag)
        if self._blocking:
            work.wait()
        else:
            self._sends.setdefault(transfer.source, []).append((work, tensor))

    def _end_sends(self, source: Action) -> None:
        """Wait for the sends of an action, which frees their memory."""
        for work, _ in self._sends.pop(source, ()):
            work.wait()

    def _receive(self, transfer: Transfer) -> None:
        arrival = self._arrival(transfer)
        if transfer.target.work is not Work.FORWARD:
            self._receive_note(transfer, arrival)
        start = self._rows[transfer.target.micro_batch].start
        for index, tensor in enumerate(arrival.tensors):
            assert tensor is not None
            part = tensor[transfer.rows.start - start : transfer.rows.stop - start]
            if part.numel():
                work = self._transport.receive(part, transfer.sender, self._tag(transfer.source, 1 + index))
                if self._blocking:
                    work.wait()
                else:
                    arrival.works.append(work)

    def _receive_note(self, transfer: Transfer, arrival: _Arrival) -> None:
        """Which gradients are there, where the sender did not say before that all are."""
        link = (transfer.sender, transfer.source.stage)
        note = arrival.notes[link] = self._answers.buffer(link, len(arrival.tensors))
        if note is not None:
            work = self._transport.receive(note, transfer.sender, self._tag(transfer.source))
            self._answers.expect(link, note, work)
            if self._blocking:
                self._answers.there({link: note}, len(arrival.tensors))

    def _arrival(self, transfer: Transfer) -> _Arrival:
        """The buffers for the input of an action, made at its first receive."""
        forward = transfer.target.work is Work.FORWARD
        if forward and (transfer.sender, transfer.source.stage) not in self._known:
            self._learn(transfer)
        if transfer.target not in self._inbox:
            signature = self._outgoing[transfer.source.stage if forward else transfer.target.stage]
            form = signature if forward else gradients_of(signature)
            num_rows = len(self._rows[transfer.target.micro_batch])
            self._inbox[transfer.target] = _Arrival(_buffers(form, num_rows, self._device))
        return self._inbox[transfer.target]

    def _learn(self, transfer: Transfer) -> None:
        """Receive the header that a sender puts before the first message of one of its stages in the step."""
        sender, stage = transfer.sender, transfer.source.stage
        header = torch.empty(HEADER_LENGTH, dtype=torch.int64, device=self._device)
        self._transport.receive(header, sender, self._tag(transfer.source)).wait()
        signature, num_rows = decode(header)
        if num_rows != self._num_rows:
            raise UsageError(
                f"rank {sender} has a batch of {num_rows} rows and rank {self._rank} one of "
                f"{self._num_rows}; give all ranks the same batches"
            )
        if (known := self._outgoing.setdefault(stage, signature)) != signature:
            raise ModelError(
                f"rank {sender} sends {signature}, another replica of its stage {known}; "
                "what crosses a boundary must not depend on the samples"
            )
        self._known.add((sender, stage))

    def _check_outputs(self, action: Action, tensors: tuple[Tensor, ...]) -> None:
        signature = signature_of(tensors, len(self._rows[action.micro_batch]))
        if (known := self._outgoing.setdefault(action.stage, signature)) != signature:
            raise ModelError(
                f"{action} gives {signature}, an earlier micro-batch of this step gave {known}; "
                "pad all samples of a global batch to one shape"
            )

    def _tag(self, source: Action, index: int = 0) -> int:
        """A tag of its own for each tensor of each action of a pair; index 0 is the header's."""
        forward = source.work is Work.FORWARD
        place = source.stage * len(self._rows) + source.micro_batch
        return (place * 2 + forward) * (MAX_TENSORS + 1) + index


def _receives_by_action(sequence: Sequence[Communication], rank: int) -> Mapping[Action, list[int]]:
    found: dict[Action, list[int]] = {}
    for index, item in enumerate(sequence):
        if isinstance(item, Transfer) and item.receiver == rank:
            found.setdefault(item.target, []).append(index)
    return found


def _sends_by_action(sequence: Sequence[Communication], rank: int) -> Counter[Action]:
    return Counter(item.source for item in sequence if isinstance(item, Transfer) and item.sender == rank)


def _buffers(signature: Signature, num_rows: int, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.empty((num_rows, *f.shape), dtype=f.dtype, device=device) for f in signature)
