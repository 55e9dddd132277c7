"""`memshare vllm-flags`: what to add to `vllm serve`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from memshare.client.cli.options import JsonOption, RuntimeOption
from memshare.client.vllm.settings import Settings, engine_arguments, serve_flags

_DEFAULTS = Settings()


def vllm_flags(
    *,
    runtime: RuntimeOption = None,
    policy: Annotated[
        str,
        typer.Option(
            metavar="PRESET", help="What to share. Default: the manager's default policy."
        ),
    ] = _DEFAULTS.policy,
    tenant: Annotated[
        str, typer.Option(help="Blocks are never shared between tenants.")
    ] = _DEFAULTS.tenant,
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="What `memshare engines` shows.")
    ] = _DEFAULTS.engine,
    lease_blocks: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Blocks this engine may use; 0 for all free ones."),
    ] = _DEFAULTS.lease_blocks,
    as_json: JsonOption = False,
) -> None:
    """Print the flags that make `vllm serve` run on the sidecar's memory.

    vllm serve MODEL $(memshare vllm-flags --policy block)

    With --json: the keyword arguments for vllm.LLM.
    """
    settings = Settings(
        runtime_dir=str(runtime.path) if runtime is not None else "",
        policy=policy,
        tenant=tenant,
        engine=engine,
        lease_blocks=lease_blocks,
    )
    if as_json:
        print(json.dumps(engine_arguments(**settings.to_extra_config())))
        return
    flags = serve_flags(settings)
    if any(character.isspace() for flag in flags for character in flag):
        raise typer.BadParameter("a name with a space cannot be passed on by $(...): use --json")
    print(" ".join(flags))
