"""What sharing did, for operators."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class ShareCounters:
    """Running sums since the session attached; see `memshare.v1.ShareCounters`."""

    sealed_tokens: int = 0
    examined_entries: int = 0
    shared_keys: int = 0
    shared_values: int = 0
    proposed: int = 0
    applied: int = 0
    missed: int = 0
    shareable_keys: int = 0
    shareable_values: int = 0
    over_budget: int = 0
    nonfinite: int = 0
    accumulated_error: float = 0.0

    def add(self, other: ShareCounters) -> None:
        """Add another session's sums to these."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
