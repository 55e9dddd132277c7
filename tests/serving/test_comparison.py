"""Agreement of answers, and loops in them."""

from __future__ import annotations

import numpy as np
import pytest

from memshare.client.serving.comparison import common_prefix, compare, loops, repeated_share
from memshare.client.serving.load import Completion


def test_the_prefix_ends_where_tokens_differ() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([5], [6]) == common_prefix([], [1]) == 0


def test_agreement_is_by_answer() -> None:
    reference = [Completion([1, 2, 3, 4]), Completion([1, 2, 3, 4]), Completion([1, 2])]
    other = [Completion([1, 2, 3, 4]), Completion([1, 9, 3, 4]), Completion([1, 2, 3, 4])]
    agreement = compare(reference, other)
    assert agreement.identical == pytest.approx(1 / 3)
    assert agreement.prefix == pytest.approx((1 + 0.25 + 0.5) / 3)
    assert agreement.log_prob_difference is None


def test_log_probabilities_are_compared_while_the_texts_agree() -> None:
    reference = [Completion([1, 2, 3], log_probs=[-1.0, -2.0, -3.0])]
    other = [Completion([1, 2, 9], log_probs=[-1.5, -2.0, -90.0])]
    assert compare(reference, other).log_prob_difference == pytest.approx(0.25)


def test_answers_to_other_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        compare([Completion([1])], [])


def test_only_what_was_there_before_is_repeated() -> None:
    unlike = np.random.default_rng(0).integers(0, 50_000, 512).tolist()
    assert repeated_share(unlike) == 0
    assert repeated_share([1, 2, 3, 4] * 128) > 0.98
    # The second half says the first again: half of the windows, less those across the seam.
    assert repeated_share(unlike[:256] * 2) == pytest.approx(0.5, abs=0.04)
    assert repeated_share([7] * 20) == 0


def test_a_loop_is_mostly_repetition() -> None:
    unlike = list(range(256))
    assert not loops(Completion(unlike))
    assert not loops(Completion([*unlike, *[1, 2, 3] * 20]))
    assert loops(Completion([*unlike, *[1, 2, 3] * 100]))
