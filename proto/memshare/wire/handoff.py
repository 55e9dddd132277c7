"""The client's side of the memory owner's socket: the pool's descriptor and a token."""

from __future__ import annotations

import array
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from memshare.v1 import common_pb2, handoff_pb2
from memshare.wire.errors import AgentUnavailable, MemshareError, PeerRefused, VersionMismatch
from memshare.wire.version import MAX_PROTOCOL, MIN_PROTOCOL, VERSION

MAX_PACKET: Final = 4096
_LEAST_TIMEOUT: Final = 0.001
_REFUSALS: Final[dict[str, type[MemshareError]]] = {
    kind.reason: kind for kind in (PeerRefused, VersionMismatch)
}


@dataclass
class PoolConnection:
    """An open connection to the owner. While it is open, the owner counts this process in.

    `descriptor` is the pool's memfd; the holder closes it once it is mapped.
    """

    connection: socket.socket
    descriptor: int
    pool: common_pb2.PoolDescriptor
    token: bytes = b""
    token_key: bytes = field(default=b"", repr=False)
    _asked: int = field(default=0, init=False, repr=False)
    _answered: int = field(default=0, init=False, repr=False)

    def close(self) -> None:
        """Close the connection and, if it is still open, the descriptor."""
        self.connection.close()
        self.close_descriptor()

    def close_descriptor(self) -> None:
        """Close the descriptor; what is mapped stays mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def is_open(self) -> bool:
        """Whether the owner is still there."""
        try:
            self.connection.settimeout(0)
            return self.connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def list_holders(self, timeout: float = 5.0) -> list[handoff_pb2.Holder]:
        """Engines that are connected to the owner now. For the manager's role, in one thread.

        Raises `AgentUnavailable` if no answer comes within `timeout` seconds, or no other one
        will; after the former it may be asked again.
        """
        deadline = time.monotonic() + timeout
        try:
            # What was asked before a time-out is answered late, with what held then. One such
            # question is waited for, so that they do not pile up in a socket nobody reads.
            while self._answered < self._asked:
                self._receive_holders(deadline)
            request = handoff_pb2.HoldersRequest(sequence=self._asked + 1)
            packet = handoff_pb2.PoolPacket(holders_request=request)
            self.connection.settimeout(max(deadline - time.monotonic(), _LEAST_TIMEOUT))
            self.connection.send(packet.SerializeToString())
            self._asked += 1
            while True:
                holders = self._receive_holders(deadline)
                if holders.sequence == self._asked:
                    return list(holders.holders)
        except (OSError, EOFError, ValueError) as error:
            raise AgentUnavailable(f"the memory owner does not answer: {error}") from error

    def _receive_holders(self, deadline: float) -> handoff_pb2.Holders:
        # Zero would not be a time-out but a socket that never blocks.
        self.connection.settimeout(max(deadline - time.monotonic(), _LEAST_TIMEOUT))
        reply, descriptor = receive_packet(self.connection, max_packet=1 << 20)
        if descriptor >= 0:
            os.close(descriptor)
        if reply.WhichOneof("message") != "holders":
            raise ValueError("not a list of holders")
        self._answered = max(self._answered, reply.holders.sequence)
        return reply.holders


def receive_packet(
    connection: socket.socket, max_packet: int = MAX_PACKET
) -> tuple[handoff_pb2.PoolPacket, int]:
    """Read one packet and the descriptor that came with it (-1 if none).

    Raises `EOFError` when the peer is gone and `ValueError` on what is not a packet.
    """
    room = socket.CMSG_SPACE(array.array("i").itemsize)
    data, ancillary, flags, _ = connection.recvmsg(max_packet, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = len(payload) - len(payload) % descriptors.itemsize
            descriptors.frombytes(payload[:whole])
    try:
        if not data:
            raise EOFError("the peer closed the connection")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ValueError(f"a packet is longer than {max_packet} bytes")
        try:
            packet = handoff_pb2.PoolPacket.FromString(data)
        except DecodeError as error:
            raise ValueError(f"not a packet of this protocol: {error}") from None
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    # The kernel's padding has room for a second one.
    for descriptor in descriptors[1:]:
        os.close(descriptor)
    return packet, descriptors[0] if descriptors else -1


def connect_pool(path: Path, role: handoff_pb2.PoolRole, timeout: float = 5.0) -> PoolConnection:
    """Ask the owner at `path` for its pool.

    Raises `AgentUnavailable` if nobody answers within `timeout` seconds, `PeerRefused` if the
    owner does not serve this user, `VersionMismatch` if no protocol version is shared.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    connection.settimeout(timeout)
    try:
        connection.connect(str(path))
        request = handoff_pb2.PoolRequest(
            min_protocol=MIN_PROTOCOL, max_protocol=MAX_PROTOCOL, version=VERSION, role=role
        )
        connection.send(handoff_pb2.PoolPacket(request=request).SerializeToString())
        packet, descriptor = receive_packet(connection)
    except PermissionError as error:
        connection.close()
        raise PeerRefused(_no_entry(path)) from error
    except (OSError, EOFError, ValueError) as error:
        connection.close()
        raise AgentUnavailable(
            f"no memory owner answers at {path} ({error}): start it with `memshare up` or "
            "`memshare agent`, or set MEMSHARE_RUNTIME_DIR to its directory"
        ) from error
    if packet.WhichOneof("message") == "refusal":
        connection.close()
        kind = _REFUSALS.get(packet.refusal.reason, AgentUnavailable)
        raise kind(packet.refusal.message)
    missing = descriptor < 0 and role != handoff_pb2.POOL_ROLE_WATCHER
    if packet.WhichOneof("message") != "grant" or missing:
        connection.close()
        raise AgentUnavailable(f"the owner at {path} granted no pool")
    connection.settimeout(None)
    grant = packet.grant
    return PoolConnection(connection, descriptor, grant.pool, grant.token, grant.token_key)


def _no_entry(path: Path) -> str:
    try:
        owner = f"uid {path.parent.stat().st_uid}"
    except OSError:
        owner = "another user"
    return (
        f"uid {os.getuid()} may not open {path}, whose directory belongs to {owner}: run the "
        "engine as that user, or list it in the agent's allowed_uids and let it enter the "
        "directory"
    )
