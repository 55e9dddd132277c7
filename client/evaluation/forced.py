"""Teacher-forced runs: the same tokens through different caches, compared position by position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

CHUNK_TOKENS = 64


@dataclass(frozen=True)
class Fidelity:
    """Means over the second half of a trace, against the unshared run.

    Attributes:
        dnll: rise of the negative log-likelihood of the true next token, nats per token.
        kl: KL(unshared || shared) of the next-token distribution, nats per token.
        agree: share of positions with the same most likely token.
    """

    dnll: float
    kl: float
    agree: float


@torch.inference_mode()
def run_forced(
    model: PreTrainedModel,
    ids: torch.Tensor,
    cache: Cache,
    after_chunk: Callable[[int], object],
    first_wanted: int,
) -> torch.Tensor:
    """Feed `ids` `[1, tokens]` in chunks; `after_chunk(tokens so far)` runs between them.

    Returns log-probabilities of the positions from `first_wanted` on, float32
    `[tokens - first_wanted, vocabulary]`.
    """
    parts = []
    for start in range(0, ids.shape[1], CHUNK_TOKENS):
        chunk = ids[:, start : start + CHUNK_TOKENS]
        end = start + chunk.shape[1]
        keep = min(max(0, end - first_wanted), chunk.shape[1])
        arguments: Any = {"logits_to_keep": keep} if keep else {"logits_to_keep": 1}
        logits = model(chunk, cache=cache, **arguments).logits[0]
        if keep:
            parts.append(logits[-keep:].float().log_softmax(-1))
        after_chunk(end)
    return torch.cat(parts)


def compare(
    unshared: torch.Tensor, shared: torch.Tensor, ids: torch.Tensor, first: int
) -> Fidelity:
    """Compare log-probabilities of the positions from `first` on, as `run_forced` gives them."""
    following = ids[0, first + 1 :]
    pick = following[:, None]
    rise = unshared[:-1].gather(1, pick) - shared[:-1].gather(1, pick)
    # Row by row: the product over the whole vocabulary at once takes gigabytes.
    kl = torch.stack([(p.exp() * (p - q)).sum() for p, q in zip(unshared, shared, strict=True)])
    same = unshared.argmax(-1) == shared.argmax(-1)
    return Fidelity(dnll=float(rise.mean()), kl=float(kl.mean()), agree=float(same.float().mean()))
