"""``talaria-sim``: finds the command, runs it, and turns what goes wrong into one line and an exit code.

0 done, 1 the run failed (or nobody reads its output), 2 bad usage or input, 130 interrupted. A mistake of ours is a traceback. A
command's module is imported only when that command is asked for.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from talaria.errors import InputError, unknown_name

COMMANDS = {
    "run": "talaria.cli.run",
    "compare": "talaria.cli.compare",
    "sweep": "talaria.cli.sweep",
    "trace": "talaria.cli.trace",
    "profile": "talaria.cli.profile",
    "scenarios": "talaria.cli.listing",
    "configs": "talaria.cli.listing",
    "knobs": "talaria.cli.listing",
    "replay-decisions": "talaria.cli.replay",
    "report": "talaria.cli.report",
}
"""Each module has a Typer ``app``: a group of that name, or the command itself among its commands."""


class LazyCommands(TyperGroup):
    """The commands of ``COMMANDS``, imported one by one on demand."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            raise unknown_name("command", cmd_name, COMMANDS)
        group = typer.main.get_group(import_module(COMMANDS[cmd_name]).app)
        group.name = cmd_name
        return group.commands.get(cmd_name, group)


app = typer.Typer(cls=LazyCommands, add_completion=False, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        from talaria import __version__

        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def talaria_sim(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Simulate session-aware serving of several large models to agents: run, compare, sweep, explain.

    Start with: talaria-sim sweep tau
    """


REFUSALS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE})
"""What the system may answer to a write for reasons that are not ours."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script. Exits the process; see the module for the codes."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller: print would send what is meant for one stream to the other
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    sys.exit(run_command(sys.argv[1:] if arguments is None else arguments))


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line (without the program's name) and return its exit code."""
    group = typer.main.get_group(app)
    try:
        code = group.main(args=list(arguments) or ["--help"], prog_name="talaria-sim", standalone_mode=False)
        sys.stdout.flush()
    except InputError as error:
        return _fail(str(error), 2)
    except typer.TyperException as error:
        return _fail(str(usage_error(error)), 2)
    except BrokenPipeError:
        _abandon_stdout()
        return 1
    except OSError as error:
        if error.filename is not None:
            return _fail(f"{error.filename}: {error.strerror}", 1)
        if error.errno not in REFUSALS:
            raise
        _abandon_stdout()
        return _fail(f"cannot write: {os.strerror(error.errno)}", 1)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    return code if isinstance(code, int) else 0


def usage_error(error: typer.TyperException) -> InputError:
    """Typer's own complaint as ours: one line that names the option, what is allowed and the nearest valid name."""
    ctx = getattr(error, "ctx", None)
    where = ctx.command_path if ctx else ""
    if hasattr(error, "possibilities"):  # an unknown option
        known = [name for parameter in ctx.command.params for name in parameter.opts if name.startswith("--")] if ctx else []
        return unknown_name("option", error.option_name, [*known, "--help"], where=where)  # type: ignore[attr-defined]
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    commands = ctx.command.list_commands(ctx) if ctx and isinstance(ctx.command, TyperGroup) else ()
    return InputError(text.rstrip("."), where=where, allowed=", ".join(commands))


def _abandon_stdout() -> None:
    """Nobody reads it, or it takes no more: what is still buffered must not raise again when the interpreter ends."""
    try:
        target = sys.stdout.fileno()
    except (OSError, ValueError):  # no file of the system lies under it
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, target)
    os.close(nowhere)


def _fail(line: str, code: int) -> int:
    print(f"error: {line}", file=sys.stderr)
    return code
