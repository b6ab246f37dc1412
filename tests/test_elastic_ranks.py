"""Real ranks that lose one in the middle of a sum and go on in the same processes."""

import multiprocessing
import queue
import signal
import threading
from contextlib import contextmanager, suppress
from multiprocessing import connection

import pytest
import torch.distributed as dist

from arachne_runtime.membership.client import AgentClient

from .coordinator_process import TOKEN, Coordinator
from .elastic_ranks import Fault, live, undisturbed

STEPS, FAULT = 30, 10
"""Steps of a job; the one in which something happens."""


class Job:
    """The ranks of node a, a coordinator, and this process as the node's agent and host of the store."""

    def __init__(self, folder, num_ranks) -> None:
        self.coordinator = Coordinator(folder, tuple(f"a:{index}" for index in range(num_ranks)))
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.agent = AgentClient(self.coordinator.address, TOKEN, "a")
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch.distributed", "arachne_runtime.testing"])
        self.processes, self.pipes, self.answers, self.threads = [], [], [], []
        self.members = {}

    def start(self, index, fault) -> None:
        ours, theirs = self.context.Pipe()
        words = (theirs, self.coordinator.address, TOKEN, self.store.port, f"a:{index}", STEPS, fault)
        process = self.context.Process(target=live, args=words)
        process.start()
        theirs.close()
        self.processes.append(process)
        self.pipes.append(ours)
        self.answers.append(queue.Queue())
        self.threads.append(
            threading.Thread(target=self.watch, args=(index, process, ours, self.answers[-1]))
        )
        self.threads[-1].start()

    def watch(self, index, process, pipe, answer) -> None:
        """As an agent does: it tells of an exit at once."""
        member = self.members[index] = pipe.recv()
        with suppress(EOFError):
            answer.put(pipe.recv())
        connection.wait([process.sentinel])
        self.agent.exited(member, process.exitcode)

    def results(self, indices) -> list:
        try:
            found = [self.answers[index].get(timeout=60) for index in indices]
        except queue.Empty:
            raise AssertionError(self.coordinator.log) from None
        for index in indices:
            self.pipes[index].send("end")
        return found

    def close(self) -> None:
        for process in self.processes:
            process.join(5)
            process.kill()
            process.join()
        for thread in self.threads:
            thread.join()
        for pipe in self.pipes:
            pipe.close()
        self.agent.close()
        self.coordinator.kill()


@contextmanager
def job(folder, num_ranks, faults):
    """Ranks in training; ``faults`` by rank."""
    found = Job(folder, num_ranks)
    try:
        for index in range(num_ranks):
            found.start(index, faults.get(index, Fault()))
        yield found
    finally:
        found.close()


def moment(times, words) -> float:
    return next(at for what, at in times if what == words)


def check(results, fault_s) -> None:
    """Losses as if nothing had been, and how long it took."""
    for losses, times in results:
        assert losses == pytest.approx(dict(enumerate(undisturbed(STEPS), 1)), abs=1e-9)
        left_s, next_s = moment(times, "left") - fault_s, moment(times, f"step {FAULT} of 2") - fault_s
        print(f"out of its sum after {left_s:.3f} s, next step after {next_s:.3f} s")
        assert left_s < 1


@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_of_a_kill_inside_a_sum_train_on_as_if_nothing_had_been(tmp_path, victim):
    with job(tmp_path, 4, {victim: Fault(step=FAULT)}) as running:
        results = running.results([index for index in range(4) if index != victim])
        check(results, float(running.store.get("fault")))
        assert running.coordinator.status().why.startswith(f"a:{victim} exited with code -9")


def test_a_stopped_rank_is_left_behind_though_no_connection_breaks(tmp_path):
    """Nobody sees an error: only the coordinator's word, and the broken groups, end the sums."""
    with job(tmp_path, 3, {1: Fault(step=FAULT, signal=signal.SIGSTOP)}) as running:
        stopped_s = float(running.store.get("fault"))
        running.agent.stopped(running.members[1])
        check(running.results([0, 2]), stopped_s)
        assert running.coordinator.status().why == "a:1 is stopped"


def test_a_joiner_gets_the_state_of_its_peers_between_two_steps(tmp_path):
    with job(tmp_path, 3, {0: Fault(joined_at=FAULT)}) as running:
        running.store.wait(["waits"])
        running.start(3, Fault())
        *results, (joined, _) = running.results(range(4))
    expected = dict(enumerate(undisturbed(STEPS), 1))
    for losses, times in results:
        assert losses == pytest.approx(expected, abs=1e-9)
        pause_s = moment(times, f"step {FAULT + 1} of 2") - moment(times, f"step {FAULT} of 1")
        print(f"pause of a survivor {pause_s:.3f} s")
    assert joined == pytest.approx({step: expected[step] for step in range(FAULT + 1, STEPS + 1)}, abs=1e-9)
