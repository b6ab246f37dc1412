"""A module that trains on all ranks with unequal shares: what DistributedDataParallel is for equal ones."""

import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..batch import NoiseReading, total
from ..data.batch import tensors_of
from ..errors import UsageError
from .arguments import refuse_of_ddp
from .ending import tell_others_at_exit
from .link import Link, link_of
from .loader import HeteroLoader
from .norm import local_norms, norms_of
from .peers import Peers, Place
from .reducer import Reducer


class HeteroDDP(nn.Module):
    """Wraps a model as DistributedDataParallel does; gradients are those of one process, whatever the shares.

        model = arachne.HeteroDDP(model)
        loader = arachne.HeteroLoader(dataset, global_batch=512)
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs), targets)  # the mean over this rank's samples, as ever
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    Each rank's gradient is weighed by its part of the global batch, once, on its way into the sum over all
    ranks. Parameters and buffers are those of the first rank from the start on. Parameters that a step does
    not use count as zero; where no rank uses one, its gradient stays None. Gradients are views of the buckets
    that are sent: keep a copy of those that you look at later.

    Args:
        module: On its device already; every rank makes the same one.
        loader: Gives out its batches; default: any loader of the process group.
        process_group: The ranks that train it; default: those of ``loader``, or all.
        noise: Measure the gradient noise of every step, from the norms of each rank's own gradient.
        of_ddp: Refused; what DistributedDataParallel takes and this has no use for.

    Raises:
        UsageError: The module differs between ranks, or is wrapped in DistributedDataParallel too.

    """

    def __init__(
        self,
        module: nn.Module,
        loader: HeteroLoader | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        noise: bool = False,
        **of_ddp: Any,
    ) -> None:
        super().__init__()
        refuse_of_ddp(of_ddp)
        if not isinstance(loader, HeteroLoader | None):
            raise UsageError(f"loader is a {type(loader).__name__}; give a HeteroLoader, or leave it out")
        _refuse_wrapped(module)
        self.module = module
        self._link: Link = loader.claim() if loader is not None else link_of(process_group)
        _agree(module, self._link.peers)
        _warn_of_local_norms(module, self._link.peers)
        self._reducer = Reducer(module, self._link)
        if noise:
            self._reducer.measure_noise()
        if self._link.peers.num_ranks > 1:
            tell_others_at_exit(self._reducer)
        self.require_backward_grad_sync = True
        self._form: _Form | None = _form_of(module)
        """Of the parameters, until the first forward has found them unchanged."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the module; where gradients are recorded, the backward will end in a sum over all ranks.

        Raises:
            WorkerFailedError: This rank ran out of memory, and no ``loader.step`` repeats the step.
            UsageError: The module is not what was wrapped.

        """
        if not torch.is_grad_enabled():
            return self.module(*inputs, **named)
        _refuse_around()
        if self._form is not None:
            self._refuse_changed(self._form)
            self._form = None
        self._reducer.arm(sync=self.require_backward_grad_sync)
        try:
            output = self.module(*inputs, **named)
        except torch.OutOfMemoryError:
            if not self._link.repeats and self._link.peers.num_ranks > 1:
                self._reducer.abandon(0)
            raise
        self._reducer.watch(tensors_of(output))
        return output

    def measure_noise(self, *optimizers: torch.optim.Optimizer) -> None:
        """Measure the gradient noise from the next step on, by parameter group of these optimizers.

        Of Adam's parameters it is that of the gradient divided as Adam is expected to divide it, by √v̂ + ε,
        which scales each direction as the step does; readings begin after the second update. Without
        optimizers all parameters are one group.
        """
        self._reducer.measure_noise(optimizers)

    def _refuse_changed(self, form: "_Form") -> None:
        self.peers.refuse_strangers()
        norms = norms_of(self.module) if self.peers.num_ranks > 1 else ()
        if _form_of(self.module) == form and all(norm.channel for norm in norms):
            return
        raise UsageError(
            "the module has other parameters, or they are elsewhere or of another dtype, or its norms were "
            "converted, since it was wrapped, so that no rank would sum their gradients; change, convert, "
            "move and load it (with assign=True) before arachne.HeteroDDP"
        )

    @property
    def peers(self) -> Peers:
        """The ranks that train it."""
        return self._link.peers

    @property
    def device(self) -> torch.device:
        """Of its parameters."""
        return self._reducer.device

    @property
    def noise(self) -> NoiseReading | None:
        """Gradient noise of the step before the last one, the same on every rank.

        Seen between all backwards whose gradients one sum takes: those of the ranks, and of each round or
        ``no_sync``. None: not asked for, nothing before it, or fewer than two backwards with samples. Under a
        loss scale s, noise and signal are s² times as large; their ratio is not. Zero gradients between
        sums, else the signal is that of several steps.
        """
        found = self._reducer.noise
        return total(found) if found else None

    @property
    def noise_by_group(self) -> tuple[NoiseReading, ...]:
        """By parameter group, as ``noise``; none where that is None."""
        return self._reducer.noise

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the sum of gradients to a later backward; the forward must be inside too.

        Raises:
            UsageError: The batch is adaptive: what makes up an update must be known where it is chosen.

        """
        if self._link.adaptation is not None:
            raise UsageError(
                "an adaptive batch is that of one update, so batches are not added up by no_sync(); set "
                "global_batch to the samples of an update, and AdaptiveBatch(max_accumulation=...) where "
                "memory does not take them at once"
            )
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


_Form: TypeAlias = list[tuple[int, torch.dtype, torch.device]]
"""Who each parameter is, and what."""


def _form_of(module: nn.Module) -> _Form:
    return [(id(parameter), parameter.dtype, parameter.device) for parameter in module.parameters()]


def _agree(module: nn.Module, peers: Peers) -> None:
    """Take over the first rank's values; UsageError on every rank where modules differ in form."""
    if peers.num_ranks == 1:
        return
    named = [*module.named_parameters(), *module.named_buffers()]
    form = [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in named]
    found = [row[0] for row in peers.table(Place.WRAP, [zlib.crc32(repr(form).encode())]).rows()]
    if unlike := [rank for rank, number in enumerate(found) if number != found[0]]:
        raise UsageError(
            f"the module of rank {unlike[0]} differs from that of rank 0 in the names, shapes, dtypes or "
            "requires_grad of its parameters and buffers; make the same model on every rank"
        )
    with torch.no_grad():
        for _, tensor in named:
            _take_over(tensor, peers)


def _take_over(tensor: Tensor, peers: Peers) -> None:
    values = tensor.detach().contiguous()
    dist.broadcast(values, group=peers.group, group_src=0)
    if values.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(values)


def _warn_of_local_norms(module: nn.Module, peers: Peers) -> None:
    names = local_norms(module.named_modules())
    if names and peers.num_ranks > 1 and peers.rank == 0:
        warnings.warn(
            f"{names[0] or 'the module'} ({len(names)} in all) normalises over one rank's batch, so that "
            "training depends on the shares; arachne.convert_batch_norm(model) takes the global batch",
            stacklevel=3,
        )


def _refuse_wrapped(module: nn.Module) -> None:
    for name, inner in module.named_modules():
        if isinstance(inner, DistributedDataParallel | HeteroDDP):
            raise UsageError(
                f"{name or 'the module'} is wrapped in {type(inner).__name__} already, so its gradients "
                "would be weighed twice; give HeteroDDP the module itself (.module)"
            )


def _refuse_around() -> None:
    if DistributedDataParallel._get_active_ddp_module() is not None:  # type: ignore[no-untyped-call]
        raise UsageError(
            "HeteroDDP is inside DistributedDataParallel, so its gradients would be weighed twice; take "
            "DistributedDataParallel away"
        )
