"""Packets of the memory owner's socket: bounded, whole, and without leaked descriptors."""

from __future__ import annotations

import array
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memshare.v1 import handoff_pb2
from memshare.wire.errors import AgentUnavailable, PeerRefused, VersionMismatch
from memshare.wire.handoff import MAX_PACKET, PoolConnection, connect_pool, receive_packet

ENGINE = handoff_pb2.POOL_ROLE_ENGINE


def descriptors():
    """What is open, by number and what it leads to: threads of other tests may close theirs."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add((entry.name, os.readlink(entry)))
    return found


def pair():
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(connection, data, *files):
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    connection.sendmsg([data], rights)


@given(st.binary(min_size=1, max_size=MAX_PACKET + 100), st.booleans())
def test_any_bytes_are_a_packet_or_refused_and_leak_nothing(data, with_file):
    ours, theirs = pair()
    with ours, theirs, open(os.devnull) as file:
        before = descriptors()
        send(theirs, data, *([file.fileno()] if with_file else []))
        try:
            packet, descriptor = receive_packet(ours)
        except ValueError:
            pass
        else:
            assert len(data) <= MAX_PACKET
            assert isinstance(packet, handoff_pb2.PoolPacket)
            assert (descriptor >= 0) == with_file
            if with_file:
                os.close(descriptor)
        assert not descriptors() - before


def test_a_packet_and_its_descriptor_arrive_together():
    ours, theirs = pair()
    sent = handoff_pb2.PoolPacket(grant=handoff_pb2.PoolGrant(protocol=1, token=b"t"))
    with ours, theirs, open(os.devnull) as file:
        send(theirs, sent.SerializeToString(), file.fileno())
        packet, descriptor = receive_packet(ours)
        assert packet == sent
        assert os.path.sameopenfile(descriptor, file.fileno())
        assert not os.get_inheritable(descriptor)
        os.close(descriptor)


def test_surplus_descriptors_are_closed():
    ours, theirs = pair()
    packet = handoff_pb2.PoolPacket(holders=handoff_pb2.Holders(holders=[handoff_pb2.Holder()]))
    with ours, theirs, open(os.devnull) as file:
        for count in (2, 3, 20):
            before = descriptors()
            send(theirs, packet.SerializeToString(), *[file.fileno()] * count)
            try:
                _, descriptor = receive_packet(ours)
            except ValueError:
                pass
            else:
                os.close(descriptor)
            assert not descriptors() - before


def test_a_packet_longer_than_the_bound_is_refused():
    ours, theirs = pair()
    with ours, theirs:
        send(theirs, bytes(MAX_PACKET + 1))
        with pytest.raises(ValueError, match=f"longer than {MAX_PACKET} bytes"):
            receive_packet(ours)


def test_the_end_of_the_connection_is_told_from_a_packet():
    ours, theirs = pair()
    with ours:
        theirs.close()
        with pytest.raises(EOFError):
            receive_packet(ours)


def test_an_open_connection_is_told_from_a_closed_one():
    ours, theirs = pair()
    connection = PoolConnection(ours, -1, handoff_pb2.PoolGrant().pool)
    assert connection.is_open()
    send(theirs, b"unread")
    assert connection.is_open()
    ours.recv(16)
    theirs.close()
    assert not connection.is_open()
    connection.close()
    assert not connection.is_open()


def owner_that_answers(path, answer):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(1)

    def serve():
        with listener:
            connection, _ = listener.accept()
            with connection:
                connection.recv(MAX_PACKET)
                if answer is not None:
                    connection.send(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def refusal(reason):
    packet = handoff_pb2.PoolPacket(
        refusal=handoff_pb2.PoolRefusal(reason=reason, message="because so")
    )
    return packet.SerializeToString()


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (refusal("PEER_REFUSED"), PeerRefused, "because so"),
        (refusal("VERSION_MISMATCH"), VersionMismatch, "because so"),
        (refusal("SOMETHING_NEWER"), AgentUnavailable, "because so"),
        (None, AgentUnavailable, "memshare up"),
        (b"\xff\xff garbage", AgentUnavailable, "not a packet of this protocol"),
        (
            handoff_pb2.PoolPacket(grant=handoff_pb2.PoolGrant(protocol=1)).SerializeToString(),
            AgentUnavailable,
            "granted no pool",
        ),
    ],
)
def test_an_owner_that_grants_nothing_is_told_readably(runtime_dir, answer, kind, words):
    path = runtime_dir / "owner.sock"
    before = descriptors()
    thread = owner_that_answers(path, answer)
    with pytest.raises(kind, match=words):
        connect_pool(path, ENGINE)
    thread.join()
    assert not descriptors() - before


def test_no_owner_is_told_with_what_to_do(runtime_dir):
    before = descriptors()
    with pytest.raises(AgentUnavailable, match=r"no memory owner.*memshare up.*MEMSHARE_RUNTIME"):
        connect_pool(runtime_dir / "owner.sock", ENGINE)
    assert not descriptors() - before


def holders(sequence, *pids):
    found = [handoff_pb2.Holder(pid=pid) for pid in pids]
    packet = handoff_pb2.PoolPacket(holders=handoff_pb2.Holders(holders=found, sequence=sequence))
    return packet.SerializeToString()


def asked(connection):
    packet, _ = receive_packet(connection)
    return packet.holders_request.sequence


def test_a_late_list_of_holders_is_not_taken_for_the_answer_to_a_later_question():
    ours, theirs = pair()
    with ours, theirs:
        theirs.settimeout(5)
        connection = PoolConnection(ours, -1, handoff_pb2.PoolGrant().pool)
        with pytest.raises(AgentUnavailable, match="does not answer"):
            connection.list_holders(timeout=0.05)
        first = asked(theirs)
        send(theirs, holders(first))  # what held then: nobody

        def answer():
            send(theirs, holders(asked(theirs), 7))

        thread = threading.Thread(target=answer)
        thread.start()
        assert [holder.pid for holder in connection.list_holders()] == [7]
        thread.join()


def test_questions_do_not_pile_up_before_an_owner_that_does_not_answer():
    ours, theirs = pair()
    with ours, theirs:
        connection = PoolConnection(ours, -1, handoff_pb2.PoolGrant().pool)
        for _ in range(3):
            with pytest.raises(AgentUnavailable):
                connection.list_holders(timeout=0.02)
        asked(theirs)
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)


@pytest.mark.parametrize("answer", [b"\xff garbage", refusal("PEER_REFUSED")])
def test_what_is_no_list_of_holders_is_not_taken_for_an_empty_one(answer):
    ours, theirs = pair()
    with ours, theirs:
        send(theirs, answer)
        connection = PoolConnection(ours, -1, handoff_pb2.PoolGrant().pool)
        with pytest.raises(AgentUnavailable):
            connection.list_holders(timeout=0.05)
