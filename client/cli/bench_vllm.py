"""`memshare bench vllm`: a stock server against one with memshare, under the same load."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from memshare.client.cli import output
from memshare.client.cli.options import JsonOption


def vllm(
    policy: Annotated[str, typer.Option(help="What memshare shares.")] = "block",
    rounds: Annotated[
        int, typer.Option(min=1, help="How often both are measured after each start.")
    ] = 3,
    starts: Annotated[
        int,
        typer.Option(
            min=1,
            help="How often both servers are started anew: where a process's memory comes to lie "
            "makes it faster or slower for as long as it lives.",
        ),
    ] = 1,
    requests: Annotated[int, typer.Option(min=1, help="Requests of one round.")] = 24,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests at a time; all of them without it.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of each answer.")] = 512,
    blocks: Annotated[int, typer.Option(min=2, help="KV blocks of 32 tokens, each server.")] = 120,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A JSONL file with a problem, question or prompt a line; without it, prompts "
            "whose answers loop.",
        ),
    ] = None,
    mechanics: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Share every N-th block whatever it holds, to measure what freed blocks are "
            "worth. THE ANSWERS ARE THEN WRONG.",
        ),
    ] = 0,
    log_probs: Annotated[
        bool, typer.Option("--log-probs", help="Compare the answers' log-probabilities too.")
    ] = False,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each server.")] = 2,
    model: Annotated[
        Path | None, typer.Option(help="A Transformers folder; SmolLM2-135M without it.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for one load.")] = 900.0,
    json: JsonOption = False,
) -> int:
    """Compare the throughput of vLLM with and without memshare where the KV cache is too small.

    Both servers stay up; they are measured in turn, in alternating order. `throughput_ratio` is
    the median of the rounds' ratios. The control is how far the stock server agrees with itself
    from round to round. Needs `make setup-vllm`.
    """
    from memshare.client.cli.serving import (
        MEMSHARE,
        STOCK,
        Comparison,
        LoadView,
        print_report,
        running_servers,
    )
    from memshare.client.serving.rounds import Round, report, run_rounds

    comparison = Comparison(
        policy=policy,
        requests=requests,
        concurrency=min(concurrency or requests, requests),
        tokens=tokens,
        blocks=blocks,
        prompts=prompts,
        model=model,
        threads=threads,
        mechanics=mechanics,
        log_probs=log_probs,
        timeout=timeout,
    )
    if mechanics:
        output.say(f"every {mechanics}th block is shared whatever it holds: the answers are wrong")
    measured: list[Round] = []
    for _ in range(starts):
        with (
            running_servers(comparison) as contenders,
            LoadView(comparison, rounds).shown() as watch,
        ):
            measured += run_rounds(contenders, comparison.load(), rounds, watch)
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(comparison).items()
    }
    settings["starts"] = starts
    document = {**report(measured, STOCK, MEMSHARE), "settings": settings}
    if json:
        output.print_json(document)
    else:
        print_report(document)
    return 0
