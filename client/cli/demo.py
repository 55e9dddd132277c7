"""`memshare demo`: the main job, on a small real model, with what it saves and costs."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from memshare.client.cli import output
from memshare.client.cli.options import JsonOption
from memshare.client.cli.progress import progress_bar
from memshare.client.cli.sidecar import Sidecar, running_sidecar
from memshare.client.cli.units import format_bytes
from memshare.manager.policy import preset


class Engine(StrEnum):
    """Engines that the demo knows."""

    TRANSFORMERS = "transformers"
    VLLM = "vllm"


def demo(
    engine: Annotated[
        Engine, typer.Option(help="Who generates; vllm needs `make setup-vllm`.")
    ] = Engine.TRANSFORMERS,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=64,
            help="New tokens of each chain. Default: 1024, with vllm 512.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="The policy that is shown. Default: balanced, with vllm block-aggressive.",
            show_default=False,
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="Where the PNG goes. Default: memshare-demo.png, with vllm memshare-demo-vllm.png",
            show_default=False,
        ),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Generate long answers through the sidecar, unshared and shared, and compare.

    Starts a sidecar of its own as separate processes and stops it in the end. With vllm: a
    stock server and one with memshare, whose KV caches are too small for the same load.
    """
    if engine is Engine.VLLM:
        from memshare.client.cli.demo_vllm import show_servers

        chosen = policy or "block-aggressive"
        return show_servers(tokens, chosen, picture or _picture("-vllm"), json)
    return _show_chains(tokens or 1024, policy or "balanced", picture or _picture(""), json)


def _picture(engine: str) -> Path:
    return Path(f"memshare-demo{engine}.png")


def _show_chains(tokens: int, policy: str, picture: Path, json: bool) -> int:
    from memshare.client.evaluation.forced import compare, run_forced
    from memshare.client.evaluation.generation import generate
    from memshare.client.evaluation.model import load_model
    from memshare.client.evaluation.pictures import draw_savings
    from memshare.client.evaluation.problems import PROBLEMS
    from memshare.client.evaluation.sharing import run_shared
    from memshare.client.transformers import MemShareCache

    preset(policy)  # an unknown one is told before anything is loaded
    output.say("starting the sidecar: an agent that owns 1 GiB, and a manager")
    runs: dict[str, Any] = {}
    cpu: dict[str, float] = {}
    with running_sidecar(pool_bytes=1 << 30) as sidecar:
        output.say("loading SmolLM2-135M (the first time it is converted from GGUF, a minute)")
        model, tokenizer = load_model()
        free = _free_rows(sidecar)
        for mode in ("observe", policy):
            output.say(f"{len(PROBLEMS)} chains of {tokens} tokens through the shim, policy {mode}")
            before = _cpu_seconds(sidecar)
            session = MemShareCache.attach(
                model, policy=mode, runtime_dir=sidecar.runtime.path, tenant=""
            )
            with session, progress_bar("tokens", tokens) as bar:
                runs[mode] = generate(
                    model,
                    tokenizer,
                    PROBLEMS,
                    tokens,
                    session,
                    bar.advance,
                    lambda: _live_rows(sidecar),
                )
            cpu[mode] = _cpu_seconds(sidecar) - before
        output.say("fidelity: the first chain's text again, teacher-forced, unshared and shared")
        ids = runs["observe"].sequences[:1, _first_real(runs["observe"], tokenizer) :]
        first = ids.shape[1] // 2
        with MemShareCache(
            model, policy="observe", runtime_dir=sidecar.runtime.path, tenant=""
        ) as cache:
            unshared = run_forced(model, ids, cache, lambda _: cache.finish_step(), first)
        forced = run_shared(model, ids, policy, sidecar.runtime.path, first)
        fidelity = compare(unshared, forced.log_probs, ids, first)
        returned = _free_rows(sidecar) == free
        output.say("stopping the sidecar")
    shared = runs[policy]
    draw_savings(shared.by_layer, shared.over_tokens, picture)
    document = {
        "policy": policy,
        "chains": len(PROBLEMS),
        "tokens_per_chain": int(shared.sequences.shape[1]),
        "kv_bytes_unshared": shared.kv_bytes,
        "kv_bytes_shared": shared.held_bytes + shared.table_bytes,
        "saved": 1 - (shared.held_bytes + shared.table_bytes) / shared.kv_bytes,
        "shared_keys": float(shared.by_layer[0].mean()),
        "shared_values": float(shared.by_layer[1].mean()),
        "shared_keys_by_layer": shared.by_layer[0].tolist(),
        "shared_values_by_layer": shared.by_layer[1].tolist(),
        "kl": fidelity.kl,
        "dnll": fidelity.dnll,
        "agree": fidelity.agree,
        "forced_saved": forced.saved,
        "tokens_per_second": {mode: run.tokens_per_second for mode, run in runs.items()},
        "sidecar_cpu_seconds": cpu,
        "engine_seconds": {mode: run.seconds for mode, run in runs.items()},
        "free_rows_returned": returned,
        "picture": str(picture),
    }
    if json:
        output.print_json(document)
    else:
        _print(document)
    return 0 if returned else 1


def _first_real(run: Any, tokenizer: Any) -> int:
    """The first slot of the first chain that is not left padding."""
    row = run.sequences[0, : run.prompt_tokens]
    return int((row != tokenizer.pad_token_id).int().argmax())


def _free_rows(sidecar: Sidecar) -> int:
    """Free rows less all rows, once no session is left: 0 when none is missing."""
    with sidecar.admin() as admin:
        for _ in range(100):
            status = admin.status()
            if status.sessions == 0:
                break
            time.sleep(0.1)
        # Not divided into rows before the first engine: all of it is free.
        return int(status.rows.free - status.rows.total)


def _live_rows(sidecar: Sidecar) -> int:
    """Rows that some table entry names, by the manager's count."""
    with sidecar.admin() as admin:
        return int(admin.status().rows.live)


def _cpu_seconds(sidecar: Sidecar) -> float:
    with sidecar.admin() as admin:
        status = admin.status()
    return float(status.cpu_seconds + status.worker_cpu_seconds)


def _print(document: dict[str, Any]) -> None:
    policy = document["policy"]
    rates, cpu = document["tokens_per_second"], document["sidecar_cpu_seconds"]
    seconds = document["engine_seconds"]
    output.print_table(
        ("", "observe", policy),
        [
            (
                "KV bytes",
                format_bytes(document["kv_bytes_unshared"]),
                f"{format_bytes(document['kv_bytes_shared'])} ({document['saved']:.1%} saved, "
                "tables counted)",
            ),
            ("K rows shared", "0", f"{document['shared_keys']:.1%}"),
            ("V rows shared", "0", f"{document['shared_values']:.1%}"),
            ("KL to unshared, same text", "0", f"{document['kl']:.4f} nats per token"),
            ("top-1 agreement", "1", f"{document['agree']:.3f}"),
            ("tokens per second", f"{rates['observe']:.1f}", f"{rates[policy]:.1f}"),
            (
                "sidecar CPU time",
                f"{cpu['observe']:.1f} s of {seconds['observe']:.0f} s",
                f"{cpu[policy]:.1f} s of {seconds[policy]:.0f} s",
            ),
        ],
    )
    keys, values = document["shared_keys_by_layer"], document["shared_values_by_layer"]
    output.print_table(
        ("layer", "K shared", "V shared"),
        [(i, f"{k:.1%}", f"{v:.1%}") for i, (k, v) in enumerate(zip(keys, values, strict=True))],
    )
    output.say("speeds compare only on an idle machine: the two runs follow one another")
    output.say(f"picture: {document['picture']}")
    kept = "all rows came back" if document["free_rows_returned"] else "ROWS WERE LOST"
    output.say(f"the pool after the demo: {kept}")
