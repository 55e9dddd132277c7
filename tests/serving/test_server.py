"""A server as a child process, by a stand-in: it starts, fails, hangs, and is gone in the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from memshare.client.serving.server import ServerFailed, ServerSettings, VllmServer, block_bytes
from memshare.wire.errors import InvalidArgument
from tests.client.harness import wait_for
from tests.serving import stand_in

COMMAND = (sys.executable, str(stand_in.__file__))
CONFIG = {
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}
Start = Callable[..., VllmServer]


def write_config(folder: Path, config: Any) -> Path:
    folder.joinpath("config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def settings(tmp_path: Path) -> ServerSettings:
    return ServerSettings(write_config(tmp_path, CONFIG), blocks=100)


@pytest.fixture
def start(
    settings: ServerSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Start]:
    """Start a stand-in in a role; it ends with the test."""
    servers: list[VllmServer] = []

    def start_one(role: str = "") -> VllmServer:
        monkeypatch.setenv("STAND_IN", role)
        servers.append(VllmServer("plain", settings, tmp_path / "server.log", command=COMMAND))
        return servers[-1]

    yield start_one
    for server in servers:
        server.kill()


def members(group: int) -> set[int]:
    """Processes of a group that are alive."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            # A zombie is dead, and its reaping another's business.
            if int(its_group) == group and state not in "ZX":
                found.add(int(entry.name))
    return found


def ignores_sigterm(pid: int) -> bool:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigIgn:"):
                return bool(int(line.split()[1], 16) & 1 << (signal.SIGTERM - 1))
    return False


def wait_gone(group: int) -> None:
    wait_for(lambda: not members(group), "every process of the server to end")


# ---- from start to end ---------------------------------------------------------------------


def test_a_server_serves_until_it_is_stopped(start: Start) -> None:
    server = start()
    server.wait(60)
    server.check()
    assert server.ended() is None
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as page:
        assert b"vllm:num_requests_running" in page.read()
    assert server.stop() is True
    assert server.ended() == "SIGTERM"
    wait_gone(server.pid)
    with pytest.raises(ServerFailed, match="the server 'plain' ended with SIGTERM"):
        server.check()
    # Once more does no harm.
    assert server.stop() is True


def test_one_that_ends_by_itself_is_told_with_its_last_words(start: Start, tmp_path: Path) -> None:
    tmp_path.joinpath("server.log").write_text("".join(f"line {n}\n" for n in range(40)))
    server = start("die")
    with pytest.raises(ServerFailed, match="'plain' ended with exit status 1") as failure:
        server.wait(60)
    lines = failure.value.log.splitlines()
    assert sorted(lines[-2:]) == ["ValueError: no room for the KV cache", "loading the model"]
    assert lines[-3] == "line 39"
    assert len(lines) == 25
    assert failure.value.reason == "SERVER_FAILED"
    with pytest.raises(ServerFailed):
        server.check()


def test_one_that_never_serves_is_given_up_and_killed(start: Start) -> None:
    server = start("deaf")
    wait_for(lambda: ignores_sigterm(server.pid), "it to be deaf")
    expected = rf"'plain' \(pid {server.pid}\) does not serve after 1 s"
    with pytest.raises(ServerFailed, match=expected):
        server.wait(1.0)
    server.check()
    assert server.stop(timeout=0.1) is False
    assert server.ended() == "SIGKILL"
    wait_gone(server.pid)


@pytest.mark.parametrize("end", [VllmServer.stop, VllmServer.kill])
def test_no_process_of_a_server_is_left(start: Start, end: Callable[[VllmServer], Any]) -> None:
    server = start("brood")
    server.wait(60)
    (child,) = members(server.pid) - {server.pid}
    wait_for(lambda: ignores_sigterm(child), "the child to ignore SIGTERM")
    end(server)
    assert server.ended() is not None
    wait_gone(server.pid)


_PARENT = """
import sys, time
from pathlib import Path
from memshare.client.serving.server import ServerSettings, VllmServer
model, *command = sys.argv[1:]
server = VllmServer(
    "tied", ServerSettings(Path(model), 100), Path(model) / "server.log", command=command
)
server.wait(60)
print(server.pid, flush=True)
input()
"""


def test_a_server_ends_with_the_process_that_started_it(settings: ServerSettings) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(settings.model), *COMMAND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None
        group = int(parent.stdout.readline())
        assert members(group) == {group}
        parent.kill()
        wait_gone(group)
    finally:
        parent.kill()
        parent.communicate()


def test_nothing_is_run_for_a_process_that_has_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "memshare.client.serving.tied"]
    touched = tmp_path / "touched"
    # Not the one that starts it.
    ended = subprocess.run(
        [*command, str(os.getppid()), "touch", str(touched)], capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert f"the process {os.getppid()} has ended" in ended.stderr
    assert not touched.exists()
    subprocess.run([*command, str(os.getpid()), "touch", str(touched)], check=True)
    assert touched.exists()


# ---- settings ------------------------------------------------------------------------------


def test_a_cache_without_room_for_one_request_is_refused(settings: ServerSettings) -> None:
    """One of the 100 blocks of 32 tokens is vLLM's own."""
    full = ServerSettings(settings.model, 100, context=99 * 32)
    full.require_room()
    with pytest.raises(InvalidArgument, match="100 blocks of 32 tokens hold no request of 3169"):
        ServerSettings(settings.model, 100, context=99 * 32 + 1).require_room()


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({}, 2 * 8),
        ({"head_dim": 16}, 2 * 16),
        ({"head_dim": None}, 2 * 8),
        # Not grouped: as many heads as queries have.
        ({"num_key_value_heads": None}, 8 * 8),
    ],
)
def test_a_block_is_k_and_v_of_all_layers(
    tmp_path: Path, changes: dict[str, int | None], width: int
) -> None:
    model = write_config(tmp_path, CONFIG | changes)
    assert block_bytes(model, 32) == 2 * 3 * 32 * width * 4
    assert block_bytes(model, 16, itemsize=2) == 2 * 3 * 16 * width * 2
    assert ServerSettings(model, 7, 16).pool_bytes == 7 * 2 * 3 * 16 * width * 4


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "{",
        "{}",
        "[]",
        json.dumps({**CONFIG, "head_dim": None, "num_attention_heads": 0}),
        json.dumps({**CONFIG, "num_hidden_layers": None}),
        json.dumps({name: CONFIG[name] for name in CONFIG if name != "hidden_size"}),
    ],
)
def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        tmp_path.joinpath("config.json").write_text(text)
    with pytest.raises(InvalidArgument) as refusal:
        block_bytes(tmp_path, 32)
    assert f"{tmp_path} is not a Transformers folder" in str(refusal.value)


def test_the_command_line_and_environment_say_what_is_set(
    settings: ServerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    arguments = settings.arguments(4711)
    pairs = dict(pairwise(arguments))
    assert pairs["--model"] == str(settings.model)
    assert (pairs["--host"], pairs["--port"]) == ("127.0.0.1", "4711")
    assert pairs["--kv-cache-memory-bytes"] == str(settings.pool_bytes)
    assert pairs["--max-model-len"] == str(settings.context)
    assert settings.environment()["VLLM_PLUGINS"] == ""
    shared = settings.with_flags(("--worker-cls=w", "--scheduler-cls=s"))
    assert shared.arguments(4711) == [*arguments, "--worker-cls=w", "--scheduler-cls=s"]
    environment = shared.environment()
    assert environment["VLLM_PLUGINS"] == "memshare"
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["PATH"] == os.environ["PATH"]
