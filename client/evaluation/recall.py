"""How much of what an exhaustive search would share the index's candidates find."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import torch
from transformers import PreTrainedModel

from memshare.client.evaluation.forced import run_forced
from memshare.client.stream import open_channel
from memshare.client.transformers import MemShareCache
from memshare.v1 import agent_pb2, agent_pb2_grpc, common_pb2
from memshare.wire import packing, status
from memshare.wire.errors import AgentUnavailable
from memshare.wire.runtime import RuntimeDirectory


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
    policies: dict[str, common_pb2.Policy],
    runtime_dir: Path,
    candidates: int,
) -> dict[str, Recall]:
    """For each policy's last stage, the recall of the index on one trace.

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
                layers = session.layout.num_layers
                return {
                    name: _recall(stub, question, policy, ids.shape[1], layers)
                    for name, policy in policies.items()
                }
            except grpc.RpcError as error:
                raise status.from_rpc_error(error, AgentUnavailable) from error


def _recall(
    stub: agent_pb2_grpc.AgentServiceStub,
    question: agent_pb2.FindDonorsRequest,
    policy: common_pb2.Policy,
    tokens: int,
    layers: int,
) -> Recall:
    stage = policy.stages[-1]
    scale = np.ones(layers)
    if policy.layer_scale:
        points = np.linspace(0, 1, len(policy.layer_scale))
        scale = np.interp(np.linspace(0, 1, layers), points, policy.layer_scale)
    question.key_thresholds = packing.pack(stage.key_threshold * scale, packing.FLOAT32)
    question.value_thresholds = packing.pack(stage.value_threshold * scale, packing.FLOAT32)
    found = shareable = 0
    step = 64
    for start in range(256, tokens, 4 * step):
        end = min(start + step, tokens)
        mask = np.zeros((2, layers, end), np.bool_)
        mask[:, :, policy.protected_tokens :] = True
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
