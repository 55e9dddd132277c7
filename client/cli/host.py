"""What this host has to give."""

from __future__ import annotations

from pathlib import Path
from typing import Final

MAX_DEFAULT_POOL: Final = 2 << 30
# Engines have weights and activations to hold as well.
DEFAULT_POOL_SHARE: Final = 4
_GRANULE: Final = 2 << 20


def available_memory(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Bytes that can be allocated without swapping, within the container's limit if it has one."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used))


def default_pool_bytes(available: int) -> int:
    """A quarter of the available memory, at most 2 GiB, in whole 2 MiB."""
    share = min(available // DEFAULT_POOL_SHARE, MAX_DEFAULT_POOL)
    return max(share - share % _GRANULE, _GRANULE)
