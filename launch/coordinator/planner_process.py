"""The planner in a process of its own, warm: a search would stop the coordinator's beats for its time.

``python -m launch.coordinator.planner_process`` reads a `Problem`, then `Question`s, from its standard input,
answers on its standard output, and ends when that input closes.
"""

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from .offers import Offers
from .planner_words import Answer, Problem, Question, SupersededError

_ENCODER = msgspec.json.Encoder()


def main() -> None:
    """Answer until standard input closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asks decides when it ends
    problem = msgspec.json.decode(sys.stdin.buffer.readline(), type=Problem)
    answers = _own_output()
    asked: queue.SimpleQueue[Question] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, asked.put), name="questions", daemon=True).start()
    offers = Offers(problem, is_superseded=lambda: not asked.empty())
    _answer(offers, offers.first_question)  # loads all that a search needs
    while True:
        question = asked.get()
        answer = _answer(offers, question) if asked.empty() else Answer(number=question.number)
        answers.write(_ENCODER.encode(answer) + b"\n")
        answers.flush()


def _own_output() -> BinaryIO:
    """For answers alone; what a library prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def _answer(offers: Offers, question: Question) -> Answer:
    try:
        return offers.answer(question)
    except SupersededError:
        return Answer(number=question.number)
    except Exception as error:
        return Answer(number=question.number, fault=f"{type(error).__name__}: {error}")


def _read(source: BinaryIO, put: Callable[[Question], None]) -> None:
    """Whoever asked is gone when it ends: nobody waits for an answer."""
    for text in source:
        put(msgspec.json.decode(text, type=Question))
    os._exit(0)


if __name__ == "__main__":
    main()
