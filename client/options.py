"""How an engine attaches, and what its session counts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from memshare.v1 import common_pb2
from memshare.wire.names import require_name

# The engine's attention reads row tables and rotates shared keys.
ROW_TABLES: Final = "row-tables"
# The engine shares by its own block table.
BLOCK_TABLES: Final = "block-tables"


@dataclass(frozen=True)
class SessionOptions:
    """How an engine attaches.

    Attributes:
        runtime_dir: directory of the sidecar's sockets; None for the default one.
        policy: a preset's name, a policy, or None for the manager's default.
        tenant: rows are never shared between tenants; "" shares nothing between requests.
        engine: what operators see this engine as.
        max_rows: greatest number of rows the session may hold, 0 for no bound.
        ahead_tokens: tokens per request for which rows are leased ahead of need.
        overflow_bytes: private memory that may stand in when no row is granted; takes memory
            only when used.
        timeout: seconds to wait at attach and for the rows of a prompt.
        capabilities: what the engine's attention can do.
        row_mode_obstacle: why keys cannot be corrected for their position, if they cannot.
    """

    runtime_dir: Path | str | None = None
    policy: str | common_pb2.Policy | None = None
    tenant: str = "default"
    engine: str = "python"
    max_rows: int = 0
    ahead_tokens: int = 64
    overflow_bytes: int = 1 << 30
    timeout: float = 30.0
    capabilities: tuple[str, ...] = (ROW_TABLES,)
    row_mode_obstacle: str = ""

    def __post_init__(self) -> None:
        """Raises `InvalidArgument` for a name that cannot be sent and shown."""
        for name in ("tenant", "engine"):
            require_name(name, getattr(self, name))
        if isinstance(self.policy, str):
            require_name("policy", self.policy)


@dataclass
class SessionStatistics:
    """Counts since the session was attached.

    Attributes:
        steps: steps ended.
        sealed_tokens: tokens the manager was told of.
        applied, missed: entries of decisions that were applied, and that came too late.
        overflow_tokens: tokens whose rows lie in private memory.
        rejected: messages the manager refused.
        reattached: times the session went on after its manager had gone.
        waits: prompts that waited for rows.
        deferred: steps that sealed nothing because the manager was behind.
        backlogs: times the stream was given up because the manager read nothing.
    """

    steps: int = 0
    sealed_tokens: int = 0
    applied: int = 0
    missed: int = 0
    overflow_tokens: int = 0
    rejected: int = 0
    reattached: int = 0
    waits: int = 0
    deferred: int = 0
    backlogs: int = 0
