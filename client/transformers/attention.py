"""Attention over row tables, registered with Transformers' `AttentionInterface`.

Each function gathers what the row tables name, shared keys rotated to their position, into one
layer's worth of scratch memory and calls Transformers' own attention on it. With nothing shared
the gathered tensors equal a plain cache's bit for bit, and so does the output.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from memshare.client.tables import KEY, VALUE
from memshare.wire.errors import InvalidArgument

if TYPE_CHECKING:
    from memshare.client.transformers.rows import SequenceBatch

SDPA: Final = "memshare"
EAGER: Final = "memshare_eager"


class RowView(NamedTuple):
    """Where a layer's keys and values are to be read."""

    batch: SequenceBatch
    layer: int


def register() -> None:
    """Make both functions known to Transformers. Safe to call twice."""
    AttentionInterface.register(SDPA, sdpa_attention)
    AttentionInterface.register(EAGER, eager_attention)
    AttentionMaskInterface.register(SDPA, sdpa_mask)
    AttentionMaskInterface.register(EAGER, eager_mask)


def use_attention(model: PreTrainedModel, name: str) -> None:
    """Set the model's attention function to one of memshare's."""
    if name not in (SDPA, EAGER):
        raise InvalidArgument(f"attention {name!r} is unknown: use {SDPA!r} or {EAGER!r}")
    if model.config._attn_implementation != name:
        model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise InvalidArgument(
            f"{type(model).__name__} does not take its attention from Transformers' "
            "AttentionInterface: pass attention=None"
        )


def sdpa_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`sdpa` over the cache's rows; plain `sdpa` where no `MemShareCache` is used."""
    key, value = _read(key, value, attention_mask)
    output: tuple[torch.Tensor, torch.Tensor | None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, **kwargs
    )
    return output


def eager_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The model's own eager attention over the cache's rows."""
    key, value = _read(key, value, attention_mask)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    output: tuple[torch.Tensor, torch.Tensor | None] = eager(
        module, query, key, value, attention_mask, **kwargs
    )
    return output


def _read(
    key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    view: RowView | None = getattr(key, "memshare_rows", None)
    if view is None:
        return key, value
    batch, layer = view
    if layer == 0 and attention_mask is not None and key.shape[2] == batch.length:
        batch.set_padding(_left_padding(attention_mask))
    return batch.gather(layer, KEY), batch.gather(layer, VALUE)


def _left_padding(attention_mask: torch.Tensor) -> list[int]:
    """Slots before the first that the newest token of each sequence attends to.

    `attention_mask` is `[batch, 1, queries, keys]`, boolean or additive.
    """
    last = attention_mask[:, 0, -1]
    attended = last if last.dtype == torch.bool else last == 0
    return [int(first) for first in attended.int().argmax(dim=-1)]
