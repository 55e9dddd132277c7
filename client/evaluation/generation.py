"""Free generation through the sidecar, watched step by step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from transformers import PreTrainedModel, StoppingCriteria

from memshare.client.evaluation.sharing import TABLE_BYTES_PER_TOKEN_AND_LAYER
from memshare.client.session import Session
from memshare.client.transformers import MemShareCache

_SAMPLE_EVERY: Final = 16


@dataclass
class Generation:
    """What one batch of chains took.

    Attributes:
        sequences: int64 `[batch, tokens]`, prompts included.
        prompt_tokens: tokens of the longest prompt, padding included.
        seconds: wall time of the generation.
        kv_bytes: bytes of all K and V without sharing, left padding included.
        held_bytes: bytes of the rows that the manager counts as live in the end.
        shared_bytes: bytes that sharing gave back, the tables' bytes not counted.
        table_bytes: bytes of the row tables.
        by_layer: share of K and of V rows that are shared, float64 `[2, num_layers]`.
        over_tokens: (tokens per chain, saved bytes, tables counted against them).
    """

    sequences: torch.Tensor
    prompt_tokens: int
    seconds: float
    kv_bytes: int = 0
    held_bytes: int = 0
    shared_bytes: int = 0
    table_bytes: int = 0
    by_layer: np.ndarray = field(default_factory=lambda: np.zeros((2, 0)))
    over_tokens: list[tuple[int, float]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all chains per second."""
        batch, length = self.sequences.shape
        return batch * (length - self.prompt_tokens) / self.seconds


class _Watch(StoppingCriteria):
    """Called after each step: progress, and the saving so far."""

    def __init__(
        self, session: Session, cache: MemShareCache, result: Generation, step: Callable[[], object]
    ) -> None:
        self._session, self._cache, self._result, self._step = session, cache, result, step

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self._step()
        length = self._cache.batch.length
        if length % _SAMPLE_EVERY == 0:
            shared, tables = _bytes(self._session, self._cache)
            self._result.over_tokens.append((length, float(shared - tables)))
        return torch.zeros(len(input_ids), dtype=torch.bool)


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    tokenizer: Any,
    problems: tuple[str, ...],
    new_tokens: int,
    session: Session,
    step: Callable[[], object],
    held_rows: Callable[[], int],
    seed: int = 0,
) -> Generation:
    """One chain of `new_tokens` for each problem, sampled, as one batch.

    `step` is called after each step, `held_rows` in the end, while the rows are still held: the
    manager's count of them. End-of-text does not stop a chain, so that all are long.
    """
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem}], tokenize=False, add_generation_prompt=True
        )
        for problem in problems
    ]
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    inputs = tokenizer(chats, return_tensors="pt", padding=True, add_special_tokens=False)
    result = Generation(torch.empty(0), inputs.input_ids.shape[1], 0.0)
    torch.manual_seed(seed)
    with MemShareCache(model, session) as cache:
        generation: Any = model
        started = time.perf_counter()
        result.sequences = generation.generate(
            **inputs,
            cache=cache,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=True,
            temperature=0.7,
            top_p=0.95,
            pad_token_id=tokenizer.pad_token_id,
            stopping_criteria=[_Watch(session, cache, result, step)],
        )
        result.seconds = time.perf_counter() - started
        cache.finish_step()
        session.synchronise()
        # Once more, so that the manager has counted what that applied.
        session.synchronise()
        tables = cache.batch.tables
        layout = session.layout
        total = sum(t.length for t in tables)
        result.kv_bytes = 2 * layout.num_layers * layout.row_bytes * total
        result.shared_bytes, result.table_bytes = _bytes(session, cache)
        result.held_bytes = held_rows() * layout.row_bytes
        result.by_layer = np.sum([t.shared_entries for t in tables], axis=0) / total
    return result


def _bytes(session: Session, cache: MemShareCache) -> tuple[int, int]:
    """(bytes that sharing gave back, bytes of the tables)."""
    layout, tables = session.layout, cache.batch.tables
    shared = sum(int(t.shared_entries.sum()) for t in tables) * layout.row_bytes
    slots = sum(t.length for t in tables)
    return shared, slots * layout.num_layers * TABLE_BYTES_PER_TOKEN_AND_LAYER
