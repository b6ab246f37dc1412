"""Batch normalisation over the global batch, whatever its shares: exact in forward and backward."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from ..errors import ModelError, UsageError

if TYPE_CHECKING:
    from .link import Link


class Channel:
    """Sums of statistics over the ranks of a link, in a group of their own: gradients go in another order."""

    def __init__(self, link: "Link") -> None:
        """Make the group; every rank calls it."""
        self._link = link
        peers = link.peers
        self._group = dist.new_group(dist.get_process_group_ranks(peers.group)) if peers.group else None
        self._sizes: list[int] = []
        """Of the messages of this step; ``_usual``: of the last whole one."""
        self._usual: list[int] = []

    def weight(self) -> float:
        """Of this rank's batch in the loss of the global batch.

        Raises:
            UsageError: The step comes in rounds, each of which would have statistics of its own.

        """
        turn = self._link.turn
        if turn is not None and turn.num_rounds > 1:
            raise UsageError(
                f"the global batch comes in {turn.num_rounds} rounds, since it does not fit into memory at "
                "once, and batch normalisation would take the statistics of each; lower global_batch, or use "
                "GroupNorm"
            )
        return self._link.weight()

    def holds_own(self) -> bool:
        """Whether the samples of this batch count."""
        return self._link.turn is None or self._link.turn.rows > 0

    def sum(self, values: Tensor) -> Tensor:
        """Over all ranks, in place."""
        self._sizes.append(values.numel())
        if self._group is not None:
            dist.all_reduce(values, group=self._group)
        return values

    def end(self) -> None:
        """A step has ended."""
        self._usual, self._sizes = self._sizes, []

    def join_rest(self, device: torch.device) -> None:
        """Take part in the messages that the other ranks still send in this step, as in the step before."""
        for size in self._usual[len(self._sizes) :]:
            self.sum(torch.zeros(size, dtype=torch.float64, device=device))
        self._sizes = []


class HeteroBatchNorm(_BatchNorm):
    """``nn.BatchNorm1d``, ``2d`` or ``3d`` with the statistics of the global batch: ``convert_batch_norm``.

    Each sample counts once, whichever rank holds it; rows held only to join do not count. Outside of
    ``HeteroDDP`` it normalises over the local batch.
    """

    channel: Channel | None = None
    _before: tuple[Tensor, Tensor, Tensor] | None = None

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ModelError(f"batch normalisation of shape {tuple(input.shape)}; (samples, channels, ...)")

    def forward(self, input: Tensor) -> Tensor:
        """(B, C, ...) → (B, C, ...)."""
        if self.channel is None or not (self.training or self.running_mean is None):
            return super().forward(input)
        self._check_input_dim(input)
        found = _Normalise.apply(input, self.weight, self.bias, self.channel, self.eps)  # type: ignore[no-untyped-call]
        out, mean, variance, count = found
        if self.running_mean is not None:
            self._track(mean, variance, float(count))
        return out  # type: ignore[no-any-return]

    def take_back(self) -> None:
        """Undo what the forward of a step that is repeated has done to the running statistics."""
        if self._before is not None:
            self.running_mean, self.running_var, self.num_batches_tracked = self._before
            self._before = None

    def keep(self) -> None:
        """A step has ended well."""
        self._before = None

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: float) -> None:
        old_mean, old_variance, number = self.running_mean, self.running_var, self.num_batches_tracked
        assert old_mean is not None
        assert old_variance is not None
        assert number is not None
        self._before = self._before or (old_mean, old_variance, number)
        self.num_batches_tracked = number + 1
        new = 1 / float(number + 1) if self.momentum is None else self.momentum
        unbiased = variance * (count / max(count - 1, 1))
        self.running_mean = old_mean + new * (mean.to(old_mean.dtype) - old_mean)
        self.running_var = old_variance + new * (unbiased.to(old_variance.dtype) - old_variance)


class _Normalise(torch.autograd.Function):
    """Loss of the global batch = Σ_j w_j loss_j, and the bucket will weigh rank i's gradients by w_i.

    So the sums over ranks in the backward are weighed by w_j, and divided by w_i here.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, channel: Channel, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Output, mean and biased variance of each channel in float64, and the count."""
        single = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        mean, variance, count = _statistics(single, channel)
        if count.item() <= 1:
            raise ModelError(
                f"a batch norm over {count.item():g} values a channel; it needs 2 in the global batch"
            )
        mean_C, variance_C = mean.to(single.dtype), variance.to(single.dtype)
        out = F.batch_norm(single, mean_C, variance_C, weight, bias, training=False, eps=eps)
        ctx.save_for_backward(single, weight, mean_C, torch.rsqrt(variance_C + eps), count)
        ctx.channel, ctx.share = channel, channel.weight() if channel.holds_own() else 0.0
        ctx.mark_non_differentiable(mean, variance, count)
        return out.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input, weight and bias of this rank's own loss, as far as ranks can have one."""
        x, weight, mean_C, scale_C, count = ctx.saved_tensors
        dims, shape = _all_but_channels(x)
        grad = grad.to(x.dtype)
        normal = (x - mean_C.view(shape)) * scale_C.view(shape)
        sums = torch.stack((grad.sum(dims), (grad * normal).sum(dims)))
        told = sums.double() * ctx.share if ctx.share else torch.zeros_like(sums, dtype=torch.float64)
        total = ctx.channel.sum(told.flatten()).view(2, -1)
        bias_C, weight_C = (sums[0], sums[1]) if weight is not None else (None, None)
        if not ctx.share:
            return torch.zeros_like(x), weight_C, bias_C, None, None
        means = (total / (count * ctx.share)).to(x.dtype)
        inner = grad - means[0].view(shape) - normal * means[1].view(shape)
        factor = scale_C if weight is None else scale_C * weight
        return inner * factor.view(shape), weight_C, bias_C, None, None


def _statistics(x: Tensor, channel: Channel) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance of each channel over all ranks, and values a channel, in float64.

    Ranks tell Σx and Σx², whose difference is taken in float64.
    """
    dims, _ = _all_but_channels(x)
    channels = x.shape[1]
    told = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
    if channel.holds_own():
        number = x.numel() // channels
        variance, mean = (value.double() for value in torch.var_mean(x.detach(), dims, correction=0))
        told[:channels], told[channels:-1], told[-1] = (
            number * mean,
            number * (variance + mean * mean),
            number,
        )
    total = channel.sum(told)
    mean, count = total[:channels] / total[-1], total[-1]
    return mean, (total[channels:-1] / count - mean * mean).clamp_min(0), count.clone()


def _all_but_channels(x: Tensor) -> tuple[list[int], list[int]]:
    """Dims to sum over, and the shape of a value a channel beside (B, C, ...)."""
    return [0, *range(2, x.dim())], [1, -1, *[1] * (x.dim() - 2)]


def convert_batch_norm(module: nn.Module) -> nn.Module:
    """The module with each ``nn.BatchNorm*d`` and ``SyncBatchNorm`` as a ``HeteroBatchNorm`` of its state.

    Call it before ``HeteroDDP`` and before the optimizer is made. ModelError for a lazy norm, which has no
    size yet.
    """
    if isinstance(module, _LazyNormBase):
        raise ModelError(
            f"{type(module).__name__} has no size yet; call the model once before it is converted"
        )
    if isinstance(module, _BatchNorm) and not isinstance(module, HeteroBatchNorm):
        return _converted(module)
    for name, child in module.named_children():
        new = convert_batch_norm(child)
        if new is not child:
            setattr(module, name, new)
    return module


def _converted(norm: _BatchNorm) -> HeteroBatchNorm:
    new = HeteroBatchNorm(
        norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats, device="meta"
    )
    new.weight, new.bias = norm.weight, norm.bias
    new.running_mean, new.running_var = norm.running_mean, norm.running_var
    new.num_batches_tracked = norm.num_batches_tracked
    new.training = norm.training
    return new


def norms_of(module: nn.Module) -> Iterator[HeteroBatchNorm]:
    """Those that follow the global batch."""
    return (inner for inner in module.modules() if isinstance(inner, HeteroBatchNorm))


def local_norms(named: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Names of those whose statistics, or gradients, are wrong where shares are unequal."""
    return [
        name
        for name, inner in named
        if isinstance(inner, _BatchNorm) and not isinstance(inner, HeteroBatchNorm)
    ]
