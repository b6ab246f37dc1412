"""Whether the packages that a plan needs are installed; asked before any rank starts, hence without torch."""

from collections.abc import Iterator
from importlib.util import find_spec

from ..errors import UnsupportedEnvironmentError
from ..plan.plan import Plan
from ..plan.zero import is_split


def refuse_without_deepspeed(plan: Plan) -> None:
    """Refuse a plan that splits optimizer states on a machine without DeepSpeed.

    Raises:
        UnsupportedEnvironmentError: With the places in the plan and the line that installs it.

    """
    found = list(_split_stages(plan))
    if found and not has_deepspeed():
        raise UnsupportedEnvironmentError(
            f"the plan splits optimizer states by ZeRO ({', '.join(found)}), which DeepSpeed does, but it is "
            "not installed here: pip install 'arachne-hetero[deepspeed]', or set zero to 0"
        )


def has_deepspeed() -> bool:
    """Whether DeepSpeed is installed; it is not imported."""
    try:
        return find_spec("deepspeed") is not None
    except ValueError:  # a module without a spec stands in its place
        return False


def _split_stages(plan: Plan) -> Iterator[str]:
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            if is_split(stage):
                yield f"$.pipelines[{p}].stages[{s}].zero is {stage.zero}"
