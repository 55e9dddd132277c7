"""How vLLM's cache is described to the agent, for backends and models that do not run here."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from memshare.client.vllm.layout import DTYPES, describe
from memshare.wire.errors import LayoutMismatch

BLOCKS, HEADS, TOKENS, DIM = 6, 2, 4, 8
SHAPE = (BLOCKS, HEADS, TOKENS, 2 * DIM)
PAGE = HEADS * TOKENS * 2 * DIM


def full(**changes):
    return FullAttentionSpec(
        **{
            "block_size": TOKENS, "num_kv_heads": HEADS, "head_size": DIM,
            "dtype": torch.float32, **changes,
        }
    )  # fmt: skip


def config(*groups):
    """Groups as (layers, spec), all in the same memory."""
    page = PAGE * 4
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[
            KVCacheTensor(
                size=len(names) * BLOCKS * page,
                layers=list(names),
                layer_stride=BLOCKS * page,
                block_stride=page,
            )
            for names, _ in groups
        ],
        kv_cache_groups=[KVCacheGroupSpec(list(names), spec) for names, spec in groups],
    )


def views(memory, order, *names, offset=0):
    """`[B, H, N, 2 D]` views, one layer after the other; `order` is how they lie."""
    found = {}
    for layer, name in enumerate(names):
        start = offset + layer * BLOCKS * PAGE
        lying = memory[start : start + BLOCKS * PAGE].view(*(SHAPE[i] for i in order))
        found[name] = lying.permute(*(order.index(i) for i in range(4)))
    return found


NHD, HND = (0, 2, 1, 3), (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("backend", "order"),
    [("CPU_ATTN", HND), ("FLASH_ATTN", NHD), ("FLASH_ATTN", HND), ("FLASHINFER", HND)],
)
def test_the_description_finds_each_key_and_value(backend, order):
    memory = torch.arange(2 * BLOCKS * PAGE, dtype=torch.float32)
    layers = views(memory, order, "a", "b")
    shared = describe(
        config((["a", "b"], full())), layers, dict.fromkeys(layers, backend), memory.data_ptr()
    )
    assert shared.groups == (0,)
    layout, (group,) = shared.layout, shared.layout.groups
    assert layout.dtype == DTYPES[torch.float32]
    assert (layout.num_blocks, layout.block_tokens) == (BLOCKS, TOKENS)
    flat = memory.numpy()
    for name, offset in zip(("a", "b"), group.layer_offsets, strict=True):
        for block in range(BLOCKS):
            start = (offset + block * group.block_stride) // 4
            keys, values = (
                flat[start + part.positions(HEADS, TOKENS, DIM)]
                for part in (group.keys, group.values)
            )
            if backend == "CPU_ATTN":
                # Per page: keys as [D, N], then values as [N, D].
                page = layers[name][block].reshape(HEADS, 2, TOKENS * DIM)
                expected = (
                    page[:, 0].reshape(HEADS, DIM, TOKENS).transpose(1, 2),
                    page[:, 1].reshape(HEADS, TOKENS, DIM),
                )
            else:
                expected = layers[name][block].split(DIM, dim=2)
            np.testing.assert_array_equal(keys, expected[0].numpy())
            np.testing.assert_array_equal(values, expected[1].numpy())


def test_a_hybrid_model_shares_its_full_attention_alone(caplog):
    window = SlidingWindowSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32, sliding_window=8
    )
    memory = torch.zeros(2 * BLOCKS * PAGE)
    layers = views(memory, HND, "w0", "w1") | views(memory, HND, "f0", "f1")
    with caplog.at_level(logging.WARNING, "vllm.memshare"):
        logging.getLogger("vllm").propagate = True
        shared = describe(
            config((["w0", "w1"], window), (["f0", "f1"], full())),
            layers,
            dict.fromkeys(layers, "CPU_ATTN"),
            memory.data_ptr(),
        )
    assert shared.groups == (1,)
    assert len(shared.layout.groups) == 1
    assert "group 0 (w0 and 1 more)" in caplog.text


@pytest.mark.parametrize(
    ("spec", "backend", "dtype", "text"),
    [
        (full(), "TREE_ATTN", torch.float32, "TREE_ATTN has an unknown layout"),
        (full(sliding_window=8), "CPU_ATTN", torch.float32, "has a window"),
        (full(), "CPU_ATTN", torch.float64, "float64 is not fp32, fp16 or bf16"),
        (full(head_size=16), "CPU_ATTN", torch.float32, r"where \[B, H, N, 2 D\] is"),
        (
            MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=DIM, dtype=torch.float32),
            "CPU_ATTN",
            torch.float32,
            "MLAAttentionSpec is not full attention",
        ),
    ],
)
def test_what_is_unknown_is_refused_by_name(spec, backend, dtype, text):
    memory = torch.zeros(BLOCKS * PAGE, dtype=dtype)
    layers = views(memory, HND, "a")
    with pytest.raises(LayoutMismatch, match=text):
        describe(config((["a"], spec)), layers, {"a": backend}, memory.data_ptr())


def test_transposed_keys_at_other_strides_are_refused():
    memory = torch.zeros(BLOCKS * PAGE)
    with pytest.raises(LayoutMismatch, match="CPU_ATTN with strides"):
        describe(
            config((["a"], full())), views(memory, NHD, "a"), {"a": "CPU_ATTN"}, memory.data_ptr()
        )
