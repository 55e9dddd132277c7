"""Which tokens of a model's vocabulary end a reasoning step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from memshare.client.vllm.settings import Settings
from memshare.client.vllm.steps import boundary_tokens


def step_boundaries(settings: Settings, model_config: Any) -> npt.NDArray[np.bool_] | None:
    """bool `[vocabulary]`, or None if no steps are to be compared or there is no tokenizer."""
    if settings.step_similarity > 1.0 or model_config.skip_tokenizer_init:
        return None
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(model_config)
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    return boundary_tokens(texts)
