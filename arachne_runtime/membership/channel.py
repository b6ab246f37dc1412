"""The coordinator's channel: TLS 1.3 between parties that hold the job's token, and frames of limited length.

Both ends derive one key and its certificate from the token and accept no other, so each proves to the other
that it holds the token, and nobody else can read, alter, replay or inject. Nothing is sent before that.
"""

import os
import secrets
import socket
import ssl
import struct
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

from ..errors import UnsupportedEnvironmentError, UsageError
from ..units import Bytes, Seconds

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

HANDSHAKE_S: Seconds = 5.0
"""How long a connection may take to prove that it holds the token; one takes 5 ms (loopback, one core)."""
_MIN_TOKEN_LENGTH = 32
"""Who connects may test guesses of a token at leisure: it must be random, as `new_token` makes it."""
_HEADER = struct.Struct(">I")
_KEEP_IDLE_S, _KEEP_TRIES = 10, 3
"""A line on which nothing is said is tried after so long, and so often: a firewall forgets it in minutes."""


class FrameError(ConnectionError):
    """A frame longer than allowed, or one that ends in the middle: the connection is of no use any more."""


def new_token() -> str:
    """A secret of 32 random bytes for one job."""
    return secrets.token_hex(32)


def server_context(token: str) -> ssl.SSLContext:
    """What the coordinator accepts connections with."""
    context = _context(token, ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # each connection proves the token anew
    return context


def client_context(token: str) -> ssl.SSLContext:
    """What a client connects with."""
    return _context(token, ssl.PROTOCOL_TLS_CLIENT)


def frame(content: bytes, limit_bytes: Bytes) -> bytes:
    """A message with its length before it; FrameError where it is too long to be read at the other end."""
    if len(content) > limit_bytes:
        raise FrameError(f"a message of {len(content)} bytes; at most {limit_bytes} are read")
    return _HEADER.pack(len(content)) + content


class _Socket(Protocol):
    """What asyncio shows of one."""

    def setsockopt(self, level: int, option: int, value: int, /) -> None: ...


def keep_alive(line: _Socket) -> None:
    """Both ends notice within a minute that the other is gone, though neither has anything to say."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_IDLE_S)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEP_IDLE_S)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEP_TRIES)


HEADER_BYTES: Bytes = _HEADER.size


def frame_length(header: bytes, limit_bytes: Bytes) -> int:
    """Bytes that follow a header; FrameError before any of a longer frame is read."""
    (length,) = _HEADER.unpack(header)
    if length > limit_bytes:
        raise FrameError(f"a frame of {length} bytes is announced; at most {limit_bytes} are read")
    return int(length)


def _context(token: str, protocol: int) -> ssl.SSLContext:
    key, certificate = _credentials(token)
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the token names the job, not a host
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.decode())
    descriptor = os.memfd_create("arachne-channel")  # ssl reads keys from files alone; this one is on no disk
    try:
        os.write(descriptor, key + certificate)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context


def _credentials(token: str) -> tuple[bytes, bytes]:
    """Key and certificate in PEM: the same bytes for the same token, on every machine."""
    if len(token) < _MIN_TOKEN_LENGTH:
        raise UsageError(
            f"the job's token has {len(token)} characters; it needs {_MIN_TOKEN_LENGTH} random ones"
        )
    try:
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as error:
        raise UnsupportedEnvironmentError(
            "an elastic job needs the package cryptography: pip install 'arachne-hetero[elastic]'"
        ) from error
    derived = HKDF(hashes.SHA256(), 32, salt=None, info=b"arachne coordinator channel 1").derive(
        token.encode()
    )
    key = Ed25519PrivateKey.from_private_bytes(derived)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return pem, _certificate(key)


def _certificate(key: "Ed25519PrivateKey") -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "arachne job")])
    builder = (
        x509.CertificateBuilder(issuer_name=name, subject_name=name, public_key=key.public_key())
        .serial_number(1)
        .not_valid_before(datetime(2000, 1, 1))  # clocks of nodes differ; the token's life is the job's
        .not_valid_after(datetime(2100, 1, 1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    )
    return builder.sign(key, algorithm=None).public_bytes(serialization.Encoding.PEM)
