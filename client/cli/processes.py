"""One child process of the sidecar, from start to a clean end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from memshare.wire.errors import MemshareError


class SidecarFailed(MemshareError):
    """A process of the sidecar did not start, or ended by itself."""

    reason = "SIDECAR_FAILED"


class Child:
    """`memshare agent` or `memshare manager`, started by this process.

    It has a session of its own, so that a terminal's Ctrl-C reaches it through its parent and
    in order, and it stops by itself should its parent die (see `follow`).
    """

    def __init__(self, name: str, arguments: Sequence[str], log: Path | None = None) -> None:
        self.name = name
        self._log = log
        command = [sys.executable, "-m", "memshare.client.cli", name, *arguments]
        command += ["--follow", str(os.getpid())]
        stream = log.open("ab") if log is not None else None
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                # stdout belongs to the command that started the sidecar.
                stdout=stream or sys.stderr.fileno(),
                stderr=stream,
                start_new_session=True,
            )
        finally:
            if stream is not None:
                stream.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def ended(self) -> str | None:
        """How it ended (`exit status 1`, `SIGKILL`), or None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        return f"exit status {code}" if code >= 0 else signal.Signals(-code).name

    def last_words(self, lines: int = 5) -> str:
        """The end of its log, empty if the log is not ours to read."""
        if self._log is None:
            return ""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait()

    def was_killed(self) -> bool:
        """Whether a signal that it did not handle ended it."""
        return (self.process.poll() or 0) < 0

    def stop(self, timeout: float) -> bool:
        """Ask it to stop, and kill it when it has not within `timeout` seconds.

        Returns whether it stopped by itself.
        """
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        return True


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
