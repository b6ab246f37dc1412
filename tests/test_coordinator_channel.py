"""The coordinator as a process: its channel, its clients, and what comes of strangers, noise and restarts."""

import asyncio
import random
import socket
import ssl
import time
from contextlib import ExitStack, contextmanager, suppress

import pytest

from arachne_runtime.errors import UsageError
from arachne_runtime.membership import channel
from arachne_runtime.membership.client import (
    AgentClient,
    CoordinatorLostError,
    MemberClient,
    RefusedError,
    ask_status,
)
from arachne_runtime.membership.decision import Flags, Report
from arachne_runtime.membership.messages import (
    MAX_INBOUND_BYTES,
    MAX_OUTBOUND_BYTES,
    AgentHello,
    AskStatus,
    Beat,
    ChangeWanted,
    Costs,
    Done,
    Exited,
    Failed,
    Freeze,
    Frozen,
    MemberHello,
    Progress,
    Status,
    decode_outbound,
    encode_inbound,
)
from launch.coordinator.journal import Journal
from launch.coordinator.server import serve
from launch.coordinator.settings import Settings

from .coordinator_process import TOKEN, Coordinator, plan_for

DEVICES = ("a:0", "a:1", "b:0")


@pytest.fixture
def coordinator(tmp_path):
    found = Coordinator(tmp_path, DEVICES)
    try:
        yield found
        assert found.process.poll() is None
        assert "Traceback" not in found.log
    finally:
        found.kill()


@contextmanager
def connected(coordinator, context=None):
    """A raw connection; the context of the job's token unless another is given."""
    context = context or channel.client_context(TOKEN)
    with (
        socket.create_connection(coordinator.address, timeout=10) as plain,
        context.wrap_socket(plain) as connection,
    ):
        yield connection


def answer(connection) -> object:
    header = connection.recv(channel.HEADER_BYTES)
    length = channel.frame_length(header, MAX_OUTBOUND_BYTES)
    content = b""
    while len(content) < length:
        content += connection.recv(length - len(content))
    return decode_outbound(content, 0)[1]


@contextmanager
def job(coordinator):
    """Three members and two agents in generation 1."""
    with ExitStack() as stack:
        agents = [stack.enter_context(AgentClient(coordinator.address, TOKEN, node)) for node in "ab"]
        members = [
            stack.enter_context(MemberClient(coordinator.address, TOKEN, device)) for device in DEVICES
        ]
        begin(members, 1)
        yield members, agents


def begin(members, generation) -> None:
    """All of them get the record and their parts."""
    for member in members:
        assert member.wait_record(generation - 1, 10).generation == generation
        member.ready()
    assert all(member.wait_completed(generation, 10) for member in members)


def blind(token=None) -> ssl.SSLContext:
    """Takes any server; shows the certificate of another token, or none."""
    context = channel.client_context(token) if token else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@pytest.mark.parametrize("token", [None, channel.new_token()])
def test_a_stranger_reads_nothing_and_changes_nothing(coordinator, token):
    hello = channel.frame(encode_inbound(1, MemberHello(device="a:0", incarnation="stranger")), 999)
    with connected(coordinator, blind(token)) as connection:
        connection.sendall(hello)  # the client's side of the handshake is done before the server refuses it
        with suppress(ssl.SSLError, ConnectionError):
            assert connection.recv(1) == b""
    coordinator.await_log("closed: [SSL")
    assert coordinator.status() == Status(
        phase="gathering", generation=0, members=(), idle=(), suspected=(), why="the job begins"
    )


def test_a_client_does_not_talk_to_a_stranger(coordinator):
    other = channel.new_token()
    with pytest.raises(CoordinatorLostError, match="certificate verify failed"):
        ask_status(coordinator.address, other, 0.5)
    with (
        MemberClient(coordinator.address, other, "a:0") as client,
        pytest.raises(CoordinatorLostError, match="certificate verify failed"),
    ):
        client.wait_record(0, 0.5)


def test_bytes_that_are_no_handshake_are_logged(coordinator):
    with socket.create_connection(coordinator.address) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        coordinator.await_log("closed: [SSL: HTTP_REQUEST]")
    assert coordinator.status().generation == 0


def test_what_was_recorded_from_the_wire_is_of_no_use(coordinator):
    """The bytes of a connection that registered, played again."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    sent = []
    with socket.create_connection(coordinator.address, timeout=10) as plain:
        session = channel.client_context(TOKEN).wrap_bio(incoming, outgoing)

        def drive(act) -> None:
            while True:
                try:
                    act()
                except ssl.SSLWantReadError:
                    pass
                else:
                    break
                finally:
                    if content := outgoing.read():
                        sent.append(content)
                        plain.sendall(content)
                incoming.write(plain.recv(65536))

        drive(session.do_handshake)
        hello = encode_inbound(1, AgentHello(node="a"))
        asks = encode_inbound(2, AskStatus())
        drive(lambda: session.write(channel.frame(hello, 99) + channel.frame(asks, 99)))
        drive(lambda: session.read(1))
    with socket.create_connection(coordinator.address, timeout=10) as plain:
        for content in sent:
            plain.sendall(content)
        coordinator.await_log("closed: [SSL: DECRYPTION_FAILED_OR_BAD_RECORD_MAC]")


def noise(random_source, number) -> bytes:
    """Bytes at random, or a message with some of its bytes changed, cut, doubled."""
    messages = [
        MemberHello(device="a:0", incarnation="x", generation=1),
        AgentHello(node="a"),
        Exited(device="a:0", incarnation="x", code=1),
        Failed(generation=1, why="why"),
        Frozen(
            generation=1, report=Report(applied=1, entered=2, held=1, flags=Flags(step=1, is_finite=True))
        ),
        Progress(generation=1, step=3, samples_per_s=1.5),
        Costs(generation=1, compute_s=0.5),
        Done(),
        Beat(),
    ]
    content = bytearray(
        encode_inbound(number - random_source.choice((0, 0, 0, 1, number)), random_source.choice(messages))
    )
    kind = random_source.randrange(5)
    if kind == 0:
        return random_source.randbytes(random_source.randrange(200))
    if kind == 1:
        return bytes(content[: random_source.randrange(len(content))])
    if kind == 2:
        return bytes(content * random_source.randrange(2, 4))
    if kind == 3:
        return b"\x91" * 5000 + content  # lists within lists
    for _ in range(random_source.randrange(4)):
        content[random_source.randrange(len(content))] = random_source.randrange(256)
    return bytes(content)


def test_noise_from_one_that_holds_the_token_changes_nothing(coordinator):
    random_source = random.Random(0)
    with job(coordinator) as (members, _):
        before = coordinator.status()
        with connected(coordinator) as connection:
            connection.sendall(channel.frame(encode_inbound(1, AgentHello(node="z")), MAX_INBOUND_BYTES))
            for number in range(2, 11_002):
                connection.sendall(channel.frame(noise(random_source, number), MAX_INBOUND_BYTES))
            connection.sendall(channel.frame(encode_inbound(2**62, AskStatus()), MAX_INBOUND_BYTES))
            assert answer(connection) == before
        assert coordinator.log.count("ignored") > 10_000  # of 11,000; beats are fine
        assert members[0].stop is None


def test_a_replayed_number_and_a_frame_too_long(coordinator):
    with connected(coordinator) as connection:
        asks = channel.frame(encode_inbound(1, AskStatus()), MAX_INBOUND_BYTES)
        connection.sendall(asks)
        assert answer(connection).generation == 0
        connection.sendall(asks)
        coordinator.await_log("message 1 after message 1: it is replayed")
        connection.sendall((MAX_INBOUND_BYTES + 1).to_bytes(4, "big"))
        coordinator.await_log(f"closed: a frame of {MAX_INBOUND_BYTES + 1} bytes is announced")
    with pytest.raises(channel.FrameError, match="at most 10 are read"):
        channel.frame(bytes(11), 10)


def test_one_that_sends_nothing_is_cut_off(coordinator):
    with socket.create_connection(coordinator.address, timeout=10) as plain:
        begun = time.monotonic()
        assert plain.recv(1) == b""
        assert 4 < time.monotonic() - begun < 8


def test_a_token_that_could_be_guessed_is_refused():
    with pytest.raises(UsageError, match="has 6 characters; it needs 32 random ones"):
        channel.server_context("secret")


def test_a_death_is_told_survivors_report_and_go_on(coordinator):
    with job(coordinator) as (members, agents):
        stops = []
        members[0]._on_stop = stops.append
        begun = time.monotonic()
        agents[1].exited(members[2].member, -9)
        for member in members[:2]:
            stop = member.wait_stop(10)
            assert (stop.generation, stop.why) == (1, "b:0 exited with code -9")
            member.frozen(Report(applied=4, entered=5, held=1))
        begin(members[:2], 2)
        print(f"exit to next generation: {time.monotonic() - begun:.3f} s")
        record = members[0].record
        assert [member.device for member in record.members] == ["a:0", "a:1"]
        assert record.decision.next_step == 6
        assert stops == [Freeze(generation=1, why="b:0 exited with code -9")]
        with pytest.raises(RefusedError, match="declared dead"):
            members[2].wait_record(1, 10)
        time.sleep(0.5)  # five times as long as it waits before it connects again
        assert coordinator.log.count("b:0 refused") == 1
        assert coordinator.status().why == "b:0 exited with code -9"


def test_a_silent_agent_is_a_dead_node(coordinator):
    with job(coordinator) as (members, agents):
        begun = time.monotonic()
        agents[1].close()
        assert members[0].wait_stop(10).why == "node b was silent for 2 s"
        assert 1.8 < time.monotonic() - begun < 4
        assert "node b has been silent for 0.5 s" in coordinator.log


def test_a_joiner_comes_in_between_two_steps(coordinator):
    with (
        job(coordinator) as (members, _),
        AgentClient(coordinator.address, TOKEN, "c"),
        MemberClient(coordinator.address, TOKEN, "c:0") as joiner,
    ):
        for member in members:
            assert isinstance(member.wait_stop(10), ChangeWanted)
            member.frozen(Report(applied=7, entered=7, held=1))
        begin([*members, joiner], 2)
        assert joiner.record.source.holders == members[0].record.members[:3]
        assert joiner.record.decision.next_step == 8


def test_a_killed_coordinator_comes_back_and_nobody_is_lost(coordinator):
    with job(coordinator) as (members, agents):
        coordinator.kill()
        members[0].progress(1, 1.0)  # told while nobody listens
        coordinator.start()
        end = time.monotonic() + 10
        while (status := coordinator.status()).phase != "training":
            assert time.monotonic() < end
            time.sleep(0.05)
        assert (status.generation, status.members) == (1, DEVICES)
        assert all(member.stop is None for member in members)
        # killed again while survivors report: they say it again
        agents[1].exited(members[2].member, 1)
        for member in members[:2]:
            assert member.wait_stop(10) is not None
        members[0].frozen(Report(applied=1, entered=1))
        coordinator.kill()
        members[1].frozen(Report(applied=1, entered=1))
        members[2].close()
        coordinator.start()
        begin(members[:2], 2)


def test_a_journal_that_cannot_be_written_ends_the_coordinator_before_anyone_hears(tmp_path, monkeypatch):
    def full(journal, entry):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Journal, "append", full)
    with ExitStack() as stack:
        clients = []

        def started(port):
            stack.enter_context(AgentClient(("127.0.0.1", port), TOKEN, "a"))
            for device in ("a:0", "a:1"):
                clients.append(stack.enter_context(MemberClient(("127.0.0.1", port), TOKEN, device)))

        settings = Settings(devices=("a:0", "a:1"))
        served = serve(settings, tmp_path / "journal", plan_for, TOKEN, host="127.0.0.1", started=started)
        with pytest.raises(OSError, match="No space left"):
            asyncio.run(asyncio.wait_for(served, 20))
        assert [client.record for client in clients] == [None, None]


def test_a_line_on_which_nothing_is_said_is_tried(coordinator):
    with MemberClient(coordinator.address, TOKEN, "a:0") as client:
        end = time.monotonic() + 10
        while (writer := client._line._writer) is None and time.monotonic() < end:
            time.sleep(0.01)
        line = writer.get_extra_info("socket")
        assert line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
