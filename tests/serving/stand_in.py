"""Something that speaks as vLLM's server does, without a model behind it.

As a program it takes vLLM's flags and does what the environment variable STAND_IN says: `die`
before it serves, `deaf` to never serve, `brood` to leave a child that ignores SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} {running}
vllm:num_requests_waiting{{engine="0"}} 2.0
vllm:kv_cache_usage_perc{{engine="0"}} 0.5
vllm:num_preemptions_total{{engine="0"}} {preemptions}
vllm:num_preemptions_created{{engine="0"}} 1.7e+09
vllm:generation_tokens_total{{engine="0"}} {generated}
memshare_attached{{engine="0"}} 1.0
memshare_shared_blocks_total{{engine="0"}} {generated}
memshare_step_seconds_bucket{{engine="0",le="0.001"}} {generated}
memshare_step_seconds_bucket{{engine="0",le="+Inf"}} {generated}
"""


def answer_tokens(prompt: str, count: int) -> list[int]:
    """The tokens that follow this prompt: always the same, looping if it says so."""
    period = 4 if "loop" in prompt else count
    return [len(prompt) * 1000 + index % period for index in range(count)]


class StandIn(ThreadingHTTPServer):
    """Counts what it is asked. `delay`: seconds that an answer takes."""

    daemon_threads = True

    def __init__(self, port: int = 0, delay: float = 0.0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.delay = delay
        self.bodies: list[dict[str, Any]] = []
        self.running = self.most_running = 0
        self.generated = 1000
        self.preemptions = 5
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def stand_in(delay: float = 0.0) -> Iterator[StandIn]:
    """One that serves from a thread while the block runs."""
    server = StandIn(delay=delay)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def do_GET(self) -> None:
        if self.path == "/health":
            return self._send(200, b"")
        with self.server.lock:
            page = METRICS.format(**vars(self.server))
        return self._send(200, page.encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.bodies.append(body)
            server.running += 1
            server.most_running = max(server.most_running, server.running)
        try:
            time.sleep(server.delay)
            self._answer(body, body["messages"][0]["content"])
        except (BrokenPipeError, ConnectionResetError):
            # The client gave up waiting, as some tests want it to.
            self.close_connection = True
        finally:
            with server.lock:
                server.running -= 1
                server.generated += body["max_tokens"]
                server.preemptions += 1

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, body: dict[str, Any], prompt: str) -> None:
        if "refuse" in prompt:
            return self._send(400, b'{"error": {"message": "the prompt is too long"}}')
        tokens = answer_tokens(prompt, body["max_tokens"])
        if "bare" in prompt:
            tokens = []
        if not body["stream"]:
            choice = {"message": {"content": " ".join(map(str, tokens))}, **_rest(tokens, body)}
            document = {"choices": [choice], "prompt_token_ids": [0] * len(prompt)}
            return self._send(200, json.dumps(document).encode())
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        head = {"choices": [{"delta": {"role": "assistant", "content": ""}, "logprobs": None}]}
        self._event({**head, "prompt_token_ids": [0] * len(prompt)})
        # As vLLM does, one chunk may bring several tokens.
        for start in range(0, len(tokens), 3):
            part = tokens[start : start + 3]
            text = (" " if start else "") + " ".join(map(str, part))
            self._event({"choices": [{"delta": {"content": text}, **_rest(part, body)}]})
            if "break" in prompt:
                self.close_connection = True
                self.connection.close()
                return None
            if "fail" in prompt:
                return self._event({"error": {"message": "the engine died"}})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True
        return None

    def _event(self, document: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(document)}\n\n".encode())
        self.wfile.flush()

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _rest(tokens: list[int], body: dict[str, Any]) -> dict[str, Any]:
    entries = [{"token": str(token), "logprob": -token / 1000} for token in tokens]
    log_probs = {"content": entries} if body["logprobs"] else None
    return {"token_ids": tokens, "logprobs": log_probs}


def main() -> None:
    role = os.environ.get("STAND_IN", "")
    if role == "die":
        print("loading the model")
        raise SystemExit("ValueError: no room for the KV cache")
    if role == "brood":
        ignoring = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
        subprocess.Popen([sys.executable, "-c", ignoring])
    if role == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    StandIn(int(sys.argv[sys.argv.index("--port") + 1])).serve_forever()


if __name__ == "__main__":
    main()
