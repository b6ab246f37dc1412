"""What `arachne run --elastic` asks for: what does not go together, and what later plans are made from."""

import msgspec
import pytest

from arachne_runtime.errors import InvalidFileError, UsageError
from arachne_runtime.plan.files import read_plan, write
from arachne_runtime.plan.plan import Plan, Stage
from launch.elastic.coordinating import Duties, plans_of
from launch.elastic.options import Replanning, elastic_job, refuse_together

from .documents import CLUSTER_TOML, written
from .test_command_line import OPT, arachne


@pytest.fixture
def files(tmp_path):
    """Plan, cluster and script of a model of the catalog."""
    (tmp_path / "train.py").write_text("")
    return written(tmp_path, OPT), written(tmp_path, CLUSTER_TOML, "cluster.toml"), tmp_path / "train.py"


def job_of(files, plan: Plan | None = None, **replanning):
    path, _, script = files
    return elastic_job(path, plan or read_plan(path), [str(script)], Replanning(**replanning))


def test_without_costs_no_planner_is_asked(files):
    job = job_of(files, min_devices=2)
    assert (job.problem, job.min_devices, job.host) == (None, 2, "127.0.0.1")


def test_a_model_of_the_catalog_needs_a_cluster_alone(files):
    problem = job_of(files, cluster=files[1]).problem
    assert (problem.model.name, problem.first) == ("opt-350m", read_plan(files[0]))
    assert {"a:0", "v-0:0"} <= set(problem.cluster.devices)


def test_the_job_begins_with_its_plan_though_the_planner_knows_a_faster_one(files, tmp_path):
    """OPT-350M of this batch is faster on the two A100 alone."""
    job = job_of(files, cluster=files[1])
    duties = Duties(plan=job.plan, journal="", token="", host="", min_devices=2, problem=job.problem)
    with plans_of(duties) as plan_for:
        first = plan_for(tuple(sorted(job.plan.devices)), None)
        later = plan_for(("a:0", "a:1"), job.plan)
        few = plan_for(("a:0",), job.plan)
    assert first.plan == job.plan
    assert (later.plan.devices, later.plan.made_by is None) == (("a:0", "a:1"), False)
    assert few is None


def test_a_plan_that_is_not_of_the_cluster_is_refused(files, tmp_path):
    small = written(tmp_path, CLUSTER_TOML.replace("gpus = 4", "gpus = 1"), "small.toml")
    with pytest.raises(InvalidFileError, match="node a has 1 devices, so no index 1"):
        job_of(files, cluster=small)


def test_mistakes_are_told(files):
    with pytest.raises(UsageError, match="--model opt-350m needs --cluster"):
        job_of(files, model="opt-350m")
    with pytest.raises(UsageError, match="--min-devices 9, but the plan has 4 devices"):
        job_of(files, min_devices=9)
    with pytest.raises(UsageError, match="--elastic and --max-restarts do not go together: an elastic job"):
        refuse_together(node=False, max_restarts=True)


def test_plans_with_shards_are_refused(files):
    plan = read_plan(files[0])
    first, last = plan.pipelines[0].stages
    sharded: tuple[Stage, ...] = (msgspec.structs.replace(first, zero=1), last)
    pipeline = msgspec.structs.replace(plan.pipelines[0], stages=sharded)
    with pytest.raises(UsageError, match="cannot lose a rank that holds a ZeRO shard"):
        job_of(files, msgspec.structs.replace(plan, pipelines=(pipeline,)))


def test_the_command_refuses_at_once(files, tmp_path):
    write(read_plan(files[0]), tmp_path / "plan.json")
    done = arachne("run", tmp_path / "plan.json", "--min-devices", 2, "--", files[2])
    assert (done.returncode, done.stderr.split(" are ")[0]) == (2, "--min-devices, --cluster and --model")
