"""`memshare policy get` and `set`: what may be shared, changed while engines run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from memshare.client.cli import output
from memshare.client.cli.admin import AdminClient
from memshare.client.cli.options import (
    UINT32_MAX,
    JsonOption,
    RuntimeOption,
    SessionOption,
    chosen,
)
from memshare.client.cli.show import MODES
from memshare.v1 import common_pb2

app = typer.Typer(
    help="Show and change what may be shared.", no_args_is_help=True, add_completion=False
)
CUSTOM = "custom"
# Of a stage that --key-threshold or --value-threshold adds to a policy without one.
DEFAULT_MIN_AGE = 64


@dataclass(frozen=True)
class Changes:
    """Single values to change; None leaves one as it is."""

    mode: int | None = None
    key_threshold: float | None = None
    value_threshold: float | None = None
    min_age: int | None = None
    protected_tokens: int | None = None
    fidelity_budget: float | None = None
    adaptive: bool | None = None

    def __bool__(self) -> bool:
        return self != Changes()

    def amend(self, policy: common_pb2.Policy) -> common_pb2.Policy:
        """A copy of the policy with these values.

        Thresholds apply to every stage. The minimum age becomes that of the first stage;
        stages that would come no later are merged into it, the last one's thresholds win.
        """
        amended = common_pb2.Policy()
        amended.CopyFrom(policy)
        amended.name = CUSTOM
        if self.mode is not None:
            amended.mode = self.mode  # type: ignore[assignment]
        staged = (self.key_threshold, self.value_threshold, self.min_age)
        if any(value is not None for value in staged):
            self._amend_stages(amended)
        if self.protected_tokens is not None:
            amended.protected_tokens = self.protected_tokens
        if self.fidelity_budget is not None:
            amended.fidelity_budget = self.fidelity_budget
        if self.adaptive is not None:
            amended.adaptive.enabled = self.adaptive
        return amended

    def _amend_stages(self, policy: common_pb2.Policy) -> None:
        stages = list(policy.stages) or [common_pb2.PolicyStage(min_age=DEFAULT_MIN_AGE)]
        if self.min_age is not None:
            age = self.min_age
            merged = [stage for stage in stages if stage.min_age <= age] or stages[:1]
            merged[-1].min_age = age
            stages = [merged[-1], *(stage for stage in stages if stage.min_age > age)]
        for stage in stages:
            if self.key_threshold is not None:
                stage.key_threshold = self.key_threshold
            if self.value_threshold is not None:
                stage.value_threshold = self.value_threshold
        kept = [common_pb2.PolicyStage.FromString(stage.SerializeToString()) for stage in stages]
        del policy.stages[:]
        policy.stages.extend(kept)


def parse_mode(text: str) -> int:
    """The number of a sharing mode's name."""
    names = {output.enum_name(MODES, value.number): value.number for value in MODES.values[1:]}
    if text not in names:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(names)}")
    return names[text]


@app.command("get")
def get(
    session: SessionOption = 0, runtime_dir: RuntimeOption = None, json: JsonOption = False
) -> None:
    """Show a session's policy, or the default one."""
    with AdminClient(chosen(runtime_dir)) as admin:
        answer = admin.policy(session)
    if json:
        output.print_json(output.to_document(answer))
        return
    output.print_fields([*_fields(answer.policy), ("presets", ", ".join(answer.presets))])


@app.command("set")
def set_(
    session: SessionOption = 0,
    preset: Annotated[
        str | None,
        typer.Option("--preset", "-p", help="A named policy; `memshare policy get` lists them."),
    ] = None,
    mode: Annotated[
        int | None, typer.Option(parser=parse_mode, metavar="MODE", help="observe, exact or row.")
    ] = None,
    key_threshold: Annotated[
        float | None,
        typer.Option(min=0, help="Greatest relative squared distance of a shared key."),
    ] = None,
    value_threshold: Annotated[
        float | None, typer.Option(min=0, help="The same for values.")
    ] = None,
    min_age: Annotated[
        int | None,
        typer.Option(
            min=0, max=UINT32_MAX, help="Newer tokens that must exist before one is shared."
        ),
    ] = None,
    protected_tokens: Annotated[
        int | None,
        typer.Option(
            min=0, max=UINT32_MAX, help="First tokens of a request that are never shared."
        ),
    ] = None,
    fidelity_budget: Annotated[
        float | None,
        typer.Option(min=0, help="Greatest mean relative squared distance over a request."),
    ] = None,
    adaptive: Annotated[
        bool | None,
        typer.Option("--adaptive/--no-adaptive", help="Let thresholds follow memory pressure."),
    ] = None,
    runtime_dir: RuntimeOption = None,
    json: JsonOption = False,
) -> None:
    """Change the policy of one session, or the default and all that follow it.

    Single values change the policy in force and leave the rest of it as it is.
    """
    changes = Changes(
        mode, key_threshold, value_threshold, min_age, protected_tokens, fidelity_budget, adaptive
    )
    if preset and changes:
        raise typer.BadParameter(
            "a preset is a whole policy: set it alone, then single values", param_hint="--preset"
        )
    if not preset and not changes:
        raise typer.BadParameter(
            "nothing to set: give --preset, or a value such as --key-threshold"
        )
    with AdminClient(chosen(runtime_dir)) as admin:
        policy = preset or changes.amend(admin.policy(session).policy)
        answer = admin.set_policy(policy, session)
    if json:
        output.print_json(output.to_document(answer))
        return
    output.print_fields(_fields(answer.policy))
    output.say(f"policy set for {answer.sessions_changed} attached engine(s)")
    for hint in _hints(answer.policy):
        output.say(hint)


def _hints(policy: common_pb2.Policy) -> list[str]:
    """Why thresholds that were set have no effect."""
    if not any(stage.key_threshold or stage.value_threshold for stage in policy.stages):
        return []
    if policy.mode == common_pb2.SHARING_MODE_EXACT:
        return ["mode exact uses no thresholds: set --mode row"]
    if policy.mode == common_pb2.SHARING_MODE_ROW and not policy.fidelity_budget:
        return ["a fidelity budget of 0 allows no error at all: set --fidelity-budget"]
    return []


def _fields(policy: common_pb2.Policy) -> list[tuple[str, object]]:
    fields: list[tuple[str, object]] = [
        ("policy", policy.name),
        ("mode", output.enum_name(MODES, policy.mode)),
    ]
    if policy.mode == common_pb2.SHARING_MODE_EXACT:
        return fields
    fields += [
        (
            f"from age {stage.min_age:,}",
            f"K ≤ {stage.key_threshold:.3g}, V ≤ {stage.value_threshold:.3g}",
        )
        for stage in policy.stages
    ]
    adaptive = policy.adaptive
    fields += [
        ("protected tokens", policy.protected_tokens),
        ("fidelity budget", f"{policy.fidelity_budget:.3g}"),
        (
            "adaptive",
            f"×{adaptive.min_scale:.3g} at {adaptive.low_watermark:.0%} used to "
            f"×{adaptive.max_scale:.3g} at {adaptive.high_watermark:.0%}"
            if adaptive.enabled
            else "no",
        ),
    ]
    if policy.layer_scale:
        scales = ", ".join(f"{scale:.3g}" for scale in policy.layer_scale)
        fields.append(("scale over depth", scales))
    return fields
