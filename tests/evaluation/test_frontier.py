"""A measurement belongs to one model and one text."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from memshare.client.evaluation.frontier import Evaluation
from memshare.client.evaluation.results import ResultsFile


def evaluation(model: LlamaForCausalLM, folder: Path) -> Evaluation:
    return Evaluation(model, {}, folder, ResultsFile(folder / "measurements.jsonl"))


def test_a_model_with_other_weights_is_another_model(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=32,
    )
    torch.manual_seed(0)
    model, same = LlamaForCausalLM(config), LlamaForCausalLM(config)
    same.load_state_dict(model.state_dict())
    assert evaluation(model, tmp_path).model_digest == evaluation(same, tmp_path).model_digest
    with torch.no_grad():
        same.model.norm.weight[0] += 1e-3
    assert evaluation(model, tmp_path).model_digest != evaluation(same, tmp_path).model_digest
