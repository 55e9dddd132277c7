"""One child process of the sidecar, from start to a clean end."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from memshare.client.process import Process
from memshare.wire.errors import MemshareError


class SidecarFailed(MemshareError):
    """A process of the sidecar did not start, or ended by itself."""

    reason = "SIDECAR_FAILED"


class Child(Process):
    """`memshare agent` or `memshare manager`, started by this process.

    It stops by itself should its parent die (see `follow`).
    """

    def __init__(self, name: str, arguments: Sequence[str], log: Path | None = None) -> None:
        command = [sys.executable, "-m", "memshare.client.cli", name, *arguments]
        super().__init__(name, [*command, "--follow", str(os.getpid())], log)


def follow(parent: int) -> None:
    """Send this process SIGTERM once its parent process has ended.

    A kill -9 of `memshare up` must not leave the memory owner behind.
    """
    descriptor = os.pidfd_open(parent)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)

    def wait() -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="follow-parent", daemon=True).start()
