"""`memshare bench`: speed and endurance."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from memshare.client.cli import output
from memshare.client.cli.bench_vllm import vllm
from memshare.client.cli.options import JsonOption
from memshare.client.cli.progress import progress_bar
from memshare.client.cli.sidecar import running_sidecar

bench = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Measure speed and endurance, each figure by one command.",
)


@bench.command()
def step(
    context: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 1024,
    steps: Annotated[int, typer.Option(min=10, help="Steps to time.")] = 300,
    policy: Annotated[str, typer.Option(help="Policy of the session.")] = "observe",
    model: Annotated[
        Path | None, typer.Option(help="A Transformers folder; SmolLM2-135M without it.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Time a decode step against Transformers' own cache, on one thread.

    `ratio` is the median of the paired ratios, `p50_us` and `p99_us` are of the whole step with
    memshare, `between_*` of what the shim does between two steps.
    """
    import torch

    from memshare.client.evaluation.decode_steps import time_steps
    from memshare.client.evaluation.model import load_model

    torch.set_num_threads(1)
    loaded, _ = load_model(model)
    with running_sidecar() as sidecar, progress_bar("steps", steps) as bar:
        times = time_steps(loaded, sidecar.runtime.path, context, steps, policy, bar.advance)
    _show(times.summary(), json)
    return 0


@bench.command()
def manager(
    seconds: Annotated[float, typer.Option(min=0.5, help="How long to measure.")] = 5.0,
    batch: Annotated[int, typer.Option(min=1, help="Rows in a message.")] = 16384,
    json: JsonOption = False,
) -> int:
    """Count row operations per second through gRPC, the manager on one core."""
    from memshare.manager.benchmark import measure_row_operations

    _show(measure_row_operations(seconds, batch), json)
    return 0


@bench.command()
def agent(
    seconds: Annotated[float, typer.Option(min=0.5, help="How long to measure.")] = 5.0,
    json: JsonOption = False,
) -> int:
    """Measure signatures against the memory's read bandwidth, on one thread."""
    from memshare.gpu_agent.benchmark import measure_signature_bandwidth

    _show(measure_signature_bandwidth(seconds), json)
    return 0


@bench.command()
def chaos(
    kills: Annotated[int, typer.Option(min=1, help="Engines to kill.")] = 50,
    json: JsonOption = False,
) -> int:
    """Kill engines with -9 in the middle of work and count what does not come back."""
    from memshare.client.evaluation.chaos import kill_engines

    with running_sidecar() as sidecar, sidecar.admin() as admin:
        admin.status()

        def free_rows() -> int:
            # Before the first engine the pool is not divided into rows: all of it is free.
            rows = admin.status().rows
            return int(rows.free - rows.total)

        with progress_bar("kills", kills) as bar:
            result = kill_engines(sidecar.runtime.path, kills, free_rows, bar.advance)
        errors = list(admin.check_integrity().errors)
    document = {**asdict(result), "integrity_errors": len(errors)}
    for error in errors:
        output.say(error)
    _show(document, json)
    return 1 if errors or result.leaked_rows else 0


bench.command()(vllm)


def _show(document: dict[str, float], json: bool) -> None:
    if json:
        output.print_json(document)
    else:
        output.print_fields((name, _readable(name, value)) for name, value in document.items())


def _readable(name: str, value: float) -> str:
    if name.endswith("_us"):
        return f"{value / 1000:.2f} ms"
    if name.endswith("bytes_per_second"):
        return f"{value / 1e9:.1f} GB/s"
    if "operations_per" in name:
        return f"{value / 1e6:.1f} million"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
