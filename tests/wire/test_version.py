"""Two sides agree on a protocol, or both releases are named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memshare.wire import version
from memshare.wire.errors import VersionMismatch

numbers = st.integers(0, 9)


@given(numbers, numbers, numbers, numbers)
def test_the_highest_protocol_of_both_sides_is_taken(own_min, own_span, peer_min, peer_max):
    own_max = own_min + own_span
    both = set(range(own_min, own_max + 1)) & set(range(peer_min, peer_max + 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(version, "MIN_PROTOCOL", own_min)
        patch.setattr(version, "MAX_PROTOCOL", own_max)
        if both:
            assert version.agree_protocol(peer_min, peer_max, "the engine", "9") == max(both)
            return
        with pytest.raises(VersionMismatch):
            version.agree_protocol(peer_min, peer_max, "the engine", "9")


def test_a_refusal_names_both_releases_and_ranges():
    with pytest.raises(VersionMismatch) as refusal:
        version.agree_protocol(7, 9, "the engine", "3.2.1")
    text = str(refusal.value)
    for part in ("the engine 3.2.1", "7 to 9", version.VERSION, "upgrade the older"):
        assert part in text
    assert refusal.value.details == {"peer_version": "3.2.1", "own_version": version.VERSION}


def test_a_peer_without_a_version_is_refused_readably():
    with pytest.raises(VersionMismatch, match=r"\(unknown version\) speaks memshare protocol 0 to"):
        version.agree_protocol(0, 0, "the manager", "")
