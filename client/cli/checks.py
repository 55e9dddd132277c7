"""What `memshare doctor` looks at on the host. Each check tells what is wrong and what to do."""

from __future__ import annotations

import os
import pwd
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from memshare.client.cli.host import available_memory
from memshare.client.cli.units import format_bytes
from memshare.v1 import handoff_pb2
from memshare.wire.errors import MemshareError
from memshare.wire.handoff import connect_pool
from memshare.wire.runtime import RuntimeDirectory
from memshare.wire.sockets import is_served, peer_credentials

_LITTLE_MEMORY: Final = 512 << 20


@dataclass(frozen=True)
class Finding:
    """The result of one check; a problem makes `memshare doctor` fail."""

    check: str
    state: Literal["ok", "warning", "problem"]
    message: str
    fix: str = ""


def check_directory(runtime: RuntimeDirectory, serving_uid: int | None) -> Finding:
    """The runtime directory exists, and nobody but the sidecar's user can write to it."""
    name, path = "runtime directory", runtime.path
    try:
        status = path.stat()
    except FileNotFoundError:
        return Finding(
            name,
            "problem",
            f"{path} does not exist: no sidecar has run here",
            "start one with `memshare up`, or name its directory with --runtime-dir",
        )
    except PermissionError:
        return Finding(
            name,
            "problem",
            f"uid {os.geteuid()} cannot look into {path.parent}",
            "run this as the sidecar's user",
        )
    mode = stat.S_IMODE(status.st_mode)
    owner = f"belongs to uid {status.st_uid}, mode {mode:04o}"
    if mode & 0o002:
        return Finding(
            name, "problem", f"{path} {owner}: anyone can replace its sockets", f"chmod 0750 {path}"
        )
    user = os.geteuid() if serving_uid is None else serving_uid
    if status.st_uid not in (user, 0):
        doing = "is this process" if serving_uid is None else "serves in it"
        return Finding(
            name,
            "problem",
            f"{path} belongs to uid {status.st_uid}, but uid {user} {doing}: uid "
            f"{status.st_uid} could replace the sockets, and memshare refuses to start there",
            f"chown {user} {path}, or run memshare as uid {status.st_uid}",
        )
    if mode & 0o005:
        return Finding(
            name, "warning", f"{path} {owner}: other users can look into it", f"chmod 0750 {path}"
        )
    return Finding(name, "ok", f"{path} {owner}")


def check_socket(path: Path, owner: str) -> Finding:
    """A process serves the socket, and its mode keeps other users out."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return Finding(
            path.name,
            "problem",
            f"{path} is missing: {owner} does not run",
            f"start it with `memshare up`, or look into the log of {owner}",
        )
    except PermissionError:
        return Finding(
            path.name,
            "problem",
            f"uid {os.geteuid()} may not enter {path.parent}",
            "run this as the sidecar's user or a member of its group",
        )
    if not is_served(path):
        return Finding(
            path.name,
            "problem",
            f"{path} is left over: {owner} ended without removing it",
            "start `memshare up` again: it replaces left-over sockets",
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o007:
        return Finding(
            path.name,
            "problem",
            f"{path} has mode {mode:04o}: any user that can enter {path.parent} can talk to it",
            f"chmod 0660 {path}",
        )
    return Finding(path.name, "ok", f"live, uid {status.st_uid}, mode {mode:04o}")


def check_handoff(runtime: RuntimeDirectory, uid: int | None) -> Finding:
    """An engine of this user (or of `uid`) is granted the pool, and the memory is there."""
    name = "engine access"
    user = os.geteuid() if uid is None else uid
    path = runtime.owner_socket
    try:
        with acting_as(uid):
            connection = connect_pool(path, handoff_pb2.POOL_ROLE_ENGINE, timeout=5.0)
            manager_is_open = os.access(runtime.manager_socket, os.W_OK, effective_ids=True)
    except MemshareError as error:
        if isinstance(error.__cause__, PermissionError):
            return _refused_by_mode(name, runtime, path, user)
        message, _, fix = str(error).partition(": ")
        return Finding(name, "problem", message, fix)
    if not manager_is_open and runtime.manager_socket.exists():
        connection.close()
        return _refused_by_mode(name, runtime, runtime.manager_socket, user)
    try:
        size = os.fstat(connection.descriptor).st_size
    finally:
        connection.close()
    pool = connection.pool
    if size < pool.pool_bytes:
        return Finding(
            name,
            "problem",
            f"the pool has {size} of {pool.pool_bytes} bytes",
            "stop the sidecar and start it again",
        )
    return Finding(name, "ok", f"an engine of uid {user} may map {format_bytes(pool.pool_bytes)}")


def check_memory() -> Finding:
    """The host has memory left beside the pool."""
    available = available_memory()
    if available < _LITTLE_MEMORY:
        return Finding(
            "host memory",
            "warning",
            f"only {format_bytes(available)} are available",
            "start the sidecar with a smaller --pool-bytes",
        )
    return Finding("host memory", "ok", f"{format_bytes(available)} available")


def serving_uid(path: Path) -> int | None:
    """The user whose process serves a socket, None if nobody does or we may not ask."""
    for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(path))
            except OSError:
                continue
            return peer_credentials(probe).uid
    return None


@contextmanager
def acting_as(uid: int | None) -> Iterator[None]:
    """Be another user for the kernel's checks; only root can."""
    if uid is None or uid == os.geteuid():
        yield
        return
    own, own_gid, own_groups = os.geteuid(), os.getegid(), os.getgroups()
    try:
        entry = pwd.getpwuid(uid)
        gid, groups = entry.pw_gid, os.getgrouplist(entry.pw_name, entry.pw_gid)
    except KeyError:
        gid, groups = uid, [uid]
    os.setgroups(groups)
    os.setegid(gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(own)
        os.setegid(own_gid)
        os.setgroups(own_groups)


def _refused_by_mode(name: str, runtime: RuntimeDirectory, path: Path, user: int) -> Finding:
    directory, status = runtime.path.stat(), path.stat()
    return Finding(
        name,
        "problem",
        f"an engine of uid {user} cannot reach {path} of uid {status.st_uid}: the directory has "
        f"gid {directory.st_gid} and mode {stat.S_IMODE(directory.st_mode):04o}, the socket gid "
        f"{status.st_gid} and mode {stat.S_IMODE(status.st_mode):04o}",
        f"run the engine as uid {status.st_uid}, or run the sidecar in a group that uid {user} "
        "belongs to, with that group's number in --allowed-gids",
    )
