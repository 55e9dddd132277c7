"""`memshare demo --engine vllm`: the same load on a stock server and on one with memshare."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from memshare.client.cli import output

_TOKENS: Final = 512
_REQUESTS: Final = 24
_BLOCKS: Final = 120


def show_servers(tokens: int | None, policy: str, picture: Path, json: bool) -> int:
    """Compare both under one load, print it and draw it."""
    from memshare.client.cli.serving import (
        MEMSHARE,
        STOCK,
        Comparison,
        LoadView,
        print_report,
        running_servers,
    )
    from memshare.client.serving.pictures import draw_load
    from memshare.client.serving.rounds import report, run_rounds

    comparison = Comparison(
        policy=policy,
        requests=_REQUESTS,
        concurrency=_REQUESTS,
        tokens=tokens or _TOKENS,
        blocks=_BLOCKS,
    )
    with running_servers(comparison) as contenders:
        output.say(
            f"{comparison.requests} answers of {comparison.tokens} tokens from each, at once; "
            f"{comparison.blocks} KV blocks hold a quarter of them"
        )
        with LoadView(comparison, rounds=1).shown() as watch:
            rounds = run_rounds(contenders, comparison.load(), 1, watch)
    draw_load({name: r.samples for name, r in rounds[0].results.items()}, picture)
    document = {
        "policy": policy,
        "kv_blocks": comparison.blocks,
        **report(rounds, STOCK, MEMSHARE),
        "picture": str(picture),
    }
    if json:
        output.print_json(document)
    else:
        print_report(document)
        output.say("speeds compare only on an idle machine: one follows the other")
        output.say(f"picture: {picture}")
    return 0
