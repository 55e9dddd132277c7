"""The settings file: TOML, with a table for each process."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from memshare.wire.errors import InvalidArgument


def no_bool(value: Any) -> Any:
    """A validator of numbers: Python's true is 1, a settings file's is not."""
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


def read_table(config: Path, name: str) -> dict[str, Any]:
    """The table `name` of the file, empty if it has none.

    Raises `InvalidArgument` if the file cannot be read or holds a key outside any table.
    """
    try:
        content = tomllib.loads(config.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidArgument(f"{config}: {error}") from None
    # Other tables belong to other processes; a bare key belongs to nobody.
    for key, value in content.items():
        if not isinstance(value, dict):
            raise InvalidArgument(
                f"{key} = {value!r} ({config}): settings belong into the [{name}] table", field=key
            )
    table: dict[str, Any] = content.get(name, {})
    return table
