"""What the packages give to users: these names and no more."""

import pytest

import arachne_runtime
import arachne_runtime.plan
import planner

RUNTIME = """
AdaptiveBatch ArachneError Cluster Colwise Engine EvaluationReport HeteroDDP HeteroLoader InvalidFileError
MoE ModelError ModelParts ModelSpec NoFeasiblePlanError NonFiniteGradientError NotMeasuredError Pipeline
Plan PlanChange Profile Recipe ReplanError Replica Rowwise ScheduleKind Session Stage StepBatch StepReport
UnsupportedEnvironmentError UnsupportedPlanError UsageError WorkerFailedError Workload __version__ add_loss
causal_lm_loss causal_lm_tokens convert_batch_norm evaluate extra_losses huggingface pipelined read_cluster
read_model read_plan read_profile split_optimizer vocabulary_parallel vocabulary_parallel_cross_entropy
"""
NOUNS = """
Action BlockSpec BlockTiming Cluster Cost Document Line LinkPoint LinkScope LinkTiming MadeBy ModelSpec
Network NetworkPair Node NodeEntry ParameterBytes Pipeline Plan Predicted Profile Record RecordKind Replica
ScheduleKind Source Stage StepTiming TpCommunication UpdateTiming Work
check_cluster check_model check_plan check_profile describe digest encode largest_remainder read_cluster
read_model read_plan read_profile water_fill water_fill_table write
"""
PLANNER = "Found Objective Progress Request find_plan signed"


@pytest.mark.parametrize(
    ("package", "names"), [(arachne_runtime, RUNTIME), (arachne_runtime.plan, NOUNS), (planner, PLANNER)]
)
def test_public_names_are_frozen(package, names) -> None:
    assert list(package.__all__) == names.split()
    for name in package.__all__:
        assert getattr(package, name) is not None
    assert set(package.__all__) <= set(dir(package))


def test_a_mistyped_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="'arachne_runtime' has no attribute 'Sesion'"):
        _ = arachne_runtime.Sesion
    with pytest.raises(AttributeError, match="'planner' has no attribute 'plan_it'"):
        _ = planner.plan_it
