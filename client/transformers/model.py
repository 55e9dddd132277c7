"""What a Transformers model's keys and values look like, and whether they can be shared."""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import PreTrainedModel

from memshare.v1 import common_pb2
from memshare.wire.errors import InvalidArgument
from memshare.wire.layout import RowLayout

DTYPES: Final = {
    torch.float32: common_pb2.ROW_DTYPE_FP32,
    torch.float16: common_pb2.ROW_DTYPE_FP16,
    torch.bfloat16: common_pb2.ROW_DTYPE_BF16,
}
# Families whose attention rotates half-split pairs and caches keys after the rotation.
HALF_SPLIT_ROPE: Final = frozenset({"llama", "mistral", "qwen2", "qwen3"})
# Variants whose frequencies are fixed when the model is built.
FIXED_FREQUENCIES: Final = frozenset({"default", "linear", "llama3", "yarn"})


def describe_model(model: PreTrainedModel) -> tuple[RowLayout, str]:
    """The layout of the model's rows, and why its keys cannot be corrected for their position.

    The second value is empty when they can. Raises `InvalidArgument` for a model whose cache
    memshare cannot hold at all.
    """
    config = model.config.get_text_config(decoder=True)
    if model.dtype not in DTYPES:
        raise InvalidArgument(
            f"the model computes in {model.dtype}: load it as float32, float16 or bfloat16"
        )
    if model.device.type != "cpu":
        raise InvalidArgument(
            f"the model is on {model.device}, the pool in host memory: move it to the CPU"
        )
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_dim, value_dim = head_dim, head_dim
    if caches_latents(model):
        # "Keys" are what K and V are expanded from, "values" the one rotated part of all keys.
        kv_heads, key_dim, value_dim = 1, config.kv_lora_rank, config.qk_rope_head_dim
    obstacle, inv_freq = _rope_of(model, config)
    layout = RowLayout(
        num_layers=config.num_hidden_layers,
        num_kv_heads=kv_heads,
        key_head_dim=key_dim,
        value_head_dim=value_dim,
        dtype=DTYPES[model.dtype],
        inv_freq=inv_freq,
    )
    return layout, obstacle


def caches_latents(model: PreTrainedModel) -> bool:
    """Whether the model caches what its keys and values are expanded from (MLA)."""
    config = model.config.get_text_config(decoder=True)
    return bool(getattr(config, "kv_lora_rank", None))


def _rope_of(model: PreTrainedModel, config: Any) -> tuple[str, tuple[float, ...]]:
    """(obstacle, frequencies): one of them is empty."""
    if caches_latents(model):
        return "multi-head latent attention (MLA) does not rotate whole keys", ()
    if windowed := _windowed_layers(config):
        return (
            f"layers {windowed[0]} to {windowed[-1]} attend to a sliding window, which drops the "
            "old tokens that sharing lives on"
        ), ()
    embeddings = [
        m for m in model.modules() if isinstance(getattr(m, "inv_freq", None), torch.Tensor)
    ]
    if not embeddings:
        return "the model has no rotary position embedding (ALiBi or learned positions)", ()
    if config.model_type not in HALF_SPLIT_ROPE:
        known = ", ".join(sorted(HALF_SPLIT_ROPE))
        return f"model type {config.model_type!r} is not known to rotate like {known}", ()
    rope_type = getattr(embeddings[0], "rope_type", "default")
    if rope_type not in FIXED_FREQUENCIES:
        return f"rotary type {rope_type!r} changes its frequencies with the length", ()
    frequencies: torch.Tensor = embeddings[0].inv_freq  # type: ignore[assignment]
    return "", tuple(frequencies.detach().float().cpu().tolist())


def _windowed_layers(config: Any) -> list[int]:
    types = getattr(config, "layer_types", None)
    if types:
        return [index for index, kind in enumerate(types) if kind != "full_attention"]
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return list(range(config.num_hidden_layers))
    return []
