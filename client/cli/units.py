"""Sizes, shares and durations, as people read and write them."""

from __future__ import annotations

import re
from typing import Final

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", re.IGNORECASE)


def format_bytes(count: float) -> str:
    """`3221225472` as `3.0 GiB`."""
    size = float(count)
    for unit in _UNITS[:-1]:
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {_UNITS[-1]}"


def parse_bytes(text: str) -> int:
    """The bytes of `2GiB`, `512M` or `1048576`; units are powers of 1024.

    Raises `ValueError` naming the text.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size: write it like 2GiB, 512MiB or 1048576")
    number, prefix = match.groups()
    return int(float(number) * 1024 ** " KMGT".index(prefix.upper() or " "))


def format_percent(part: float, whole: float) -> str:
    """`part` of `whole` in percent, or `-` if there is no whole."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def format_duration(seconds: float) -> str:
    """`93784` seconds as `1d 2h 3m`, to the two or three largest units."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour}h {minute}m"
    if hours:
        return f"{hour}h {minute}m"
    return f"{minute}m {second}s" if minutes else f"{seconds:.1f}s"
