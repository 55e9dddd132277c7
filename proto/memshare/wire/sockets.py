"""Claiming a Unix socket path: never steal a live one, replace a dead one."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from memshare.wire.errors import SocketInUse


@dataclass(frozen=True)
class PeerCredentials:
    """Who is at the other end of a Unix socket, by the kernel's word (SO_PEERCRED)."""

    pid: int
    uid: int
    gid: int


def peer_credentials(connection: socket.socket) -> PeerCredentials:
    """Credentials of the process that connected."""
    size = struct.calcsize("3i")
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return PeerCredentials(*struct.unpack("3i", data))


def is_served(path: Path) -> bool:
    """Whether a process accepts connections at this path, of whatever socket type."""
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(path))
            except OSError as error:
                # EPROTOTYPE: bound with another type, so try that one; a full
                # backlog (EAGAIN) or a time-out is a live listener too.
                if error.errno == errno.EPROTOTYPE:
                    continue
                return error.errno in (errno.EAGAIN, errno.EACCES) or isinstance(
                    error, TimeoutError
                )
            return True
    return False


@contextmanager
def claimed_path(path: Path) -> Iterator[bool]:
    """Hold the right to bind `path` until the block ends; then the path is removed.

    The lock file beside the path is held with flock, so that two starting processes cannot
    both find the path dead. Yields whether a dead socket was swept away. Raises
    `SocketInUse` if a live process serves the path or is about to, and if something that is no
    socket lies there.
    """
    lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SocketInUse(
                f"{path} is served by another memshare process: stop it, or choose another "
                "runtime directory",
                path=path,
            ) from None
        if is_served(path):
            raise SocketInUse(
                f"{path} is served by another process: stop it, or choose another runtime "
                "directory",
                path=path,
            )
        swept = path.exists()
        if swept and not path.is_socket():
            raise SocketInUse(
                f"{path} is not a socket: remove it, or choose another runtime directory",
                path=path,
            )
        path.unlink(missing_ok=True)
        try:
            yield swept
        finally:
            with suppress(FileNotFoundError):
                path.unlink()
    finally:
        os.close(lock)
