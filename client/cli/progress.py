"""Progress on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from memshare.client.cli import output


class Bar:
    """Counts to `total`."""

    def __init__(self, what: str, total: int, bar: Progress | None) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._bar = bar
        self._task = bar.add_task(what, total=total) if bar is not None else None

    def advance(self) -> None:
        """One more is done."""
        self._done += 1
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task)
        elif self._done * 10 // self._total > (self._done - 1) * 10 // self._total:
            output.say(f"{self._what}: {self._done} of {self._total}")

    def describe(self, what: str) -> None:
        """What is being done now."""
        self._what = what
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=what)


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Bar]:
    """A bar that is there while the block runs."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Bar(what, total, None)
        return
    columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        yield Bar(what, total, bar)
