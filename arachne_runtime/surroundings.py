"""What the launcher told this process, and what follows from it: the plan, the ranks, the device.

No other file of the runtime reads what a launcher sets.
"""

import os
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist

from .errors import UnsupportedEnvironmentError, UsageError
from .plan.cluster import index_of
from .plan.files import read_plan
from .plan.placement import rank_order
from .plan.plan import Pipeline, Plan, Replica, Stage

LONE_DEVICE = "local:0"
"""Name of the device where one process trains without a plan."""
ANY_BATCH = 2**31 - 1
"""Global batch of the plan of a lone process: it takes a batch of any number of rows, whole."""


LEFT_OUT_CODE = os.EX_TEMPFAIL
"""Exit code of a process that an elastic job goes on without: start a fresh one, which may join."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """What a process of an elastic job is told by the agent of its node; rank and plan come in a record."""

    device: str
    coordinator: tuple[str, int]
    store: tuple[str, int]
    """Where process groups meet."""
    token: str = field(repr=False)
    member_descriptor: int | None
    """To which it writes its incarnation."""

    @classmethod
    def here(cls) -> "Elastic | None":
        """From the variables of the agent; None where the job is not elastic."""
        if (coordinator := os.environ.get("ARACHNE_COORDINATOR")) is None:
            return None
        missing = [name for name in _ELASTIC if name not in os.environ]
        if missing:
            raise UnsupportedEnvironmentError(
                f"ARACHNE_COORDINATOR is set, but not {', '.join(missing)}; start with `arachne run "
                "--elastic`"
            )
        descriptor = os.environ.get("ARACHNE_MEMBER_FD")
        return cls(
            device=os.environ["ARACHNE_DEVICE"],
            coordinator=_address(coordinator),
            store=_address(os.environ["ARACHNE_STORE"]),
            token=_token(int(os.environ["ARACHNE_TOKEN_FD"])),
            member_descriptor=None if descriptor is None else int(descriptor),
        )


_ELASTIC = ("ARACHNE_DEVICE", "ARACHNE_STORE", "ARACHNE_TOKEN_FD")


@lru_cache
def _token(descriptor: int) -> str:
    """It is there to be read once."""
    with os.fdopen(descriptor) as pipe:
        return pipe.read().strip()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the launcher told this process."""

    rank: int
    world_size: int
    plan: Path | None
    trace: Path | None
    tensorboard: Path | None
    elastic: Elastic | None = None

    @classmethod
    def here(cls) -> "Surroundings":
        """From the process group if there is one, else from the variables that the launcher set."""
        joined = dist.is_initialized()
        return cls(
            rank=dist.get_rank() if joined else int(os.environ.get("RANK", "0")),
            world_size=dist.get_world_size() if joined else int(os.environ.get("WORLD_SIZE", "1")),
            plan=_path(os.environ.get("ARACHNE_PLAN")),
            trace=_path(os.environ.get("ARACHNE_TRACE")),
            tensorboard=_path(os.environ.get("ARACHNE_TENSORBOARD")),
            elastic=None if joined else Elastic.here(),
        )


def lone_plan(num_blocks: int) -> Plan:
    """The plan of one process that trains the whole model, whatever the number of rows of a batch."""
    replica = Replica(devices=(LONE_DEVICE,), share=ANY_BATCH)
    stage = Stage(layers=(0, num_blocks), replicas=(replica,))
    pipeline = Pipeline(micro_batches=1, micro_batch=ANY_BATCH, stages=(stage,))
    return Plan(model="local", global_batch=ANY_BATCH, sequence=1, pipelines=(pipeline,))


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def find_plan(asked: Plan | Path | str | None, around: Surroundings) -> Plan | None:
    """The script's plan, or the launcher's; UsageError where both speak and differ."""
    if not isinstance(asked, Plan | Path | str | None):
        raise UsageError(f"a plan is a Plan or the name of its file, not {type(asked).__name__}")
    if around.elastic is not None:
        if asked is not None:
            raise UsageError(
                "the plan of an elastic job is its coordinator's; use arachne.Session() without one"
            )
        return None
    mine = asked if isinstance(asked, Plan) or asked is None else read_plan(Path(asked))
    launched = read_plan(around.plan) if around.plan is not None else None
    if mine is not None and launched is not None and mine != launched:
        raise UsageError(
            f"the script asks for another plan than the one it was launched with, {around.plan}; "
            "use arachne.Session() without a plan under `arachne run`"
        )
    return mine or launched


def refuse_world(plan: Plan | None, world_size: int) -> None:
    """UsageError where the number of processes is not that of the plan's devices, or none shares the work."""
    if plan is None and world_size > 1:
        raise UsageError(
            f'{world_size} processes and no plan to share the work: use arachne.Session("plan.json"), or '
            "start with `arachne run plan.json -- train.py`"
        )
    if plan is not None and len(plan.devices) != world_size:
        count = len(plan.devices)
        devices = f"{count} device{'s' if count > 1 else ''} ({', '.join(rank_order(plan))})"
        raise UsageError(
            f"the plan uses {devices}, but there are {world_size} processes; start one a device: "
            f"`arachne run plan.json -- train.py`, or `torchrun --nproc-per-node {count} train.py`"
        )


def _device_of(asked: torch.device | str) -> torch.device:
    try:
        return torch.device(asked)
    except RuntimeError:
        raise UsageError(
            f"device={asked!r} is no device of torch; give 'cpu' or 'cuda:0', or leave it out"
        ) from None


def plan_and_device(
    plan: Plan | Path | str | None, device: torch.device | str | None, around: Surroundings
) -> tuple[Plan | None, torch.device]:
    """What a session begins with, from what its script says.

    Raises:
        UsageError: The script and the launcher say different things; a number of processes that is not the
            plan's.
        UnsupportedEnvironmentError: The device is not there, or not for an elastic job.

    """
    found = find_plan(plan, around)
    if around.elastic is not None:
        return found, choose_elastic_device(device)
    refuse_world(found, around.world_size)
    return found, choose_device(device, found, around.rank)


def choose_elastic_device(asked: torch.device | str | None) -> torch.device:
    """The CPU: groups of another backend than gloo cannot be broken yet. UnsupportedEnvironmentError else."""
    device = _device_of(asked) if asked is not None else torch.device("cpu")
    if device.type != "cpu" or (asked is None and torch.cuda.is_available()):
        raise UnsupportedEnvironmentError(
            "an elastic job computes on CPUs yet, over gloo; pass Session(device='cpu'), or run without "
            "--elastic"
        )
    return device


def choose_device(asked: torch.device | str | None, plan: Plan | None, rank: int) -> torch.device:
    """Where a rank computes: what the script asks for, the CUDA device with the plan's index, or the CPU.

    Raises:
        UsageError: The script asks for what is no device.
        UnsupportedEnvironmentError: This machine lacks the plan's CUDA device.

    """
    if asked is not None:
        return _device_of(asked)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    name = rank_order(plan)[rank] if plan else LONE_DEVICE
    if index_of(name) >= torch.cuda.device_count():
        raise UnsupportedEnvironmentError(
            f"rank {rank} is {name}, but this machine has {torch.cuda.device_count()} CUDA devices; "
            "plan for the devices that are there, or pass Session(device='cpu')"
        )
    return torch.device("cuda", index_of(name))
