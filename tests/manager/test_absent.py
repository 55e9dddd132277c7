"""Whom the manager waits for, with an owner that answers now and then."""

from __future__ import annotations

import asyncio

from memshare.manager.absent import AbsentEngines
from memshare.manager.sessions import Session
from memshare.wire.errors import AgentUnavailable


async def test_rows_of_a_dead_engine_come_back_though_the_owner_stalled_as_it_died() -> None:
    answers: list[dict[bytes, int] | None] = [None, {b"a": 1, b"b": 2}, None, {b"b": 2}]
    given_back: list[int] = []

    async def holders() -> dict[bytes, int]:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer is None:
            raise AgentUnavailable("stalled")
        return answer

    async def give_back(session: Session) -> None:
        given_back.append(session.session_id)

    absent = AbsentEngines(holders, give_back, lambda: None)
    for number, token in enumerate((b"a", b"b"), 1):
        absent.add(token, number, Session(number, 0, 1, "", 0, None, 1, 0))
    async with asyncio.timeout(5):
        while len(absent) > 1:
            await asyncio.sleep(0.01)
    assert given_back == [1]
    assert absent.get(b"b")
    absent.remove(b"b")
