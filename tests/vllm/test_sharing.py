"""When the sidecar hears of what vLLM takes from a request, with steps in flight.

The CPU backend finishes each step before it schedules the next one, so vLLM and the session are
stood in for here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from memshare.client.block_tables import BlockTable
from memshare.client.vllm.settings import Settings
from memshare.client.vllm.sharing import BlockSharing
from memshare.v1 import common_pb2


@dataclass
class Request:
    request_id: str
    num_preemptions: int = 0
    cache_salt: str | None = None


@dataclass
class Session:
    """Notes what it is told."""

    told: list[str] = field(default_factory=list)
    policy: Any = field(default_factory=lambda: common_pb2.Policy(name="exact"))

    def open_request(self, *, private: bool) -> BlockTable:
        return BlockTable(1, 1, private)

    def seal(self, table: BlockTable, blocks: Any, candidates: Any) -> None:
        table.append(blocks, candidates)
        self.told.append(f"sealed {table.sealed}")

    def truncate(self, table: BlockTable) -> None:
        table.truncate(0)
        self.told.append("truncated")

    def close_requests(self, tables: list[BlockTable]) -> None:
        self.told += ["closed"] * len(tables)

    def can_seal(self) -> bool:
        return True

    def take_unpinned(self) -> list[int]:
        return []

    take_pin_requests = take_decisions = take_unpinned

    def end_step(self) -> None:
        pass


class Blocks:
    """Of every request the first two blocks are final."""

    def num_final(self, request: Request) -> int:
        return 2

    def blocks_of(self, name: str, start: int, end: int) -> Any:
        return np.arange(start, end, dtype=np.int32)[None]

    def unpin(self, blocks: list[int]) -> None:
        assert not blocks


def started(steps_in_flight: int) -> tuple[BlockSharing, Session, Request]:
    session: Any = Session()
    blocks: Any = Blocks()
    sharing = BlockSharing(session, blocks, Settings(), None, steps_in_flight=steps_in_flight)
    request = Request("one")
    sharing.begin_step([request])
    assert session.told == ["sealed 2"]
    session.told.clear()
    return sharing, session, request


@pytest.mark.parametrize("steps_in_flight", [0, 2])
def test_a_preempted_request_is_rolled_back_when_no_step_in_flight_reads_it(steps_in_flight):
    sharing, session, request = started(steps_in_flight)
    request.num_preemptions = 1
    sharing.preempted(["one"])
    # vLLM lets it run again at once.
    for _ in range(steps_in_flight):
        assert session.told == []
        sharing.begin_step([request])
    if steps_in_flight:
        assert session.told == ["truncated", "sealed 2"]
    else:
        assert session.told == ["truncated"]


@pytest.mark.parametrize("steps_in_flight", [0, 2])
def test_a_finished_request_is_closed_when_no_step_in_flight_reads_it(steps_in_flight):
    sharing, session, _ = started(steps_in_flight)
    sharing.finished("one")
    for _ in range(steps_in_flight):
        assert session.told == []
        sharing.begin_step([])
    assert session.told == ["closed"]


def test_a_long_prompt_is_sealed_in_pieces():
    sharing, session, _ = started(0)
    sharing._blocks.num_final = lambda request: 70  # type: ignore[method-assign]
    for _ in range(4):
        sharing.begin_step([Request("long")])
    assert session.told == ["sealed 32", "sealed 64", "sealed 70"]
