"""What commands print: one JSON document or a table on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from rich.console import Console
from rich.markup import escape
from rich.table import Table

# Fields of type bytes that hold packed numbers; all others are opaque ids.
_PACKED: Final = {
    "inv_freq": np.dtype("<f4"),
    "shared_keys_by_layer": np.dtype("<u4"),
    "shared_values_by_layer": np.dtype("<u4"),
}


def say(text: str) -> None:
    """Tell a person something on stderr, at once."""
    print(f"memshare: {text}", file=sys.stderr, flush=True)


def fail(error: object) -> None:
    """Print an error as one line on stderr."""
    print(f"memshare: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)


def print_json(document: object) -> None:
    """Print the command's only document on stdout."""
    print(json.dumps(document, indent=2), flush=True)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under their headings."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading)
    for row in rows:
        table.add_row(*(escape(str(value)) for value in row))
    _console().print(table)


def print_fields(fields: Iterable[tuple[str, object]]) -> None:
    """Print names and values in two columns."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in fields:
        table.add_row(name, escape(str(value)))
    _console().print(table)


def enum_name(descriptor: Any, number: int) -> str:
    """`SHARING_MODE_ROW` of enum `SharingMode` as `row`."""
    value = descriptor.values_by_number.get(number)
    if value is None:
        return str(number)
    prefix = descriptor.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return str(value.name).removeprefix(prefix).lower()


def to_document(message: Message) -> dict[str, Any]:
    """A message as JSON values: every field by its proto name, 64-bit numbers as numbers."""
    return {
        field.name: _field(message, field)
        for field in message.DESCRIPTOR.fields
        if not (field.has_presence and not message.HasField(field.name))
    }


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.is_repeated:
        return [_scalar(field, item) for item in value]
    return _scalar(field, value)


def _scalar(field: Any, value: Any) -> Any:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return to_document(value)
    if field.type == FieldDescriptor.TYPE_ENUM:
        return enum_name(field.enum_type, value)
    if field.type == FieldDescriptor.TYPE_FLOAT:
        # The shortest decimal of a 32-bit number: 0.1, not 0.10000000149011612.
        return float(str(np.float32(value)))
    if field.type == FieldDescriptor.TYPE_BYTES:
        packed = _PACKED.get(field.name)
        if packed is None:
            return value.hex()
        return [
            float(str(item)) if packed.kind == "f" else int(item)
            for item in np.frombuffer(value, packed)
        ]
    return value


def _console() -> Console:
    # Piped output keeps whole rows: no terminal's width cuts them.
    return Console(width=None if sys.stdout.isatty() else 200)
