"""What sharing must beat: controls that share badly, and low-bit caches that do not share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from memshare.client.tables import KEY, VALUE

ATTENTION: Final = "memshare_controls"


@dataclass(frozen=True)
class SharedEntries:
    """Entries that a policy shared once `tokens` tokens were there: int64 `[items]` each."""

    tokens: int
    kinds: torch.Tensor
    layers: torch.Tensor
    targets: torch.Tensor


class EditedCache(DynamicCache):
    """A plain cache whose old entries are overwritten or dropped between two chunks."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(config=model.config)
        # Per layer, tokens no query attends to any more.
        self.dropped: dict[int, torch.Tensor] = {}

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append, and mark the keys with what the layer has dropped."""
        keys, values = super().update(key_states, value_states, layer_idx)
        keys.memshare_dropped = self.dropped.get(layer_idx)  # type: ignore[attr-defined]
        return keys, values

    def states(self, layer: int, kind: int) -> torch.Tensor:
        """`[heads, tokens, dim]`, writable."""
        stored: Any = self.layers[layer]
        states: torch.Tensor = (stored.keys if kind == KEY else stored.values)[0]
        return states


def attention_with_drops(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`sdpa` that attends to no dropped token."""
    dropped: torch.Tensor | None = getattr(key, "memshare_dropped", None)
    if dropped is not None and dropped.any():
        queries, keys = query.shape[2], key.shape[2]
        if attention_mask is None:
            attention_mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
            attention_mask = attention_mask[None, None]
        attention_mask = attention_mask.clone()
        attention_mask[..., : len(dropped)] &= ~dropped
    output: tuple[torch.Tensor, torch.Tensor | None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, **kwargs
    )
    return output


AttentionInterface.register(ATTENTION, attention_with_drops)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def _by_layer(entries: SharedEntries) -> Iterator[tuple[int, int, torch.Tensor]]:
    planes = entries.kinds * (1 << 16) + entries.layers
    for plane in planes.unique().tolist():
        yield plane >> 16, plane & 0xFFFF, entries.targets[planes == plane]


class RandomDonors:
    """Point the entries that a policy shared at random donors instead of similar ones."""

    name = "random donor"

    def __init__(self, events: list[SharedEntries], inv_freq: torch.Tensor, first: int) -> None:
        """`first`: tokens before it are protected and never donors."""
        self._events = {event.tokens: event for event in events}
        self._inv_freq = inv_freq
        self._first = first
        self._random = torch.Generator().manual_seed(0)
        self._taken: dict[tuple[int, int], torch.Tensor] = {}

    def edit(self, cache: EditedCache, tokens: int) -> None:
        """Apply what the policy applied at this length."""
        event = self._events.get(tokens)
        for kind, layer, targets in _by_layer(event) if event else ():
            states = cache.states(layer, kind)
            shared = self._taken.setdefault((kind, layer), torch.zeros(1 << 20, dtype=torch.bool))
            shared[targets] = True
            own = (~shared[: int(targets.min())]).nonzero()[:, 0]
            own = own[own >= self._first]
            if not len(own):
                continue
            donors = own[torch.randint(len(own), targets.shape, generator=self._random)]
            moved = states[:, donors]
            if kind == KEY:
                moved = rotate(moved, targets - donors, self._inv_freq)
            states[:, targets] = moved


class DroppedTokens:
    """Attend no more to as many tokens of each layer as a policy freed rows for."""

    name = "dropped"

    def __init__(self, events: list[SharedEntries]) -> None:
        self._events = {event.tokens: event for event in events}
        self._owed: dict[int, float] = {}

    def edit(self, cache: EditedCache, tokens: int) -> None:
        """Drop a token for every two entries that were shared in its layer."""
        event = self._events.get(tokens)
        for _, layer, targets in _by_layer(event) if event else ():
            dropped = cache.dropped.get(layer, torch.zeros(0, dtype=torch.bool))
            grown = torch.zeros(tokens, dtype=torch.bool)
            grown[: len(dropped)] = dropped
            self._owed[layer] = self._owed.get(layer, 0.0) + len(targets) / 2
            fresh = targets[~grown[targets]][: int(self._owed[layer])]
            self._owed[layer] -= len(fresh)
            grown[fresh] = True
            cache.dropped[layer] = grown


class LowBits:
    """Keep K per channel and V per token in few bits, asymmetric, in groups of 64 tokens.

    After KIVI (Liu et al., 2024): the newest 64 tokens stay as they are.
    """

    group: Final = 64

    def __init__(self, bits: int) -> None:
        self.name = f"{bits}-bit cache"
        self.bits = bits
        self._done = 0

    def edit(self, cache: EditedCache, tokens: int) -> None:
        """Quantise whole groups that have become older than the newest 64 tokens."""
        while self._done + self.group <= tokens - self.group:
            group = slice(self._done, self._done + self.group)
            for layer in range(len(cache.layers)):
                keys, values = cache.states(layer, KEY), cache.states(layer, VALUE)
                keys[:, group] = quantise(keys[:, group], self.bits, dim=1)
                values[:, group] = quantise(values[:, group], self.bits, dim=2)
            self._done += self.group

    def saved(self, tokens: int, head_dim: int) -> float:
        """Saved share of a 16-bit cache, 16-bit scales and offsets counted against it."""
        overhead = 32 / self.group / 2 + 32 / head_dim / 2
        return self._done / tokens * (1 - (self.bits + overhead) / 16)


def quantise(states: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Round to 2^bits levels between the least and greatest value along `dim`."""
    low, high = states.amin(dim, keepdim=True), states.amax(dim, keepdim=True)
    step = (high - low).clamp_min(1e-8) / (2**bits - 1)
    rounded: torch.Tensor = ((states - low) / step).round() * step + low
    return rounded


def rotate(keys: torch.Tensor, deltas: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Rotate `[heads, items, dim]` by `deltas` `[items]` positions (half-split RoPE)."""
    angles = deltas[:, None].double() * inv_freq.double()
    cos, sin = angles.cos().float(), angles.sin().float()
    half = inv_freq.numel()
    first, second = keys[..., :half], keys[..., half : 2 * half]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned, keys[..., 2 * half :]], dim=-1)
