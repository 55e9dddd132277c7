"""A vLLM server as child processes of this one, on this host alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from memshare.client.process import Process
from memshare.wire.errors import InvalidArgument, MemshareError

# Half a minute on an idle machine; two that start together need twice that.
START_TIMEOUT: Final = 240.0
STOP_TIMEOUT: Final = 20.0
MODEL_NAME: Final = "model"
HOST: Final = "127.0.0.1"
_POLL_INTERVAL: Final = 0.25
_LAST_WORDS: Final = 25
# The server's own command; the `vllm` script asks for a distribution of that name, which the
# builds for the CPU are not.
_COMMAND: Final = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")


class ServerFailed(MemshareError):
    """A vLLM server did not start, or ended by itself. `log` is the end of what it wrote."""

    reason = "SERVER_FAILED"

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


@dataclass(frozen=True)
class ServerSettings:
    """What a server serves with.

    Attributes:
        model: a Transformers folder.
        blocks: blocks of the KV cache.
        block_tokens: tokens of one block.
        max_sequences: requests in a batch at most.
        context: tokens of a request at most, prompt and answer.
        threads: cores to compute on.
        flags: further ones, such as memshare's.
        plugin: whether memshare's plugin is loaded, else none is.
    """

    model: Path
    blocks: int
    block_tokens: int = 32
    max_sequences: int = 32
    context: int = 2048
    threads: int = 2
    flags: tuple[str, ...] = ()
    plugin: bool = False

    @property
    def pool_bytes(self) -> int:
        """Bytes of the KV cache."""
        return self.blocks * block_bytes(self.model, self.block_tokens)

    def require_room(self) -> None:
        """Raise `InvalidArgument` if the cache holds not even one request."""
        # vLLM keeps one block for itself.
        if self.context > (self.blocks - 1) * self.block_tokens:
            raise InvalidArgument(
                f"{self.blocks} blocks of {self.block_tokens} tokens hold no request of "
                f"{self.context} tokens: take more blocks or shorter answers"
            )

    def with_flags(self, flags: tuple[str, ...]) -> Self:
        """The same with memshare's plugin, set up by `flags`."""
        return replace(self, flags=flags, plugin=True)

    def arguments(self, port: int) -> list[str]:
        """The server's command line after its command."""
        return [
            *("--model", str(self.model), "--served-model-name", MODEL_NAME),
            *("--host", HOST, "--port", str(port), "--uvicorn-log-level", "warning"),
            # Other widths are emulated on a CPU without AVX-512, several times slower.
            *("--dtype", "float32", "--enforce-eager", "--enable-prefix-caching"),
            *("--block-size", str(self.block_tokens)),
            *("--kv-cache-memory-bytes", str(self.pool_bytes)),
            *("--max-num-seqs", str(self.max_sequences), "--max-model-len", str(self.context)),
            *self.flags,
        ]

    def environment(self) -> dict[str, str]:
        """The whole environment of the server."""
        return {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_PLUGINS": "memshare" if self.plugin else "",
            # What spins while it waits takes the cores from what works: the engine beside a
            # worker process of its own, and idle threads.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_WAIT_POLICY": "PASSIVE",
            "GOMP_SPINCOUNT": "0",
            "OMP_NUM_THREADS": str(self.threads),
        }


def block_bytes(model: Path, block_tokens: int, itemsize: int = 4) -> int:
    """Bytes of K and V of one block in all layers.

    Raises `InvalidArgument` for a folder that is no Transformers model.
    """
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return int(2 * config["num_hidden_layers"] * heads * width * itemsize * block_tokens)
    except (OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidArgument(
            f"{model} is not a Transformers folder of a decoder: {type(error).__name__} {error}"
        ) from error


class VllmServer(Process):
    """One server. Starts at once; `wait` until it serves, and `stop` it in any case."""

    def __init__(
        self,
        name: str,
        settings: ServerSettings,
        log: Path,
        *,
        command: Sequence[str] = _COMMAND,
    ) -> None:
        self.port = free_port()
        tied = (sys.executable, "-m", "memshare.client.serving.tied", str(os.getpid()))
        super().__init__(
            name,
            [*tied, *command, *settings.arguments(self.port)],
            log,
            settings.environment(),
        )

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://{HOST}:{self.port}"

    def wait(self, timeout: float = START_TIMEOUT) -> None:
        """Return once it serves. Raises `ServerFailed` if it does not within `timeout` s."""
        started = time.monotonic()
        while not self._is_healthy():
            self.check()
            if time.monotonic() - started > timeout:
                raise ServerFailed(
                    f"the server {self.name!r} (pid {self.pid}) does not serve after "
                    f"{timeout:.0f} s",
                    self.last_words(_LAST_WORDS),
                )
            time.sleep(_POLL_INTERVAL)

    def check(self) -> None:
        """Raise `ServerFailed` if it has ended."""
        if (ending := self.ended()) is not None:
            raise ServerFailed(
                f"the server {self.name!r} ended with {ending}", self.last_words(_LAST_WORDS)
            )

    def kill(self) -> None:
        """End it and all its processes at once."""
        # The group is there as long as one of its processes is.
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self, timeout: float = STOP_TIMEOUT) -> bool:
        """Ask it to stop, and end what is left of its processes after `timeout` seconds."""
        try:
            return super().stop(timeout)
        finally:
            self.kill()

    def _is_healthy(self) -> bool:
        # No proxy stands before a server of this host.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self.url}/health", timeout=2.0) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
