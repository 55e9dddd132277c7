"""An engine that shares by its own block table, and says what it is told to."""

from __future__ import annotations

from typing import Any

import numpy as np
from manager_harness import Engine, Sidecar

from memshare.v1 import common_pb2, manager_pb2
from memshare.wire import packing
from memshare.wire.block_layout import BlockGroup, BlockLayout, PagePart
from memshare.wire.packing import INT32, UINT8, pack

TOKENS = 16
HEAD = 16
LAYERS = 2
GROUPS = 2
BLOCK = LAYERS * TOKENS * 2 * HEAD * 4
POOL_BYTES = 1 << 20
BLOCKS = POOL_BYTES // BLOCK


def group(**changes: Any) -> BlockGroup:
    """Each layer's page of a block lies in the block, K before V."""
    page = BLOCK // LAYERS
    fields = {
        "num_kv_heads": 1, "key_head_dim": HEAD, "value_head_dim": HEAD,
        "layer_offsets": tuple(layer * page for layer in range(LAYERS)), "block_stride": BLOCK,
        "keys": PagePart(0, TOKENS * HEAD, HEAD, 1),
        "values": PagePart(TOKENS * HEAD, TOKENS * HEAD, HEAD, 1),
    }  # fmt: skip
    return BlockGroup(**{**fields, **changes})


LAYOUT = BlockLayout(common_pb2.ROW_DTYPE_FP32, TOKENS, BLOCK, BLOCKS, (group(),))
TWO_GROUPS = BlockLayout(common_pb2.ROW_DTYPE_FP32, TOKENS, BLOCK, BLOCKS, (group(), group()))


class BlockEngine(Engine):
    """Like `Engine`; each message names blocks, [groups, n] flat."""

    def __init__(self, sidecar: Sidecar, shape: BlockLayout = LAYOUT, **hello: Any) -> None:
        self.shape = shape
        self.asked: list[manager_pb2.PinRows] = []
        self.unpinned: list[int] = []
        fields = {
            "layout": None, "block_layout": shape.to_proto(), "capabilities": ["block-tables"]
        }  # fmt: skip
        super().__init__(sidecar, **{**fields, **hello})
        self.blocks = np.frombuffer(self.memory, np.float32).reshape(-1, BLOCK // 4)

    def receive(self, timeout: float = 10.0) -> manager_pb2.AttachResponse:
        answer = super().receive(timeout)
        if answer.HasField("pin_rows"):
            self.asked.append(answer.pin_rows)
        if answer.HasField("unpin_rows"):
            self.unpinned += packing.unpack(answer.unpin_rows.rows, INT32, "rows").tolist()
        return answer

    def next_ask(self) -> manager_pb2.PinRows:
        while not self.asked:
            self.receive()
        return self.asked.pop(0)

    def wait_unpinned(self, count: int) -> list[int]:
        while len(self.unpinned) < count:
            self.receive()
        unpinned, self.unpinned = self.unpinned, []
        return sorted(unpinned)

    def next_decision(self) -> manager_pb2.ShareDecision:
        while not self.decisions:
            answer = self.receive()
            if answer.HasField("share_decision"):
                self.decisions.append(answer.share_decision)
        return self.decisions.pop(0)

    def seal(
        self, request: int, rows: np.ndarray, start: int = 0, generation: int = 0, **changes: Any
    ) -> None:
        fields = {
            "request_id": request, "generation": generation, "start": start,
            "num_tokens": len(rows) // self.shape.num_groups, "key_rows": pack(rows, INT32),
        }  # fmt: skip
        self.send(seal_tokens=manager_pb2.SealTokens(**{**fields, **changes}))

    def write(self, request: int, content: np.ndarray) -> np.ndarray:
        """Lease blocks, fill block i with content[i] and seal them; their ids."""
        rows = self.lease(len(content))
        self.blocks[rows] = content
        self.open(request)
        self.seal(request, rows)
        return rows

    def pin(self, ask: manager_pb2.PinRows, mask: list[int] | None = None) -> None:
        pinned = [1] * (len(ask.rows) // 4) if mask is None else mask
        self.send(pin_result=manager_pb2.PinResult(pin_id=ask.pin_id, pinned=pack(pinned, UINT8)))

    def truncate(self, request: int, keep: int, generation: int = 0) -> None:
        self.send(
            truncate_request=manager_pb2.TruncateRequest(
                request_id=request, generation=generation, new_generation=generation + 1,
                num_tokens=keep,
            )
        )  # fmt: skip

    def restore(
        self, leases: np.ndarray, tables: dict[int, np.ndarray], pinned: np.ndarray | None = None,
        shared: dict[int, np.ndarray] | None = None, **changes: Any,
    ) -> manager_pb2.SnapshotResponse:  # fmt: skip
        """Send a snapshot; `shared` masks the entries of a request that name donors."""
        parts: list[dict[str, Any]] = [
            {
                "lease": manager_pb2.SnapshotLease(
                    rows=pack(leases, INT32),
                    pinned_rows=pack([] if pinned is None else pinned, INT32),
                )
            }
        ]
        for request, rows in tables.items():
            flags = (shared or {}).get(request, np.zeros(len(rows), np.uint8))
            table = manager_pb2.SnapshotTable(
                request_id=request, num_tokens=len(rows) // self.shape.num_groups,
                key_rows=pack(rows, INT32), shared=pack(flags, UINT8), **changes,
            )  # fmt: skip
            parts.append({"table": table})
        parts.append({"end": manager_pb2.SnapshotEnd(parts=len(parts))})
        name = {"session_id": self.welcome.session_id, "epoch": self.welcome.epoch}
        return self.stub.Snapshot(
            iter([manager_pb2.SnapshotRequest(**name, **part) for part in parts]), timeout=10
        )


def content(blocks: int, seed: int = 0) -> np.ndarray:
    """Random data of blocks, [blocks, elements]."""
    return np.random.default_rng(seed).standard_normal((blocks, BLOCK // 4), np.float32)
