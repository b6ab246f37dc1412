"""bench.overhead: which pairs it judges, and whose CPU time a phase is."""

import threading
import time

import pytest

from bench.overhead import Pair, judged
from bench.overhead_phases import COMMUNICATION, Ledger


def spin(seconds):
    """Use CPU time of the calling thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_pairs_with_checks_are_told_and_not_judged(capsys):
    plain, checked = Pair(1.01, 1.02, 0.1, watched=False), Pair(1.25, 1.5, 0.1, watched=True)
    found = {result.name: result.figure for result in judged("ddp", [plain] * 6 + [checked] * 9)}
    assert found == {"ddp-cpu": 1.01, "ddp-wall": 1.02}
    told = capsys.readouterr().out
    assert "in steps with checks 1.250" in told
    assert "in steps with checks 1.500" in told


def test_a_phase_leaves_out_those_inside_it():
    ledger = Ledger()
    inner = ledger.timed("inner", lambda: spin(0.02))
    ledger.timed("outer", lambda: (spin(0.01), inner()))()
    assert ledger.spent["inner"] == pytest.approx(0.02, abs=0.005)
    assert ledger.spent["outer"] == pytest.approx(0.01, abs=0.005)


def test_threads_beside_a_phase_are_told_on_their_own():
    ledger = Ledger()

    def wait_for_another() -> None:
        thread = threading.Thread(target=spin, args=(0.05,))
        thread.start()
        thread.join()

    ledger.timed("waits", wait_for_another)()
    assert ledger.spent[COMMUNICATION] == pytest.approx(0.05, abs=0.02)
    assert ledger.spent["waits"] < 0.02
