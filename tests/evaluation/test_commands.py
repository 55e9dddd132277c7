"""The commands that measure, run whole: real model, real sidecar, real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Reasoning that comes back to what it said, as chains of thought do.
TRACE = " ".join(
    f"Step {n}: we have {n} loaves and {2 * n} coins. Wait, let me check this again. If we add "
    f"{n} and {2 * n}, we get {3 * n}. So after step {n} there are {3 * n} things in all."
    for n in range(1, 40)
)


def run(*arguments: str, cwd: Path) -> Any:
    """The one document that a command prints on stdout."""
    command = [sys.executable, "-m", "memshare.client.cli", *arguments, "--json"]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=580)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_demo_saves_memory_and_gives_all_rows_back(tmp_path: Path) -> None:
    document = run("demo", "--tokens", "256", cwd=tmp_path)
    assert document["free_rows_returned"]
    assert document["saved"] > 0.02
    assert 0 <= document["kl"] < 0.01
    assert document["agree"] > 0.9
    assert (tmp_path / document["picture"]).stat().st_size > 10_000


def test_eval_measures_policies_beside_their_controls_and_resumes(tmp_path: Path) -> None:
    traces = tmp_path / "traces.jsonl"
    traces.write_text(json.dumps({"id": "loaves", "trace": TRACE}))
    arguments = ("eval", "--traces", "traces.jsonl", "--limit", "1", "--tokens", "1024")
    rows = run(*arguments, "--policy", "balanced", "--recall", cwd=tmp_path)
    assert {"policy", "saved", "dnll", "kl", "agree"} <= set(rows[0])
    found = {row["policy"]: row for row in rows}
    shared = found["balanced"]
    assert shared["saved"] > 0.2
    assert shared["recall"] >= 0.97
    assert shared["kl"] < found["balanced: dropped"]["kl"]
    assert shared["kl"] < found["balanced: random donor"]["kl"] / 10
    assert {"4-bit cache", "8-bit cache", "balanced on 8 bits"} <= set(found)
    assert (tmp_path / "results" / "frontier.png").stat().st_size > 10_000
    measured = (tmp_path / "results" / "measurements.jsonl").read_text()
    assert run(*arguments, "--policy", "balanced", cwd=tmp_path)[0]["kl"] == shared["kl"]
    assert (tmp_path / "results" / "measurements.jsonl").read_text() == measured


def test_killed_engines_leak_nothing(tmp_path: Path) -> None:
    document = run("bench", "chaos", "--kills", "50", cwd=tmp_path)
    assert (document["kills"], document["leaked_rows"], document["integrity_errors"]) == (50, 0, 0)
    assert document["shared"] > 10


def test_no_decode_step_waits_for_the_sidecar(tmp_path: Path) -> None:
    document = run("bench", "step", "--context", "128", "--steps", "50", cwd=tmp_path)
    assert (document["waits"], document["overflow_tokens"]) == (0, 0)
    assert {"ratio", "p50_us", "p99_us"} <= set(document)
