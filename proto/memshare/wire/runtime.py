"""Where a host's memshare processes meet: one directory of sockets."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from memshare.wire.errors import InvalidArgument

ENVIRONMENT: Final = "MEMSHARE_RUNTIME_DIR"
# sun_path holds 108 bytes with its NUL; the longest name below needs 17 of them.
MAX_DIRECTORY_BYTES: Final = 90


def default_directory() -> Path:
    """`$MEMSHARE_RUNTIME_DIR`, else the user's runtime directory, else one under /tmp."""
    if configured := os.environ.get(ENVIRONMENT):
        return Path(configured)
    if os.getuid() == 0:
        return Path("/run/memshare")
    if session := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(session) / "memshare"
    return Path(tempfile.gettempdir()) / f"memshare-{os.getuid()}"


@dataclass(frozen=True)
class RuntimeDirectory:
    """The sockets of one sidecar."""

    path: Path

    def __post_init__(self) -> None:
        if len(os.fsencode(self.path)) > MAX_DIRECTORY_BYTES:
            raise InvalidArgument(
                f"runtime directory {self.path} is too long for a Unix socket: use at most "
                f"{MAX_DIRECTORY_BYTES} bytes"
            )

    @classmethod
    def default(cls) -> RuntimeDirectory:
        """The directory that everything uses unless told otherwise."""
        return cls(default_directory())

    @classmethod
    def at(cls, path: Path | str | None) -> RuntimeDirectory:
        """The directory at `path`, or the default one with None or ""."""
        return cls(Path(path)) if path else cls.default()

    @property
    def owner_socket(self) -> Path:
        """The memory owner's descriptor-passing socket."""
        return self.path / "owner.sock"

    @property
    def worker_socket(self) -> Path:
        """AgentService of the worker."""
        return self.path / "worker.sock"

    @property
    def manager_socket(self) -> Path:
        """ManagerService and AdminService."""
        return self.path / "manager.sock"

    def create(self) -> None:
        """Make the directory, for its owner and group alone.

        Raises `InvalidArgument` if it exists and others may write into it.
        """
        self.path.mkdir(mode=0o750, parents=True, exist_ok=True)
        status = self.path.stat()
        if status.st_mode & 0o002 or status.st_uid not in (os.getuid(), 0):
            raise InvalidArgument(
                f"runtime directory {self.path} belongs to uid {status.st_uid} with mode "
                f"{status.st_mode & 0o7777:o}: use one of uid {os.getuid()} that others "
                "cannot write to"
            )
