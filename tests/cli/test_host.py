from __future__ import annotations

from pathlib import Path

from memshare.client.cli.host import available_memory, default_pool_bytes

GIB = 1 << 30


def write_host(root: Path, available: int, limit: str | None, used: int = 0) -> tuple[Path, Path]:
    meminfo = root / "meminfo"
    meminfo.write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available // 1024} kB\n")
    if limit is not None:
        (root / "memory.max").write_text(limit + "\n")
        (root / "memory.current").write_text(f"{used}\n")
    return meminfo, root


def test_a_host_without_limits_gives_what_is_available(tmp_path: Path) -> None:
    assert available_memory(*write_host(tmp_path, 8 * GIB, None)) == 8 * GIB
    assert available_memory(*write_host(tmp_path, 8 * GIB, "max")) == 8 * GIB


def test_a_container_gives_no_more_than_its_limit(tmp_path: Path) -> None:
    assert available_memory(*write_host(tmp_path, 8 * GIB, str(3 * GIB), GIB)) == 2 * GIB
    assert available_memory(*write_host(tmp_path, 8 * GIB, str(GIB), 2 * GIB)) == 0


def test_the_default_pool_is_a_quarter_and_at_most_two_gib() -> None:
    assert default_pool_bytes(4 * GIB) == GIB
    assert default_pool_bytes(64 * GIB) == 2 * GIB
    assert default_pool_bytes(0) == 2 << 20
    assert default_pool_bytes(GIB + 12345) % (2 << 20) == 0
