"""Results on disk, one JSON line each, so that an interrupted evaluation goes on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Measurement:
    """One trace under one policy, control or lever.

    `saved` is a share of K and V bytes; the rest is as in `Fidelity`. `kind` is "policy",
    "control" or "lever".
    """

    trace: str
    tokens: int
    policy: str
    kind: str
    saved: float
    dnll: float
    kl: float
    agree: float
    # Of model, text and policy: what has changed is measured anew.
    digest: str = ""
    layers: list[list[float]] = field(default_factory=list)


class ResultsFile:
    """Appends measurements and finds those that are there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[tuple[str, int, str, str], Measurement] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    self._remember(Measurement(**json.loads(line)))
                except (ValueError, TypeError):
                    continue  # the last line of a run that was killed

    def find(self, trace: str, tokens: int, policy: str, digest: str) -> Measurement | None:
        """The measurement of that trace, length and policy, if there is one."""
        return self._known.get((trace, tokens, policy, digest))

    def add(self, measurement: Measurement) -> None:
        """Write it down at once."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(measurement)) + "\n")
        self._remember(measurement)

    def _remember(self, measurement: Measurement) -> None:
        key = (measurement.trace, measurement.tokens, measurement.policy, measurement.digest)
        self._known[key] = measurement
