"""The domain's errors, free of gRPC. `memshare.wire.status` maps them to status codes."""

from __future__ import annotations

from typing import ClassVar


class MemshareError(Exception):
    """Base of all errors that cross a process boundary.

    `reason` is the stable name a program may branch on (ErrorInfo.reason), `details` the
    values that belong to it, `retry_after` seconds after which trying again may help.
    """

    reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self, message: str, *, retry_after: float | None = None, **details: object
    ) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.details = {key: str(value) for key, value in details.items()}


class InvalidArgument(MemshareError):
    """A value is wrong whatever the state; nothing was changed."""

    reason = "INVALID_ARGUMENT"


class VersionMismatch(MemshareError):
    """The two sides share no protocol version or lack a needed capability."""

    reason = "VERSION_MISMATCH"


class LayoutMismatch(MemshareError):
    """The pool is divided into rows of another size."""

    reason = "LAYOUT_MISMATCH"


class UnknownSession(MemshareError):
    """The manager does not know this session (any more): attach again."""

    reason = "UNKNOWN_SESSION"


class UnknownRequest(MemshareError):
    """No request of this id is open in the session."""

    reason = "UNKNOWN_REQUEST"


class StaleGeneration(MemshareError):
    """The message speaks of an older generation or epoch; nothing was changed."""

    reason = "STALE_GENERATION"


class RowNotHeld(MemshareError):
    """A row is not in the state or not with the session that the call supposes."""

    reason = "ROW_NOT_HELD"


class PoolExhausted(MemshareError):
    """Fewer rows are free than were asked for; none was granted."""

    reason = "POOL_EXHAUSTED"


class TokenRefused(MemshareError):
    """The session token was not minted by this pool's owner, or is in use."""

    reason = "TOKEN_REFUSED"


class PeerRefused(MemshareError):
    """The process at the other end of the socket may not use it."""

    reason = "PEER_REFUSED"


class WorkerRestarted(MemshareError):
    """The agent's worker started anew and lost its index: index again."""

    reason = "WORKER_RESTARTED"


class AgentUnavailable(MemshareError):
    """The agent's owner or worker does not answer."""

    reason = "AGENT_UNAVAILABLE"


class ManagerUnavailable(MemshareError):
    """The manager does not answer."""

    reason = "MANAGER_UNAVAILABLE"


class Recovering(MemshareError):
    """The manager waits for engines that held rows before it started."""

    reason = "RECOVERING"


class Draining(MemshareError):
    """The process is stopping."""

    reason = "DRAINING"


class PoolLost(MemshareError):
    """The owner of the pool is gone; the session's memory is no longer shared."""

    reason = "POOL_LOST"


class SocketInUse(MemshareError):
    """Another live process serves this socket path."""

    reason = "SOCKET_IN_USE"


class IntegrityError(MemshareError):
    """An invariant of the counts or tables is broken."""

    reason = "INTEGRITY"
