"""Who gets the pool's descriptor, and what a bad peer can do to the owner: nothing."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memshare.gpu_agent.pool import HostPool
from memshare.v1 import handoff_pb2
from memshare.wire import handoff, version
from memshare.wire.errors import AgentUnavailable, TokenRefused, VersionMismatch
from memshare.wire.tokens import verify_token

if TYPE_CHECKING:
    from conftest import Agent

ENGINE = handoff_pb2.POOL_ROLE_ENGINE
MANAGER = handoff_pb2.POOL_ROLE_MANAGER
# An engine of another user, told by the two arguments which uid and socket to use.
OTHER_USER = """
import os, sys
from pathlib import Path
from memshare.v1 import handoff_pb2
from memshare.wire.errors import MemshareError
from memshare.wire.handoff import connect_pool
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[1]))
try:
    connect_pool(Path(sys.argv[3]), int(sys.argv[4])).close()
except MemshareError as error:
    sys.exit(f"{error.reason}: {error}")
"""


def raw_connection(agent: Agent) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(5)
    connection.connect(str(agent.runtime.owner_socket))
    return connection


def request_packet(low: int, high: int, role: int = ENGINE) -> bytes:
    request = handoff_pb2.PoolRequest(min_protocol=low, max_protocol=high, version="9.9", role=role)
    return handoff_pb2.PoolPacket(request=request).SerializeToString()


def is_closed(connection: socket.socket) -> bool:
    """Whether the owner hangs up, whatever it says before."""
    with suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


def test_an_engine_maps_the_memory_that_all_others_map(agent: Agent) -> None:
    first, second = agent.connect(), agent.connect()
    pools = [HostPool.attach(os.dup(one.descriptor), one.pool.pool_id) for one in (first, second)]
    assert first.pool == second.pool
    assert pools[0].num_bytes == first.pool.pool_bytes
    pools[0].rows(64, 4)[5] = 17
    assert (pools[1].rows(64, 4)[5] == 17).all()
    for each in (*pools, first, second):
        each.close()


def test_a_granted_descriptor_cannot_be_truncated(agent: Agent) -> None:
    connection = agent.connect()
    with pytest.raises(PermissionError):
        os.ftruncate(connection.descriptor, 0)
    assert fcntl.fcntl(connection.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
    connection.close()


def test_the_manager_can_check_tokens_and_an_engine_cannot(agent: Agent) -> None:
    engine, manager = agent.connect(), agent.connect(MANAGER)
    peer = verify_token(manager.token_key, engine.token)
    assert (peer.pid, peer.uid) == (os.getpid(), os.getuid())
    assert not engine.token_key
    assert not manager.token
    with pytest.raises(TokenRefused):
        verify_token(bytes(32), engine.token)
    engine.close()
    manager.close()


def test_the_manager_sees_who_holds_the_pool_until_they_close(agent: Agent) -> None:
    manager, engine = agent.connect(MANAGER), agent.connect()
    (holder,) = manager.list_holders()
    assert (holder.pid, holder.uid) == (os.getpid(), os.getuid())
    assert holder.token == engine.token
    engine.close()
    deadline = time.monotonic() + 5
    while manager.list_holders():
        assert time.monotonic() < deadline
    manager.close()


def test_a_watcher_holds_nothing(agent: Agent) -> None:
    manager, watcher = agent.connect(MANAGER), agent.connect(handoff_pb2.POOL_ROLE_WATCHER)
    assert (watcher.descriptor, watcher.token, watcher.token_key) == (-1, b"", b"")
    assert manager.list_holders() == []
    assert watcher.is_open()
    watcher.close()
    manager.close()


def test_an_engine_may_not_list_holders(agent: Agent) -> None:
    engine = agent.connect()
    packet = handoff_pb2.PoolPacket(holders_request=handoff_pb2.HoldersRequest())
    engine.connection.send(packet.SerializeToString())
    assert is_closed(engine.connection)
    engine.close()


@pytest.mark.parametrize(("low", "high"), [(2, 9), (0, 0), (1, 0)])
def test_a_version_mismatch_names_both_versions(agent: Agent, low: int, high: int) -> None:
    with raw_connection(agent) as connection:
        connection.send(request_packet(low, high))
        packet, descriptor = handoff.receive_packet(connection)
        assert descriptor == -1
        assert packet.refusal.reason == VersionMismatch.reason
        assert "9.9" in packet.refusal.message
        assert version.VERSION in packet.refusal.message
        assert is_closed(connection)


@pytest.mark.parametrize("role", [0, 7])
def test_an_unknown_role_is_refused(agent: Agent, role: int) -> None:
    with raw_connection(agent) as connection:
        connection.send(request_packet(1, 1, role))
        packet, _ = handoff.receive_packet(connection)
        assert packet.refusal.reason == "INVALID_ARGUMENT"
        assert is_closed(connection)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_another_user_is_refused_by_name_and_served_when_allowed(
    start_agent: Callable[..., Agent],
) -> None:
    agent = start_agent("--allowed-uids", "12345", "--allowed-gids", "777").wait_owner()
    # Let them reach the socket, so that the owner has to say no.
    for path, mode in (
        (agent.runtime.path.parent, 0o755),
        (agent.runtime.path, 0o755),
        (agent.runtime.owner_socket, 0o666),
    ):
        path.chmod(mode)

    def connect(uid: int, gid: int, role: int = ENGINE) -> str:
        arguments = [str(uid), str(gid), str(agent.runtime.owner_socket), str(role)]
        return subprocess.run(
            [sys.executable, "-c", OTHER_USER, *arguments],
            capture_output=True,
            text=True,
            timeout=30,
        ).stderr.strip()

    refusal = connect(54321, 1)
    assert refusal.startswith("PEER_REFUSED: an engine of uid 54321 (gid 1)")
    assert "the agent of uid 0" in refusal
    assert "--allowed-uids 54321" in refusal
    assert connect(12345, 1) == ""
    assert connect(54321, 777) == ""
    assert connect(12345, 1, MANAGER).startswith("PEER_REFUSED: a manager of uid 12345")


def test_only_the_group_reaches_the_sockets(agent: Agent) -> None:
    def mode(path: os.PathLike[str]) -> int:
        return os.stat(path).st_mode & 0o777

    assert mode(agent.runtime.path) == 0o750
    assert mode(agent.runtime.owner_socket) == 0o660
    assert mode(agent.runtime.worker_socket) == 0o600


@settings(max_examples=60, deadline=None)
@given(packets=st.lists(st.binary(max_size=200), max_size=4))
def test_garbage_closes_its_own_connection_and_nothing_else(
    agent: Agent, packets: list[bytes]
) -> None:
    with raw_connection(agent) as connection, suppress(ConnectionError):
        for packet in packets:
            connection.send(packet)
    agent.connect().close()


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 30), flips=st.lists(st.integers(0, 239), max_size=3))
def test_a_damaged_request_closes_its_own_connection_and_nothing_else(
    agent: Agent, cut: int, flips: list[int]
) -> None:
    data = bytearray(request_packet(1, 1))
    for bit in flips:
        data[bit // 8 % len(data)] ^= 1 << bit % 8
    with raw_connection(agent) as connection, suppress(ConnectionError):
        connection.send(data[: len(data) - cut])
    agent.connect().close()


@pytest.mark.parametrize("size", [4097, 100_000])
def test_a_huge_packet_is_not_read(agent: Agent, size: int) -> None:
    with raw_connection(agent) as connection:
        connection.send(bytes(size))
        assert is_closed(connection)
    assert any("longer than" in event.get("error", "") for event in agent.events())


def test_a_silent_connection_ends_in_time(agent: Agent) -> None:
    with raw_connection(agent) as connection:
        started = time.monotonic()
        assert is_closed(connection)
        assert time.monotonic() - started < 3


def test_a_granted_connection_may_stay_silent(agent: Agent) -> None:
    engine = agent.connect()
    time.sleep(0.7)
    assert engine.is_open()
    engine.close()


@pytest.mark.parametrize("count", [1, 2, 20])
def test_descriptors_that_a_peer_sends_are_closed(agent: Agent, count: int) -> None:
    before = agent.descriptors()
    engine = agent.connect()
    with raw_connection(agent) as connection:
        rights = array.array("i", [connection.fileno()] * count)
        connection.sendmsg([request_packet(1, 1)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        with suppress(ConnectionError, ValueError, EOFError):
            _, descriptor = handoff.receive_packet(connection)
            os.close(descriptor)
    engine.close()
    deadline = time.monotonic() + 5
    while agent.descriptors() > before:
        assert time.monotonic() < deadline


def test_connections_past_the_limit_are_refused_and_the_rest_served(
    start_agent: Callable[..., Agent],
) -> None:
    agent = start_agent("--max-connections=2").wait_owner()
    held = [agent.connect(), agent.connect()]
    with pytest.raises(AgentUnavailable):
        agent.connect()
    held.pop().close()
    deadline = time.monotonic() + 5
    while True:
        with suppress(AgentUnavailable):
            held.append(agent.connect())
            break
        assert time.monotonic() < deadline
    for connection in held:
        connection.close()


def test_a_hundred_engines_that_vanish_leave_no_descriptors(agent: Agent) -> None:
    agent.connect().close()
    time.sleep(0.1)
    before = agent.descriptors()
    for _ in range(100):
        agent.connect().close()
    deadline = time.monotonic() + 5
    while agent.descriptors() > before:
        assert time.monotonic() < deadline


def test_written_rows_are_seen_by_the_worker(agent: Agent) -> None:
    from memshare.v1 import agent_pb2
    from memshare.wire import packing

    engine = agent.connect()
    rows = HostPool.attach(os.dup(engine.descriptor), engine.pool.pool_id).rows(64, 4)
    rows[1] = 7
    with agent.channel() as channel:
        stub = agent.stub(channel)
        epoch = stub.GetAgentInfo(agent_pb2.GetAgentInfoRequest()).worker_epoch
        stub.CopyRows(
            agent_pb2.CopyRowsRequest(
                worker_epoch=epoch,
                row_bytes=64,
                source_rows=packing.pack([1], packing.INT32),
                destination_rows=packing.pack([2], packing.INT32),
            )
        )
        assert np.array_equal(rows[1], rows[2])
        stub.ZeroRows(
            agent_pb2.ZeroRowsRequest(
                worker_epoch=epoch, row_bytes=64, rows=packing.pack([1], packing.INT32)
            )
        )
    assert not rows[1].any()
    assert rows[2].all()
    engine.close()
