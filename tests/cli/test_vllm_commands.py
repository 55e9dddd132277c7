"""Commands that concern vLLM, where vLLM is not installed."""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from memshare.client.vllm.settings import Settings

from .conftest import Result

Run = Callable[..., Result]
BENCH = ("bench", "vllm")
DEMO = ("demo", "--engine", "vllm")
without_vllm = pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo that went too far would write its picture here."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)


def refused(result: Result, code: int = 1) -> str:
    """What one line a command was refused with, having done nothing."""
    assert result.code == code, result.err
    assert result.err.count("\n") == 1
    assert result.err.startswith("memshare: error: ")
    assert result.out == ""
    assert list(Path().iterdir()) == []
    return result.err


# ---- demo and bench ------------------------------------------------------------------------


@without_vllm
@pytest.mark.parametrize("arguments", [DEMO, BENCH, (*DEMO, "--json"), (*BENCH, "--json")])
def test_without_vllm_one_is_told_how_to_get_it(command: Run, arguments: tuple[str, ...]) -> None:
    said = refused(command(*arguments))
    assert "vLLM is not installed beside memshare" in said
    assert "`make setup-vllm`" in said
    assert "memshare[serving]" in said


@pytest.mark.parametrize("arguments", [DEMO, BENCH])
def test_an_unknown_policy_is_told_before_anything_else(
    command: Run, arguments: tuple[str, ...]
) -> None:
    said = refused(command(*arguments, "--policy", "lax"))
    assert "there is no preset 'lax', use observe, exact, " in said
    assert "block" in said.partition("use ")[2]


@pytest.mark.parametrize(
    ("lines", "requests", "said"),
    [
        ("no JSON\n", 1, ":1: not a JSON object with a field problem, question or prompt"),
        ('{"prompt": "a"}\n\n{"text": "b"}\n', 2, ":3: not a JSON object"),
        ('{"prompt": 7}\n', 1, ":1: not a JSON object"),
        ('["prompt"]\n', 1, ":1: not a JSON object"),
        ('{"prompt": "a"}\n', 2, "2 requests need as many prompts: 1 in "),
        ("", 1, "1 requests need as many prompts: 0 in "),
    ],
)
def test_a_file_without_the_prompts_is_refused_by_name(
    command: Run, tmp_path: Path, lines: str, requests: int, said: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(lines)
    line = refused(command(*BENCH, "--prompts", path, "--requests", requests))
    assert said in line
    assert str(path) in line


@without_vllm
def test_a_file_with_enough_prompts_is_not_what_is_wrong(command: Run, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"problem": "a"}\n{"question": "b"}\n\n{"prompt": "c"}\n')
    line = refused(command(*BENCH, "--prompts", path, "--requests", 3))
    assert "vLLM is not installed" in line


def test_more_requests_than_built_in_prompts_need_a_file(command: Run) -> None:
    line = refused(command(*BENCH, "--requests", 1000))
    assert "1000 requests need as many prompts: " in line
    assert "--prompts" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*BENCH, "--prompts", "/nowhere/prompts.jsonl"), "'/nowhere/prompts.jsonl' does not"),
        ((*BENCH, "--prompts", "/"), "is a directory"),
        ((*BENCH, "--requests", "0"), "--requests"),
        ((*BENCH, "--blocks", "1"), "--blocks"),
        ((*BENCH, "--tokens", "many"), "--tokens"),
        (("demo", "--engine", "sglang"), "sglang"),
        ((*DEMO, "--tokens", "1"), "--tokens"),
    ],
)
def test_wrong_usage_is_code_2(command: Run, arguments: tuple[str, ...], said: str) -> None:
    assert said in refused(command(*arguments), code=2)


# ---- flags ---------------------------------------------------------------------------------


def parse_flags(out: str) -> argparse.Namespace:
    """As `vllm serve MODEL $(memshare vllm-flags)` has them: split by a shell, then parsed."""
    words = subprocess.run(
        ["sh", "-c", r'printf "%s\0" $(cat)'], input=out, capture_output=True, text=True,
        check=True,
    ).stdout.split("\0")[:-1]  # fmt: skip
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--kv-transfer-config", type=json.loads, required=True)
    parser.add_argument("--worker-cls", required=True)
    parser.add_argument("--scheduler-cls", required=True)
    return parser.parse_args(words)


def settings_of(config: dict[str, Any]) -> Settings:
    assert config["kv_role"] == "kv_both"
    return Settings.from_extra_config(config["kv_connector_extra_config"])


def defines(path: str) -> bool:
    """Whether a module of ours has a class or function of that name, without importing vLLM."""
    module, _, name = path.rpartition(".")
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    body = ast.parse(Path(spec.origin).read_text()).body
    return name in {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


OPTIONS = (
    *("--policy", "block", "--tenant", "größer", "--engine", 'a"b', "--lease-blocks", "77"),
    *("--runtime-dir", "/run/memshare-here"),
)
CHOSEN = Settings("/run/memshare-here", "block", "größer", 'a"b', 77)


@pytest.mark.parametrize(("options", "settings"), [((), Settings()), (OPTIONS, CHOSEN)])
def test_flags_are_read_back_as_they_were_asked_for(
    command: Run, options: tuple[str, ...], settings: Settings
) -> None:
    result = command("vllm-flags", *options)
    assert result.code == 0, result.err
    assert result.err == ""
    flags = parse_flags(result.out)
    assert settings_of(flags.kv_transfer_config) == settings
    assert defines(flags.worker_cls)
    assert defines(flags.scheduler_cls)
    # The same, as the arguments of vllm.LLM.
    arguments = command("vllm-flags", *options, "--json").document
    assert arguments == vars(flags)


def test_flags_that_a_shell_would_split_are_refused(command: Run) -> None:
    assert "use --json" in refused(command("vllm-flags", "--engine", "a b"), code=2)
    document = command("vllm-flags", "--engine", "a b", "--json").document
    assert settings_of(document["kv_transfer_config"]).engine == "a b"


@pytest.mark.parametrize("value", ["-1", "some"])
def test_flags_of_no_number_of_blocks_are_refused(command: Run, value: str) -> None:
    assert "--lease-blocks" in refused(command("vllm-flags", "--lease-blocks", value), code=2)
    too_many = command("vllm-flags", "--lease-blocks", str(1 << 31))
    assert "lease_blocks is 2147483648, must be 0 to 2147483647" in refused(too_many)
