"""A script of an elastic job on real engines, and a job of such processes that a test disturbs."""

import faulthandler
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import arachne_runtime as arachne
from arachne_runtime.elastic import joining, patience
from arachne_runtime.engine import Engine
from arachne_runtime.engine import engine as engine_module
from arachne_runtime.engine.bucket import Bucket
from arachne_runtime.engine.courier import Courier
from arachne_runtime.engine.evaluate import Tally
from arachne_runtime.membership.client import AgentClient, MemberClient
from arachne_runtime.membership.messages import Member
from arachne_runtime.mesh import Mesh
from arachne_runtime.model import tensor_parallel
from arachne_runtime.plan.plan import Pipeline, Plan, Replica, Stage
from arachne_runtime.state import buddy
from arachne_runtime.state import replan as replan_module
from arachne_runtime.state.carry import Carrier

from .recovery_coordinator import Coordinator

ROWS, WIDTH, VOCABULARY, SEQUENCE = 12, 8, 13, 4
STEPS = 16
BLOCKS = 5
SNAPSHOT_STEPS = 4
EVALUATED = 9
EVALUATIONS = (3, EVALUATED)
"""Steps done when it evaluates."""


class Layer(nn.Module):
    """A residual MLP whose inner width can be shared out."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return x_BSD + self.down(torch.tanh(self.up(self.norm(x_BSD))))


@arachne.pipelined(
    first="embed", blocks="layers", last="head", tensor_parallel={"up": "colwise", "down": "rowwise"}
)
class Model(nn.Module):
    """Tokens to logits."""

    def __init__(self, inner: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(inner) for _ in range(BLOCKS - 2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens_BS)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Tokens(torch.utils.data.Dataset):
    """Of each sample, by its number."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, (SEQUENCE,), generator=torch.Generator().manual_seed(index))


def loss(logits_BSV: torch.Tensor, tokens_BS: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), tokens_BS[:, 1:].flatten())


def optimizer(inner: int):
    """With a rate and an eps that keep rounding from being blown up, whatever the width."""
    return lambda parameters: torch.optim.AdamW(parameters, lr=0.12 / inner, eps=1e-3)


def stage(layers: tuple[int, int], *replicas: tuple) -> Stage:
    """Replicas: (share, devices)."""
    found = tuple(Replica(devices=tuple(devices), share=share) for share, *devices in replicas)
    return Stage(layers=layers, replicas=found)


def plan_of(*pipelines: tuple) -> Plan:
    """Pipelines: (micro-batches, stages)."""
    made = tuple(
        Pipeline(micro_batches=count, micro_batch=sum(stages[0].shares), stages=tuple(stages))
        for count, *stages in pipelines
    )
    return Plan(model="tiny", global_batch=ROWS, sequence=SEQUENCE, pipelines=made)


class Fault(NamedTuple):
    """What happens to a process in a step of its engine."""

    step: int = -1
    """Steps done before it; -1: never."""
    where: str = "sums"
    signal: int = signal.SIGKILL
    joined_at: int = -1
    """The step before which it waits for a joiner."""
    hangs: bool = False
    """It does not get the signal, but stands still, and has patience of half a second."""
    own_batches: bool = False
    """Its script makes the batches itself, from the first on."""
    raises: bool = False
    """It gets an error of its own instead."""
    patience_s: float = patience.PATIENCE_S
    has_memory: bool = True
    """For snapshots; a process of a job in which any lacks it has none."""


UNHARMED = Fault()
PLACES = {
    "exchange": (tensor_parallel, "collective"),
    "message": (Courier, "take"),
    "sums": (Bucket, "start"),
    "figures": (engine_module, "added"),
    "word": (engine_module, "committed"),
    "update": (Engine, "_update"),
    "applied": (Engine, "_report"),
    "forming": (Mesh, "form"),
    "carrying": (Carrier, "carry"),
    "settling": (replan_module, "settle"),
    "ready": (MemberClient, "ready"),
    "batch": (Tally, "add"),
    "tally": (Tally, "mean"),
}


def set_trap(fault: Fault, told) -> None:
    """The process ends, or stops, as it comes to the place in the step."""
    owner, name = PLACES[fault.where]
    function, engines = getattr(owner, name), []
    once, reduced = [True], Engine._reduced

    def entered(engine, *words):
        engines[:] = [engine]
        return reduced(engine, *words)

    def trapped(*words, **options):
        if engines and engines[0].num_steps - (fault.where == "applied") == fault.step and once:
            once.clear()
            told.send(("fault", time.monotonic()))
            if fault.raises:
                raise ValueError("a fault of this process alone")
            if fault.hangs:
                patience.PATIENCE_S = 0.5
                time.sleep(1000)
            os.kill(os.getpid(), fault.signal)
        return function(*words, **options)

    Engine._reduced = entered
    setattr(owner, name, trapped)


def environment(
    device: str, coordinator: tuple[str, int], token: str, store_port: int, told
) -> dict[str, str]:
    """What an agent sets, and its two pipes."""
    secret, writer = os.pipe()
    os.write(writer, token.encode())
    os.close(writer)
    named, name = os.pipe()

    def tell() -> None:
        with os.fdopen(named) as pipe:
            told.send(("member", pipe.read().strip()))

    threading.Thread(target=tell, daemon=True).start()
    return {
        "ARACHNE_DEVICE": device,
        "ARACHNE_COORDINATOR": f"{coordinator[0]}:{coordinator[1]}",
        "ARACHNE_STORE": f"127.0.0.1:{store_port}",
        "ARACHNE_TOKEN_FD": str(secret),
        "ARACHNE_MEMBER_FD": str(name),
    }


class Told(NamedTuple):
    """What a process says at its end."""

    losses: dict[int, float]
    steps: list[tuple[int, float]]
    """Each step that it finished, and when."""
    changes: list[tuple[int, int, float]]
    """Of each change: step, bytes moved, pause."""
    between: list[float]
    """Losses of the evaluations behind EVALUATIONS."""
    evaluation: float


def own_of(data: Tokens) -> Iterator[torch.Tensor]:
    """Batches as a script makes them that knows no session: the whole one on every rank."""
    for first in range(0, len(data), ROWS):
        yield torch.stack([data[row] for row in range(first, first + ROWS)])


def train(
    session: arachne.Session,
    num_steps: int,
    inner: int = 12,
    each_step=lambda engine: None,
    tell=lambda kind, what: None,
    own_batches: bool = False,
) -> Told:
    """The script, which knows nothing of what happens."""
    losses, steps, changes, between = {}, [], [], []
    engine = session.engine(lambda: Model(inner).double(), optimizer=optimizer(inner), loss=loss)

    def changed(change) -> None:
        changes.append((change.step, change.moved_bytes, change.seconds))
        tell("change", changes[-1])

    session.on_replan(changed)
    data = Tokens(ROWS * num_steps)
    for batch in own_of(data) if own_batches else session.batches(data, global_batch=ROWS, seed=3):
        each_step(engine)
        report = engine.step(batch)
        losses[report.step] = report.loss
        steps.append((report.step, time.monotonic()))
        tell("step", (*steps[-1], report.loss))
        if engine.num_steps in EVALUATIONS:
            checked = session.batches(Tokens(3 * ROWS), global_batch=ROWS, shuffle=False)
            between.append(engine.evaluate(checked).loss)
    checked = session.batches(Tokens(2 * ROWS), global_batch=ROWS, shuffle=False)
    return Told(losses, steps, changes, between, engine.evaluate(checked).loss)


def live(told, device, coordinator, token, store_port, num_steps, fault, inner, pace_s) -> None:
    """The process of one device; SIGUSR1 shows where it is."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    os.environ.update(environment(device, coordinator, token, store_port, told))
    joining.SNAPSHOT_STEPS, patience.PATIENCE_S = SNAPSHOT_STEPS, fault.patience_s
    if not fault.has_memory:
        buddy.free_bytes = lambda: 0
    if fault.step >= 0:
        set_trap(fault, told)

    def each_step(engine) -> None:
        time.sleep(pace_s)
        if engine.num_steps == fault.joined_at:
            told.send(("waits", time.monotonic()))
            engine.survival.client.wait_stop(60)

    try:
        with arachne.Session(timeout_s=60) as session:
            answer = train(
                session, num_steps, inner, each_step, lambda *words: told.send(words), fault.own_batches
            )
    except Exception as error:
        told.send(("error", str(error)))
        raise
    told.send(("end", answer))


def undisturbed(num_steps: int = STEPS, inner: int = 12, own_batches: bool = False) -> Told:
    """One process."""
    with arachne.Session() as session:
        return train(session, num_steps, inner, own_batches=own_batches)


class Job:
    """The processes of node a, their coordinator, and this process as their agent and host of the store."""

    def __init__(
        self, folder: Path, plans: tuple[Plan, ...], num_steps: int, inner: int, pace_s: float
    ) -> None:
        self.num_steps, self.inner, self.pace_s = num_steps, inner, pace_s
        self.losses: dict[int, set[float]] = defaultdict(set)
        self.coordinator = Coordinator(folder, plans)
        self.token = self.coordinator.token
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.agent = AgentClient(self.coordinator.address, self.token, "a")
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch.distributed", "torch._dynamo", "arachne_runtime.session"])
        self.processes, self.pipes, self.words, self.threads, self.members = {}, {}, {}, [], {}

    def start(self, device: str, fault: Fault = UNHARMED) -> None:
        ours, theirs = self.context.Pipe()
        words = (
            theirs, device, self.coordinator.address, self.token, self.store.port, self.num_steps, fault,
            self.inner, self.pace_s,
        )  # fmt: skip
        process = self.context.Process(target=live, args=words)
        process.start()
        theirs.close()
        self.processes[device], self.pipes[device] = process, ours
        self.words[device] = queue.Queue()
        watching = threading.Thread(target=self._watch, args=(device, process, ours, self.words[device]))
        watching.start()
        self.threads.append(watching)

    def _watch(self, device, process, pipe, words) -> None:
        """As an agent does: it tells of an exit at once."""
        with suppress(EOFError, OSError):
            while True:
                kind, what = pipe.recv()
                if kind == "member":
                    self.members[device] = Member(device=device, incarnation=what)
                if kind == "step":
                    self.losses[what[0]].add(what[2])
                words.put((kind, what))
        connection.wait([process.sentinel])
        process.join()
        if device in self.members:
            self.agent.exited(self.members[device], process.exitcode)
        words.put(("exit", process.exitcode))

    def hear(self, device: str, kind: str, timeout_s: float = 90):
        """What a process says of that kind."""
        end = time.monotonic() + timeout_s
        while True:
            try:
                said, what = self.words[device].get(timeout=max(0.1, end - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{device} says no {kind!r}\n{self.coordinator.log}") from None
            if said == kind:
                return what
            assert said != "exit" or kind == "exit", f"{device} exited with {what}\n{self.coordinator.log}"

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()
        for thread in self.threads:
            thread.join()
        for pipe in self.pipes.values():
            pipe.close()
        self.agent.close()
        self.coordinator.close()


@contextmanager
def job(
    folder: Path,
    plans: tuple[Plan, ...],
    faults: dict[str, Fault],
    *,
    num_steps: int = STEPS,
    inner: int = 12,
    pace_s: float = 0.0,
) -> Iterator[Job]:
    """The devices of the first plan in training; ``faults`` by device."""
    found = Job(folder, plans, num_steps, inner, pace_s)
    try:
        for device in plans[0].devices:
            found.start(device, faults.get(device, UNHARMED))
        yield found
    finally:
        found.close()
