"""A bounded load on an OpenAI-compatible server, and what it answered."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import httpx2

from memshare.client.serving.metrics import Metrics, Sample
from memshare.wire.errors import MemshareError

SAMPLE_INTERVAL: Final = 1.0
# More of the server's answer than this is not for an error's one line.
_ERROR_CHARACTERS: Final = 300


class LoadFailed(MemshareError):
    """The server refused a request, broke off, or was not done in time."""

    reason = "LOAD_FAILED"


@dataclass(frozen=True)
class Load:
    """What is asked, greedily and with at most `concurrency` requests at a time.

    Attributes:
        prompts: one chat of one message each.
        output_tokens: where an answer is cut.
        ignore_eos: answers go on to `output_tokens` past their end.
        log_probs: ask for those of the chosen tokens.
        stream: token by token; without it first tokens are not timed.
        salt: keeps the server's prefix cache from answering with what another load left there.
        timeout: seconds within which all of it must be answered.
    """

    prompts: tuple[str, ...]
    output_tokens: int
    concurrency: int
    ignore_eos: bool = True
    log_probs: bool = False
    stream: bool = True
    salt: str = ""
    timeout: float = 600.0

    def body(self, model: str, prompt: str) -> dict[str, Any]:
        """The JSON of one request."""
        return {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self.output_tokens,
            "temperature": 0,
            "ignore_eos": self.ignore_eos,
            "logprobs": self.log_probs,
            "return_token_ids": True,
            "stream": self.stream,
            **({"cache_salt": self.salt} if self.salt else {}),
        }


@dataclass
class Completion:
    """One answer.

    Attributes:
        tokens: ids of the answer's tokens.
        text: the same as text.
        log_probs: one for each token, or empty when they were not asked for.
        prompt_tokens: tokens of the prompt, template included.
        first_token_seconds: from the request to its first token, None when not streamed.
        seconds: from the request to its end.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    log_probs: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    first_token_seconds: float | None = None
    seconds: float = 0.0

    def absorb(self, document: dict[str, Any]) -> None:
        """Add one chunk of a stream, or a whole answer."""
        if prompt := document.get("prompt_token_ids"):
            self.prompt_tokens = len(prompt)
        for choice in document.get("choices", ()):
            self.tokens += choice.get("token_ids") or ()
            self.text += (choice.get("delta") or choice.get("message") or {}).get("content") or ""
            for entry in (choice.get("logprobs") or {}).get("content") or ():
                self.log_probs.append(entry["logprob"])


@dataclass(frozen=True)
class LoadResult:
    """What a load took.

    Attributes:
        completions: in the order of the prompts.
        seconds: from the first request to the last answer.
        samples: the server by and by, the last one after the last answer.
        before: the server's metrics before the load.
        after: and after it.
    """

    completions: list[Completion]
    seconds: float
    samples: list[Sample]
    before: Metrics
    after: Metrics

    @property
    def output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(completion.tokens) for completion in self.completions)

    @property
    def tokens_per_second(self) -> float:
        """Throughput over the whole load."""
        return self.output_tokens / self.seconds


Watch = Callable[[Sample], object]
Probe = Callable[[], dict[str, float]]


def run_load(
    base_url: str,
    model: str,
    load: Load,
    *,
    watch: Watch | None = None,
    probe: Probe | None = None,
    interval: float = SAMPLE_INTERVAL,
) -> LoadResult:
    """Put the load on the server at `base_url` and wait until all of it is answered.

    Every `interval` seconds the server's metrics and, in a thread, `probe` are read and given
    to `watch`. Raises `LoadFailed` saying what the server did or how far it came in time.
    """
    return asyncio.run(_Run(base_url, model, load, watch, probe, interval).run())


class _Run:
    def __init__(
        self,
        base_url: str,
        model: str,
        load: Load,
        watch: Watch | None,
        probe: Probe | None,
        interval: float,
    ) -> None:
        self._client = httpx2.AsyncClient(
            base_url=base_url,
            timeout=None,  # the load's own is over all of it
            limits=httpx2.Limits(max_connections=None),
            trust_env=False,  # no proxy stands before a server of this host
        )
        self._model, self._load = model, load
        self._watch, self._probe, self._interval = watch, probe, interval
        self._samples: list[Sample] = []
        self._started = 0.0

    async def run(self) -> LoadResult:
        load = self._load
        completions = [Completion() for _ in load.prompts]
        pending = iter(zip(load.prompts, completions, strict=True))
        async with self._client:
            try:
                async with asyncio.timeout(load.timeout):
                    before = await self._metrics()
                    self._started = time.perf_counter()
                    sampler = asyncio.create_task(self._sample(before))
                    try:
                        async with asyncio.TaskGroup() as workers:
                            for _ in range(load.concurrency):
                                workers.create_task(self._answer(pending))
                        seconds = time.perf_counter() - self._started
                    finally:
                        sampler.cancel()
                        with suppress(asyncio.CancelledError):
                            await sampler
                    after = await self._metrics()
            except TimeoutError:
                done = sum(completion.seconds > 0 for completion in completions)
                raise LoadFailed(
                    f"{done} of {len(completions)} requests were answered within "
                    f"{load.timeout:g} s: ask for less, or allow more time"
                ) from None
            except ExceptionGroup as group:
                raise _as_load_failed(group.exceptions[0]) from group
            except httpx2.HTTPError as error:
                raise _as_load_failed(error) from error
        self._keep(before, after, seconds, {})
        return LoadResult(completions, seconds, self._samples, before, after)

    async def _answer(self, pending: Iterator[tuple[str, Completion]]) -> None:
        for prompt, completion in pending:
            body = self._load.body(self._model, prompt)
            started = time.perf_counter()
            async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise LoadFailed(_refusal(response.status_code, await response.aread()))
                if self._load.stream:
                    await _read_stream(response, completion, started)
                else:
                    completion.absorb(json.loads(await response.aread()))
            if not completion.tokens:
                raise LoadFailed("the server answered without token ids: vLLM gives them")
            completion.seconds = time.perf_counter() - started

    async def _sample(self, before: Metrics) -> None:
        """Until cancelled. A metric that fails to come is left out: the load tells more."""
        while True:
            await asyncio.sleep(self._interval)
            with suppress(httpx2.HTTPError, LoadFailed, MemshareError):
                probed = await asyncio.to_thread(self._probe) if self._probe else {}
                now = await self._metrics()
                self._keep(before, now, time.perf_counter() - self._started, probed)

    def _keep(
        self, before: Metrics, now: Metrics, seconds: float, probed: dict[str, float]
    ) -> None:
        sample = Sample.of(seconds, before, now, probed)
        self._samples.append(sample)
        if self._watch is not None:
            self._watch(sample)

    async def _metrics(self) -> Metrics:
        response = await self._client.get("/metrics", follow_redirects=True)
        if response.status_code != 200:
            raise LoadFailed(_refusal(response.status_code, response.content))
        return Metrics(response.text)


async def _read_stream(response: Any, completion: Completion, started: float) -> None:
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        if not line.startswith("data:"):
            continue
        document = json.loads(data)
        if "error" in document:
            raise LoadFailed(f"the server broke off: {_shortened(json.dumps(document['error']))}")
        completion.absorb(document)
        if completion.tokens and completion.first_token_seconds is None:
            completion.first_token_seconds = time.perf_counter() - started
    raise LoadFailed("the server broke off: its answer has no end")


def _refusal(status: int, body: bytes) -> str:
    return f"the server answered with status {status}: {_shortened(body.decode(errors='replace'))}"


def _shortened(text: str) -> str:
    return text if len(text) <= _ERROR_CHARACTERS else f"{text[:_ERROR_CHARACTERS]}…"


def _as_load_failed(error: BaseException) -> LoadFailed:
    if isinstance(error, LoadFailed):
        return error
    return LoadFailed(f"the server broke off: {type(error).__name__} {error}".strip())
