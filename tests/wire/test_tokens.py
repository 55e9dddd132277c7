"""Session tokens: whom they name, and every way in which a false one is refused."""

from __future__ import annotations

import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memshare.wire.errors import TokenRefused
from memshare.wire.sockets import PeerCredentials
from memshare.wire.tokens import KEY_BYTES, mint_token, verify_token

KEY = secrets.token_bytes(KEY_BYTES)
PEER = PeerCredentials(pid=4321, uid=1000, gid=100)
ids = st.integers(0, (1 << 31) - 1)


@given(ids, ids, ids)
def test_a_token_names_the_process_it_was_minted_for(pid, uid, gid):
    peer = PeerCredentials(pid, uid, gid)
    assert verify_token(KEY, mint_token(KEY, peer)) == peer


def test_two_tokens_of_one_process_differ():
    assert mint_token(KEY, PEER) != mint_token(KEY, PEER)


def test_a_token_of_another_key_is_refused():
    with pytest.raises(TokenRefused, match="not minted by this pool's owner"):
        verify_token(secrets.token_bytes(KEY_BYTES), mint_token(KEY, PEER))


@given(st.data())
def test_a_token_with_one_bit_changed_is_refused(data):
    token = bytearray(mint_token(KEY, PEER))
    bit = data.draw(st.integers(0, 8 * len(token) - 1))
    token[bit // 8] ^= 1 << bit % 8
    with pytest.raises(TokenRefused):
        verify_token(KEY, bytes(token))


@given(st.data())
def test_a_token_that_was_cut_is_refused(data):
    token = mint_token(KEY, PEER)
    cut = data.draw(st.integers(0, len(token) - 1))
    with pytest.raises(TokenRefused, match=f"has {len(token)} bytes, this one {cut}"):
        verify_token(KEY, token[:cut])


def test_a_token_with_something_after_it_is_refused():
    with pytest.raises(TokenRefused):
        verify_token(KEY, mint_token(KEY, PEER) + b"\0")


@given(st.binary(max_size=200))
def test_bytes_that_nobody_signed_are_refused(token):
    with pytest.raises(TokenRefused):
        verify_token(KEY, token)
