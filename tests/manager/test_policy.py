"""Policies: presets, limits, thresholds, budget."""

from __future__ import annotations

import numpy as np
import pytest

from memshare.manager.policy import PRESETS, Adaptive, Mode, Policy, Stage, preset
from memshare.v1 import common_pb2
from memshare.wire.errors import InvalidArgument


def row_policy(**fields: object) -> Policy:
    return Policy(**{"name": "p", "mode": Mode.ROW, "stages": (Stage(64, 0.02, 0.1),), **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_the_wire(name: str) -> None:
    message = common_pb2.Policy.FromString(preset(name).to_proto().SerializeToString())
    assert Policy.from_proto(message) == preset(name)


def test_an_unknown_preset_names_the_known() -> None:
    with pytest.raises(InvalidArgument, match="'bold', use observe, exact, strict"):
        preset("bold")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": 0}, "mode is 0"),
        ({"stages": ()}, "stages is 0"),
        ({"stages": (Stage(0),) * 17}, "stages is 17"),
        ({"stages": (Stage(-1),)}, r"stages\[0\].min_age is -1"),
        ({"stages": (Stage(0), Stage(0, -0.5))}, r"stages\[1\].key_threshold is -0.5"),
        ({"stages": (Stage(0, 0, float("nan")),)}, "value_threshold is nan"),
        ({"stages": (Stage(0, float("inf")),)}, "key_threshold is inf"),
        ({"protected_tokens": -3}, "protected_tokens is -3"),
        ({"layer_scale": (1.0, -1.0)}, r"layer_scale\[1\] is -1"),
        ({"fidelity_budget": -1}, "fidelity_budget is -1"),
        ({"adaptive": Adaptive(min_scale=2, max_scale=1)}, "adaptive.min_scale is 2"),
        ({"adaptive": Adaptive(low_watermark=0.9, high_watermark=0.5)}, "low_watermark is 0.9"),
        ({"adaptive": Adaptive(high_watermark=1.5)}, "high_watermark is 1.5"),
    ],
)
def test_errors_name_key_and_value(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        row_policy(**fields)


def test_an_unspecified_mode_is_refused_on_the_wire() -> None:
    with pytest.raises(InvalidArgument, match="mode is 0"):
        Policy.from_proto(common_pb2.Policy(name="x"))


def test_a_row_policy_is_narrowed_to_exact_where_rows_cannot_be_rotated() -> None:
    assert preset("balanced").narrowed("") is preset("balanced")
    narrowed = preset("balanced").narrowed("no rope")
    assert (narrowed.mode, narrowed.stages) == (Mode.EXACT, (Stage(0),))
    assert preset("observe").narrowed("no rope") is preset("observe")


def test_layer_scale_is_interpolated_over_the_depth() -> None:
    policy = row_policy(layer_scale=(2.0, 1.0, 0.0))
    keys, values = policy.thresholds(policy.stages[0], 5, 0.0)
    np.testing.assert_allclose(keys, [0.04, 0.03, 0.02, 0.01, 0.0], rtol=1e-6)
    np.testing.assert_allclose(values, np.multiply(keys, 5), rtol=1e-6)
    assert policy.thresholds(policy.stages[0], 1, 0.0)[0].tolist() == [np.float32(0.04)]
    flat = row_policy()
    assert set(flat.thresholds(flat.stages[0], 3, 1.0)[0].tolist()) == {float(np.float32(0.02))}


def test_the_adaptive_scale_follows_the_used_share_within_its_bounds() -> None:
    policy = row_policy(adaptive=Adaptive(True, 0.5, 1.5, 0.5, 0.9))
    assert [round(policy.scale(used), 6) for used in (0, 0.5, 0.7, 0.9, 1)] == [
        0.5,
        0.5,
        1,
        1.5,
        1.5,
    ]
    step = row_policy(adaptive=Adaptive(True, 0.5, 1.5, 0.8, 0.8))
    assert (step.scale(0.7), step.scale(0.8)) == (0.5, 1.5)
    assert row_policy().scale(1.0) == 1.0


def test_the_budget_is_spent_on_the_best_first() -> None:
    policy = row_policy(fidelity_budget=0.01)
    distances = np.array([0.5, 0.1, 0.3, 0.2], np.float32)
    assert policy.within_budget(distances, 0.0, 61).tolist() == [False, True, True, True]
    assert policy.within_budget(distances, 0.3, 61).tolist() == [False, True, False, True]
    assert not policy.within_budget(distances, 0.61, 61).any()
    assert policy.within_budget(distances, 0.0, 1000).all()
    assert len(policy.within_budget(distances[:0], 0.0, 10)) == 0
