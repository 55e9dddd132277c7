"""Settings are refused at start, naming the key, the value and where it was set."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memshare.gpu_agent.config import load_settings
from memshare.wire.errors import InvalidArgument


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_flags_win_over_the_environment_and_that_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write(
        tmp_path / "memshare.toml",
        '[agent]\npool_bytes = "2GiB"\nthreads = 3\nsearch = "faiss"\n[manager]\nother = 1\n',
    )
    monkeypatch.setenv("MEMSHARE_AGENT_THREADS", "4")
    monkeypatch.setenv("MEMSHARE_AGENT_SEARCH", "popcount")
    settings = load_settings(config, threads=5, log_level=None)
    assert settings.pool_bytes == 2 << 30
    assert settings.threads == 5
    assert settings.search == "popcount"
    assert "pool_bytes" in settings.model_fields_set
    assert "log_level" not in settings.model_fields_set


def test_lists_are_read_from_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write(tmp_path / "memshare.toml", "[agent]\nallowed_uids = [1000, 1001]\n")
    assert load_settings(config).allowed_uids == (1000, 1001)
    monkeypatch.setenv("MEMSHARE_AGENT_ALLOWED_UIDS", "[7]")
    assert load_settings(config).allowed_uids == (7,)
    assert load_settings(config, allowed_uids=[9]).allowed_uids == (9,)


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ('allowed_uids = "1000"', ["allowed_uids", "'1000'"]),
        ("allowed_uids = [-1]", ["allowed_uids.0", "-1"]),
        ("alowed_uids = [1000]", ["alowed_uids", "1000"]),
        ('threads = "many"', ["threads", "'many'"]),
        ("threads = 0", ["threads", "0"]),
        ("threads = true", ["threads", "True"]),
        ("pool_bytes = true", ["pool_bytes", "True"]),
        ("max_connections = true", ["max_connections", "True"]),
        ("allowed_uids = [true]", ["allowed_uids.0", "True"]),
        ("stop_timeout = true", ["stop_timeout", "True"]),
        ("worker_timeout = -1", ["worker_timeout", "-1"]),
        ("stop_timeout = -1.0", ["stop_timeout", "-1.0"]),
        ("stop_timeout = inf", ["stop_timeout", "inf"]),
        ('pool_bytes = "two"', ["pool_bytes", "'two'"]),
        ("pool_bytes = 1", ["pool_bytes", "1"]),
        ('kernels = "cuda"', ["kernels", "'cuda'"]),
        ('log_level = "loud"', ["log_level", "'loud'"]),
    ],
)
def test_a_wrong_value_in_the_file_is_named(tmp_path: Path, line: str, names: list[str]) -> None:
    config = write(tmp_path / "memshare.toml", f"[agent]\n{line}\n")
    with pytest.raises(InvalidArgument) as refused:
        load_settings(config)
    for name in (*names, str(config)):
        assert name in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("THREADS", "many"), ("ALLOWED_UIDS", "1000 1001"), ("POOL_BITES", "1GiB"), ("SEARCH", "")],
)
def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"MEMSHARE_AGENT_{name}", value)
    with pytest.raises(InvalidArgument, match=f"MEMSHARE_AGENT_{name}"):
        load_settings()


@pytest.mark.parametrize("text", ["pool_bytes = 1\n[agent]\n", "agent = 3\n", "not toml"])
def test_a_file_of_another_shape_is_refused(tmp_path: Path, text: str) -> None:
    config = write(tmp_path / "memshare.toml", text)
    with pytest.raises(InvalidArgument, match=str(config)):
        load_settings(config)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="No such file"):
        load_settings(tmp_path / "missing.toml")


def test_the_process_says_what_is_wrong_and_exits_2() -> None:
    command = [sys.executable, "-m", "memshare.gpu_agent", "--threads=none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert "threads = 'none' (flag)" in done.stderr
