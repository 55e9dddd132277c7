"""The driver of a session's search, with a worker that answers what the test wants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from memshare.manager.pins import Pins
from memshare.manager.policy import Mode, Policy, Stage
from memshare.manager.sharing import Sharer
from memshare.manager.state import ManagerState
from memshare.v1 import agent_pb2, common_pb2
from memshare.wire.layout import RowLayout

LAYOUT = RowLayout(1, 1, 4, 4, common_pb2.ROW_DTYPE_FP32)
EARLY = Policy("early", Mode.EXACT, (Stage(0), Stage(1)))
LATER = Policy("later", Mode.EXACT, (Stage(0), Stage(1), Stage(2)))


class Worker:
    """Stands for the link; `on[name]` is called before the call of that name is answered."""

    worker_epoch = 1

    def __init__(self) -> None:
        self.on: dict[str, Callable[[], None]] = {}
        self.calls: list[str] = []
        names = ("CloseIndex", "OpenIndex", "IndexRows", "DropRequests", "FindDonors")
        self.stub = SimpleNamespace(**{name: name for name in names})

    async def call(self, method: str, request: object) -> Any:
        self.calls.append(method)
        await asyncio.sleep(0)
        self.on.pop(method, lambda: None)()
        return getattr(agent_pb2, f"{method}Response")()


async def test_a_policy_that_changes_while_the_worker_is_waited_for_is_followed() -> None:
    state, worker = ManagerState(64), Worker()
    session = state.open_session(1, tenant="", num_layers=1)
    state.open_request(1, 1, 0)
    rows, _ = state.lease(1, 32)
    state.seal(1, 1, 0, 0, rows[:16], rows[16:])
    told: asyncio.Queue[Any] = asyncio.Queue()
    sharer = Sharer(
        state,
        session,
        LAYOUT,
        EARLY,
        worker,
        told.put,
        Pins(state, lambda _: None),
        batch_tokens=16,
        candidates=8,  # type: ignore[arg-type]
    )

    def change_back_and_forth() -> None:
        sharer.set_policy(LATER)
        sharer.set_policy(EARLY)

    for change in (change_back_and_forth, lambda: sharer.set_policy(LATER)):
        # A drop is what the examination of a request waits for.
        worker.on = {
            "IndexRows": lambda: sharer.dropped(1, 16, 0),
            "DropRequests": change,
        }
        state.request(1, 1, 0).indexed = 0
        sharer.sync(1)
        if sharer._task is None:
            sharer.start()
        async with asyncio.timeout(5):
            await told.get()
        assert not worker.on
    # A failed search opens the index anew.
    assert worker.calls.count("OpenIndex") == 1
    assert len(state.request(1, 1, 0).examined) == len(LATER.stages)
    assert np.all(state.request(1, 1, 0).examined)
    await sharer.close()
