"""What an island tells its command arrives whole, whatever an error says and whoever writes beside it."""

import asyncio
import io
import json
import os
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from launch.elastic import island
from launch.elastic.helper import LONGEST_LINE_BYTES, Helper
from launch.elastic.island import tell
from launch.elastic.words import WORD_MARK, Gone, Orders, line, read_told
from launch.failure import read_failure
from launch.streams import written


class Slow(io.StringIO):
    """A stream that takes each text in two pieces."""

    def write(self, text):
        half = len(text) // 2
        super().write(text[:half])
        time.sleep(0.001)
        return super().write(text[half:])


def test_words_and_lines_of_ranks_do_not_mix(monkeypatch):
    monkeypatch.setattr(sys, "stderr", shown := Slow())
    thread = threading.Thread(target=lambda: [written(sys.stderr, "[a:0] a line\n") for _ in range(50)])
    thread.start()
    for code in range(50):
        tell(Gone(device="a:0", code=code))
    thread.join()
    lines = shown.getvalue().split("\n")  # the mark is a line end to splitlines
    words = [read_told(one.removeprefix(WORD_MARK).encode()) for one in lines if one.startswith(WORD_MARK)]
    assert [word.code for word in words] == list(range(50))
    assert lines.count("[a:0] a line") == 50


def recorded(text: str, **words) -> dict:
    """As a rank's file gives it."""
    extra = {"kind": "OSError", "text": text, "notes": [], "causes": [], "lines": [], "lost_peer": False}
    return json.loads(json.dumps({"message": {"extraInfo": {**extra, "time_s": 1.0, **words}}}))


@pytest.mark.parametrize("text", ["no file caf\udce9", "x" * 5_000_000, "\x1b" * 1_000_000])
def test_any_error_of_a_script_can_be_told(text):
    data = recorded(text, notes=[text[:5000]], causes=[text[:5000]] * 10, lines=[text[:5000]] * 200)
    failure = read_failure(0, "device a:0", 1, 0.0, data, ())
    told = line(Gone(device="a:0", code=1, failure=failure))
    assert len(told) < LONGEST_LINE_BYTES
    assert read_told(told).failure == failure
    assert failure.text.startswith(text[:5])


def test_an_error_that_left_no_word_but_its_output_can_be_told():
    failure = read_failure(0, "device a:0", 1, 0.0, {}, ["caf\udce9", *["y" * 65_536] * 11])
    assert len(line(Gone(device="a:0", code=1, failure=failure))) < 100_000


def test_a_line_that_is_too_long_is_left_out_and_the_next_is_heard():
    async def heard() -> list[str]:
        text = f"import sys; sys.stderr.write('x' * {3 * LONGEST_LINE_BYTES} + '\\nthe next\\n')"
        helper = await Helper.start("the island of node a", [sys.executable, "-c", text])
        found: list[str] = []
        await helper.listen(found.append)
        await helper.end(5)
        return found

    found = asyncio.run(heard())
    assert "is left out" in found[0]
    assert found[-1] == "the next\n"


def test_a_process_that_cannot_be_started_is_told_as_gone(monkeypatch):
    told = []
    monkeypatch.setattr(island, "tell", told.append)
    monkeypatch.setattr(island.DeviceProcess, "start", lambda *_: os.open("/nowhere/at/all", os.O_RDONLY))
    orders = Orders(
        node="a",
        ranks={"a:0": 0},
        command=("train.py",),
        coordinator=("", 1),
        store=("", 2),
        token="",
        run="",
    )

    async def start() -> None:
        island.Island(orders, SimpleNamespace(variables=lambda device: {}), None)._start("a:0")

    asyncio.run(start())
    assert (told[0].device, told[0].code) == ("a:0", os.EX_OSERR)
    assert "no process can be started: [Errno 2]" in told[0].failure.lines[0]
