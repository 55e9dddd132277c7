"""The directory where a sidecar's sockets lie."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from memshare.wire import runtime
from memshare.wire.errors import InvalidArgument
from memshare.wire.runtime import MAX_DIRECTORY_BYTES, RuntimeDirectory


def test_the_environment_names_the_directory(monkeypatch):
    monkeypatch.setenv(runtime.ENVIRONMENT, "/somewhere/else")
    assert RuntimeDirectory.default().manager_socket == Path("/somewhere/else/manager.sock")


@pytest.mark.parametrize(
    ("uid", "session", "expected"),
    [
        (0, "/run/user/0", "/run/memshare"),
        (1000, "/run/user/1000", "/run/user/1000/memshare"),
        (1000, None, "/tmp/memshare-1000"),
    ],
)
def test_each_user_has_a_directory_of_its_own(monkeypatch, uid, session, expected):
    monkeypatch.delenv(runtime.ENVIRONMENT, raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: uid)
    monkeypatch.setattr(runtime.tempfile, "gettempdir", lambda: "/tmp")
    if session:
        monkeypatch.setenv("XDG_RUNTIME_DIR", session)
    assert runtime.default_directory() == Path(expected)


def test_the_longest_directory_allowed_still_fits_a_sockets_path():
    longest = RuntimeDirectory(Path("/" + "d" * (MAX_DIRECTORY_BYTES - 1)))
    for socket in (longest.owner_socket, longest.worker_socket, longest.manager_socket):
        assert len(os.fsencode(socket)) < 108
    with pytest.raises(InvalidArgument, match="too long for a Unix socket"):
        RuntimeDirectory(Path("/" + "d" * MAX_DIRECTORY_BYTES))


def test_bytes_count_not_characters():
    with pytest.raises(InvalidArgument, match="too long"):
        RuntimeDirectory(Path("/" + "ü" * (MAX_DIRECTORY_BYTES // 2)))


def test_others_cannot_look_into_a_directory_that_was_made(runtime_dir):
    directory = RuntimeDirectory(runtime_dir / "a" / "b")
    before = os.umask(0)
    try:
        directory.create()
    finally:
        os.umask(before)
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o750
    directory.create()


def test_a_directory_that_others_may_write_to_is_refused(runtime_dir):
    runtime_dir.chmod(0o777)
    with pytest.raises(InvalidArgument, match=r"mode 777: use one of uid \d+"):
        RuntimeDirectory(runtime_dir).create()
