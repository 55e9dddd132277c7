"""The driver of one session: index what was sealed, look for donors, propose."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from memshare.manager import lending, search
from memshare.manager.agent_link import AgentLink
from memshare.manager.decisions import Candidates, Decision
from memshare.manager.division import Layout
from memshare.manager.pins import Pins
from memshare.manager.policy import Mode, Policy
from memshare.manager.session_index import SessionIndex
from memshare.manager.sessions import Session
from memshare.manager.state import ManagerState
from memshare.manager.tables import RequestTable
from memshare.v1 import manager_pb2
from memshare.wire.block_layout import BlockLayout
from memshare.wire.errors import AgentUnavailable, MemshareError, WorkerRestarted

_BACKOFF_SECONDS: Final = 1.0
# Equal blocks are looked for in this many at once: a lender that is asked for some of them
# answers only at its next step.
_EXACT_BLOCKS: Final = 256
_log = structlog.get_logger("memshare.manager")
Send = Callable[[manager_pb2.AttachResponse], Awaitable[None]]


class Sharer:
    """Runs beside a session's stream; nothing an engine waits for passes through here.

    The stream tells it what happened (`sealed`, `dropped`, `sync`); it works through it in
    order, one call of the worker at a time. While no worker is ready it pauses, then opens the
    session's index anew and indexes from the tables.
    """

    def __init__(
        self,
        state: ManagerState,
        session: Session,
        layout: Layout,
        policy: Policy,
        link: AgentLink,
        send: Send,
        pins: Pins,
        *,
        batch_tokens: int,
        candidates: int,
    ) -> None:
        self._state = state
        self._session = session
        self._layout = layout
        self._link = link
        self._send = send
        self._pins = pins
        self._unit = layout.block_tokens if isinstance(layout, BlockLayout) else 1
        self._batch = -(-batch_tokens // self._unit)
        self._candidates = candidates
        self._policy = self._in_units(policy)
        self._index = SessionIndex(session, layout, link)
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._touched: dict[int, None] = {}
        self._syncs: list[int] = []

    def _in_units(self, policy: Policy) -> Policy:
        """Policies count tokens, the tables of this session tokens or blocks."""
        blocks = isinstance(self._layout, BlockLayout)
        return policy.in_blocks(self._unit) if blocks else policy

    @property
    def _policy_is_exact(self) -> bool:
        if isinstance(self._layout, BlockLayout):
            return self._policy.mode is Mode.EXACT
        return self._policy.mode is Mode.EXACT or not self._layout.inv_freq

    def wake(self) -> None:
        """Go on: a worker is ready."""
        self._wake.set()

    def sealed(self, request_id: int) -> None:
        """Tokens of a request were sealed."""
        self._touched[request_id] = None
        self._wake.set()

    def dropped(self, request_id: int, keep: int, generation: int) -> None:
        """A request was truncated to `keep` tokens, or closed (0)."""
        if self._index.note_dropped(request_id, keep, generation):
            self._wake.set()

    def sync(self, sequence: int) -> None:
        """Answer with Synced when all that was told before is done."""
        self._syncs.append(sequence)
        self._wake.set()

    def set_policy(self, policy: Policy) -> None:
        """Examine all tokens again, by another policy."""
        self._policy = self._in_units(policy)
        for table in self._session.requests.values():
            table.examined = [0] * len(policy.stages)
            table.clear_shadow()
            self._touched[table.request_id] = None
        self._wake.set()

    def start(self) -> None:
        """Work, beside whatever else runs, until `close`."""
        self._task = asyncio.create_task(self._run())
        self._wake.set()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            syncs, self._syncs = self._syncs, []
            try:
                if self._link.worker_epoch:
                    await self._work(everything=bool(syncs))
            except (WorkerRestarted, AgentUnavailable) as error:
                self._index.epoch = 0
                _log.info("sharing paused", session=self._session.session_id, error=str(error))
            except MemshareError as error:
                self._index.epoch = 0
                _log.error("search refused", session=self._session.session_id, error=str(error))
                asyncio.get_running_loop().call_later(_BACKOFF_SECONDS, self._wake.set)
            except Exception:
                self._index.epoch = 0
                _log.exception("search failed", session=self._session.session_id)
                asyncio.get_running_loop().call_later(_BACKOFF_SECONDS, self._wake.set)
            for sequence in syncs:
                await self._send(
                    manager_pb2.AttachResponse(sequence=sequence, synced=manager_pb2.Synced())
                )

    async def close(self) -> None:
        """Stop, and let the worker forget the session."""
        await self._index.close(self._task)

    async def _work(self, *, everything: bool) -> None:
        if await self._index.open():
            self._touched.update(dict.fromkeys(self._session.requests))
        await self._index.drop()
        if everything:
            self._touched.update(dict.fromkeys(self._session.requests))
        while self._touched:
            request_id = next(iter(self._touched))
            del self._touched[request_id]
            table = self._session.requests.get(request_id)
            if table is None:
                continue
            if everything or table.sealed - table.indexed >= self._batch:
                await self._index.add(table)
                await self._examine(table, everything=everything)

    async def _examine(self, table: RequestTable, *, everything: bool) -> None:
        policy, exact = self._policy, self._policy_is_exact
        least = 1 if everything else self._batch
        blocks = isinstance(self._layout, BlockLayout)
        most = max(self._batch, _EXACT_BLOCKS) if blocks and exact else self._batch
        table.examined = table.examined or [0] * len(policy.stages)
        first = table.first_token + (0 if exact else policy.protected_tokens)
        for number, stage in enumerate(policy.stages):
            while True:
                await self._index.drop()
                # Either may have changed while the worker was waited for.
                if self._policy is not policy or not self._index.is_open(table, table.generation):
                    return
                start = max(table.examined[number], first)
                end = min(table.sealed - stage.min_age, table.indexed)
                if end - start < least:
                    break
                end = min(end, start + most)
                window = search.Window(number, start, end, first, exact)
                await self._find(table, policy, window)

    async def _find(self, table: RequestTable, policy: Policy, window: search.Window) -> None:
        generation = table.generation
        table.examined[window.stage] = window.end
        pool = self._state.pool
        used = 1 - pool.free / pool.num_rows
        request = search.build_request(pool, table, policy, window, used)
        if request is None:
            return
        request.worker_epoch = self._index.epoch
        request.session_id = self._session.session_id
        request.candidates = self._candidates
        as_of = self._state.clock
        try:
            response = await self._index.call(self._link.stub.FindDonors, request)
        except MemshareError:
            if self._goes_on(table, generation, policy):
                table.examined[window.stage] = min(table.examined[window.stage], window.start)
            raise
        counters = self._session.counters
        counters.examined_entries += response.examined
        counters.nonfinite += response.nonfinite
        if not self._goes_on(table, generation, policy):
            return
        found = search.read_response(response)
        if not window.exact:
            found = search.affordable(table, policy, found, counters)
        if not len(found):
            return
        if policy.mode is Mode.OBSERVE:
            search.observe(table, self._session.session_id, found, counters)
            return
        decision = await self._propose(table, policy, found, as_of, exact=window.exact)
        if decision is not None:
            message = search.to_message(decision, self._state)
            await self._send(manager_pb2.AttachResponse(share_decision=message))

    def _goes_on(self, table: RequestTable, generation: int, policy: Policy) -> bool:
        return self._index.is_open(table, generation) and self._policy is policy

    async def _propose(
        self, table: RequestTable, policy: Policy, found: Candidates, as_of: int, *, exact: bool
    ) -> Decision | None:
        """What comes of the items; blocks of other engines only if those agree to keep them."""
        name = self._session.session_id, table.request_id, table.generation
        asks = lending.ask(self._state, *name, found, as_of) if exact else []
        try:
            if asks:
                await self._pins.wait(asks)
                if not self._goes_on(table, name[2], policy):
                    return None
            return self._state.propose(*name, found, approximate=not exact, as_of=as_of)
        finally:
            self._pins.finish(asks)
