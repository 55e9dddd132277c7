"""How much of what an exhaustive search would share the index's candidates find."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from memshare.client.evaluation.forced import run_forced
from memshare.client.stream import open_channel
from memshare.client.transformers import MemShareCache
from memshare.v1 import agent_pb2, agent_pb2_grpc
from memshare.wire import packing, status
from memshare.wire.errors import AgentUnavailable
from memshare.wire.runtime import RuntimeDirectory


@dataclass(frozen=True)
class Thresholds:
    """Of each layer, float32 `[num_layers]`; the first tokens are neither donors nor targets."""

    keys: npt.NDArray[np.float32]
    values: npt.NDArray[np.float32]
    protected_tokens: int


@dataclass(frozen=True)
class Recall:
    """Entries within the thresholds that were found, of those an exhaustive search finds."""

    found: int
    shareable: int

    @property
    def share(self) -> float:
        """found / shareable, 1 when there was nothing to find."""
        return self.found / self.shareable if self.shareable else 1.0


def measure_recall(
    model: PreTrainedModel,
    ids: torch.Tensor,
    thresholds: dict[str, Thresholds],
    runtime_dir: Path,
    candidates: int,
) -> dict[str, Recall]:
    """For each policy's thresholds, the recall of the index on one trace.

    The trace's rows are brought into the pool in `observe`; then the agent itself is asked
    twice, for its index's answer and for an exhaustive one over the same donors.
    """
    session = MemShareCache.attach(model, policy="observe", runtime_dir=runtime_dir, tenant="")
    with session, MemShareCache(model, session) as cache:
        run_forced(model, ids, cache, lambda _: cache.finish_step(), ids.shape[1] - 1)
        cache.finish_step()
        session.synchronise(300.0)
        with open_channel(RuntimeDirectory(runtime_dir).worker_socket) as channel:
            stub = agent_pb2_grpc.AgentServiceStub(channel)
            try:
                epoch = stub.GetAgentInfo(agent_pb2.GetAgentInfoRequest()).worker_epoch
                tables = cache.batch.tables[0]
                question = agent_pb2.FindDonorsRequest(
                    worker_epoch=epoch,
                    session_id=session.session_id,
                    request_id=tables.request_id,
                    generation=tables.generation,
                    candidates=candidates,
                )
                return {
                    name: _recall(stub, question, one, ids.shape[1])
                    for name, one in thresholds.items()
                }
            except grpc.RpcError as error:
                raise status.from_rpc_error(error, AgentUnavailable) from error


def _recall(
    stub: agent_pb2_grpc.AgentServiceStub,
    question: agent_pb2.FindDonorsRequest,
    thresholds: Thresholds,
    tokens: int,
) -> Recall:
    layers = len(thresholds.keys)
    question.key_thresholds = packing.pack(thresholds.keys, packing.FLOAT32)
    question.value_thresholds = packing.pack(thresholds.values, packing.FLOAT32)
    found = shareable = 0
    step = 64
    for start in range(256, tokens, 4 * step):
        end = min(start + step, tokens)
        mask = np.zeros((2, layers, end), np.bool_)
        mask[:, :, thresholds.protected_tokens :] = True
        question.target_start, question.target_end = start, end
        question.donor_mask = question.target_mask = packing.pack_mask(mask)
        for exhaustive in (False, True):
            question.exhaustive = exhaustive
            answer: agent_pb2.FindDonorsResponse = stub.FindDonors(question, timeout=300.0)
            count = len(answer.targets) // packing.INT32.itemsize
            if exhaustive:
                shareable += count
            else:
                found += count
    return Recall(found, shareable)
