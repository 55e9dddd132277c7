"""Run a command that ends when the process that started it does.

    python -m memshare.client.serving.tied PARENT COMMAND ...

A kill -9 of a bench must not leave a server behind. The kernel sends the command SIGTERM once
the thread that started it has ended; it keeps that promise over `exec`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Become the command."""
    parent, *command = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(parent):
        raise SystemExit(f"the process {parent} has ended")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
