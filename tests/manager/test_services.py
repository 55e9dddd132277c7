"""What the services do with what the manager tells them, without a process around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memshare.manager.admin_service import fitting
from memshare.manager.config import ManagerSettings
from memshare.manager.manager import Manager
from memshare.manager.service import ManagerService
from memshare.v1 import admin_pb2, manager_pb2
from memshare.wire.errors import AgentUnavailable, MemshareError


class Aborted(Exception):
    """What `context.abort` raises."""


class Context:
    async def abort(self, *status: object) -> None:
        raise Aborted(status)


@pytest.mark.parametrize("failure", [AgentUnavailable("gone"), ValueError("out of range")])
async def test_an_engine_that_cannot_be_welcomed_departs(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    manager = Manager(ManagerSettings(runtime_dir=runtime_dir))
    engine, departed = SimpleNamespace(), []

    async def attach(hello: manager_pb2.Hello) -> tuple[Any, int]:
        return engine, 1

    async def depart(engine: Any, *, goodbye: bool) -> None:
        departed.append((engine, goodbye))

    def welcome(*_: object) -> None:
        raise failure

    monkeypatch.setattr(manager, "attach", attach)
    monkeypatch.setattr(manager, "depart", depart)
    service = ManagerService(manager)
    monkeypatch.setattr(service, "_welcome", welcome)

    async def requests() -> AsyncIterator[manager_pb2.AttachRequest]:
        yield manager_pb2.AttachRequest(hello=manager_pb2.Hello())

    expected = Aborted if isinstance(failure, MemshareError) else ValueError
    with pytest.raises(expected):
        await service.Attach(requests(), Context())  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert departed == [(engine, False)]


def test_a_list_that_does_not_fit_into_an_answer_is_cut() -> None:
    requests = [admin_pb2.RequestInfo(shared_keys_by_layer=bytes(100)) for _ in range(100)]
    kept = fitting(iter(requests), 2000)
    assert 0 < len(kept) < 20
    assert admin_pb2.ListRequestsResponse(requests=kept).ByteSize() <= 2000
    assert len(fitting(iter(requests))) == 100
