"""The planner behind `plan_for`: asks its process, survives the loss of it, and falls back to no planner."""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Self

import msgspec

from arachne_runtime.errors import ArachneError
from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import Seconds

from ..rank_environment import search_path
from .planner_words import Answer, Problem, Question, SupersededError
from .shrink import Shrinker
from .worth import Offer

ANSWER_S: Seconds = 30.0
"""A planner that says nothing for so long is taken for dead; a warm one answers in under 2 s (docs)."""
_ENCODER = msgspec.json.Encoder()
_ANSWER = msgspec.json.Decoder(Answer)
_LOGGER = logging.getLogger(__name__)


class PlannerError(ArachneError, RuntimeError):
    """The planner failed, which says nothing of plans."""


class Planner:
    """Offers for one job, from any thread. `plan_for` is what the coordinator's `serve` takes."""

    def __init__(self, problem: Problem, answer_s: Seconds = ANSWER_S) -> None:
        self._problem = problem
        self._answer_s = answer_s
        self._shrinker = Shrinker(problem.first)
        self._lock = threading.Lock()
        self._number = 0
        self._slower: dict[str, float] = {}
        self._is_closed = False
        self._child = _Child(problem)

    def plan_for(self, devices: tuple[str, ...], running: Plan | None) -> Offer | None:
        """The best plan that a short search finds, else what is left of the running and the first plan.

        None: neither is there. PlannerError where nothing is left and the planner failed, twice;
        SupersededError where a newer question took its place.
        """
        fault: PlannerError | None = None
        for _ in range(2):
            try:
                answer = self._ask(devices, running)
            except PlannerError as error:
                _LOGGER.warning("%s", error)
                fault = error
                continue
            if answer.offer is not None:
                return answer.offer
            if not answer.no_plan:
                raise SupersededError
            _LOGGER.info("the planner has no plan for %d devices: %s", len(devices), answer.no_plan)
            return self._shrinker.plan_for(devices, running)
        left = self._shrinker.plan_for(devices, running)
        if left is None and fault is not None:
            raise fault
        return left

    def assume(self, slower: Mapping[str, float]) -> None:
        """From now on these devices compute so many times longer than their profile says."""
        self._slower = dict(slower)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._is_closed = True
            self._child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, devices: tuple[str, ...], running: Plan | None) -> Answer:
        with self._lock:
            if self._is_closed:
                raise PlannerError("the planner is closed")
            if not self._child.is_alive:
                self._child.close()
                self._child = _Child(self._problem)
            child = self._child
            self._number += 1
            question = Question(number=self._number, devices=devices, running=running, slower=self._slower)
            answered = child.ask(question)
        try:
            answer = answered.result(self._answer_s)
        except TimeoutError:
            child.close()
            raise PlannerError(f"the planner said nothing for {self._answer_s:g} s") from None
        if answer.fault:
            raise PlannerError(f"the planner failed: {answer.fault}")
        return answer


class _Child:
    """One process, and the answers that are waited for. Nothing here waits for it but `close`."""

    def __init__(self, problem: Problem) -> None:
        self.is_alive = True
        self._waiting: dict[int, Future[Answer]] = {}
        self._changed = threading.Lock()
        self._unsent: SimpleQueue[bytes | None] = SimpleQueue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "launch.coordinator.planner_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **search_path()},
        )
        self._threads = [
            threading.Thread(target=act, name="planner", daemon=True) for act in (self._read, self._write)
        ]
        for thread in self._threads:
            thread.start()
        self._unsent.put(_ENCODER.encode(problem))

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def ask(self, question: Question) -> "Future[Answer]":
        """Its answer, once it comes; PlannerError in it where the process ends before."""
        answered: Future[Answer] = Future()
        with self._changed:
            self._waiting[question.number] = answered
            if not self.is_alive:
                self._fail()
        self._unsent.put(_ENCODER.encode(question))
        return answered

    def close(self) -> None:
        """End it now."""
        self._process.kill()
        self._unsent.put(None)
        for thread in self._threads:
            thread.join()
        self._process.wait()

    def _write(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as pipe:
            while (text := self._unsent.get()) is not None:
                pipe.write(text + b"\n")
                pipe.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            for text in pipe:
                try:
                    answer = _ANSWER.decode(text)
                except msgspec.MsgspecError as error:
                    _LOGGER.warning("a word of the planner is left out, it cannot be read: %s", error)
                    continue
                with self._changed:
                    answered = self._waiting.pop(answer.number, None)
                if answered is not None:
                    answered.set_result(answer)
        with self._changed:
            self.is_alive = False
            self._fail()

    def _fail(self) -> None:
        for answered in self._waiting.values():
            answered.set_exception(PlannerError("the planner's process has ended"))
        self._waiting.clear()
