"""What is asked of the servers: prompts that make a small model loop, or a user's own."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Final

from memshare.wire.errors import InvalidArgument

# Without sampling a small model answers these with chains that come back to what they said.
_TASKS: Final = (
    "Count the {} on the table one by one. After each one say how many there are so far.",
    "Explain in detail, step by step, how {} are made. Check every step again before you go on.",
    "Write a long poem about {}. Every verse has four lines and ends with the same line.",
    "There are three boxes with {} in them. Try every way to give them to four children, and "
    "check for each way whether it is fair.",
)
_THINGS: Final = (
    "apples", "bricks", "candles", "drums", "eggs", "flutes",
    "gates", "hats", "jars", "kites", "lamps", "maps",
)  # fmt: skip
LOOPING_PROMPTS: Final = tuple(
    task.format(thing) for thing, task in itertools.product(_THINGS, _TASKS)
)
_FIELDS: Final = ("problem", "question", "prompt")


def take_prompts(path: Path | None, count: int) -> tuple[str, ...]:
    """The first `count` prompts of a file, or of those that loop.

    A prompt that came twice would be answered from the prefix cache, so none does. Raises
    `InvalidArgument` when there are too few, naming the file.
    """
    prompts = LOOPING_PROMPTS if path is None else read_prompts(path)
    if len(prompts) < count:
        where = "are built in; name a file of more with --prompts" if path is None else f"in {path}"
        raise InvalidArgument(f"{count} requests need as many prompts: {len(prompts)} {where}")
    return tuple(prompts[:count])


def read_prompts(path: Path) -> tuple[str, ...]:
    """The prompts of a JSONL file: field `problem`, `question` or `prompt` of each line.

    Raises `InvalidArgument` naming the line that has none.
    """
    prompts = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            found = record if isinstance(record, dict) else {}
            texts = [found[name] for name in _FIELDS if isinstance(found.get(name), str)]
            if not texts:
                raise InvalidArgument(
                    f"{path}:{number}: not a JSON object with a field {', '.join(_FIELDS[:-1])} "
                    f"or {_FIELDS[-1]}"
                )
            prompts.append(texts[0])
    return tuple(prompts)
