"""Plays the actions of one stage by autograd, each with its rows, context and weight."""

import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..backends.protocol import GradientSums
from ..data.batch import StepBatch, take_rows, tensors_of, to_device
from ..data.chance import drawn_under
from ..errors import ModelError
from ..measure.recorder import Records
from ..model import extra_losses
from ..model.deferral import Deferral
from ..plan.records import RecordKind
from ..plan.schedule import Action, Work
from .compiled import uncompiled
from .courier import Courier
from .entry import Entry
from .mixing import TwoRows
from .play import Play
from .precision import as_single, autocast
from .shard_rule import ShardRule
from .weight import Weight

_Result = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""What some blocks return, and the losses that they added."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A run of blocks between its forward and its backward."""

    blocks: range
    entry: Entry
    outputs: tuple[Tensor, ...]
    added: tuple[Tensor, ...]
    """Losses that its blocks added, weighted."""
    deferral: Deferral | None
    """Gradients of weights that the backward leaves out."""


class Player:
    """One stage during one step."""

    def __init__(
        self,
        play: Play,
        courier: Courier,
        gradients: GradientSums,
        batch: StepBatch,
        rows: tuple[range, ...],
        guests: Collection[int],
        *,
        records: Records,
        step: int,
        watched: bool,
        scale: float = 1.0,
    ) -> None:
        """Play on this replica's ``rows`` of each micro-batch, ``watched`` for what depends on the split.

        In micro-batches that are ``guests`` it has a row of another replica: no loss, and gradients of zero.
        Gradients come out ``scale`` times as large.
        """
        self._play = play
        self._courier = courier
        self._gradients = gradients
        self._batch = batch
        self._rows = rows
        self._guests = guests
        self._records = records
        self._step = step
        self._watched = watched and play.watch.exact
        self._scale = scale
        used = [m for m, mine in enumerate(rows) if mine]
        self._first, self._last = min(used, default=None), max(used, default=None)
        self._held: dict[int, list[_Piece]] = {}
        self._owing: dict[int, list[tuple[range, Deferral]]] = {}
        """By micro-batch whose backward is half done, blocks in descending order."""
        self._samples: dict[int, Any] = {}
        self._shared: tuple[bool, ...] = ()
        """Of the inputs of the forward that runs: see ``_sharing``."""
        self.loss = torch.zeros((), dtype=torch.float64, device=play.device)
        """Weighted sum of the losses so far: of the last stage, and of those that blocks added."""

    def play(self, action: Action, following: Action | None, weight: Weight) -> None:
        """Play one action; the input of the ``following`` one is received meanwhile."""
        records, courier, sent_before = self._records, self._courier, self._courier.sent_bytes
        start = records.mark()
        courier.advance()
        if following is not None:
            courier.look_ahead(following)
        taken = self._take(action)
        there = records.mark()
        result: tuple[Tensor | None, ...] = ()
        if action.work is Work.FORWARD:
            entered = cast(tuple[Tensor, ...], taken)  # only gradients may be missing
            with autocast(self._play.precision, self._play.device):
                result = self._forward(action.micro_batch, entered, weight)
        elif action.work is Work.WEIGHT:
            self._weigh(action.micro_batch)
        else:
            result = self._backward(action.micro_batch, taken)
        courier.played(action)
        computed = records.mark()
        if not self._is_end(action):
            courier.give(action, result)
        marks = (start, there, computed, records.mark())
        samples = 0 if action.micro_batch in self._guests else len(self._rows[action.micro_batch])
        sent = courier.sent_bytes - sent_before
        records.add(RecordKind.ACTION, str(action), marks, samples=samples, sent_bytes=sent)

    @property
    def has_loss(self) -> bool:
        """Whether the stage is the last of its pipeline."""
        return self._play.is_last

    def samples(self, micro_batch: int) -> Any:
        """Samples of a micro-batch that are this replica's, on its device."""
        if micro_batch not in self._samples:
            rows = self._rows[micro_batch]
            self._samples[micro_batch] = to_device(self._batch.rows(rows), self._play.device)
        return self._samples[micro_batch]

    def own_samples(self) -> Iterator[Any]:
        """Of each micro-batch whose loss is computed here and counts, without guests."""
        if self.has_loss:
            used = (m for m, rows in enumerate(self._rows) if rows and m not in self._guests)
            yield from map(self.samples, used)

    def _take(self, action: Action) -> tuple[Tensor | None, ...]:
        """What the action needs from elsewhere: samples, received outputs, or received gradients."""
        if action.work is Work.FORWARD and self._play.is_first:
            return self._inputs(self.samples(action.micro_batch))
        if action.work is Work.WEIGHT or (action.work is not Work.FORWARD and self._play.is_last):
            return ()
        return self._courier.take(action)

    def _is_end(self, action: Action) -> bool:
        """Whether no neighbour waits for the result."""
        if action.work is Work.WEIGHT:
            return True
        return self._play.is_last if action.work is Work.FORWARD else self._play.is_first

    def _forward(self, micro_batch: int, taken: tuple[Tensor, ...], weight: Weight) -> tuple[Tensor, ...]:
        samples = self.samples(micro_batch) if self._play.needs_samples else None
        context = self._play.context(samples) if self._play.context else {}
        needs_grad = (
            (False,) * len(taken) if self._play.is_first else self._courier.needs_grad(self._play.index)
        )
        self._shared = self._sharing(taken, samples)
        stays = self._courier.stays(Action(self._play.index - 1, Work.FORWARD, micro_batch))
        outputs, pieces = taken, list[_Piece]()
        mixes = self._looks_for_mixing(micro_batch)
        shares = self._looks_at_shards(micro_batch)
        two = self._two_rows(taken, samples) if mixes or shares else None
        looks = self._play.watch.forward(context, random_too=self._watched)
        with looks, self._draws_alike(micro_batch):
            for blocks in self._pieces(micro_batch):
                entry = Entry.behind(outputs) if pieces or stays else Entry(taken, needs_grad)
                deferral = Deferral() if self._play.defers else None
                outputs, added = self._run(entry.tensors, context, blocks, deferral)
                added = self._weighted_by_rows(added, micro_batch)
                ends = self._play.is_last and blocks.stop == self._play.stage.block_range.stop
                if ends and micro_batch not in self._guests:
                    outputs = (self._weighted_loss(outputs, samples, weight, len(self._rows[micro_batch])),)
                pieces.append(_Piece(blocks, entry, outputs, added, deferral))
        if two is not None:
            with uncompiled(self._play.compiled):
                if mixes:
                    two.refuse_mixing(self._play.stage)
                if shares is not None:
                    shares.refuse(two)
        if torch.is_grad_enabled():
            self._held[micro_batch] = pieces
        self._samples.pop(micro_batch, None)
        return outputs

    def _draws_alike(self, micro_batch: int) -> AbstractContextManager[None]:
        """Devices of one replica draw the same: dropout would make their copies of a sample differ."""
        if self._play.shard_rule is None or not self._play.stochastic:
            return nullcontext()
        place = (self._play.seed, self._step, self._play.index, self._rows[micro_batch].start)
        return drawn_under(zlib.crc32(repr(place).encode()), self._play.device)

    def _sharing(self, taken: tuple[Tensor, ...], samples: Any) -> tuple[bool, ...]:
        """Which inputs share memory with what others hold, where a change in place would not show."""
        if not self._play.is_first:
            return self._courier.shares_memory(self._play.index)
        if self._play.is_last and not self._play.recompute:
            return ()  # the loss reads the same memory
        memory = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(samples)}
        return tuple(tensor.untyped_storage().data_ptr() in memory for tensor in taken)

    def _looks_at_shards(self, micro_batch: int) -> ShardRule | None:
        rule = self._play.shard_rule
        looks = self._watched and micro_batch == self._first and rule is not None and rule.is_open
        return rule if looks else None

    def _looks_for_mixing(self, micro_batch: int) -> bool:
        return self._watched and self._play.splits and micro_batch == self._first

    def _two_rows(self, taken: tuple[Tensor, ...], samples: Any) -> TwoRows | None:
        """Copies, taken before a block may change them; None where the user's functions fail on two rows."""
        assert self._first is not None
        num_rows = len(self._rows[self._first])
        ends = (0, num_rows - 1)
        two = take_rows(samples, ends, num_rows)
        try:
            inputs = self._inputs(two) if self._play.is_first else take_rows(taken, ends, num_rows)
            return TwoRows(inputs, self._play.context(two) if self._play.context else {})
        except Exception:
            return None

    def _inputs(self, samples: Any) -> tuple[Tensor, ...]:
        inputs = self._play.inputs(samples)
        return inputs if isinstance(inputs, tuple) else (inputs,)

    def _pieces(self, micro_batch: int) -> tuple[range, ...]:
        """The stage in one, or for the last micro-batch in pieces, so that sums start between them."""
        return self._play.pieces if micro_batch == self._last else (self._play.stage.block_range,)

    def _run(
        self,
        inputs: tuple[Tensor, ...],
        context: Mapping[str, Tensor],
        blocks: range,
        deferral: Deferral | None,
    ) -> _Result:
        if not (self._play.recompute and torch.is_grad_enabled()):
            return self._through(inputs, context, blocks, deferral)
        keep_random = self._play.stochastic
        return checkpoint(  # type: ignore[no-any-return]
            self._on_copies,
            inputs,
            context,
            blocks,
            deferral,
            use_reentrant=False,
            preserve_rng_state=keep_random,
        )

    def _on_copies(
        self,
        inputs: tuple[Tensor, ...],
        context: Mapping[str, Tensor],
        blocks: range,
        deferral: Deferral | None,
    ) -> _Result:
        """The stage run again must begin where it began, though a block may change its input in place."""
        return self._through(tuple(tensor.clone() for tensor in inputs), context, blocks, deferral)

    def _through(
        self,
        inputs: tuple[Tensor, ...],
        context: Mapping[str, Tensor],
        blocks: range,
        deferral: Deferral | None,
    ) -> _Result:
        """Run blocks; ModelError where they change what shared its memory before it crossed a boundary."""
        enters = blocks.start == self._play.stage.block_range.start
        shared = self._shared if enters else ()
        before = [(t, t._version) for t, flag in zip(inputs, shared, strict=False) if flag]
        with extra_losses() as added, deferral or nullcontext():
            outputs: tuple[Tensor, ...] = self._play.stage(inputs, context, blocks)
        if any(tensor._version != version for tensor, version in before):
            if self._play.is_first:
                raise ModelError(
                    f"block {blocks.start} or one behind it changes the batch in place, which the loss would "
                    "see in one process, and not on another rank or after a recomputation; give it a copy: "
                    "engine(..., inputs=lambda batch: (batch[0].clone(),))"
                )
            raise ModelError(
                f"block {blocks.start} or one behind it changes its input in place, which shared memory with "
                f"another output of block {blocks.start - 1}: one process would see the change in both; "
                "return copies (.clone()) from that block"
            )
        return outputs, tuple(added)

    def _weighted_by_rows(self, added: tuple[Tensor, ...], micro_batch: int) -> tuple[Tensor, ...]:
        """Means over its rows as parts of the mean over the global batch; nothing of a guest.

        An evaluation is of the user's loss alone.
        """
        if micro_batch in self._guests or not torch.is_grad_enabled():
            return ()
        part = len(self._rows[micro_batch]) / self._batch.num_rows
        weighted = tuple(as_single(value) * part for value in added)
        for value in weighted:
            self.loss += value.detach()
        return weighted

    def _weighted_loss(
        self, outputs: tuple[Tensor, ...], samples: Any, weight: Weight, num_rows: int
    ) -> Tensor:
        loss = self._play.loss(outputs[0] if len(outputs) == 1 else outputs, samples)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ModelError(
                f"loss(output, batch) must return one number, the mean over its samples; got {what}"
            )
        if any(tensor.requires_grad for tensor in outputs) and not loss.requires_grad:
            raise ModelError(
                "loss(output, batch) does not depend on the output by gradients: nothing would be trained; "
                "leave .detach(), .item() and torch.no_grad() out of it"
            )
        weighted = as_single(loss) * weight.of(num_rows)
        if self._watched and self._play.splits:
            self._play.loss_rule.refuse(outputs, samples, loss.detach())
        self.loss += weighted.detach().reshape(())
        return weighted

    def _backward(self, micro_batch: int, taken: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Down through the pieces; None stands for the gradient of what nothing behind it used."""
        pieces = self._held.pop(micro_batch)
        gradients: tuple[Tensor | None, ...] | None = None if self._play.is_last else taken
        if micro_batch in self._guests:
            gradients = tuple(torch.zeros_like(t) for t in pieces[-1].outputs if t.requires_grad)
        while pieces:
            piece = pieces.pop()
            roots = self._roots(piece, gradients)
            if roots:
                if piece.deferral is not None:
                    piece.deferral.is_due = True
                self._gradients.enter()
                torch.autograd.backward([output for output, _ in roots], [given for _, given in roots])
            gradients = piece.entry.gradients()
            if piece.deferral is not None:
                self._owing.setdefault(micro_batch, []).append((piece.blocks, piece.deferral))
            elif micro_batch == self._last:
                self._courier.passed(piece.blocks)
        return self._gradients.settle(gradients or ())

    def _roots(
        self, piece: _Piece, gradients: tuple[Tensor | None, ...] | None
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Where the backward of a piece begins, and with what; without ``gradients`` at the loss."""
        outputs = [tensor for tensor in piece.outputs if tensor.requires_grad]
        if gradients is None:
            roots = [(loss, self._root(loss)) for loss in outputs]
        else:
            roots = [pair for pair in zip(outputs, gradients, strict=True) if pair[1] is not None]
        return roots + [(value, self._root(value)) for value in piece.added if value.requires_grad]

    def _weigh(self, micro_batch: int) -> None:
        """The gradients of weights that the backward left out."""
        for blocks, deferral in self._owing.pop(micro_batch):
            deferral.pay()
            if micro_batch == self._last:
                self._courier.passed(blocks)
        self._gradients.settle(())

    def _root(self, loss: Tensor) -> Tensor | None:
        """What differentiation starts with at a loss, of one number."""
        return None if self._scale == 1 else torch.full_like(loss, self._scale)
