"""Settings are refused at start, naming key, value and source."""

from __future__ import annotations

from pathlib import Path

import pytest

from memshare.manager.__main__ import main
from memshare.manager.config import load_settings
from memshare.manager.policy import Mode
from memshare.wire.errors import InvalidArgument


def test_flags_rank_above_variables_above_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[manager]\nbatch_tokens = 4\ncandidates = 5\nlog_level = 'error'\n")
    monkeypatch.setenv("MEMSHARE_MANAGER_BATCH_TOKENS", "8")
    monkeypatch.setenv("MEMSHARE_MANAGER_LOG_LEVEL", "warning")
    settings = load_settings(config, log_level="debug", candidates=None)
    assert (settings.batch_tokens, settings.candidates, settings.log_level) == (8, 5, "debug")


def test_a_fresh_sidecar_shares_exactly() -> None:
    assert load_settings().policy.name == "exact"


def test_a_policy_may_be_given_in_full(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        "[manager.policy]\nname = 'mine'\nmode = 'row'\nfidelity_budget = 0.01\n"
        "[[manager.policy.stages]]\nmin_age = 32\nkey_threshold = 0.01\nvalue_threshold = 0.02\n"
    )
    policy = load_settings(config).policy
    assert (policy.name, policy.mode, policy.stages[0].min_age) == ("mine", Mode.ROW, 32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_tokens = 'many'", "batch_tokens = 'many'"),
        ("batch_tokens = 0", "batch_tokens = 0"),
        ("batch_tokens = true", "batch_tokens = True"),
        ("candidates = true", "candidates = True"),
        ("hello_seconds = true", "hello_seconds = True"),
        ("policy = {mode = 'row', protected_tokens = true}", "protected_tokens = True"),
        ("policy = {mode = 'row', layer_scale = [true]}", r"layer_scale = \[True\]"),
        ("policy = {mode = 'row', stages = [{min_age = true}]}", r"stages\[0\].min_age = True"),
        ("policy = {mode = 'row', adaptive = {max_scale = true}}", "adaptive.max_scale = True"),
        ("batch_tokens = [16]", r"batch_tokens = \[16\]"),
        ("hello_second = 3", "hello_second = 3"),
        ("drain_seconds = -1", "drain_seconds = -1"),
        ("log_level = 'loud'", "log_level = 'loud'"),
        ("policy = 'bold'", "policy = 'bold'.*there is no preset"),
        ("policy = 3", "policy = 3"),
        ("policy = ['exact']", "policy"),
        ("policy = {mode = 'row', stages = [{min_age = -1}]}", r"stages\[0\].min_age is -1"),
        ("policy = {mode = 'row', stages = [{age = 1}]}", r"stages\[0\].age = 1: no such"),
        ("policy = {mode = 'row', budget = 1}", "budget = 1: no such setting"),
        ("policy = {mode = 'wild'}", "mode"),
    ],
)
def test_errors_name_key_and_value(tmp_path: Path, text: str, message: str) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f"[manager]\n{text}\n")
    with pytest.raises(InvalidArgument, match=message):
        load_settings(config)


def test_an_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSHARE_MANAGER_BATCH", "1")
    with pytest.raises(InvalidArgument, match="MEMSHARE_MANAGER_BATCH"):
        load_settings()


@pytest.mark.parametrize("text", ["batch_tokens = 1", "[manager\n"])
def test_files_that_are_not_ours_are_refused(tmp_path: Path, text: str) -> None:
    config = tmp_path / "c.toml"
    config.write_text(text)
    with pytest.raises(InvalidArgument, match=r"c\.toml"):
        load_settings(config)


def test_the_command_exits_with_2_on_wrong_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--batch-tokens", "x"]) == 2
    assert "batch_tokens = 'x' (flag)" in capsys.readouterr().err
