"""What `demo --engine vllm` and `bench vllm` have in common: two servers, and a view of them."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.live import Live
from rich.table import Table

from memshare.client.cli import output
from memshare.client.cli.sidecar import Sidecar, running_sidecar
from memshare.client.serving.load import Load
from memshare.client.serving.metrics import Sample
from memshare.client.serving.prompts import take_prompts
from memshare.client.serving.rounds import Contender, warm_up
from memshare.client.serving.server import ServerFailed, ServerSettings, VllmServer
from memshare.manager.policy import preset
from memshare.wire.errors import InvalidArgument

STOCK: Final = "stock"
MEMSHARE: Final = "memshare"
# Room for a prompt beside its answer.
_PROMPT_TOKENS: Final = 512
# Where there is no terminal, a line in this many seconds is enough.
_LINE_INTERVAL: Final = 15.0


@dataclass(frozen=True)
class Comparison:
    """What is asked of a stock vLLM and of one with memshare.

    Attributes:
        policy: what memshare shares.
        requests: how many, all different.
        concurrency: how many of them at a time.
        tokens: of each answer.
        blocks: of each server's KV cache, 32 tokens each.
        prompts: a JSONL file, None for prompts whose answers loop.
        model: a Transformers folder, None for SmolLM2-135M.
        threads: that each server computes on.
        mechanics: share every n-th block whatever it holds; 0 for off.
        log_probs: measure how far those of the answers lie apart.
        timeout: seconds for one load.
    """

    policy: str
    requests: int
    concurrency: int
    tokens: int
    blocks: int
    prompts: Path | None = None
    model: Path | None = None
    threads: int = 2
    mechanics: int = 0
    log_probs: bool = False
    timeout: float = 900.0

    def load(self) -> Load:
        """Raises `InvalidArgument` when there are not enough prompts."""
        return Load(
            prompts=take_prompts(self.prompts, self.requests),
            output_tokens=self.tokens,
            concurrency=self.concurrency,
            log_probs=self.log_probs,
            timeout=self.timeout,
        )


@contextmanager
def running_servers(comparison: Comparison) -> Iterator[list[Contender]]:
    """A stock server and one on a sidecar of its own, both up, warm and idle.

    Raises `InvalidArgument` where vLLM is not installed, and what the sidecar's and the servers'
    starts raise; the end of a server's log then stands on stderr.
    """
    # What is wrong is told before anything is loaded.
    preset(comparison.policy)
    load = comparison.load()
    if find_spec("vllm") is None:
        raise InvalidArgument(
            "vLLM is not installed beside memshare: `make setup-vllm` builds an environment with "
            "it, or install memshare[serving] beside the vLLM you have"
        )
    settings = ServerSettings(
        model=comparison.model or _small_model(),
        blocks=comparison.blocks,
        max_sequences=comparison.concurrency,
        context=comparison.tokens + _PROMPT_TOKENS,
        threads=comparison.threads,
    )
    settings.require_room()
    logs = Path(tempfile.mkdtemp(prefix="memshare-vllm-"))
    try:
        with ExitStack() as stack:
            output.say("starting the sidecar, a stock vLLM server and one with memshare (a minute)")
            sidecar = stack.enter_context(running_sidecar(pool_bytes=settings.pool_bytes))
            sharing = settings.with_flags(_memshare_flags(sidecar, comparison))
            servers = {
                name: VllmServer(name, chosen, logs / f"{name}.log")
                for name, chosen in ((STOCK, settings), (MEMSHARE, sharing))
            }
            for server in servers.values():
                stack.callback(server.stop)
            probe = stack.enter_context(_probe(sidecar))
            contenders = []
            for name, server in servers.items():
                server.wait()
                contenders.append(Contender(name, server, probe if name == MEMSHARE else None))
            for contender in contenders:
                warm_up(contender, load)
            yield contenders
            output.say("stopping the servers and the sidecar")
    except ServerFailed as error:
        print(error.log, file=sys.stderr, flush=True)
        raise
    finally:
        shutil.rmtree(logs, ignore_errors=True)


class LoadView:
    """The loads as they go: a table on a terminal, a line now and then elsewhere."""

    def __init__(self, comparison: Comparison, rounds: int) -> None:
        self._total = comparison.requests * comparison.tokens
        self._rounds = rounds
        self._latest: dict[str, tuple[int, Sample]] = {}
        self._told = -_LINE_INTERVAL
        self._live: Live | None = None

    @contextmanager
    def shown(self) -> Iterator[Callable[[str, int, Sample], None]]:
        """Visible while the block runs; yields what to call with each sample."""
        console = Console(stderr=True)
        if not console.is_terminal:
            yield self._tell
            return
        with Live(self._table(), console=console, refresh_per_second=4) as self._live:
            yield self._draw

    def _tell(self, name: str, number: int, sample: Sample) -> None:
        if 0 <= sample.seconds - self._told < _LINE_INTERVAL:
            return
        self._told = sample.seconds
        output.say(
            f"{name}{self._round(number)}: {sample.generated:,.0f} of {self._total:,} tokens in "
            f"{sample.seconds:.0f} s, {sample.running:.0f} running, {sample.waiting:.0f} waiting, "
            f"KV {sample.kv_use:.0%}, {sample.preemptions:.0f} preemptions"
        )

    def _draw(self, name: str, number: int, sample: Sample) -> None:
        self._latest[name] = (number, sample)
        if self._live is not None:
            self._live.update(self._table())

    def _table(self) -> Table:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for heading in (
            *("server", "tokens", "per second", "seconds"),
            *("running", "waiting", "KV held", "preemptions"),
        ):
            table.add_column(heading, justify="left" if heading == "server" else "right")
        for name, (number, sample) in self._latest.items():
            table.add_row(
                f"{name}{self._round(number)}",
                f"{sample.generated:,.0f} of {self._total:,}",
                f"{sample.generated / sample.seconds:.1f}",
                f"{sample.seconds:.0f}",
                f"{sample.running:.0f}",
                f"{sample.waiting:.0f}",
                f"{sample.kv_use:.0%}",
                f"{sample.preemptions:.0f}",
            )
        return table

    def _round(self, number: int) -> str:
        return f", round {number + 1} of {self._rounds}" if self._rounds > 1 else ""


def print_report(document: Mapping[str, Any]) -> None:
    """The comparison as a table."""
    stock, memshare = document[STOCK], document[MEMSHARE]

    def row(title: str, name: str, form: str) -> tuple[str, str, str]:
        first, second = (
            "-" if value is None else format(value, form)
            for value in (stock.get(name), memshare.get(name))
        )
        return title, first, second

    output.print_table(
        ("", STOCK, MEMSHARE),
        [
            row("tokens per second", "tokens_per_second", ".1f"),
            row("preemptions", "preemptions", ".0f"),
            row("requests running, mean", "mean_running", ".1f"),
            row("KV blocks held, mean", "mean_kv_use", ".1%"),
            row("seconds of a request, median", "latency_p50_seconds", ".1f"),
            row("blocks shared", "memshare_shared_blocks_total", ",.0f"),
            row("plugin time per step, p50 µs", "step_p50_us", ",.0f"),
            row("plugin time per step, p99 µs", "step_p99_us", ",.0f"),
            row("answers that loop", "looping", ".0f"),
            _agreement("answers the same to the end", document, "identical"),
            _agreement("mean share before they differ", document, "prefix"),
        ],
    )
    spread = ""
    if document["throughput_ratio_min"] != document["throughput_ratio_max"]:
        spread = (
            f" ({document['throughput_ratio_min']:.2f} to {document['throughput_ratio_max']:.2f} "
            f"in {len(document['rounds'])} rounds)"
        )
    output.say(f"throughput: × {document['throughput_ratio']:.2f}{spread}")


def _agreement(title: str, document: Mapping[str, Any], kind: str) -> tuple[str, str, str]:
    control = document[f"control_{kind}"]
    own = "-" if control is None else f"{control:.1%} (with itself)"
    return title, own, f"{document[f'agreement_{kind}']:.1%}"


def _memshare_flags(sidecar: Sidecar, comparison: Comparison) -> tuple[str, ...]:
    from memshare.client.vllm import Settings, serve_flags

    settings = Settings(
        runtime_dir=str(sidecar.runtime.path),
        policy=comparison.policy,
        test_share_every=comparison.mechanics,
    )
    return tuple(serve_flags(settings))


@contextmanager
def _probe(sidecar: Sidecar) -> Iterator[Callable[[], dict[str, float]]]:
    with sidecar.admin() as admin:

        def ask() -> dict[str, float]:
            status = admin.status()
            return {
                "live_blocks": status.rows.live,
                "leased_blocks": status.rows.leased,
                "sidecar_cpu_seconds": status.cpu_seconds + status.worker_cpu_seconds,
            }

        yield ask


def _small_model() -> Path:
    output.say("SmolLM2-135M (the first time it is converted from GGUF, a minute)")
    from memshare.client.evaluation.model import small_model_folder

    return small_model_folder()
