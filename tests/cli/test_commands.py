"""Commands against one running sidecar."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memshare.client.cli.sidecar import Sidecar

from .conftest import Result

Run = Callable[..., Result]


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("status",), dict),
        (("engines",), list),
        (("requests",), list),
        (("policy", "get"), dict),
        (("policy", "set", "--preset", "exact"), dict),
        (("policy", "set", "--min-age", "128"), dict),
        (("doctor",), dict),
        (("agent", "--show-settings"), dict),
        (("manager", "--show-settings"), dict),
    ],
)
def test_json_is_one_document_and_alone_on_stdout(
    sidecar: Sidecar, command: Run, arguments: tuple[str, ...], kind: type
) -> None:
    result = command(*arguments, "--runtime-dir", sidecar.runtime.path, "--json")
    assert result.code == 0, result.err
    assert isinstance(result.document, kind)


@pytest.mark.parametrize("arguments", ["status", "engines", "requests", "policy get", "doctor"])
def test_people_get_text(sidecar: Sidecar, command: Run, arguments: str) -> None:
    result = command(*arguments.split(), "-d", sidecar.runtime.path)
    assert result.code == 0, result.err
    assert result.out


def test_the_environment_names_the_directory(sidecar: Sidecar, memshare: Run) -> None:
    result = memshare("status", "--json", MEMSHARE_RUNTIME_DIR=str(sidecar.runtime.path))
    assert result.document["state"] == "serving"


def test_a_policy_is_changed_while_running(sidecar: Sidecar, command: Run) -> None:
    directory = ("-d", sidecar.runtime.path)
    assert command("policy", "set", "--preset", "balanced", *directory).code == 0
    changed = command(
        "policy", "set", "--key-threshold", "0.03", "--min-age", "600", *directory, "--json"
    )
    assert changed.code == 0, changed.err
    now = command("policy", "get", *directory, "--json").document["policy"]
    assert now["mode"] == "row"
    assert now["stages"][0]["min_age"] == 600
    assert {stage["key_threshold"] for stage in now["stages"]} == {0.03}
    assert command("policy", "set", "--preset", "exact", *directory).code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("policy", "set", "--preset", "lax"), "lax"),
        (("policy", "get", "--session", "4711"), "4711"),
        (("requests", "--session", "4711"), "4711"),
        (("policy", "set", "--fidelity-budget", "1e9"), "fidelity_budget"),
    ],
)
def test_what_the_manager_refuses_is_one_line(
    sidecar: Sidecar, command: Run, arguments: tuple[str, ...], said: str
) -> None:
    result = command(*arguments, "-d", sidecar.runtime.path, "--json")
    assert result.code == 1
    assert said in result.err
    assert result.err.count("\n") == 1
    assert result.out == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("stats",), "Did you mean 'status'?"),
        (("status", "--colour"), "--colour"),
        (("policy", "set"), "nothing to set"),
        (("policy", "set", "--preset", "exact", "--min-age", "1"), "whole policy"),
        (("policy", "set", "--mode", "lax"), "'lax' is not one of observe, exact, row"),
        (("up", "--pool-bytes", "lots"), "'lots' is not a size"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(
    command: Run, arguments: tuple[str, ...], said: str
) -> None:
    result = command(*arguments)
    assert result.code == 2
    assert said in result.err
    assert result.err.count("\n") == 1
    assert result.out == ""


def test_without_a_sidecar_the_error_says_what_to_do(command: Run) -> None:
    result = command("status", "-d", "/tmp/memshare-nobody-is-here", "--json")
    assert result.code == 1
    assert "memshare up" in result.err
    assert "/tmp/memshare-nobody-is-here/manager.sock" in result.err
    assert result.err.count("\n") == 1


def test_the_version(memshare: Run) -> None:
    assert memshare("--version").out.startswith("memshare 0.")
