"""The owner's side of descriptor passing: who may map the pool, and who has it mapped."""

from __future__ import annotations

import array
import asyncio
import os
import secrets
import socket
from dataclasses import dataclass
from typing import Final

import structlog

from memshare.gpu_agent.config import AgentSettings
from memshare.gpu_agent.pool import HostPool
from memshare.v1 import handoff_pb2
from memshare.wire import handoff
from memshare.wire.errors import AgentUnavailable, InvalidArgument, MemshareError, PeerRefused
from memshare.wire.sockets import PeerCredentials, peer_credentials
from memshare.wire.tokens import KEY_BYTES, mint_token
from memshare.wire.version import VERSION, agree_protocol

# Descriptors too few for another connection: wait for one to close.
_ACCEPT_PAUSE: Final = 0.1
_ROLE_NAMES: Final = {
    handoff_pb2.POOL_ROLE_ENGINE: "engine",
    handoff_pb2.POOL_ROLE_MANAGER: "manager",
    handoff_pb2.POOL_ROLE_WATCHER: "watcher",
}

log = structlog.get_logger()


@dataclass
class _Connection:
    socket: socket.socket
    peer: PeerCredentials
    deadline: asyncio.TimerHandle | None = None
    role: int = handoff_pb2.POOL_ROLE_UNSPECIFIED
    token: bytes = b""


class HandoffServer:
    """Serves the pool's descriptor on a listening SOCK_SEQPACKET socket.

    Runs on the event loop and never blocks it. A peer that breaks the protocol loses its own
    connection and nothing else.
    """

    def __init__(self, listener: socket.socket, pool: HostPool, settings: AgentSettings) -> None:
        self._listener = listener
        self._pool = pool
        self._settings = settings
        self._key = secrets.token_bytes(KEY_BYTES)
        self._loop = asyncio.get_running_loop()
        self._connections: dict[int, _Connection] = {}
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Stop listening and end all connections: the peers learn that the owner is gone."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for connection in list(self._connections.values()):
            self._drop(connection)

    def _accept(self) -> None:
        try:
            peer_socket, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            log.error("cannot accept a connection", error=str(error))
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_ACCEPT_PAUSE, self._resume)
            return
        peer_socket.setblocking(False)
        connection = _Connection(peer_socket, peer_credentials(peer_socket))
        if len(self._connections) >= self._settings.max_connections:
            limit = AgentUnavailable(
                f"the memory owner serves {self._settings.max_connections} connections, its "
                "limit: close one or raise max_connections"
            )
            self._refuse(connection, limit)
            return
        self._connections[peer_socket.fileno()] = connection
        connection.deadline = self._loop.call_later(
            self._settings.request_timeout, self._expire, connection
        )
        self._loop.add_reader(peer_socket, self._read, connection)

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _expire(self, connection: _Connection) -> None:
        log.warning("a connection asked for nothing in time", peer=connection.peer.pid)
        self._drop(connection)

    def _read(self, connection: _Connection) -> None:
        try:
            packet, descriptor = handoff.receive_packet(connection.socket)
        except BlockingIOError:
            return
        except ValueError as error:
            log.warning("closed a connection", peer=connection.peer.pid, error=str(error))
            self._drop(connection)
            return
        except (EOFError, OSError):
            self._drop(connection)
            return
        if descriptor >= 0:
            os.close(descriptor)
        kind = packet.WhichOneof("message")
        try:
            if kind == "request" and not connection.role:
                self._grant(connection, packet.request)
            elif kind == "holders_request" and connection.role == handoff_pb2.POOL_ROLE_MANAGER:
                holders = self._holders(packet.holders_request.sequence)
                self._send(connection, handoff_pb2.PoolPacket(holders=holders))
            else:
                log.warning("closed a connection", peer=connection.peer.pid, unexpected=kind)
                self._drop(connection)
        except MemshareError as error:
            self._refuse(connection, error)

    def _grant(self, connection: _Connection, request: handoff_pb2.PoolRequest) -> None:
        if request.role not in _ROLE_NAMES:
            raise InvalidArgument(f"role {request.role} is unknown")
        role = _ROLE_NAMES[request.role]
        self._check_peer(connection.peer, role)
        protocol = agree_protocol(
            request.min_protocol, request.max_protocol, f"the {role}", request.version
        )
        grant = handoff_pb2.PoolGrant(
            protocol=protocol, version=VERSION, pool=self._pool.describe()
        )
        if request.role == handoff_pb2.POOL_ROLE_MANAGER:
            grant.token_key = self._key
        elif request.role == handoff_pb2.POOL_ROLE_ENGINE:
            connection.token = mint_token(self._key, connection.peer)
            grant.token = connection.token
        connection.role = request.role
        if connection.deadline is not None:
            connection.deadline.cancel()
        watches = request.role == handoff_pb2.POOL_ROLE_WATCHER
        descriptor = -1 if watches else self._pool.descriptor
        if self._send(connection, handoff_pb2.PoolPacket(grant=grant), descriptor):
            log.info(
                "granted the pool", role=role, peer=connection.peer.pid, uid=connection.peer.uid
            )

    def _check_peer(self, peer: PeerCredentials, role: str) -> None:
        own = os.getuid()
        if peer.uid in (own, 0):
            return
        if role == "manager":
            raise PeerRefused(
                f"a manager of uid {peer.uid} may not drive the agent of uid {own}: run both "
                "as one user",
                peer_uid=peer.uid,
                own_uid=own,
            )
        if peer.uid in self._settings.allowed_uids or peer.gid in self._settings.allowed_gids:
            return
        raise PeerRefused(
            f"an engine of uid {peer.uid} (gid {peer.gid}) may not map the pool of the agent of "
            f"uid {own}: run both as one user, or start the agent with --allowed-uids {peer.uid} "
            f"(MEMSHARE_AGENT_ALLOWED_UIDS='[{peer.uid}]')",
            peer_uid=peer.uid,
            own_uid=own,
        )

    def _holders(self, sequence: int) -> handoff_pb2.Holders:
        return handoff_pb2.Holders(
            sequence=sequence,
            holders=[
                handoff_pb2.Holder(
                    pid=connection.peer.pid, uid=connection.peer.uid, token=connection.token
                )
                for connection in self._connections.values()
                if connection.role == handoff_pb2.POOL_ROLE_ENGINE
            ],
        )

    def _refuse(self, connection: _Connection, error: MemshareError) -> None:
        log.warning("refused a connection", peer=connection.peer.pid, reason=error.reason,
                    error=str(error))  # fmt: skip
        refusal = handoff_pb2.PoolRefusal(reason=error.reason, message=str(error))
        self._send(connection, handoff_pb2.PoolPacket(refusal=refusal))
        self._drop(connection)

    def _send(
        self, connection: _Connection, packet: handoff_pb2.PoolPacket, descriptor: int = -1
    ) -> bool:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        try:
            connection.socket.sendmsg(
                [packet.SerializeToString()], rights if descriptor >= 0 else []
            )
        except OSError as error:
            # The peer is gone, or does not read what it asks for.
            log.warning("closed a connection", peer=connection.peer.pid, error=str(error))
            self._drop(connection)
            return False
        return True

    def _drop(self, connection: _Connection) -> None:
        if connection.deadline is not None:
            connection.deadline.cancel()
        number = connection.socket.fileno()
        if number >= 0:
            self._loop.remove_reader(number)
            self._connections.pop(number, None)
            connection.socket.close()
