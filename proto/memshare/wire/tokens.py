"""Session tokens: minted by the memory owner, checked by the manager without asking it."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from typing import Final

from memshare.wire.errors import TokenRefused
from memshare.wire.sockets import PeerCredentials

KEY_BYTES: Final = 32
_CLAIMS = struct.Struct("<16siii")
_SIGNATURE_BYTES: Final = hashlib.sha256().digest_size


def mint_token(key: bytes, peer: PeerCredentials) -> bytes:
    """A token for the process the kernel named, signed with HMAC-SHA256 (RFC 2104)."""
    claims = _CLAIMS.pack(secrets.token_bytes(16), peer.pid, peer.uid, peer.gid)
    return claims + hmac.digest(key, claims, "sha256")


def verify_token(key: bytes, token: bytes) -> PeerCredentials:
    """Who the token was minted for. Raises `TokenRefused` if the key did not sign it."""
    if len(token) != _CLAIMS.size + _SIGNATURE_BYTES:
        raise TokenRefused(
            f"a session token has {_CLAIMS.size + _SIGNATURE_BYTES} bytes, this one {len(token)}"
        )
    claims, signature = token[: _CLAIMS.size], token[_CLAIMS.size :]
    if not hmac.compare_digest(hmac.digest(key, claims, "sha256"), signature):
        raise TokenRefused(
            "the session token was not minted by this pool's owner: connect to it again"
        )
    _, pid, uid, gid = _CLAIMS.unpack(claims)
    return PeerCredentials(pid, uid, gid)
