"""Socket paths: a dead one is replaced, a live one never stolen."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from memshare.wire.errors import SocketInUse
from memshare.wire.sockets import claimed_path, is_served, peer_credentials

KINDS = [socket.SOCK_STREAM, socket.SOCK_SEQPACKET]

CLAIM = """
import sys, time
from pathlib import Path
from memshare.wire.errors import SocketInUse
from memshare.wire.sockets import claimed_path
try:
    with claimed_path(Path(sys.argv[1])) as swept:
        print("won", swept, flush=True)
        sys.stdin.read()
except SocketInUse as error:
    print("lost", error, flush=True)
"""


@pytest.fixture
def path(runtime_dir):
    return runtime_dir / "some.sock"


def listen(path, kind=socket.SOCK_STREAM):
    listener = socket.socket(socket.AF_UNIX, kind)
    listener.bind(str(path))
    listener.listen(1)
    return listener


def claimant(path):
    command = [sys.executable, "-c", CLAIM, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def finish(process):
    process.stdin.close()
    process.wait(10)
    process.stdout.close()


def test_a_free_path_is_claimed_and_left_clean(path):
    with claimed_path(path) as swept:
        assert swept is False
        listen(path).close()
    assert not path.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_left_over_socket_is_replaced(path, kind):
    listen(path, kind).close()
    assert path.exists()
    assert not is_served(path)
    with claimed_path(path) as swept:
        assert swept is True
        with listen(path, kind):
            assert is_served(path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_live_socket_is_never_stolen(path, kind):
    with listen(path, kind) as listener:
        refusal = pytest.raises(SocketInUse, match="served by another process")
        with refusal as caught, claimed_path(path):
            pytest.fail("stolen")
        assert caught.value.details == {"path": str(path)}
        assert path.exists()
        with socket.socket(socket.AF_UNIX, kind) as client:
            client.connect(str(path))
            listener.accept()[0].close()


def test_a_listener_whose_queue_is_full_counts_as_live(path):
    with listen(path) as listener:
        listener.listen(0)
        waiting = []
        for _ in range(4):
            client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            client.setblocking(False)
            waiting.append(client)
            try:
                client.connect(str(path))
            except BlockingIOError:
                break
        assert is_served(path)
        for client in waiting:
            client.close()


def test_a_second_claim_is_refused_while_the_first_holds(path):
    with claimed_path(path):
        with pytest.raises(SocketInUse, match="another memshare process"), claimed_path(path):
            pytest.fail("claimed twice")
        # Nothing of the first one's was touched.
        with listen(path):
            assert is_served(path)
    with claimed_path(path):
        pass


def test_of_two_racing_starters_exactly_one_wins(path):
    listen(path).close()
    for _ in range(3):
        racers = [claimant(path) for _ in range(2)]
        words = sorted(racer.stdout.readline().split()[0] for racer in racers)
        for racer in racers:
            finish(racer)
        assert words == ["lost", "won"]


def test_of_many_racing_threads_exactly_one_wins(path):
    start, done = threading.Barrier(8), threading.Event()
    outcomes = []

    def race():
        start.wait()
        try:
            with claimed_path(path):
                outcomes.append("won")
                done.wait(10)
        except SocketInUse:
            outcomes.append("lost")

    racers = [threading.Thread(target=race) for _ in range(8)]
    for racer in racers:
        racer.start()
    while len(outcomes) < 8 and any(racer.is_alive() for racer in racers):
        pass
    done.set()
    for racer in racers:
        racer.join()
    assert sorted(outcomes) == ["lost"] * 7 + ["won"]


def test_a_crash_releases_the_claim(path):
    crashing = claimant(path)
    assert crashing.stdout.readline().startswith("won")
    listen(path).close()  # what the crash leaves behind
    crashing.send_signal(signal.SIGKILL)
    finish(crashing)
    with claimed_path(path) as swept:
        assert swept is True


def test_a_child_that_was_started_inside_does_not_keep_the_claim(path):
    with claimed_path(path):
        child = subprocess.Popen(["sleep", "30"])
    try:
        with claimed_path(path):
            pass
    finally:
        child.kill()
        child.wait()


def test_the_path_is_removed_when_the_block_fails(path):
    def fail():
        with claimed_path(path):
            listen(path).close()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not path.exists()


def test_nothing_and_plain_files_are_not_served(path):
    assert not is_served(path)
    path.write_text("")
    assert not is_served(path)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_names_the_peer(kind):
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with ours, theirs:
        peer = peer_credentials(ours)
    assert (peer.pid, peer.uid, peer.gid) == (os.getpid(), os.getuid(), os.getgid())


def test_a_file_that_is_no_socket_is_left_alone(path):
    path.write_text("precious")
    with pytest.raises(SocketInUse, match="not a socket"), claimed_path(path):
        pass
    assert path.read_text() == "precious"
