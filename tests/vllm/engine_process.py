"""A real vLLM engine in a process of its own, driven by JSON lines.

`Engine` is the test's side, `python engine_process.py` the other.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

MODEL = Path.home() / ".cache/memshare/smollm2-135m"
BLOCK_TOKENS = 32
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "OMP_NUM_THREADS": "2",
    "HF_HUB_OFFLINE": "1",
}


class Engine:
    """Starts with `arguments` for `vllm.LLM`; a failed start raises `RuntimeError` with its end."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        # Closed with the process.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **_ENVIRONMENT},
        )
        self.ask("start", **arguments)

    def ask(self, command: str, **arguments: Any) -> Any:
        """The answer to a command."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            print(json.dumps([command, arguments]), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        self.process.wait()
        self._errors.seek(0)
        raise RuntimeError(self._errors.read()[-4000:])

    def close(self) -> None:
        """End the process and what it started."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class _ChurnRequest:
    name: str
    prompt: list[int]
    samples: int
    tokens: int
    abort_after: int | None

    @classmethod
    def drawn(cls, seed: int, number: int, tokens: int) -> Self:
        chance = random.Random(f"{seed} {number}")
        length = chance.randrange(20, 150)
        most = chance.randrange(1, tokens)
        return cls(
            name=str(number),
            prompt=[100 + (number % 7 * 37 + j * 11) % 4000 for j in range(length)],
            samples=chance.choice((1, 1, 1, 2)),
            tokens=most,
            abort_after=chance.randrange(most) if chance.random() < 0.15 else None,
        )

    def parameters(self) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0.8 if self.samples > 1 else 0.0,
            seed=int(self.name),
            ignore_eos=True,
            n=self.samples,
            max_tokens=self.tokens,
        )


class _Served:
    """The engine's side: each method is a command."""

    llm: Any

    def start(self, **arguments: Any) -> None:
        from vllm import LLM

        defaults = {
            "model": str(MODEL),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_seqs": 16,
            "block_size": BLOCK_TOKENS,
        }
        self.llm = LLM(**{**defaults, **arguments})

    @property
    def _scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def generate(
        self, prompts: list[list[int]], tokens: int, salt: str | None = None, n: int = 1
    ) -> list[list[list[int]]]:
        """Greedy tokens of each prompt and sample."""
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, n=n)
        inputs = [
            {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})}
            for prompt in prompts
        ]
        answers = self.llm.generate(inputs, parameters, use_tqdm=False)
        return [[list(one.token_ids) for one in answer.outputs] for answer in answers]

    def cached(self, prompt: list[int]) -> dict[str, Any]:
        """Tokens that the prefix cache gives a prompt, and the token it is answered with."""
        from vllm import SamplingParams

        answer = self.llm.generate(
            [{"prompt_token_ids": prompt}],
            SamplingParams(temperature=0, max_tokens=1, logprobs=0),
            use_tqdm=False,
        )[0]
        logprobs = answer.outputs[0].logprobs[0]
        return {
            "cached": answer.num_cached_tokens,
            "logprob": next(iter(logprobs.values())).logprob,
        }

    def churn(self, seed: int, count: int, tokens: int) -> dict[str, Any]:
        """Run `count` requests with aborts and n > 1; check vLLM's own pool after every step.

        Each request is drawn from a generator of its own, so that another engine, which takes
        other steps, is asked the same. `answers` are those of the greedy ones that were not
        aborted.
        """
        engine = self.llm.llm_engine
        waiting = [_ChurnRequest.drawn(seed, number, tokens) for number in range(count)]
        running: dict[str, _ChurnRequest] = {}
        answers: dict[str, list[int]] = {}
        problems: list[str] = []
        preempted: set[str] = set()
        steps = aborted = 0
        while waiting or engine.has_unfinished_requests():
            while waiting and len(running) < 12:
                request = waiting.pop()
                engine.add_request(
                    request.name, {"prompt_token_ids": request.prompt}, request.parameters()
                )
                running[request.name] = request
            for output in engine.step():
                # The samples of an aborted request may end one by one.
                request = running.get(output.request_id)
                if request is None:
                    continue
                written = output.outputs[0].token_ids
                if output.finished:
                    del running[output.request_id]
                    if request.samples == 1:
                        answers[request.name] = list(written)
                elif request.abort_after is not None and len(written) >= request.abort_after:
                    del running[output.request_id]
                    engine.abort_request([request.name])
                    aborted += 1
            steps += 1
            problems += self._check_pool()
            preempted.update(r.request_id for r in self._scheduler.running if r.num_preemptions)
        engine.step()
        return {
            "problems": problems[:5],
            "steps": steps,
            "aborted": aborted,
            "preempted": len(preempted),
            "answers": answers,
            **self.blocks(),
        }

    def _check_pool(self) -> list[str]:
        """Every reference is a table entry, a held block or a pin; all else is free."""
        scheduler = self._scheduler
        manager = scheduler.kv_cache_manager
        pool = manager.block_pool
        named = Counter(
            block.block_id
            for single in manager.coordinator.single_type_managers
            for blocks in single.req_to_blocks.values()
            for block in blocks
            if not block.is_null
        )
        sharing = getattr(scheduler.connector, "_sharing", None)
        held = sharing._blocks._held if sharing is not None else set()
        pinned = sharing._session.pinned if sharing is not None else set()
        free = {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}
        problems = []
        for block in pool.blocks[1:]:
            expected = named[block.block_id] + sum(block.block_id in one for one in (held, pinned))
            if block.ref_cnt != expected:
                problems.append(f"block {block.block_id}: {block.ref_cnt} instead of {expected}")
            if (block.block_id in free) != (block.ref_cnt == 0):
                problems.append(f"block {block.block_id}: {block.ref_cnt} references and free")
        return problems

    def blocks(self) -> dict[str, int]:
        """How many blocks vLLM has free, and how many this engine may use."""
        connector = self._scheduler.connector
        pool = self._scheduler.kv_cache_manager.block_pool
        usable = connector._sharing._blocks.num_usable if connector else pool.num_gpu_blocks - 1
        return {"free": pool.get_num_free_blocks(), "usable": usable}

    def shared(self) -> dict[str, Any]:
        """What the plugin counted since the last call."""
        metrics = vars(self._scheduler.connector._sharing.collect())
        session = self._scheduler.connector._sharing._session
        return {**metrics, "state": session.state, "statistics": vars(session.statistics)}

    def settle(self) -> bool:
        """Wait until the sidecar has decided on all that was sealed."""
        return bool(self._scheduler.connector._sharing._session.synchronise())

    def reset(self) -> bool:
        """Reset vLLM's prefix cache."""
        return bool(self.llm.reset_prefix_cache())


def main() -> None:
    """Answer commands until stdin ends."""
    served = _Served()
    for line in sys.stdin:
        command, arguments = json.loads(line)
        print("\nanswer " + json.dumps(getattr(served, command)(**arguments)), flush=True)


if __name__ == "__main__":
    main()
