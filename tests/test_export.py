"""``arachne export deepspeed``: files that DeepSpeed accepts, and plans that it cannot express."""

import json
import os
import sys
from itertools import pairwise

import msgspec
import pytest
import torch
from torch import nn

from arachne_runtime.errors import UnsupportedPlanError
from arachne_runtime.plan.files import write
from arachne_runtime.plan.plan import Pipeline, ScheduleKind
from arachne_runtime.testing import run_ranks
from launch.deepspeed_files import DeepSpeedFiles, inexpressible
from tests.test_command_line import arachne, options_of
from tests.test_zero import PARALLEL, UNLIKE, plan_of, stage

EQUAL = plan_of(Pipeline(micro_batches=3, micro_batch=4, stages=(
    stage((0, 5), ("a:0", 2), ("b:0", 2), zero=2, recompute=True),
)))  # fmt: skip
DEEP = plan_of(*[
    Pipeline(micro_batches=4, micro_batch=2, stages=(
        stage((0, 1), (f"{node}:0", 2), zero=1), stage((1, 6), (f"{node}:1", 2), zero=1),
    ))
    for node in "ab"
])  # fmt: skip
FREE = plan_of(
    Pipeline(micro_batches=3, micro_batch=3, stages=(
        stage((0, 1), ("a:0", 2), ("a:1", 1), zero=1), stage((1, 5), ("b:0 b:1", 3), zero=2, recompute=True),
    )),
    Pipeline(micro_batches=2, micro_batch=2, stages=(
        stage((0, 2), ("c:0", 2), expert_parallel=2, expert_tensor=2), stage((2, 5), ("c:1", 2)),
    )),
    schedule=ScheduleKind.GPIPE,
)  # fmt: skip


def test_the_options_are_frozen():
    assert options_of("export") == {"--out", "--json"}


def test_a_data_parallel_plan(tmp_path):
    write(EQUAL, tmp_path / "plan.json")
    done = arachne("export", "deepspeed", tmp_path / "plan.json", "--out", tmp_path / "out", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    names = ("ds_config.json", "partition.json")
    assert answer.pop("files") == [str(tmp_path / "out" / name) for name in names]
    assert [answer["config"], answer["partition"]] == [
        json.loads((tmp_path / "out" / name).read_text()) for name in names
    ]
    assert answer["config"] == {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    assert answer["partition"] == {
        "parts": [0, 5], "recompute": True, "tensor_parallel": 1, "ranks": ["a:0", "b:0"],
    }  # fmt: skip
    assert (
        "2 ranks, 1 stages"
        in arachne("export", "deepspeed", tmp_path / "plan.json", "--out", tmp_path).stdout
    )


def test_pipelines_of_one_form_are_one_of_several_replicas():
    files = DeepSpeedFiles.of(DEEP)
    assert (files.config.train_batch_size, files.config.train_micro_batch_size_per_gpu) == (16, 2)
    assert files.partition.parts == (0, 1, 6)
    assert files.partition.ranks == ("a:0", "b:0", "a:1", "b:1")
    assert files.config.gradient_accumulation_steps == 4


def test_tensor_parallel_replicas_keep_their_ranks_together():
    equal = msgspec.structs.replace(PARALLEL.pipelines[0].stages[0].replicas[1], share=2)
    parts = PARALLEL.pipelines[0].stages[0]
    plan = plan_of(Pipeline(micro_batches=2, micro_batch=4, stages=(
        msgspec.structs.replace(parts, replicas=(parts.replicas[0], equal)),
    )))  # fmt: skip
    partition = DeepSpeedFiles.of(plan).partition
    assert (partition.tensor_parallel, partition.ranks) == (2, ("a:0", "a:1", "b:0", "b:1"))


REASONS = [
    "$.schedule is gpipe; DeepSpeed's pipelines play 1f1b",
    "$.pipelines[0].stages[0].replicas[1].share is 1, of the first replica 2",
    "$.pipelines[0].stages[1].replicas are 1, of the first stage 2",
    "$.pipelines[0].stages[1].replicas[0].share is 3, of the first replica 2",
    "$.pipelines[0].stages[1].replicas[0].devices are 2, of the first replica 1",
    "$.pipelines[0].stages[1].zero is 2, of the first stage 1",
    "$.pipelines[0].stages[1].recompute is true, of the first stage false",
    "$.pipelines[0].stages[1].zero is 2; in pipelines of several stages DeepSpeed has 0 and 1",
    "$.pipelines[1].stages cut the blocks at 2, pipeline 0 at 1",
    "$.pipelines[1].micro_batches is 2, of pipeline 0 3",
    "$.pipelines[1].stages[0].zero is 0, of the first stage 1",
    "$.pipelines[1].stages[0].expert_parallel is 2; DeepSpeed shares out experts of its own MoE layer only",
    "$.pipelines[1].stages[0].expert_tensor is 2; DeepSpeed shares out experts of its own MoE layer only",
    "$.pipelines[1].stages[1].zero is 0, of the first stage 1",
]


def test_everything_it_cannot_express_is_told_at_once(tmp_path):
    assert list(inexpressible(FREE)) == REASONS
    with pytest.raises(UnsupportedPlanError) as caught:
        DeepSpeedFiles.of(FREE)
    assert str(caught.value).splitlines()[1:-1] == [f"  {reason}" for reason in REASONS]
    write(UNLIKE, tmp_path / "plan.json")
    done = arachne("export", "deepspeed", tmp_path / "plan.json", "--out", tmp_path / "out")
    assert (done.returncode, done.stdout) == (3, "")
    assert "$.pipelines[0].stages[0].replicas[1].share is 1, of the first replica 3" in done.stderr
    assert not (tmp_path / "out").exists()


def accepted(config, parts):
    """What DeepSpeed makes of both files: its batch sizes, ZeRO stage, clipping, and blocks of this rank."""
    from arachne_runtime.backends.deepspeed import load

    deepspeed = load(torch.device("cpu"))
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.utils import groups

    class Cut(PipelineModule):
        def _partition_layers(self, method="uniform"):
            self.parts = parts
            mine = self._topo.get_coord(self.global_rank).pipe
            self._set_bounds(start=parts[mine], stop=parts[mine + 1])

    os.environ["LOCAL_RANK"] = "0"
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    try:
        if len(parts) > 2:
            module = Cut([LayerSpec(nn.Linear, 3, 3) for _ in range(parts[-1])], num_stages=len(parts) - 1)
        else:
            module = nn.Sequential(*[nn.Linear(3, 3) for _ in range(parts[-1])])
        optimizer = torch.optim.AdamW(module.parameters())
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        sizes = (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu())
        found = (*sizes, engine.gradient_accumulation_steps(), engine.zero_optimization_stage())
        return (*found, engine.gradient_clipping(), sum(1 for _ in module.parameters()) // 2)
    finally:
        del os.environ["LOCAL_RANK"]
        groups._WORLD_GROUP = groups.mpu = None


@pytest.mark.parametrize("plan", [EQUAL, DEEP])
def test_deepspeed_accepts_what_is_written(plan):
    files = DeepSpeedFiles.of(plan)
    config = json.loads(msgspec.json.encode(files.config))
    found = run_ranks(len(files.partition.ranks), accepted, config, list(files.partition.parts))
    first = plan.pipelines[0]
    wanted = (plan.global_batch, 2, first.micro_batches, first.stages[0].zero, 0.0)
    blocks = [b - a for a, b in pairwise(files.partition.parts) for _ in range(2)]
    assert found == [(*wanted, count) for count in blocks]


def test_it_needs_no_deepspeed(mocker):
    mocker.patch.dict(sys.modules, {"deepspeed": None})
    assert DeepSpeedFiles.of(EQUAL).config.zero_optimization.stage == 2
