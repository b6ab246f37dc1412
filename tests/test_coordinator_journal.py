"""The journal: one history, on the disk, whatever happens while it is written."""

import subprocess
import sys

import pytest

from arachne_runtime.errors import InvalidFileError, UsageError
from arachne_runtime.membership.messages import Completed, Member, Published, Record
from launch.coordinator.history import History, HistoryError
from launch.coordinator.journal import Journal

from .coordinator_world import plan_of


def record(generation: int) -> Published:
    members = (Member(device="a:0", incarnation="x"),)
    return Published(
        record=Record(generation=generation, members=members, plan=plan_of(("a:0",)), why="a\nnew line")
    )


ENTRIES = [record(1), Completed(generation=1), record(2), record(3), Completed(generation=3)]


def write(path, entries) -> None:
    journal = Journal.open(path)
    for entry in entries:
        journal.append(entry)
    journal.close()


def read(path) -> History:
    journal = Journal.open(path)
    journal.close()
    return journal.history


def test_a_restart_reads_what_was_written(tmp_path):
    path = tmp_path / "journal"
    assert read(path) == History()
    for number, entry in enumerate(ENTRIES, 1):
        write(path, [entry])
        assert len(path.read_bytes().splitlines()) == number
    assert read(path) == History(record(3).record, completed=3)


def test_a_generation_is_published_once(tmp_path):
    journal = Journal.open(tmp_path / "journal")
    journal.append(record(1))
    for entry in (record(1), record(3), Completed(generation=2)):
        before = (tmp_path / "journal").read_bytes()
        with pytest.raises(HistoryError, match="cannot follow generation 1"):
            journal.append(entry)
        assert (tmp_path / "journal").read_bytes() == before
    journal.append(Completed(generation=1))
    with pytest.raises(HistoryError, match="Completed cannot follow"):
        journal.append(Completed(generation=1))
    journal.close()


def test_a_crash_at_any_byte_of_an_entry_leaves_what_came_before(tmp_path):
    path = tmp_path / "journal"
    write(path, ENTRIES[:3])
    shorter = len(path.read_bytes())
    write(path, ENTRIES[3:4])
    content = path.read_bytes()
    for cut in range(shorter, len(content)):
        path.write_bytes(content[:cut])
        assert read(path).generation == 2
        assert path.read_bytes() == content[:shorter]
    path.write_bytes(content[:-1])
    write(path, ENTRIES[3:4])  # goes on from there
    assert path.read_bytes() == content


def test_an_altered_journal_is_refused_with_its_line(tmp_path):
    path = tmp_path / "journal"
    write(path, ENTRIES)
    content = path.read_bytes()
    for at in range(0, len(content) - 1, 7):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(InvalidFileError, match=r"journal: 1 problem\n  line \d"):
            read(path)
    path.write_bytes(b"".join(content.splitlines(keepends=True)[1:]))
    with pytest.raises(InvalidFileError, match=r"line 1\s+Completed cannot follow generation 0"):
        read(path)


def test_two_coordinators_never_share_a_journal(tmp_path):
    journal = Journal.open(tmp_path / "journal")
    code = (
        "import sys, pathlib; from launch.coordinator.journal import Journal\n"
        "try: Journal.open(pathlib.Path(sys.argv[1]))\n"
        "except ValueError as error: print(error)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "journal")]
    assert "of a coordinator that runs" in subprocess.check_output(command, text=True)
    with pytest.raises(UsageError, match="of a coordinator that runs"):
        Journal.open(tmp_path / "journal")
    journal.close()
    assert subprocess.check_output(command, text=True) == ""
