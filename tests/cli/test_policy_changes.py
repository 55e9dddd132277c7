from __future__ import annotations

import pytest

from memshare.client.cli.policy import CUSTOM, Changes
from memshare.v1 import common_pb2


def policy(*stages: tuple[int, float, float]) -> common_pb2.Policy:
    return common_pb2.Policy(
        name="some",
        mode=common_pb2.SHARING_MODE_ROW,
        stages=[
            common_pb2.PolicyStage(min_age=age, key_threshold=key, value_threshold=value)
            for age, key, value in stages
        ],
        protected_tokens=4,
    )


def stages(amended: common_pb2.Policy) -> list[tuple[int, float, float]]:
    return [
        (stage.min_age, pytest.approx(stage.key_threshold), pytest.approx(stage.value_threshold))
        for stage in amended.stages
    ]


def test_no_change_is_false() -> None:
    assert not Changes()
    assert Changes(adaptive=False)


def test_a_threshold_applies_to_every_stage_and_leaves_the_rest() -> None:
    before = policy((64, 0.02, 0.1), (512, 0.1, 0.3))
    after = Changes(key_threshold=0.05).amend(before)
    assert stages(after) == [(64, 0.05, 0.1), (512, 0.05, 0.3)]
    assert (after.name, after.protected_tokens, after.mode) == (CUSTOM, 4, before.mode)
    assert stages(before) == [(64, 0.02, 0.1), (512, 0.1, 0.3)]


@pytest.mark.parametrize(
    ("age", "expected"),
    [
        (32, [(32, 0.02, 0.1), (512, 0.1, 0.3)]),
        (128, [(128, 0.02, 0.1), (512, 0.1, 0.3)]),
        (512, [(512, 0.1, 0.3)]),
        (1024, [(1024, 0.1, 0.3)]),
    ],
)
def test_a_minimum_age_moves_the_first_stage(age: int, expected: list[object]) -> None:
    assert stages(Changes(min_age=age).amend(policy((64, 0.02, 0.1), (512, 0.1, 0.3)))) == expected


def test_a_threshold_makes_a_stage_where_there_is_none() -> None:
    assert stages(Changes(key_threshold=0.05, min_age=100).amend(policy())) == [(100, 0.05, 0.0)]


def test_single_values() -> None:
    after = Changes(
        mode=common_pb2.SHARING_MODE_OBSERVE,
        protected_tokens=16,
        fidelity_budget=0.5,
        adaptive=True,
    ).amend(policy((64, 0.02, 0.1)))
    assert after.mode == common_pb2.SHARING_MODE_OBSERVE
    assert (after.protected_tokens, after.fidelity_budget, after.adaptive.enabled) == (
        16,
        0.5,
        True,
    )
