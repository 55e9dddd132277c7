"""What may be shared: modes, stages, thresholds, budget and the presets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from memshare.manager.rows import Mask
from memshare.v1 import common_pb2
from memshare.wire.errors import InvalidArgument
from memshare.wire.names import require_name

Floats = npt.NDArray[np.float32]
MAX_TOKENS: Final = 1 << 24
MAX_THRESHOLD: Final = 4.0
MAX_POINTS: Final = 4096


class Mode(IntEnum):
    """Values of `memshare.v1.SharingMode`."""

    OBSERVE = common_pb2.SHARING_MODE_OBSERVE
    EXACT = common_pb2.SHARING_MODE_EXACT
    ROW = common_pb2.SHARING_MODE_ROW
    BLOCK = common_pb2.SHARING_MODE_BLOCK


MODES: Final = "observe, exact, row or block"


@dataclass(frozen=True)
class Stage:
    """One examination of a token, once `min_age` newer tokens are sealed.

    Thresholds are relative squared distances |x - y|^2 / |x|^2.
    """

    min_age: int
    key_threshold: float = 0.0
    value_threshold: float = 0.0


@dataclass(frozen=True)
class Adaptive:
    """A multiplier of all thresholds, linear in the used share of the pool between watermarks."""

    enabled: bool = False
    min_scale: float = 0.5
    max_scale: float = 1.0
    low_watermark: float = 0.5
    high_watermark: float = 0.9


@dataclass(frozen=True)
class Policy:
    """What one session may share. All counts are of tokens, whatever the session shares.

    `protected_tokens` first tokens are never shared approximately. `layer_scale` multiplies the
    thresholds, interpolated between points equally spaced over the depth; empty is 1 everywhere.
    `fidelity_budget` bounds the mean distance over all rows of a request. Raises
    `InvalidArgument` naming key and value.
    """

    name: str
    mode: Mode
    stages: tuple[Stage, ...] = (Stage(0),)
    protected_tokens: int = 16
    layer_scale: tuple[float, ...] = ()
    fidelity_budget: float = 0.0
    adaptive: Adaptive = field(default_factory=Adaptive)

    def __post_init__(self) -> None:
        require_name("policy name", self.name)
        if self.mode not in tuple(Mode):
            raise self._wrong("mode", self.mode, MODES)
        if not 1 <= len(self.stages) <= 16:
            raise self._wrong("stages", len(self.stages), "1 to 16 stages")
        for number, stage in enumerate(self.stages):
            key = f"stages[{number}]"
            self._require(f"{key}.min_age", stage.min_age, 0, MAX_TOKENS)
            self._require(f"{key}.key_threshold", stage.key_threshold, 0, MAX_THRESHOLD)
            self._require(f"{key}.value_threshold", stage.value_threshold, 0, MAX_THRESHOLD)
        self._require("protected_tokens", self.protected_tokens, 0, MAX_TOKENS)
        if len(self.layer_scale) > MAX_POINTS:
            raise self._wrong("layer_scale", len(self.layer_scale), f"at most {MAX_POINTS} points")
        for number, scale in enumerate(self.layer_scale):
            self._require(f"layer_scale[{number}]", scale, 0, 100)
        self._require("fidelity_budget", self.fidelity_budget, 0, MAX_THRESHOLD)
        adaptive = self.adaptive
        self._require("adaptive.max_scale", adaptive.max_scale, 0, 100)
        self._require("adaptive.min_scale", adaptive.min_scale, 0, adaptive.max_scale)
        self._require("adaptive.high_watermark", adaptive.high_watermark, 0, 1)
        self._require("adaptive.low_watermark", adaptive.low_watermark, 0, adaptive.high_watermark)

    def _require(self, key: str, value: float, low: float, high: float) -> None:
        if not low <= value <= high:  # NaN fails too
            raise self._wrong(key, value, f"{low:g} to {high:g}")

    def _wrong(self, key: str, value: object, allowed: str) -> InvalidArgument:
        return InvalidArgument(
            f"policy {self.name!r}: {key} is {value}, must be {allowed}", field=key, value=value
        )

    def narrowed(self, obstacle: str) -> Policy:
        """The exact policy for a session that cannot share approximately, if this one would."""
        if not obstacle or self.mode in (Mode.OBSERVE, Mode.EXACT):
            return self
        return replace(self, mode=Mode.EXACT, stages=(Stage(0),), fidelity_budget=0.0)

    def in_blocks(self, block_tokens: int) -> Policy:
        """This policy with all counts in blocks, begun ones counted whole.

        A block is of all layers: there is nothing to scale over the depth.
        """
        stages = tuple(
            replace(stage, min_age=-(-stage.min_age // block_tokens)) for stage in self.stages
        )
        protected = -(-self.protected_tokens // block_tokens)
        return replace(self, stages=stages, protected_tokens=protected, layer_scale=())

    def scale(self, used: float) -> float:
        """The adaptive multiplier when `used` (0 to 1) of the pool is not free."""
        adaptive = self.adaptive
        if not adaptive.enabled:
            return 1.0
        watermarks = (adaptive.low_watermark, adaptive.high_watermark)
        if watermarks[0] == watermarks[1]:
            return adaptive.max_scale if used >= watermarks[0] else adaptive.min_scale
        return float(np.interp(used, watermarks, (adaptive.min_scale, adaptive.max_scale)))

    def thresholds(self, stage: Stage, num_layers: int, used: float) -> tuple[Floats, Floats]:
        """Effective K and V thresholds of each layer, [num_layers] float32."""
        scale = np.ones(num_layers)
        if self.layer_scale:
            depth = np.linspace(0, 1, num_layers) if num_layers > 1 else np.zeros(1)
            points = np.linspace(0, 1, len(self.layer_scale))
            scale = np.interp(depth, points, self.layer_scale)
        scale = scale * self.scale(used)
        keys, values = stage.key_threshold * scale, stage.value_threshold * scale
        return keys.astype(np.float32), values.astype(np.float32)

    def within_budget(self, distances: Floats, spent: float, num_rows: int) -> Mask:
        """Which items a request of `num_rows` sealed rows can still afford, best first.

        `spent` is the sum of the distances that are shared or proposed already.
        """
        left = self.fidelity_budget * num_rows - spent
        order = np.argsort(distances, kind="stable")
        affordable = np.cumsum(distances[order], dtype=np.float64) <= left
        accepted = np.zeros(len(distances), np.bool_)
        accepted[order[affordable]] = True
        return accepted

    def to_proto(self) -> common_pb2.Policy:
        """The message of this policy."""
        return common_pb2.Policy(
            name=self.name,
            mode=int(self.mode),  # type: ignore[arg-type]
            stages=[
                common_pb2.PolicyStage(
                    min_age=stage.min_age,
                    key_threshold=stage.key_threshold,
                    value_threshold=stage.value_threshold,
                )
                for stage in self.stages
            ],
            protected_tokens=self.protected_tokens,
            layer_scale=self.layer_scale,
            fidelity_budget=self.fidelity_budget,
            adaptive=common_pb2.AdaptiveThreshold(
                enabled=self.adaptive.enabled,
                min_scale=self.adaptive.min_scale,
                max_scale=self.adaptive.max_scale,
                low_watermark=self.adaptive.low_watermark,
                high_watermark=self.adaptive.high_watermark,
            ),
        )

    @classmethod
    def from_proto(cls, policy: common_pb2.Policy) -> Policy:
        """The policy of a message. Raises `InvalidArgument` naming key and value."""
        name = policy.name or "custom"
        if int(policy.mode) not in tuple(Mode):
            raise InvalidArgument(
                f"policy {name!r}: mode is {policy.mode}, must be {MODES}",
                field="mode",
                value=policy.mode,
            )
        mode = Mode(policy.mode)
        stages = tuple(
            Stage(stage.min_age, _short(stage.key_threshold), _short(stage.value_threshold))
            for stage in policy.stages
        )
        adaptive = Adaptive()
        if policy.HasField("adaptive"):
            adaptive = Adaptive(
                policy.adaptive.enabled,
                _short(policy.adaptive.min_scale),
                _short(policy.adaptive.max_scale),
                _short(policy.adaptive.low_watermark),
                _short(policy.adaptive.high_watermark),
            )
        return cls(
            name,
            mode,
            stages or ((Stage(0),) if mode is Mode.EXACT else ()),
            policy.protected_tokens,
            tuple(_short(scale) for scale in policy.layer_scale),
            _short(policy.fidelity_budget),
            adaptive,
        )


def _short(value: float) -> float:
    # What was 0.02 before it went through a float32 is 0.02 again.
    return float(str(np.float32(value)))


# Errors in the fourth fifth of the depth are felt most. Measured on a model of 30 layers, one
# point each: docs/fidelity.md.
_LAYER_SCALE: Final = (1.0,) * 18 + (0.3,) * 6 + (1.0,) * 6


def _by_age(ages: tuple[int, ...], keys: list[float], values: list[float]) -> tuple[Stage, ...]:
    return tuple(map(Stage, ages, keys, values))


# The older a token, the less its error is felt. Measured: docs/fidelity.md.
_AGES: Final = (64, 256, 512, 1024)
_STRICT: Final = _by_age(_AGES, [0.003, 0.01, 0.025, 0.05], [0.015, 0.04, 0.08, 0.15])
_BALANCED: Final = _by_age(_AGES, [0.007, 0.02, 0.055, 0.11], [0.035, 0.08, 0.18, 0.35])
_AGGRESSIVE: Final = _by_age(_AGES, [0.0125, 0.0375, 0.10, 0.20], [0.06, 0.15, 0.30, 0.60])


def _row_policy(
    name: str, stages: tuple[Stage, ...], budget: float, adaptive: Adaptive | None = None
) -> Policy:
    return Policy(
        name,
        Mode.ROW,
        stages,
        layer_scale=_LAYER_SCALE,
        fidelity_budget=budget,
        adaptive=adaptive or Adaptive(),
    )


PRESETS: Final[dict[str, Policy]] = {
    policy.name: policy
    for policy in (
        replace(_row_policy("observe", _BALANCED, 0.03), mode=Mode.OBSERVE),
        Policy("exact", Mode.EXACT, protected_tokens=0),
        _row_policy("strict", _STRICT, 0.01),
        _row_policy("balanced", _BALANCED, 0.03),
        _row_policy("aggressive", _AGGRESSIVE, 0.06),
        # About strict while memory is plenty, about aggressive when it runs out.
        _row_policy("adaptive", _BALANCED, 0.06, Adaptive(True, 0.4, 1.8, 0.5, 0.9)),
        Policy("block", Mode.BLOCK, (Stage(64, 0.70, 1.0),), 32, fidelity_budget=0.50),
        # For chains that loop; what does not repeat pays for it.
        Policy("block-aggressive", Mode.BLOCK, (Stage(64, 0.80, 1.3),), 32, fidelity_budget=0.50),
    )
}
DEFAULT_POLICY: Final = "exact"
# What `observe` counts in a session of blocks.
_OBSERVE_BLOCKS: Final = replace(PRESETS["block"], name="observe", mode=Mode.OBSERVE)


def for_blocks(policy: Policy) -> Policy:
    """The same policy for a session of blocks: the preset `observe` watches for other things."""
    return _OBSERVE_BLOCKS if policy == PRESETS["observe"] else policy


def preset(name: str) -> Policy:
    """A preset by name. Raises `InvalidArgument` naming the known ones."""
    if name not in PRESETS:
        raise InvalidArgument(
            f"policy: there is no preset {name!r}, use {', '.join(PRESETS)}",
            field="policy", value=name,
        )  # fmt: skip
    return PRESETS[name]
