"""`memshare eval`: what policies save and cost on given traces, beside what they must beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from memshare.client.cli import output
from memshare.client.cli.progress import progress_bar
from memshare.client.cli.sidecar import running_sidecar
from memshare.manager.policy import Adaptive, Policy, preset
from memshare.wire.errors import InvalidArgument

# A candidate list that is longer finds no more: docs/fidelity.md.
CANDIDATES = 8
DEFAULT_POLICIES = ("strict", "balanced", "aggressive")


def evaluate(
    traces: Annotated[Path, typer.Option(help="JSON lines with a `trace` field.")],
    limit: Annotated[int, typer.Option(min=1, help="Traces to take.")] = 6,
    tokens: Annotated[int, typer.Option(min=128, help="Tokens of each trace.")] = 2048,
    policy: Annotated[
        list[str] | None, typer.Option(help="A preset's name; may be given several times.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A Transformers folder; SmolLM2-135M without it.")
    ] = None,
    recall: Annotated[
        bool, typer.Option(help="Also measure the index's recall on the first trace.")
    ] = False,
    looping: Annotated[bool, typer.Option(help="Take traces marked as looping too.")] = False,
    results: Annotated[
        Path, typer.Option(help="Folder of the measurements and the picture.")
    ] = Path("results"),
    fresh: Annotated[bool, typer.Option(help="Measure anew what is in the folder.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> int:
    """Measure saved bytes, dNLL, KL and agreement on the second half of each trace.

    Teacher-forced through a sidecar of its own: agent, manager and shim as in service. An
    interrupted run goes on where it stopped.
    """
    # Loaded here: torch takes seconds, and other commands do without it.
    from memshare.client.evaluation.frontier import Evaluation
    from memshare.client.evaluation.model import load_model
    from memshare.client.evaluation.pictures import Point, draw_frontier
    from memshare.client.evaluation.recall import measure_recall
    from memshare.client.evaluation.results import ResultsFile
    from memshare.client.evaluation.traces import read_traces

    policies = {name: preset(name) for name in policy or DEFAULT_POLICIES}
    if not traces.is_file():
        raise InvalidArgument(f"--traces {traces}: no such file")
    output.say("loading the model")
    loaded, tokenizer = load_model(model)
    chosen = read_traces(traces, tokenizer, tokens, limit, looping)
    file = results / "measurements.jsonl"
    if fresh:
        file.unlink(missing_ok=True)
    output.say(f"traces: {len(chosen)} of {tokens} tokens; measurements go to {file}")
    with running_sidecar(pool_bytes=_pool_bytes(loaded, tokens)) as sidecar:
        messages = {name: one.to_proto() for name, one in policies.items()}
        evaluation = Evaluation(loaded, messages, sidecar.runtime.path, ResultsFile(file))
        measurements = _measure(evaluation, chosen)
        recalls = {}
        if recall:
            output.say("measuring the index's recall")
            layers = evaluation.layout.num_layers
            thresholds = {name: _last_thresholds(one, layers) for name, one in policies.items()}
            recalls = measure_recall(
                loaded, chosen[0].ids, thresholds, sidecar.runtime.path, CANDIDATES
            )
    rows = _averages(measurements)
    for row in rows:
        if row["policy"] in recalls:
            row["recall"] = recalls[row["policy"]].share
    picture = results / "frontier.png"
    draw_frontier(
        [Point(row["policy"], row["kind"], row["saved"], row["kl"]) for row in rows],
        picture,
        f"{len(chosen)} traces of {tokens} tokens",
    )
    output.say(f"picture: {picture}")
    if json:
        output.print_json(rows)
    else:
        headings = ("policy", "saved", "dNLL", "KL", "agree", "saved, least to most", "recall")
        output.print_table(headings, [_cells(row) for row in rows])
    return 0


def _measure(evaluation: Any, traces: Sequence[Any]) -> list[Any]:
    measurements = []
    with progress_bar("", evaluation.runs_per_trace() * len(traces)) as bar:

        def starting(trace: str, what: str) -> None:
            bar.describe(f"…{trace[-24:]}: {what}" if len(trace) > 25 else f"{trace}: {what}")

        try:
            for measurement in evaluation.measure(traces, starting):
                measurements.append(measurement)
                bar.advance()
        except KeyboardInterrupt:
            output.say("stopped; the same command goes on from here")
            raise
    return measurements


def _last_thresholds(policy: Policy, num_layers: int) -> Any:
    """Of the policy's last stage, as they are while memory is not scarce."""
    from memshare.client.evaluation.recall import Thresholds

    steady = replace(policy, adaptive=Adaptive())
    keys, values = steady.thresholds(policy.stages[-1], num_layers, used=0.0)
    return Thresholds(keys, values, policy.protected_tokens)


def _pool_bytes(model: Any, tokens: int) -> int:
    from memshare.client.transformers import describe_model

    layout, _ = describe_model(model)
    needed = 2 * layout.num_layers * tokens * layout.row_bytes
    # Rows leased ahead, and the trace before that is still being released.
    return max(256 << 20, 3 * needed)


def _averages(measurements: Sequence[Any]) -> list[dict[str, Any]]:
    rows = []
    ordered = sorted(measurements, key=lambda m: (m.kind != "policy", m.kind, m.policy))
    for (kind, name), group in groupby(ordered, key=lambda m: (m.kind, m.policy)):
        members = [asdict(m) for m in group]
        row: dict[str, Any] = {"policy": name, "kind": kind, "traces": len(members)}
        row |= {key: fmean(m[key] for m in members) for key in ("saved", "dnll", "kl", "agree")}
        row["saved_range"] = [min(m["saved"] for m in members), max(m["saved"] for m in members)]
        rows.append(row)
    return rows


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    least, most = row["saved_range"]
    return (
        row["policy"],
        f"{row['saved']:.1%}" + ("" if row["kind"] in ("policy", "control") else " of 16 bits"),
        f"{row['dnll']:+.4f}",
        f"{row['kl']:.5f}",
        f"{row['agree']:.3f}",
        f"{least:.1%} to {most:.1%}",
        f"{row['recall']:.3f}" if "recall" in row else "",
    )
