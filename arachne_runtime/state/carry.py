"""Carries parts of tensors between processes: packed into messages of bounded size, in one agreed order.

All processes list the same messages. Each starts its own in that order and has a few under way, so that the
first unfinished one can always run.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product

import torch
import torch.distributed as dist
from torch import Tensor

from ..plan.moves import Move
from ..units import Bytes
from .holdings import Holding
from .parts import Part, copy_part, crossing, run_of_elements, shape_of

BUDGET_BYTES: Bytes = 64 * 2**20
"""Of all messages that a process has under way."""
MESSAGE_BYTES: Bytes = 4 * 2**20
"""Of the largest message: 40 ms on a link of 100 MB/s, beside which what a message costs is little."""
ROUNDS_UNDER_WAY = 2
"""One is on its way while the next is packed."""


@dataclass(frozen=True, slots=True)
class MovePiece:
    """Some elements of a move, row by row."""

    move: Move
    elements: range

    @property
    def nbytes(self) -> Bytes:
        """Of the piece."""
        return len(self.elements) * self.move.itemsize


@dataclass(frozen=True, slots=True)
class Message:
    """What one process sends to another at once: pieces one behind the other, wide elements first."""

    source: int
    target: int
    number: int
    """Of the messages between these two."""
    pieces: tuple[MovePiece, ...]

    @property
    def nbytes(self) -> Bytes:
        """Of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)


def messages(moves: Sequence[Move], *, largest: Bytes | None = None) -> list[Message]:
    """All messages, in the order in which every process starts its own: the first of each pair come first.

    ``largest``: of one message; default: what keeps the busiest process within its budget.
    """
    by_pair: dict[tuple[int, int], list[Move]] = defaultdict(list)
    for move in moves:
        by_pair[move.source, move.target].append(move)
    limit = largest or _largest(by_pair)
    found = [
        Message(*pair, number, pieces)
        for pair, mine in by_pair.items()
        for number, pieces in enumerate(_filled(mine, limit))
    ]
    return sorted(found, key=lambda message: (message.number, message.source, message.target))


@dataclass(slots=True)
class Carrier:
    """One process's part in it: what it has, what it is to have, and what went wrong."""

    before: Mapping[str, Sequence[Holding]]
    """By label."""
    after: Mapping[str, Sequence[Holding]]
    here: int
    """Number of this process."""
    device: torch.device
    """Where messages are packed."""
    sent_bytes: Bytes = field(default=0, init=False)
    fault: Exception | None = field(default=None, init=False)
    """The first; messages go on, since others wait for them."""

    @classmethod
    def of(
        cls, before: Iterable[Holding], after: Iterable[Holding], here: int, device: torch.device
    ) -> "Carrier":
        """From all that a process has, and all that it is to have."""
        return cls(_by_label(before), _by_label(after), here, device)

    def copy_own(self) -> None:
        """Copy what stays on this process, unless old and new are the same memory."""
        for name, targets in self.after.items():
            for source, target in product(self.before.get(name, ()), targets):
                part = crossing(source.part, target.part)
                if part is not None and not _are_one(source, target):
                    copy_part(part, source.tensor, source.part, target.tensor, target.part)

    def carry(self, every: Sequence[Message]) -> None:
        """Send and receive this process's messages; all processes call it with the same ones."""
        mine = [message for message in every if self.here in (message.source, message.target)]
        under_way: deque[_Round] = deque()
        for _, alike in groupby(mine, key=lambda message: message.number):
            under_way.append(self._start(tuple(alike)))
            if len(under_way) >= ROUNDS_UNDER_WAY:
                self._finish(under_way.popleft())
        while under_way:
            self._finish(under_way.popleft())

    def _start(self, alike: Sequence[Message]) -> "_Round":
        buffers = [torch.empty(m.nbytes, dtype=torch.uint8, device=self.device) for m in alike]
        operations = []
        for message, buffer in zip(alike, buffers, strict=True):
            if message.source == self.here:
                self._try(self._pack, message, buffer)
                self.sent_bytes += buffer.nbytes
                operations.append(dist.P2POp(dist.isend, buffer, message.target, tag=message.number))
            else:
                operations.append(dist.P2POp(dist.irecv, buffer, message.source, tag=message.number))
        return _Round(alike, buffers, dist.batch_isend_irecv(operations))

    def _finish(self, round_: "_Round") -> None:
        for work in round_.works:
            work.wait()
        for message, buffer in zip(round_.messages, round_.buffers, strict=True):
            if message.target == self.here:
                self._try(self._unpack, message, buffer)

    def _try(self, action: Callable[[Message, Tensor], None], message: Message, buffer: Tensor) -> None:
        if self.fault is not None:
            return
        try:
            action(message, buffer)
        except Exception as error:
            self.fault = error

    def _pack(self, message: Message, buffer: Tensor) -> None:
        for common, dense, part, holding in _places(message, buffer, self.before):
            copy_part(common, holding.tensor, holding.part, dense, part)

    def _unpack(self, message: Message, buffer: Tensor) -> None:
        for common, dense, part, holding in _places(message, buffer, self.after):
            copy_part(common, dense, part, holding.tensor, holding.part)


@dataclass(frozen=True, slots=True)
class _Round:
    """Messages of one number, under way."""

    messages: Sequence[Message]
    buffers: Sequence[Tensor]
    works: Sequence[dist.Work]


def label(holding: Holding) -> str:
    """Name of a whole tensor: that of a parameter, or of one of its states."""
    return f"{holding.name}:{holding.key}" if holding.key else holding.name


def _largest(by_pair: Mapping[tuple[int, int], object]) -> Bytes:
    partners = Counter(process for pair in by_pair for process in pair)
    busiest = max(partners.values(), default=1)
    return min(MESSAGE_BYTES, BUDGET_BYTES // (busiest * ROUNDS_UNDER_WAY))


def _filled(moves: Sequence[Move], limit: Bytes) -> Iterator[tuple[MovePiece, ...]]:
    """The pieces of each message of a pair.

    Wide elements come first, so that each piece begins at a multiple of its element's size.
    """
    pieces: list[MovePiece] = []
    room = limit
    for move in sorted(moves, key=lambda move: -move.itemsize):
        numel, done = move.nbytes // move.itemsize, 0
        while done < numel:
            count = min(numel - done, room // move.itemsize)
            if count == 0:
                yield tuple(pieces)
                pieces, room = [], limit
                continue
            pieces.append(MovePiece(move, range(done, done + count)))
            done, room = done + count, room - count * move.itemsize
    if pieces:
        yield tuple(pieces)


def _by_label(holdings: Iterable[Holding]) -> dict[str, list[Holding]]:
    found: dict[str, list[Holding]] = defaultdict(list)
    for holding in holdings:
        found[label(holding)].append(holding)
    return dict(found)


def _are_one(source: Holding, target: Holding) -> bool:
    same = source.tensor.data_ptr() == target.tensor.data_ptr() and source.tensor.numel() > 0
    return same and source.part == target.part


def _places(
    message: Message, buffer: Tensor, held: Mapping[str, Sequence[Holding]]
) -> Iterator[tuple[Part, Tensor, Part, Holding]]:
    """What a message has in common with what is held: the common part, a dense part of the buffer, which
    part that is, and the holding.
    """
    offset = 0
    for piece in message.pieces:
        mine = held[piece.move.name]
        memory = buffer[offset : offset + piece.nbytes].view(mine[0].tensor.dtype)
        offset += piece.nbytes
        for elements, part in run_of_elements(piece.elements, piece.move.part):
            first = elements.start - piece.elements.start
            dense = memory[first : first + len(elements)].view(shape_of(part))
            for holding in mine:
                if (common := crossing(part, holding.part)) is not None:
                    yield common, dense, part, holding
