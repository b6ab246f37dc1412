"""Train one PyTorch model on unequal devices: the runtime, and the nouns it shares with the planner.

Names are imported when they are first used, so ``import arachne_runtime`` is quick and works without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .data import StepBatch
    from .data_parallel import (
        AdaptiveBatch,
        HeteroDDP,
        HeteroLoader,
        convert_batch_norm,
        split_optimizer,
    )
    from .data_parallel.evaluate import evaluate
    from .engine import Engine, EvaluationReport, Recipe, StepReport
    from .errors import (
        ArachneError,
        InvalidFileError,
        ModelError,
        NoFeasiblePlanError,
        NonFiniteGradientError,
        NotMeasuredError,
        ReplanError,
        UnsupportedEnvironmentError,
        UnsupportedPlanError,
        UsageError,
        WorkerFailedError,
    )
    from .model import (
        Colwise,
        ModelParts,
        MoE,
        Rowwise,
        Workload,
        add_loss,
        extra_losses,
        pipelined,
        vocabulary_parallel,
        vocabulary_parallel_cross_entropy,
    )
    from .model.huggingface import causal_lm_loss, causal_lm_tokens, huggingface
    from .plan.cluster import Cluster
    from .plan.files import read_cluster, read_model, read_plan, read_profile
    from .plan.model import ModelSpec
    from .plan.plan import Pipeline, Plan, Replica, ScheduleKind, Stage
    from .plan.profile import Profile
    from .session import Session
    from .state.changes import PlanChange

__version__ = "0.1.0"

__all__ = [
    "AdaptiveBatch",
    "ArachneError",
    "Cluster",
    "Colwise",
    "Engine",
    "EvaluationReport",
    "HeteroDDP",
    "HeteroLoader",
    "InvalidFileError",
    "MoE",
    "ModelError",
    "ModelParts",
    "ModelSpec",
    "NoFeasiblePlanError",
    "NonFiniteGradientError",
    "NotMeasuredError",
    "Pipeline",
    "Plan",
    "PlanChange",
    "Profile",
    "Recipe",
    "ReplanError",
    "Replica",
    "Rowwise",
    "ScheduleKind",
    "Session",
    "Stage",
    "StepBatch",
    "StepReport",
    "UnsupportedEnvironmentError",
    "UnsupportedPlanError",
    "UsageError",
    "WorkerFailedError",
    "Workload",
    "__version__",
    "add_loss",
    "causal_lm_loss",
    "causal_lm_tokens",
    "convert_batch_norm",
    "evaluate",
    "extra_losses",
    "huggingface",
    "pipelined",
    "read_cluster",
    "read_model",
    "read_plan",
    "read_profile",
    "split_optimizer",
    "vocabulary_parallel",
    "vocabulary_parallel_cross_entropy",
]

_NAMES = {
    ".data": ("StepBatch",),
    ".data_parallel": (
        "AdaptiveBatch",
        "HeteroDDP",
        "HeteroLoader",
        "convert_batch_norm",
        "evaluate",
        "split_optimizer",
    ),
    ".engine": ("Engine", "EvaluationReport", "Recipe", "StepReport"),
    ".errors": tuple(name for name in __all__ if name.endswith("Error")),
    ".model": (
        "Colwise",
        "ModelParts",
        "MoE",
        "Rowwise",
        "Workload",
        "add_loss",
        "extra_losses",
        "pipelined",
        "vocabulary_parallel",
        "vocabulary_parallel_cross_entropy",
    ),
    ".model.huggingface": ("causal_lm_loss", "causal_lm_tokens", "huggingface"),
    ".plan.cluster": ("Cluster",),
    ".plan.files": ("read_cluster", "read_model", "read_plan", "read_profile"),
    ".plan.model": ("ModelSpec",),
    ".plan.plan": ("Pipeline", "Plan", "Replica", "ScheduleKind", "Stage"),
    ".plan.profile": ("Profile",),
    ".session": ("Session",),
    ".state.changes": ("PlanChange",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
