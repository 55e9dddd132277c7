"""Names that one process gives and others keep, show and log."""

from __future__ import annotations

from typing import Final

from memshare.wire.errors import InvalidArgument

MAX_NAME_BYTES: Final = 256


def require_name(field: str, text: str, most: int = MAX_NAME_BYTES) -> None:
    """Raise `InvalidArgument` for a text that cannot be shown or is too long to be kept.

    Control characters would change the terminal or the log that shows it, half a character
    cannot be sent. `most` is in bytes.
    """
    if not text.isprintable():
        raise InvalidArgument(f"{field} is {text!r:.80}, must be printable", field=field)
    if (length := len(text.encode())) > most:
        raise InvalidArgument(f"{field} has {length} bytes, at most {most}", field=field)
