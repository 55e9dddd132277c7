"""The checks that need a CUDA device, as one script for a machine that has one."""

from __future__ import annotations

import sys


def main() -> int:
    """Run them. Returns the exit code."""
    print("memshare has no CUDA backend yet: the pool lives in host memory; nothing to check")
    return 0


if __name__ == "__main__":
    sys.exit(main())
