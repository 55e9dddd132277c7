"""Controls and low-bit caches do what they are compared as."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from memshare.client.evaluation.levers import (
    DroppedTokens,
    EditedCache,
    LowBits,
    RandomDonors,
    SharedEntries,
    quantise,
    rotate,
)
from memshare.client.tables import KEY, VALUE

LAYERS, HEADS, TOKENS, DIM = 2, 2, 256, 8
INV_FREQ = torch.tensor([1.0, 0.1, 0.01, 0.001])


class _Model:
    """All that an EditedCache asks of a model."""

    config = None


@pytest.fixture
def cache() -> EditedCache:
    filled = EditedCache(_Model())  # type: ignore[arg-type]
    torch.manual_seed(0)
    for layer in range(LAYERS):
        filled.update(torch.randn(1, HEADS, TOKENS, DIM), torch.randn(1, HEADS, TOKENS, DIM), layer)
    return filled


def entries(kind: int, layer: int, targets: list[int]) -> SharedEntries:
    count = len(targets)
    return SharedEntries(
        TOKENS,
        torch.full((count,), kind),
        torch.full((count,), layer),
        torch.tensor(targets),
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_quantising_keeps_the_extremes_and_errs_by_half_a_step_at_most(bits: int) -> None:
    states = torch.randn(2, 64, 8, dtype=torch.float64)
    rounded = quantise(states, bits, dim=1)
    step = (states.amax(1) - states.amin(1)) / (2**bits - 1)
    assert ((rounded - states).abs() <= step[:, None] / 2 + 1e-12).all()
    assert torch.allclose(rounded.amax(1), states.amax(1))
    assert len(rounded[0, :, 0].unique()) <= 2**bits


def test_low_bits_leave_the_newest_tokens_alone(cache: EditedCache) -> None:
    before = cache.states(1, VALUE).clone()
    LowBits(4).edit(cache, TOKENS)
    after = cache.states(1, VALUE)
    assert torch.equal(after[:, TOKENS - 64 :], before[:, TOKENS - 64 :])
    assert not torch.equal(after[:, :64], before[:, :64])


def test_low_bits_count_their_scales() -> None:
    lever = LowBits(4)
    lever._done = TOKENS
    assert 0.6 < lever.saved(TOKENS, 64) < 0.75


def test_random_donors_replace_just_the_shared_entries(cache: EditedCache) -> None:
    before = cache.states(1, KEY).clone()
    RandomDonors([entries(KEY, 1, [200, 201])], INV_FREQ, first=16).edit(cache, TOKENS)
    changed = (cache.states(1, KEY) != before).any(dim=-1).any(dim=0).nonzero()[:, 0]
    assert changed.tolist() == [200, 201]


def test_a_random_donor_is_an_older_own_unprotected_token(cache: EditedCache) -> None:
    values = cache.states(0, VALUE)
    values[:] = torch.arange(TOKENS, dtype=torch.float32)[None, :, None]
    control = RandomDonors([entries(VALUE, 0, list(range(100, 160)))], INV_FREQ, first=16)
    control.edit(cache, TOKENS)
    donors = cache.states(0, VALUE)[0, 100:160, 0]
    assert ((donors >= 16) & (donors < 100)).all()
    assert len(donors.unique()) > 10


def test_a_token_is_dropped_for_every_two_entries(cache: EditedCache) -> None:
    event = entries(KEY, 1, [10, 20, 30, 40])
    DroppedTokens([event]).edit(cache, TOKENS)
    assert int(cache.dropped[1].sum()) == 2
    assert 0 not in cache.dropped


def test_rotation_is_the_group_of_rope() -> None:
    keys = torch.randn(HEADS, 5, DIM)
    there = rotate(keys, torch.arange(5) + 100, INV_FREQ)
    back = rotate(there, -torch.arange(5) - 100, INV_FREQ)
    np.testing.assert_allclose(back, keys, atol=1e-5)
