"""The experts of a model of transformers: computed by its own block, or by ours where they are shared out."""

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ...errors import ModelError
from ...plan.shards import Split
from ..experts import ExpertMesh, MoE

_ACTIVATIONS = ("silu", "swish")
"""Names of the only activation that both blocks have."""


class RoutedExperts(nn.Module):
    """A MoE block of transformers, (B, S, D) → (B, S, D); ``arachne.MoE`` runs on its weights if need be."""

    def __init__(self, block: Any, moe: MoE) -> None:
        super().__init__()
        self.block = block
        self._moe = (moe,)
        """No submodule: its parameters are those of ``block``."""
        self._is_shared = False

    def splits(self) -> Mapping[str, tuple[Split, ...]]:
        """How devices may share its parameters, by name."""
        ours = self._moe[0].splits()
        return {"block.experts.gate_up_proj": ours["up"], "block.experts.down_proj": ours["down"]}

    def place_experts(self, mesh: ExpertMesh) -> None:
        """Use the groups of ``mesh``; a device that needs no other uses the original block.

        In a replica of several devices each computes a part of the tokens, even where all hold all experts:
        their gradients of experts are summed.
        """
        self._is_shared = mesh != ExpertMesh()
        self._moe[0].place_experts(mesh)

    def forward(self, x: Tensor) -> Tensor:
        """Route, compute, and combine."""
        moe = self._moe[0]
        if not self._is_shared and not moe.balance:
            output: Tensor = self.block(x)
            return output
        moe.router.weight = self.block.gate.weight
        moe.up, moe.down = self.block.experts.gate_up_proj, self.block.experts.down_proj
        shared: Tensor = moe(x)
        return shared


def with_routed_experts(layer: Any, config: Any, balance: float) -> Any:
    """The layer, or one of the same modules whose MoE block is behind ``RoutedExperts``."""
    block: Any = getattr(layer, "mlp", None)
    if not hasattr(block, "experts"):
        return layer
    if config.hidden_act not in _ACTIVATIONS:
        if balance:
            raise ModelError(
                f"balance={balance} is for experts with the activation silu, and the config's is "
                f"{config.hidden_act!r}; leave balance out"
            )
        return layer
    num_experts, hidden, ffn = block.experts.down_proj.shape
    moe = MoE(
        hidden,
        ffn,
        num_experts,
        config.num_experts_per_tok,
        normalise=getattr(config, "norm_topk_prob", True),
        balance=balance,
    )
    alike = copy.copy(layer)
    alike.__dict__["_modules"] = {**layer._modules, "mlp": RoutedExperts(block, moe)}
    return alike
