"""One attached engine as the services see it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from memshare.manager.division import Layout
from memshare.manager.pins import Outlet, Pins
from memshare.manager.policy import Mode, Policy, for_blocks, preset
from memshare.manager.sessions import Session
from memshare.manager.sharing import Sharer
from memshare.manager.state import ManagerState
from memshare.v1 import manager_pb2
from memshare.wire.block_layout import BlockLayout
from memshare.wire.errors import InvalidArgument, MemshareError
from memshare.wire.names import require_name

_MAX_TEXT_BYTES: Final = 1024
_MAX_CAPABILITIES: Final = 64


@dataclass(eq=False)
class Engine:
    """A session whose stream is open.

    `state` is the pool it was attached to; after the pool is lost the manager has another.
    `policy` is what was asked for, `narrowed` what is done; `reason` says why they differ.
    """

    token: bytes
    pid: int
    hello: manager_pb2.Hello
    layout: Layout
    policy: Policy
    follows_default: bool
    state: ManagerState
    session: Session
    pins: Pins
    snapshot_required: bool
    outlet: Outlet = field(default_factory=Outlet)
    failure: asyncio.Future[MemshareError] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    departed: asyncio.Event = field(default_factory=asyncio.Event)
    zeroing: asyncio.Task[None] | None = None
    sharer: Sharer | None = None

    @property
    def session_id(self) -> int:
        """Id of the session, the same over all its attachments."""
        return self.session.session_id

    @property
    def outbox(self) -> asyncio.Queue[manager_pb2.AttachResponse | None]:
        """What is to be sent, None after the last."""
        return self.outlet.queue

    @property
    def narrowed(self) -> Policy:
        """The policy that is followed."""
        policy = self.policy.narrowed(self.reason)
        return for_blocks(policy) if isinstance(self.layout, BlockLayout) else policy

    @property
    def reason(self) -> str:
        """Why only the exact part of `policy` is followed; empty if all of it is."""
        return obstacle(self.hello, self.layout, self.policy.mode)

    def follow(self, policy: Policy) -> None:
        """Share by another policy from now on, and say so."""
        self.policy = policy
        if self.sharer:
            self.sharer.set_policy(self.narrowed)
        news = manager_pb2.PolicyChanged(policy=self.narrowed.to_proto(), mode_reason=self.reason)
        self.tell(manager_pb2.AttachResponse(policy_changed=news))

    def fail(self, error: MemshareError) -> None:
        """End the stream with this error."""
        if not self.failure.done():
            self.failure.set_result(error)

    def tell(self, message: manager_pb2.AttachResponse) -> None:
        """Send news, unless the engine has stopped reading."""
        self.outlet.offer(message)


def require_bounded(hello: manager_pb2.Hello) -> None:
    """Raise `InvalidArgument` for a text that cannot be kept and shown."""
    for name in ("client_version", "engine", "tenant", "policy_name"):
        require_name(name, getattr(hello, name))
    require_name("row_mode_obstacle", hello.row_mode_obstacle, _MAX_TEXT_BYTES)
    for capability in hello.capabilities:
        require_name("capabilities", capability)
    if len(hello.capabilities) > _MAX_CAPABILITIES:
        raise InvalidArgument(
            f"{len(hello.capabilities)} capabilities, at most {_MAX_CAPABILITIES}",
            field="capabilities",
        )


def requested_policy(hello: manager_pb2.Hello, default: Policy) -> tuple[Policy, bool]:
    """The policy a session asks for, and whether it follows the default.

    Raises `InvalidArgument` for one that is wrong or unknown.
    """
    if hello.HasField("policy"):
        return Policy.from_proto(hello.policy), False
    if hello.HasField("policy_name"):
        return preset(hello.policy_name), False
    return default, True


def obstacle(hello: manager_pb2.Hello, layout: Layout, mode: Mode) -> str:
    """Why a session cannot share in a mode; empty if it can."""
    if isinstance(layout, BlockLayout):
        if mode is Mode.ROW:
            return "the engine shares blocks through its own block table and cannot share rows"
        return ""
    if mode is Mode.BLOCK:
        return "the engine shares rows and has no block table: use a row policy"
    return _row_mode_obstacle(hello) if mode is Mode.ROW else ""


def _row_mode_obstacle(hello: manager_pb2.Hello) -> str:
    if not hello.layout.HasField("rope"):
        why = hello.row_mode_obstacle or "the engine gave no rotary frequencies"
        return f"keys cannot be corrected for their position: {why}"
    if "row-tables" not in hello.capabilities:
        return "the engine lacks the capability row-tables"
    return ""
