"""One child process, from start to a clean end."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


class Process:
    """A command that this process started, in a session of its own.

    A terminal's Ctrl-C then reaches it through its parent, and in order.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`log`: where it writes, else to this process's stderr; `environment`: its whole one."""
        self.name = name
        self._log = log
        stream = log.open("ab") if log is not None else None
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                # stdout belongs to the command that was called.
                stdout=stream or sys.stderr.fileno(),
                stderr=stream,
                env=environment,
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
