"""What is asked of the servers: prompts that make a small model loop, or a user's own."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Final

from memshare.wire.errors import InvalidArgument

# Without sampling a small model answers these with verses that come back to what they said.
_TASKS: Final = (
    "Write a long poem about {}. Every verse has four lines and ends with the same line.",
    "Write a long ballad about {}. Every verse has four lines and ends with the same line.",
    "Write an endless poem about {} in which every line begins with the same words.",
    "Write a long prayer about {}. Every verse has four lines and ends with the same words.",
)
_THINGS: Final = (
    "apples", "bricks", "candles", "drums", "rivers", "stones",
    "the moon", "the sea", "bread", "the wind", "old trees", "my village",
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
    # As bytes, so that what is not UTF-8 is told by its line too.
    with path.open("rb") as lines:
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
    return tuple(dict.fromkeys(prompts))
