"""Policies, controls and other levers on given traces, through the real sidecar."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedModel

from memshare.client.evaluation.forced import Fidelity, compare, run_forced
from memshare.client.evaluation.levers import (
    ATTENTION,
    DroppedTokens,
    EditedCache,
    LowBits,
    RandomDonors,
)
from memshare.client.evaluation.results import Measurement, ResultsFile
from memshare.client.evaluation.sharing import SharedRun, run_shared
from memshare.client.evaluation.traces import Trace
from memshare.client.transformers import describe_model
from memshare.v1 import common_pb2
from memshare.wire.layout import RowLayout

LOW_BITS = (4, 8)
# What sharing adds to a low-bit cache is measured on this one.
COMBINED_BITS = 8
Editor = RandomDonors | DroppedTokens | LowBits


@dataclass(frozen=True)
class Evaluation:
    """What is measured: every policy, its two controls, the low-bit caches, and both together."""

    model: PreTrainedModel
    policies: dict[str, common_pb2.Policy]
    runtime_dir: Path
    results: ResultsFile

    @cached_property
    def layout(self) -> RowLayout:
        """The shape of the model's rows."""
        return describe_model(self.model)[0]

    @cached_property
    def model_digest(self) -> bytes:
        """Tells one model from another: a hash of its configuration and all its weights."""
        digest = hashlib.sha256(self.model.config.to_json_string().encode())
        for name, weights in sorted(self.model.state_dict().items()):
            digest.update(name.encode() + weights.contiguous().view(torch.uint8).numpy().data)
        return digest.digest()

    def runs_per_trace(self) -> int:
        """Measurements of one trace."""
        return 4 * len(self.policies) + len(LOW_BITS)

    def measure(
        self, traces: Sequence[Trace], starting: Callable[[str, str], None]
    ) -> Iterator[Measurement]:
        """Measure what is not known yet; `starting(trace, what)` tells of each run."""
        for trace in traces:
            yield from _TraceRun(self, trace, starting).measure()


class _TraceRun:
    def __init__(
        self, evaluation: Evaluation, trace: Trace, starting: Callable[[str, str], None]
    ) -> None:
        self._evaluation = evaluation
        self._trace = trace
        self._starting = starting
        self._tokens = trace.ids.shape[1]
        self._subject = hashlib.sha256(
            evaluation.model_digest + trace.ids.numpy().tobytes()
        ).digest()
        self._first = self._tokens // 2
        self._unshared: torch.Tensor | None = None

    def measure(self) -> Iterator[Measurement]:
        for bits in LOW_BITS:
            yield self._known(f"{bits}-bit cache", self._digest(b"")) or self._low_bits(bits)
        for name, policy in self._evaluation.policies.items():
            digest = self._digest(policy.SerializeToString(deterministic=True))
            labels = (name, f"{name}: random donor", f"{name}: dropped")
            known = [found for label in labels if (found := self._known(label, digest))]
            if len(known) == len(labels):
                yield from known
            else:
                yield from self._policy(name, policy, digest)
            label = f"{name} on {COMBINED_BITS} bits"
            yield self._known(label, digest) or self._combined(label, policy, digest)

    def _digest(self, policy: bytes) -> str:
        return hashlib.sha256(self._subject + policy).hexdigest()[:16]

    def _known(self, label: str, digest: str) -> Measurement | None:
        return self._evaluation.results.find(self._trace.name, self._tokens, label, digest)

    def _policy(self, name: str, policy: common_pb2.Policy, digest: str) -> Iterator[Measurement]:
        run, fidelity = self._shared(name, policy)
        yield self._add(name, "policy", run.saved, fidelity, digest, run)
        inv_freq = torch.tensor(self._evaluation.layout.inv_freq)
        controls: tuple[Editor, ...] = (
            RandomDonors(run.events, inv_freq, policy.protected_tokens),
            DroppedTokens(run.events),
        )
        for control in controls:
            fidelity = self._edited(control)
            yield self._add(f"{name}: {control.name}", "control", run.saved, fidelity, digest)

    def _combined(self, label: str, policy: common_pb2.Policy, digest: str) -> Measurement:
        run, fidelity = self._shared(label, policy, COMBINED_BITS)
        saved = run.saved_of_16_bits(self._evaluation.layout, COMBINED_BITS)
        return self._add(label, "combined", saved, fidelity, digest)

    def _low_bits(self, bits: int) -> Measurement:
        lever = LowBits(bits)
        fidelity = self._edited(lever)
        saved = lever.saved(self._tokens, self._evaluation.layout.key_head_dim)
        return self._add(lever.name, "lever", saved, fidelity, self._digest(b""))

    def _shared(
        self, label: str, policy: common_pb2.Policy, bits: int | None = None
    ) -> tuple[SharedRun, Fidelity]:
        evaluation, ids = self._evaluation, self._trace.ids
        unshared = self._baseline()
        self._starting(self._trace.name, label)
        run = run_shared(evaluation.model, ids, policy, evaluation.runtime_dir, self._first, bits)
        fidelity = compare(unshared, run.log_probs, ids, self._first)
        # Hundreds of megabytes, and not needed any more.
        run.log_probs = torch.empty(0)
        return run, fidelity

    def _edited(self, editor: Editor) -> Fidelity:
        unshared = self._baseline()
        self._starting(self._trace.name, editor.name)
        log_probs = self._plain_run(editor)
        return compare(unshared, log_probs, self._trace.ids, self._first)

    def _baseline(self) -> torch.Tensor:
        if self._unshared is None:
            self._starting(self._trace.name, "unshared")
            self._unshared = self._plain_run(None)
        return self._unshared

    def _plain_run(self, editor: Editor | None) -> torch.Tensor:
        model = self._evaluation.model
        model.set_attn_implementation(ATTENTION)
        cache = EditedCache(model)

        def edit(tokens: int) -> None:
            if editor is not None:
                editor.edit(cache, tokens)

        return run_forced(model, self._trace.ids, cache, edit, self._first)

    def _add(
        self,
        label: str,
        kind: str,
        saved: float,
        fidelity: Fidelity,
        digest: str,
        run: SharedRun | None = None,
    ) -> Measurement:
        measurement = Measurement(
            trace=self._trace.name,
            tokens=self._tokens,
            policy=label,
            kind=kind,
            saved=saved,
            dnll=fidelity.dnll,
            kl=fidelity.kl,
            agree=fidelity.agree,
            digest=digest,
            layers=run.by_layer.tolist() if run is not None else [],
        )
        self._evaluation.results.add(measurement)
        return measurement
