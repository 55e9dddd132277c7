"""The command line's commands, and how it fails: one line on stderr and an exit code."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any, Final

import typer
import typer.core
import typer.main

from memshare.client.cli import output
from memshare.wire.errors import MemshareError
from memshare.wire.version import MAX_PROTOCOL, MIN_PROTOCOL, VERSION

# Where each command lives: a module beside this one, and the function or typer app in it.
COMMANDS: Final = {
    "up": ("up", "up"),
    "agent": ("daemons", "agent"),
    "manager": ("daemons", "manager"),
    "status": ("show", "status"),
    "engines": ("show", "engines"),
    "requests": ("show", "requests"),
    "policy": ("policy", "app"),
    "doctor": ("doctor", "doctor"),
    "vllm-flags": ("vllm_flags", "vllm_flags"),
    "demo": ("demo", "demo"),
    "eval": ("evaluate", "evaluate"),
    "bench": ("bench", "bench"),
}
# The extra that brings a module which may be missing; any other comes with `agent`.
_EXTRAS: Final = {
    "torch": "transformers",
    "transformers": "transformers",
    "accelerate": "demo",
    "gguf": "demo",
    "matplotlib": "demo",
}


class Commands(typer.core.TyperGroup):
    """Commands whose modules are imported when they run: some load torch."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        # Their names alone, for "did you mean".
        self.commands: Any = dict.fromkeys(self.list_commands(None))

    def list_commands(self, ctx: Any) -> list[str]:
        """Every command that this installation has."""
        return [name for name, (module, _) in COMMANDS.items() if find_spec(_path(module))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, or None for one that is unknown or lacks a package."""
        try:
            return _load(cmd_name) if cmd_name in self.commands else None
        except ModuleNotFoundError:
            return None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command to run. Raises `ModuleNotFoundError` if it lacks a package."""
        if args[0] in self.commands:
            return args[0], _load(args[0]), args[1:]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="memshare",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Keep one copy of what repeats in the KV cache of the engines on this host.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"memshare {VERSION} (protocol {MIN_PROTOCOL} to {MAX_PROTOCOL})")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version."),
    ] = False,
) -> None:
    """Options that stand before a command."""


def run(arguments: list[str] | None = None) -> int:
    """Run the command that the arguments name. Returns the exit code."""
    try:
        code = app(arguments, prog_name="memshare", standalone_mode=False)
    except typer.TyperException as error:
        # Without arguments a group has printed its help and has nothing to add.
        if error.format_message():
            output.fail(_usage_message(error))
        return error.exit_code
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "memshare":
            raise
        extra = _EXTRAS.get(package, "agent")
        output.fail(f"this command needs {package}: pip install 'memshare[{extra}]'")
        return 1
    except (MemshareError, OSError) as error:
        output.fail(error)
        return 1
    return code if isinstance(code, int) else 0


def _path(module: str) -> str:
    return f"{__package__}.{module}"


def _load(name: str) -> Any:
    module, attribute = COMMANDS[name]
    target = getattr(import_module(_path(module)), attribute)
    if not isinstance(target, typer.Typer):
        function, target = target, typer.Typer(add_completion=False)
        target.command(name)(function)
    target.info.name = name
    command = typer.main.get_command(target)
    command.name = name
    return command


def _usage_message(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", "memshare")
    return f"{error.format_message()} (see `{path} --help`)"
