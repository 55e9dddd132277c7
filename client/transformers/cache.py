"""`MemShareCache`: a Transformers cache whose rows lie in the agent's pool."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from memshare.client.options import SessionOptions
from memshare.client.session import Session, attach
from memshare.client.tables import KEY, VALUE
from memshare.client.transformers.attention import SDPA, RowView, use_attention
from memshare.client.transformers.model import caches_latents, describe_model
from memshare.client.transformers.rows import SequenceBatch
from memshare.v1 import common_pb2
from memshare.wire.errors import InvalidArgument


class MemShareCache(Cache):
    """Pass it to `model.generate(..., cache=MemShareCache(model))`; until Transformers 6 the
    argument may also be called `past_key_values`.

    One cache holds one batch of sequences. Its rows go back when it is closed, leaves a `with`
    block or is garbage; so does the session, if the cache attached it.

    Safety: the cache belongs to one thread. If the sidecar goes away, the generation under way
    finishes without new sharing; a new cache then raises `PoolLost` until a new session is
    attached.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        session: Session | None = None,
        *,
        policy: str | common_pb2.Policy | None = None,
        runtime_dir: Path | str | None = None,
        tenant: str = "default",
        attention: str | None = SDPA,
    ) -> None:
        """Attach `model` to the sidecar, or join a `session` made by `MemShareCache.attach`.

        `attention` is the attention function the model is set to: "memshare" (over SDPA) or
        "memshare_eager"; None leaves the model's own, which then gets whole K and V tensors. A
        model with latent attention (MLA) keeps its own in any case.

        Raises what `memshare.client.attach` raises, and `InvalidArgument` for a model whose
        cache cannot be held.
        """
        self._owns_session = session is None
        if session is None:
            session = self.attach(model, policy=policy, runtime_dir=runtime_dir, tenant=tenant)
        elif policy is not None or runtime_dir is not None:
            raise InvalidArgument("policy and runtime_dir belong to the session that is passed")
        layout, _ = describe_model(model)
        if layout != session.layout:
            raise InvalidArgument(
                "the session was attached for another model: its layout is "
                f"{session.layout}, this model's {layout}"
            )
        self.session = session
        self.batch = SequenceBatch(session, model.dtype)
        # `generate(..., MemShareCache(model))` leaves nobody to close it.
        self._give_back = weakref.finalize(
            self, _release, self.batch, session if self._owns_session else None
        )
        reads_rows = attention is not None and not caches_latents(model)
        if attention is not None and reads_rows:
            use_attention(model, attention)
        super().__init__(
            layers=[MemShareLayer(self.batch, i, reads_rows) for i in range(layout.num_layers)]
        )

    @staticmethod
    def attach(
        model: PreTrainedModel,
        *,
        policy: str | common_pb2.Policy | None = None,
        runtime_dir: Path | str | None = None,
        tenant: str = "default",
        **options: Any,
    ) -> Session:
        """A session for caches of this model; further `options` are `SessionOptions`."""
        layout, obstacle = describe_model(model)
        return attach(
            layout,
            SessionOptions(
                runtime_dir=runtime_dir,
                policy=policy,
                tenant=tenant,
                engine=f"transformers/{model.config.model_type}",
                row_mode_obstacle=obstacle,
                **options,
            ),
        )

    def finish_step(self) -> None:
        """Tell the sidecar of the last step's tokens, which no further step will."""
        self.batch.finish_step()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest `-tokens_to_remove` tokens of every sequence (a rollback).

        As in Transformers' own caches the number is 0 or negative.
        """
        if not -self.batch.length <= tokens_to_remove <= 0:
            raise InvalidArgument(
                f"crop({tokens_to_remove}): the cache holds {self.batch.length} tokens, pass 0 "
                f"to {-self.batch.length}"
            )
        if tokens_to_remove:
            self.batch.truncate(self.batch.length + tokens_to_remove)

    def reset(self) -> None:
        """Forget all sequences; their rows go back to the pool."""
        self.batch.close()

    def close(self) -> None:
        """Give all rows back; detach if this cache attached itself. Safe to call twice."""
        self._give_back()

    def __enter__(self) -> MemShareCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Beam search moves rows between sequences, which row tables do not support yet."""
        raise NotImplementedError(
            "MemShareCache does not support beam search: use greedy search or sampling"
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Not supported; see `reorder_cache`."""
        raise NotImplementedError("MemShareCache cannot repeat its sequences")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Not supported; see `reorder_cache`."""
        raise NotImplementedError("MemShareCache cannot select among its sequences")


def _release(batch: SequenceBatch, own_session: Session | None) -> None:
    batch.close()
    if own_session is not None:
        own_session.detach()


class MemShareLayer(CacheLayerMixin):
    """One layer's face of the batch, as Transformers calls it."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, batch: SequenceBatch, layer: int, reads_rows: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._batch = batch
        self._layer = layer
        self._reads_rows = reads_rows
        self._length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool is there already."""
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store this step's K and V, each `[batch, heads, tokens, dim]`.

        Returns all of K and V; or, for memshare's own attention function, the new ones marked
        with the rows to read.
        """
        batch, layer = self._batch, self._layer
        if layer == 0:
            batch.begin_step(key_states.shape[0], key_states.shape[2])
        batch.write(layer, KEY, key_states)
        batch.write(layer, VALUE, value_states)
        self.is_initialized = True
        self._length = batch.length
        if self._reads_rows:
            batch.expect_read(layer)
            key_states.memshare_rows = RowView(batch, layer)  # type: ignore[attr-defined]
            return key_states, value_states
        return batch.gather(layer, KEY), batch.gather(layer, VALUE)

    @property
    def batch_size(self) -> int:
        """Sequences in the cache, -1 before the first step."""
        return len(self._batch.tables) or -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys the mask covers, offset of the first)."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens of this layer that are stored."""
        return min(self._length, self._batch.length)

    def get_max_length(self) -> int:
        """No bound but the pool."""
        return -1
