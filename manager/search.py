"""What is asked of the worker's search, and what its answer comes to. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memshare.manager.counters import ShareCounters
from memshare.manager.decisions import Candidates, Decision, Ids
from memshare.manager.policy import Mode, Policy
from memshare.manager.rows import RowPool
from memshare.manager.state import ManagerState
from memshare.manager.tables import KEY, OWN, RequestTable
from memshare.v1 import agent_pb2, manager_pb2
from memshare.wire.packing import (
    FLOAT32,
    INT32,
    UINT8,
    UINT16,
    UINT32,
    UINT64,
    pack,
    pack_mask,
    unpack,
)

# Marks of entries that `observe` counted as shared, or as a donor.
COUNTED = 1
LENT = 2


@dataclass(frozen=True)
class Window:
    """Tokens [start, end) to examine in one stage; tokens before `first` are left alone."""

    stage: int
    start: int
    end: int
    first: int
    exact: bool


def build_request(
    pool: RowPool, table: RequestTable, policy: Policy, window: Window, used: float
) -> agent_pb2.FindDonorsRequest | None:
    """The search of a window, or None if it would find nothing.

    With no target the agent still enters an exact window among the donors of other requests.
    A donor owns its row. A target owns its row alone and lends it to nobody.
    """
    start, end = window.start, window.end
    donors = table.own(end)
    donors[:, :, : window.first] = False
    rows = table.rows[:, :, start:end]
    targets = np.zeros_like(donors)
    targets[:, :, start:] = (
        donors[:, :, start:] & (pool.references[rows] == 1) & (pool.pins[rows] == 0)
    )
    if policy.mode is Mode.OBSERVE:
        shadow = table.shadow[:, :, :end]
        donors &= shadow != COUNTED
        targets &= shadow == 0
    if not (targets.any() or window.exact):
        return None
    keys, values = policy.thresholds(policy.stages[window.stage], table.num_layers, used)
    return agent_pb2.FindDonorsRequest(
        request_id=table.request_id,
        generation=table.generation,
        target_start=start,
        target_end=end,
        donor_mask=pack_mask(donors),
        target_mask=pack_mask(targets),
        key_thresholds=pack(keys, FLOAT32),
        value_thresholds=pack(values, FLOAT32),
        exact=window.exact,
    )


def read_response(response: agent_pb2.FindDonorsResponse) -> Candidates:
    """The columns of an answer. Raises `InvalidArgument` if one has another length."""
    kinds = unpack(response.kinds, UINT8, "kinds")
    count = len(kinds)
    elsewhere = bool(response.donor_sessions)
    return Candidates(
        layers=unpack(response.layers, UINT16, "layers", count),
        kinds=kinds,
        targets=unpack(response.targets, INT32, "targets", count),
        donors=unpack(response.donors, INT32, "donors", count),
        donor_rows=unpack(response.donor_rows, INT32, "donor_rows", count),
        distances=unpack(response.distances, FLOAT32, "distances", count),
        donor_sessions=unpack(response.donor_sessions, UINT64, "donor_sessions", count)
        if elsewhere
        else None,
        donor_requests=unpack(response.donor_requests, UINT64, "donor_requests", count)
        if elsewhere
        else None,
    )


def affordable(
    table: RequestTable, policy: Policy, found: Candidates, counters: ShareCounters
) -> Candidates:
    """The items that the request's fidelity budget still allows, best first."""
    spent = table.error + table.pending_error + table.shadow_error
    num_rows = table.per_token * table.sealed
    accepted = policy.within_budget(found.distances, spent, num_rows)
    counters.over_budget += int((~accepted).sum())
    return found.where(accepted)


def observe(
    table: RequestTable, session_id: int, found: Candidates, counters: ShareCounters
) -> None:
    """Count items as if they were shared, each entry once and in one role only."""
    inside = (found.kinds < table.kinds) & (found.layers < table.num_layers)
    found = found.where(inside & (found.targets >= 0) & (found.targets < table.sealed))
    where = found.kinds, found.layers, found.targets
    found = found.where((table.shadow[where] == 0) & (table.entries[where] == OWN))
    local = (found.donors >= 0) & (found.donors < table.sealed)
    if found.donor_sessions is not None and found.donor_requests is not None:
        local &= found.donor_sessions == session_id
        local &= found.donor_requests == table.request_id
    table.shadow[found.kinds[local], found.layers[local], found.donors[local]] = LENT
    table.shadow[found.kinds, found.layers, found.targets] = COUNTED
    table.shadow_error += float(found.distances.sum(dtype=np.float64))
    keys = int((found.kinds == KEY).sum())
    counters.shareable_keys += keys
    counters.shareable_values += len(found) - keys


def to_message(decision: Decision, state: ManagerState) -> manager_pb2.ShareDecision:
    """What the engine is asked to apply. Exact matches need no rotation, and blocks cannot have
    any: instead the engine hears what it can check their donors by.
    """
    items = decision.items
    deltas = np.zeros(len(items), np.int32)
    blocks = state.pool.kinds == 1
    if decision.approximate and not blocks:
        keys = items.kinds == KEY
        deltas[keys] = items.targets[keys] - items.donors[keys]
    message = manager_pb2.ShareDecision(
        decision_id=decision.decision_id,
        request_id=decision.request_id,
        generation=decision.generation,
        layers=pack(items.layers, UINT16),
        kinds=pack(items.kinds, UINT8),
        targets=pack(items.targets, INT32),
        target_rows=pack(decision.target_rows, INT32),
        donor_rows=pack(items.donor_rows, INT32),
        deltas=pack(deltas, INT32),
        distances=pack(items.distances, FLOAT32),
    )
    if blocks:
        requests, generations = _owners_of_donors(decision, state)
        message.donors = pack(items.donors, INT32)
        message.donor_requests = pack(requests, UINT64)
        message.donor_generations = pack(generations, UINT32)
    return message


def _owners_of_donors(decision: Decision, state: ManagerState) -> tuple[Ids, Ids]:
    """(request, generation) of each item's donor; request 0 for those of other sessions."""
    items = decision.items
    requests = np.full(len(items), decision.request_id, np.uint64)
    if items.donor_sessions is not None and items.donor_requests is not None:
        own = items.donor_sessions == decision.session_id
        requests = np.where(own, items.donor_requests, 0).astype(np.uint64)
    tables = state.session(decision.session_id).requests
    generations = np.zeros(len(items), np.uint32)
    for request in np.unique(requests).tolist():
        if table := tables.get(request):
            generations[requests == request] = table.generation
    return requests, generations
