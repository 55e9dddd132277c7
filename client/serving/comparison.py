"""Two servers' answers to the same prompts, and how much an answer repeats itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from memshare.client.serving.load import Completion

# An answer loops when more than this share of its windows was there before.
LOOP_WINDOW: Final = 16
LOOP_SHARE: Final = 0.4


@dataclass(frozen=True)
class Agreement:
    """How far two lists of answers agree, answer by answer.

    Attributes:
        identical: share of answers with the same tokens from first to last.
        prefix: mean share of an answer's tokens before the first that differs.
        log_prob_difference: mean absolute difference of the chosen tokens' log-probabilities
            over those prefixes, None where they were not asked for.
    """

    identical: float
    prefix: float
    log_prob_difference: float | None


def compare(reference: Sequence[Completion], other: Sequence[Completion]) -> Agreement:
    """The agreement of `other` with `reference`, which answered the same prompts."""
    prefixes, same, differences = [], 0, []
    for one, two in zip(reference, other, strict=True):
        length = common_prefix(one.tokens, two.tokens)
        longest = max(len(one.tokens), len(two.tokens))
        prefixes.append(length / longest if longest else 1.0)
        same += length == longest
        known = min(length, len(one.log_probs), len(two.log_probs))
        differences.append(np.abs(np.subtract(one.log_probs[:known], two.log_probs[:known])))
    measured = np.concatenate(differences) if differences else np.zeros(0)
    return Agreement(
        identical=same / len(prefixes) if prefixes else 1.0,
        prefix=float(np.mean(prefixes)) if prefixes else 1.0,
        log_prob_difference=float(measured.mean()) if measured.size else None,
    )


def common_prefix(one: Sequence[int], two: Sequence[int]) -> int:
    """How many first tokens are the same."""
    length = min(len(one), len(two))
    differs = np.flatnonzero(np.asarray(one[:length]) != np.asarray(two[:length]))
    return int(differs[0]) if differs.size else length


def repeated_share(tokens: Sequence[int], window: int = LOOP_WINDOW) -> float:
    """The share of an answer's windows of `window` tokens that it had before, 0 to 1.

    Near 0 for text that goes on, near 1 for one that says the same over and over.
    """
    if len(tokens) < 2 * window:
        return 0.0
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens), window)
    return 1.0 - len(np.unique(windows, axis=0)) / len(windows)


def loops(completion: Completion) -> bool:
    """Whether an answer is a loop for the most part."""
    return repeated_share(completion.tokens) > LOOP_SHARE
