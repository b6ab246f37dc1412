"""Ranks of a job that survives: a tiny model, data parallel on gloo, by the words of the membership alone."""

import os
import signal
import time
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from arachne_runtime.membership.client import MemberClient
from arachne_runtime.membership.decision import Flags, Report, Verdict
from arachne_runtime.membership.messages import ChangeWanted
from arachne_runtime.membership.watch import Watch, break_group, form_world, leave_world

ROWS, WIDTH, RATE = 12, 5, 0.05
PADDING = torch.zeros(2**19, dtype=torch.float64)
"""Summed with the gradient, 4 MB, so that a kill comes in the middle of it."""
TIMEOUT_S = 60.0
"""Of collectives: who waits for it is seen."""


def batch(step: int) -> torch.Tensor:
    """x_BD of a step, in float64."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


def gradient(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over rows of the loss and of its gradient, divided by the rows of the global batch."""
    error = x @ weight - x.roll(1, dims=1)
    return error.square().sum() / ROWS, 2 * x.T @ error / ROWS


def undisturbed(num_steps: int) -> list[float]:
    """Losses of one process."""
    weight, losses = torch.zeros(WIDTH, WIDTH, dtype=torch.float64), []
    for step in range(1, num_steps + 1):
        loss, grad = gradient(weight, batch(step))
        weight -= RATE * grad
        losses.append(loss.item())
    return losses


class Fault(NamedTuple):
    """What happens to a rank."""

    step: int = 0  # in whose sum it gets the signal, 0: never
    signal: int = signal.SIGKILL
    joined_at: int = 0  # the step before which it waits for a joiner, 0: never


class Rank:
    """One process: the three parts of a step, and what it does when a generation ends."""

    def __init__(self, client, watch, store, num_steps, fault) -> None:
        self.client, self.watch, self.store, self.num_steps = client, watch, store, num_steps
        self.fault = fault
        self.seen = 0  # the newest record
        self.weight = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
        self.applied = self.entered = 0
        self.held: int | None = None
        self.grad = self.flags = None
        self.holds = False
        self.losses: dict[int, float] = {}
        self.times: list[tuple[str, float]] = []  # what happened when, by the machine's clock

    def note(self, what: str) -> None:
        self.times.append((what, time.monotonic()))

    def train(self) -> None:
        while self.applied < self.num_steps:
            self.enter_generation()
            failure = ""
            try:
                while self.applied < self.num_steps:
                    self.step(self.applied + 1)
                    if self.flags.wants_change:
                        break
            except RuntimeError as error:
                failure = str(error).splitlines()[0]
            if self.applied < self.num_steps or failure:
                self.leave_generation(failure)

    def step(self, step: int) -> None:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        x = batch(step).tensor_split(num_ranks)[rank]
        self.held = None
        loss, grad = gradient(self.weight, x)
        summed = torch.cat([grad.flatten(), loss.reshape(1), PADDING])
        if step == self.fault.joined_at:
            self.store.set("waits", "")
            self.client.wait_stop(20)  # until a joiner is there
        if step == self.fault.step:
            dist.all_reduce(summed, async_op=True)
            self.store.set("fault", str(time.monotonic()))
            os.kill(os.getpid(), self.fault.signal)
        dist.all_reduce(summed)
        self.grad, self.held, self.entered = summed, self.client.generation, step
        wants = torch.tensor([float(isinstance(self.client.stop, ChangeWanted))])
        dist.all_reduce(wants)
        self.flags = Flags(step=step, is_finite=bool(summed.isfinite().all()), wants_change=wants.item() > 0)
        self.apply(step)
        time.sleep(0.01)

    def apply(self, step: int) -> None:
        self.weight -= RATE * self.grad[: WIDTH**2].view(WIDTH, WIDTH)
        self.losses[step] = self.grad[WIDTH**2].item()
        self.applied = step
        self.note(f"step {step} of {self.client.generation}")

    def leave_generation(self, failure: str) -> None:
        self.note("left")
        if failure:
            self.client.failed(failure)
            if (world := dist.group.WORLD) is not None:
                break_group(world)
        report = Report(applied=self.applied, entered=self.entered, held=self.held, flags=self.flags)
        self.client.frozen(report if self.holds else None)
        self.watch.release()
        leave_world()

    def enter_generation(self) -> None:
        """Until one is entered by all its members."""
        while True:
            record = self.client.wait_record(self.seen, 30)
            self.seen = record.generation
            if self.client.member in record.holders:
                self.act_on(record.decision)
            failure = ""
            try:
                self.form(record)
            except RuntimeError as error:
                failure = str(error).splitlines()[0]
            if failure:
                self.leave_generation(failure)
                continue
            self.client.ready()
            if self.client.wait_completed(record.generation, 30):
                self.holds = True
                self.note(f"generation {record.generation}")
                return
            self.leave_generation("")

    def act_on(self, decision) -> None:
        if decision.verdict is Verdict.APPLY and self.applied < decision.step:
            self.apply(decision.step)
        self.held = None

    def form(self, record) -> None:
        """The group, and the weights from a holder for those that hold none."""
        rank = record.members.index(self.client.member)
        world = form_world(
            self.store, record.generation, rank, len(record.members), form_s=10, timeout_s=TIMEOUT_S
        )
        self.watch.guard(record.generation, [world])
        holders = [number for number, member in enumerate(record.members) if member in record.holders]
        if holders and len(holders) < len(record.members):
            state = torch.cat([self.weight.flatten(), torch.tensor([self.applied], dtype=torch.float64)])
            dist.broadcast(state, holders[0])
            self.weight = state[:-1].view(WIDTH, WIDTH).clone()
            self.applied = self.entered = int(state[-1])


def live(pipe, address, token, store_port, device, num_steps, fault) -> None:
    """The process of one rank; sends its member at once, its losses and times at the end."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False, timeout=timedelta(seconds=30))
    with Watch() as watch, MemberClient(address, token, device, watch.on_stop) as client:
        pipe.send(client.member)
        rank = Rank(client, watch, store, num_steps, fault)
        rank.train()
        pipe.send((rank.losses, rank.times))
        pipe.recv()  # nobody leaves the group before all have ended
        watch.release()
        leave_world()
