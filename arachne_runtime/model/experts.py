"""A mixture of experts: every token goes to the top k of them, wherever they are; no token is dropped."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ModelError
from ..plan.shards import Axis, Split, even_part
from .exchange import Peers, all_parts, exchange, gather, own_part, scatter_sum
from .extra_loss import add_loss

_ALONE: ContextVar[bool] = ContextVar("arachne_experts_alone", default=False)


class Activation(StrEnum):
    """What an expert computes between its two products."""

    SWIGLU = "swiglu"
    """``silu(gate(x)) * up(x)``, of two products side by side (arXiv 2002.05202)."""
    GELU = "gelu"
    """``gelu(up(x))``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMesh:
    """The groups of one device among which its stage's experts are shared out; None: it is alone in one."""

    experts: Peers | None = None
    """Devices that hold the other experts, each some whole ones (EP)."""
    tensor: Peers | None = None
    """Devices that hold the other parts of the same experts (ETP)."""
    replica: Peers | None = None
    """Devices of the same replica, which are given the same tokens (TP)."""


@runtime_checkable
class HoldsExperts(Protocol):
    """A module whose experts may be shared out among devices."""

    def place_experts(self, mesh: ExpertMesh) -> None:
        """Use the groups of ``mesh``; the parameters are cut to this device's part."""
        ...


@contextmanager
def experts_alone() -> Iterator[None]:
    """Inside, each device answers from the experts that it holds, without the others.

    The result of a sample is another one, but still of that sample alone.
    """
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


def place_experts(stage: nn.Module, mesh: ExpertMesh) -> None:
    """Give every module with experts the groups of this device; an empty mesh lets go of them."""
    for module in stage.modules():
        if isinstance(module, HoldsExperts):
            module.place_experts(mesh)


class MoE(nn.Module):
    """Top-k routing to equal experts, as in Mixtral (arXiv 2401.04088, §2.1): (B, ..., D) → (B, ..., D).

    Args:
        hidden: Width D of a token.
        ffn: Inner width F of one expert.
        num_experts: E.
        top_k: Experts that work on each token.
        activation: SWIGLU or GELU.
        normalise: Divide the weights of a token's experts by their sum.
        balance: Factor of the load-balancing loss (arXiv 2101.03961, §2.2), taken for each sample and added
            by ``add_loss``; 0: none.

    Raises:
        ModelError: ``top_k`` is not among 1..num_experts, or ``activation`` is not known.

    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        num_experts: int,
        top_k: int,
        *,
        activation: Activation | str = Activation.SWIGLU,
        normalise: bool = True,
        balance: float = 0.0,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ModelError(f"top_k={top_k} of {num_experts} experts; give 1 to {num_experts}")
        if activation not in list(Activation):
            raise ModelError(f"activation={activation!r} is not known; known: {', '.join(Activation)}")
        self.num_experts, self.top_k = num_experts, top_k
        self.activation, self.normalise, self.balance = Activation(activation), normalise, balance
        self.halves = (ffn, ffn) if self.activation is Activation.SWIGLU else (ffn,)
        """Rows of ``up`` by product: gate and up, or up alone."""
        self.router = nn.Linear(hidden, num_experts, bias=False)
        self.up = nn.Parameter(torch.empty(num_experts, sum(self.halves), hidden))
        """(E, 2F, D): the gate's rows, then those of up; with GELU (E, F, D)."""
        self.down = nn.Parameter(torch.empty(num_experts, hidden, ffn))
        """(E, D, F)."""
        self._mesh = ExpertMesh()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As ``nn.Linear`` would, for each expert."""
        for weight in (self.up, self.down):
            bound = 1 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)

    def splits(self) -> Mapping[str, tuple[Split, ...]]:
        """Whole experts by EP; by ETP the inner rows of each, those of gate and up alike."""
        experts, ffn = (self.num_experts,), self.halves[:1]
        whole = Split(Axis.EXPERT, 0, experts, experts)
        return {
            "up": (whole, Split(Axis.EXPERT_TENSOR, 1, self.halves, self.halves)),
            "down": (whole, Split(Axis.EXPERT_TENSOR, 2, ffn, ffn)),
        }

    def place_experts(self, mesh: ExpertMesh) -> None:
        """Use the groups of ``mesh``; the parameters are cut to this device's part."""
        self._mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        """Route, compute, and combine; all devices of a mesh call it together, some perhaps without rows."""
        tokens_TD = x.reshape(-1, x.shape[-1])
        probabilities_TE = F.softmax(self.router(tokens_TD), dim=-1, dtype=_routing_dtype(x.dtype))
        weights_TK, chosen_TK = probabilities_TE.topk(self.top_k, dim=-1)
        if self.balance and len(x):
            add_loss(
                self.balance * balancing_loss(probabilities_TE.view(len(x), -1, self.num_experts), chosen_TK)
            )
        if self.normalise:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        mixed_TD = self._of_replica(tokens_TD, weights_TK.to(x.dtype), chosen_TK)
        return mixed_TD.view_as(x)

    def _of_replica(self, tokens_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor) -> Tensor:
        """A replica's devices hold the same tokens: each sends a part of them, so that each goes once."""
        peers = self._mesh.replica
        if peers is None or _ALONE.get():
            return self._mix(tokens_TD, weights_TK, chosen_TK)
        # weights and tokens are routed before they are cut: so each device has the router's whole gradient
        tokens, weights = own_part(tokens_TD, peers), own_part(weights_TK, peers)
        return all_parts(self._mix(tokens, weights, own_part(chosen_TK, peers)), len(tokens_TD), peers)

    def _mix(self, tokens_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor) -> Tensor:
        """The weighted sum over each token's experts."""
        if _ALONE.get():
            chosen_TK = chosen_TK % len(self.up)
        order_A = chosen_TK.flatten().argsort(stable=True)
        counts_E = chosen_TK.flatten().bincount(minlength=self.num_experts)
        copies_TKD = tokens_TD[:, None].expand(-1, self.top_k, -1)
        # no name for what is as large as all copies and not needed again: it would live to the end
        found_AD = self._to_experts(copies_TKD.flatten(0, 1).index_select(0, order_A), counts_E)
        found_TKD = found_AD.index_select(0, order_A.argsort()).view(*chosen_TK.shape, tokens_TD.shape[-1])
        del found_AD
        return (found_TKD * weights_TK[..., None]).sum(1)

    def _to_experts(self, rows_AD: Tensor, counts_E: Tensor) -> Tensor:
        """Rows sorted by expert, to the devices that hold whole experts and back."""
        peers = self._mesh.experts
        if peers is None or _ALONE.get():
            return self._to_parts(rows_AD, counts_E[None, : len(self.up)])
        held = [len(even_part(self.num_experts, index, len(peers))) for index in range(len(peers))]
        mine = held[peers.here]
        counts_PE = exchange(counts_E, held, [mine] * len(peers), peers).view(len(peers), mine)
        sent = [int(part.sum()) for part in torch.split(counts_E, held)]
        received: list[int] = counts_PE.sum(1).tolist()
        found = self._to_parts(exchange(rows_AD, sent, received, peers), counts_PE)
        return exchange(found, received, sent, peers)

    def _to_parts(self, rows_AD: Tensor, counts_PE: Tensor) -> Tensor:
        """Rows by source and expert, to all that hold parts of these experts; the sum of what they find."""
        peers = self._mesh.tensor
        if peers is None or _ALONE.get():
            return self._grouped(rows_AD, counts_PE)
        every = gather(counts_PE[None], [1] * len(peers), peers)
        counts: list[int] = every.sum((1, 2)).tolist()
        found = self._grouped(gather(rows_AD, counts, peers), every.flatten(0, 1))
        return scatter_sum(found, counts, peers)

    def _grouped(self, rows_AD: Tensor, counts_PE: Tensor) -> Tensor:
        """Rows by source and expert through the experts of this device."""
        if len(counts_PE) == 1:
            return self._compute(rows_AD, counts_PE[0].tolist())
        expert_E = torch.arange(counts_PE.shape[1], device=rows_AD.device)
        expert_A = expert_E.expand_as(counts_PE).flatten().repeat_interleave(counts_PE.flatten())
        order_A = expert_A.argsort(stable=True)
        found_AD = self._compute(rows_AD.index_select(0, order_A), counts_PE.sum(0).tolist())
        return found_AD.index_select(0, order_A.argsort())

    def _compute(self, rows_AD: Tensor, counts_E: Sequence[int]) -> Tensor:
        """Each expert on its run of rows, also on none: so every device has the same gradients."""
        runs = zip(torch.split(rows_AD, list(counts_E)), self.up.unbind(), self.down.unbind(), strict=True)
        return torch.cat([F.linear(self._act(F.linear(rows, up)), down) for rows, up, down in runs])

    def _act(self, inner: Tensor) -> Tensor:
        if self.activation is Activation.GELU:
            return F.gelu(inner)
        gate, up = inner.chunk(2, -1)
        return F.silu(gate) * up


def balancing_loss(probabilities_BSE: Tensor, chosen_TK: Tensor) -> Tensor:
    """Mean over samples of E x the sum over experts of (part of tokens) x (mean probability).

    1 where all experts are used alike. It is of each sample by itself, since over the tokens of a micro-batch
    it would depend on how a plan splits the batch.

    Args:
        probabilities_BSE: Of every expert for every token.
        chosen_TK: Experts of each of the B x S tokens.

    """
    num_samples, _, num_experts = probabilities_BSE.shape
    chosen = chosen_TK.view(num_samples, -1)
    used_BE = torch.zeros_like(probabilities_BSE[:, 0]).scatter_add_(
        1, chosen, torch.ones_like(chosen, dtype=probabilities_BSE.dtype)
    )
    parts_BE = used_BE / chosen.shape[1]
    return num_experts * (parts_BE * probabilities_BSE.mean(1)).sum(-1).mean()


def _routing_dtype(dtype: torch.dtype) -> torch.dtype:
    """Probabilities of few bits would tie: at least float32."""
    return dtype if dtype.itemsize >= torch.float32.itemsize else torch.float32
