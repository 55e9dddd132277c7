"""Reasoning traces to measure on: JSON lines with a `trace` and, if there is one, a `problem`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memshare.wire.errors import InvalidArgument


@dataclass(frozen=True)
class Trace:
    """A tokenised trace. `ids` is int64 `[1, tokens]`."""

    name: str
    ids: torch.Tensor


def read_traces(
    path: Path, tokenizer: Any, tokens: int, limit: int, include_looping: bool = False
) -> list[Trace]:
    """The first `limit` traces of at least `tokens` tokens, cut to that length.

    Traces marked `looping` are passed over unless asked for: they repeat so much that they
    flatter any method. Raises `InvalidArgument` naming the line that is wrong.
    """
    found: list[Trace] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if len(found) == limit:
                break
            try:
                record = json.loads(line)
                text = record["trace"]
                problem = record.get("problem", "")
            except (ValueError, KeyError, TypeError, AttributeError):
                raise InvalidArgument(
                    f"{path}:{number}: not a JSON object with a `trace` field"
                ) from None
            if record.get("looping") and not include_looping:
                continue
            ids = tokenizer(f"{problem}\n{text}" if problem else text, return_tensors="pt")
            ids = ids.input_ids[:, :tokens]
            if ids.shape[1] == tokens:
                found.append(Trace(str(record.get("id", f"line {number}")), ids))
    if not found:
        raise InvalidArgument(f"{path}: no trace has {tokens} tokens; ask for fewer with --tokens")
    return found
