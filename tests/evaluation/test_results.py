"""Measurements survive interruption, and traces are read or refused by line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from memshare.client.evaluation.forced import compare
from memshare.client.evaluation.results import Measurement, ResultsFile
from memshare.client.evaluation.traces import read_traces
from memshare.wire.errors import InvalidArgument

MEASUREMENT = Measurement("a", 128, "strict", "policy", 0.2, 0.0, 0.001, 0.99, digest="d")


class _Words:
    """A tokenizer of words."""

    def __call__(self, text: str, **_: Any) -> Any:
        ids = torch.arange(len(text.split()))[None]
        return type("Encoding", (), {"input_ids": ids})


def test_an_interrupted_evaluation_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "results" / "measurements.jsonl"
    ResultsFile(path).add(MEASUREMENT)
    with path.open("a") as file:
        file.write('{"trace": "b", "tok')
    known = ResultsFile(path)
    assert known.find("a", 128, "strict", "d") == MEASUREMENT
    assert known.find("b", 128, "strict", "d") is None


@pytest.mark.parametrize("change", [{"digest": "e"}, {"tokens": 256}, {"policy": "x"}])
def test_what_was_measured_otherwise_is_measured_anew(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    results = ResultsFile(tmp_path / "measurements.jsonl")
    results.add(MEASUREMENT)
    other = replace(MEASUREMENT, **change)
    assert results.find(other.trace, other.tokens, other.policy, other.digest) is None


def test_traces_are_cut_and_short_or_looping_ones_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    records = [
        {"id": "short", "trace": "w " * 10},
        {"id": "loop", "trace": "w " * 200, "looping": True},
        {"id": "good", "trace": "w " * 200, "problem": "p"},
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    (trace,) = read_traces(path, _Words(), tokens=100, limit=5)
    assert trace.name == "good"
    assert trace.ids.shape == (1, 100)


def test_a_wrong_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text('{"trace": "w w"}\n["no object"]\n')
    with pytest.raises(InvalidArgument, match=r"traces\.jsonl:2"):
        read_traces(path, _Words(), tokens=2, limit=5)


def test_too_short_traces_say_so(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text('{"trace": "w w"}\n')
    with pytest.raises(InvalidArgument, match="no trace has 100 tokens"):
        read_traces(path, _Words(), tokens=100, limit=5)


def test_fidelity_is_what_its_definition_says() -> None:
    unshared = torch.tensor([[0.6, 0.4], [0.9, 0.1]])
    shared = torch.tensor([[0.25, 0.75], [0.9, 0.1]])
    ids = torch.tensor([[0, 0, 0]])
    fidelity = compare(unshared.log(), shared.log(), ids, first=1)
    expected = float((unshared * (unshared / shared).log()).sum()) / 2
    assert fidelity.kl == pytest.approx(expected)
    assert fidelity.dnll == pytest.approx(float(torch.tensor(0.6 / 0.25).log()))
    assert fidelity.agree == 0.5
