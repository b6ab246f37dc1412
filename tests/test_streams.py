"""Output of ranks passes on whatever they print and wherever it goes; it never holds them up."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.streams import LONGEST_LINE_BYTES, RankStreams, _Stream
from launch.torchrun import run_ranks

REPOSITORY = Path(__file__).parents[1]


class Gone(io.StringIO):
    """A terminal whose reader has left, or a file on a full disk."""

    name = "rank-0.out"

    def write(self, text):
        raise OSError(28, "No space left on device")


@pytest.fixture
def shown():
    return io.StringIO()


@pytest.fixture
def stream(shown):
    reader, writer = os.pipe()
    made = _Stream("[0] ", shown, None, reader, writer)
    yield made
    made.close()


def test_a_progress_bar_is_shown_as_it_goes(stream, shown):
    for piece in (b"\r 1/3", b"\r 2/3", b"\r", b" 3/3\r", b"\ndone\r\n"):
        stream.take(piece)
    assert shown.getvalue() == "[0]  1/3\n[0]  2/3\n[0]  3/3\n[0] done\n"


def test_a_line_that_never_ends_is_passed_on_in_parts(stream, shown):
    for _ in range(40):
        stream.take(b"x" * 10_000)
    assert len(stream.rest) <= LONGEST_LINE_BYTES
    assert shown.getvalue().count("x") + len(stream.rest) == 400_000


def test_a_full_disk_ends_the_log_and_nothing_else(stream, shown, capsys):
    stream.log = Gone()
    stream.take(b"one\ntwo\n")
    assert shown.getvalue() == "[0] one\n[0] two\n"
    assert capsys.readouterr().err == "arachne: rank-0.out ends here: No space left on device\n"


def test_words_that_a_terminal_cannot_show_are_escaped(stream):
    stream.shown_on = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    stream.take("grüße\n".encode())
    assert stream.shown_on.buffer.getvalue() == b"[0] gr\\xfc\\xdfe\n"


def test_ranks_go_on_when_nobody_reads_what_they_print(tmp_path):
    script = tmp_path / "loud.py"
    script.write_text("for i in range(20_000): print('line', i)\nprint('to the end')")
    start = f"from launch.torchrun import run_ranks; run_ranks(['a:0', 'a:1'], [{str(script)!r}])"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen([sys.executable, "-c", start], env=environment, stdout=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    process.wait(timeout=100)


def test_the_log_has_all_that_was_printed(tmp_path):
    script = tmp_path / "loud.py"
    script.write_text("import sys\nsys.stdout.write('y' * 300_000)\nprint('grüße')")
    run_ranks(["a:0", "a:1"], [str(script)], quiet=True, log_dir=tmp_path)
    text = (tmp_path / "rank-1.out").read_text("utf-8")
    assert text.count("y") == 300_000
    assert text.endswith("grüße\n")


def test_the_log_of_an_island_that_was_lost_stays(tmp_path):
    logs = tmp_path / "logs"
    for number, appends in enumerate([False, True, False]):
        with RankStreams(tmp_path, ["a:0"], prefixed=True, log_dir=logs, appends=appends) as streams:
            os.write(streams._streams["a:0", "out"].writer, b"life %d\n" % number)
        if number == 1:
            assert (logs / "rank-a-0.out").read_text() == "life 0\nlife 1\n"
    assert (logs / "rank-a-0.out").read_text() == "life 2\n"
