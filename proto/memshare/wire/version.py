"""The release and the range of protocol versions this build speaks."""

from __future__ import annotations

from typing import Final

from memshare.wire.errors import VersionMismatch

VERSION: Final = "0.1.0"
MIN_PROTOCOL: Final = 1
MAX_PROTOCOL: Final = 1


def agree_protocol(peer_min: int, peer_max: int, peer: str, peer_version: str) -> int:
    """Return the highest protocol that both sides speak.

    Raises `VersionMismatch`, naming both releases and ranges, if there is none.
    """
    highest = min(peer_max, MAX_PROTOCOL)
    if peer_min > peer_max or highest < max(peer_min, MIN_PROTOCOL):
        raise VersionMismatch(
            f"{peer} {peer_version or '(unknown version)'} speaks memshare protocol "
            f"{peer_min} to {peer_max}, this side ({VERSION}) speaks {MIN_PROTOCOL} to "
            f"{MAX_PROTOCOL}: upgrade the older of the two",
            peer_version=peer_version,
            own_version=VERSION,
        )
    return highest
