"""How vLLM's KV cache lies in the pool, as the agent is told."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from memshare.v1 import common_pb2
from memshare.wire.block_layout import BlockGroup, BlockLayout, PagePart
from memshare.wire.errors import LayoutMismatch

_log = logging.getLogger("vllm.memshare")
DTYPES: Final = {
    torch.float32: common_pb2.ROW_DTYPE_FP32,
    torch.float16: common_pb2.ROW_DTYPE_FP16,
    torch.bfloat16: common_pb2.ROW_DTYPE_BF16,
}
# Per (block, head): all keys, [dim, token], then all values, [token, dim].
_KEYS_TRANSPOSED: Final = ("CPU_ATTN",)
# Per (block, head, token) or (block, token, head): the key, then the value.
_KEY_THEN_VALUE: Final = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")


@dataclass(frozen=True)
class SharedGroups:
    """The KV cache groups that can be shared, by number, and how their blocks lie."""

    layout: BlockLayout
    groups: tuple[int, ...]


def describe(
    kv_cache_config: Any, views: Mapping[str, torch.Tensor], backends: Mapping[str, str], base: int
) -> SharedGroups:
    """The layout of the groups that can be shared; others are left alone and logged.

    `views` are vLLM's `[B, H, N, C]` views of each layer, `backends` the names of the layers'
    attention backends, `base` the address at which the pool is mapped. Raises `LayoutMismatch` if
    no group can be shared, naming each group's obstacle.
    """
    num_blocks: int = kv_cache_config.num_blocks
    sizes = {tensor.size for tensor in kv_cache_config.kv_cache_tensors}
    obstacles: list[str] = []
    shared: list[tuple[int, BlockGroup, int, torch.dtype]] = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        obstacle = find_obstacle(group, views, backends, num_blocks)
        if obstacle:
            obstacles.append(f"group {number} ({_layer_range(group.layer_names)}): {obstacle}")
            continue
        layers = [views[name] for name in group.layer_names]
        described = _describe_group(group, layers, backends[group.layer_names[0]], base)
        shared.append((number, described, group.kv_cache_spec.block_size, layers[0].dtype))
    # One descriptor has one block size and one dtype: those of the first group.
    for number, _, block_size, dtype in shared[1:]:
        if (block_size, dtype) != shared[0][2:]:
            obstacles.append(f"group {number}: its block size or dtype is not the first group's")
    shared = [one for one in shared if one[2:] == shared[0][2:]]
    if not shared:
        raise LayoutMismatch(
            "memshare can share no KV cache group of this model: " + "; ".join(obstacles)
        )
    for obstacle in obstacles:
        _log.warning("memshare: left alone: %s", obstacle)
    return SharedGroups(
        BlockLayout(
            dtype=DTYPES[shared[0][3]],
            block_tokens=shared[0][2],
            block_bytes=max(sizes) // num_blocks,
            num_blocks=num_blocks,
            groups=tuple(group for _, group, _, _ in shared),
        ),
        tuple(number for number, _, _, _ in shared),
    )


def find_obstacle(
    group: Any, views: Mapping[str, torch.Tensor], backends: Mapping[str, str], num_blocks: int
) -> str:
    """Why a group cannot be shared, "" if it can."""
    spec = group.kv_cache_spec
    if not isinstance(spec, FullAttentionSpec) or isinstance(spec, MLAAttentionSpec):
        return f"{type(spec).__name__} is not full attention with keys and values"
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        return "its attention has a window"
    if group.is_eagle_group:
        return "it belongs to a draft model"
    missing = [name for name in group.layer_names if name not in views]
    if missing:
        return f"layer {missing[0]} has no memory of its own"
    names = {backends[name] for name in group.layer_names}
    unknown = names - set(_KEYS_TRANSPOSED + _KEY_THEN_VALUE)
    if unknown or len(names) > 1:
        return f"attention backend {' and '.join(sorted(unknown or names))} has an unknown layout"
    first = views[group.layer_names[0]]
    if first.dtype not in DTYPES:
        return f"{first.dtype} is not fp32, fp16 or bf16"
    expected = (num_blocks, spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
    for name in group.layer_names:
        view = views[name]
        if tuple(view.shape) != expected:
            return f"layer {name} is {tuple(view.shape)} where [B, H, N, 2 D] is {expected}"
        if view.stride() != first.stride() or view.stride(3) != 1:
            return f"layer {name} has strides {view.stride()}, the first {first.stride()}"
    if names <= set(_KEYS_TRANSPOSED) and first.stride(2) != 2 * spec.head_size:
        return f"{names.pop()} with strides {first.stride()} has an unknown layout"
    return ""


def _describe_group(
    group: Any, layers: Sequence[torch.Tensor], backend: str, base: int
) -> BlockGroup:
    spec = group.kv_cache_spec
    heads, tokens, dim = spec.num_kv_heads, spec.block_size, spec.head_size
    block, head, token, _ = layers[0].stride()
    if backend in _KEYS_TRANSPOSED:
        keys = PagePart(0, head, 1, tokens)
        values = PagePart(tokens * dim, head, dim, 1)
    else:
        keys = PagePart(0, head, token, 1)
        values = PagePart(dim, head, token, 1)
    return BlockGroup(
        num_kv_heads=heads,
        key_head_dim=dim,
        value_head_dim=dim,
        layer_offsets=tuple(layer.data_ptr() - base for layer in layers),
        block_stride=block * layers[0].element_size(),
        keys=keys,
        values=values,
    )


def _layer_range(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
