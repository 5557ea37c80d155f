"""A console program: finds the command, runs it, and turns what goes wrong into one line and an exit code.

0 done, 1 the run failed (or nobody reads its output), 2 bad usage or input, 130 interrupted. A mistake of ours is a traceback. A
command's module is imported only when that command is asked for.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from talaria.errors import InputError, unknown_name

REFUSALS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE})
"""What the system may answer to a write for reasons that are not ours."""


class Program:
    """``commands`` maps each command to its module, which has a Typer ``app``: a group of that name, or the command itself
    among its commands. ``about`` is what the help begins with; ``extra``: the extra of the package that they need, and its modules."""

    def __init__(self, name: str, commands: Mapping[str, str], about: str, extra: tuple[str, frozenset[str]] | None = None) -> None:
        self._name = name
        self._extra, self._extra_modules = extra or ("", frozenset())
        self._app = typer.Typer(cls=_lazy_group(commands), add_completion=False, pretty_exceptions_enable=False)
        self._app.callback(help=about)(_options)

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """The console script. Exits the process; see the module for the codes."""
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed by the caller: print would send what is meant for one stream to the other
                setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        sys.exit(self.run_command(sys.argv[1:] if arguments is None else arguments))

    def run_command(self, arguments: Sequence[str]) -> int:
        """Run one command line (without the program's name) and return its exit code."""
        group = typer.main.get_group(self._app)
        try:
            code = group.main(args=list(arguments) or ["--help"], prog_name=self._name, standalone_mode=False)
            sys.stdout.flush()
        except InputError as error:
            return _fail(str(error), 2)
        except typer.TyperException as error:
            return _fail(str(usage_error(error)), 2)
        except ModuleNotFoundError as error:
            if error.name not in self._extra_modules:
                raise
            return _fail(f"{error.name} is not installed; in a checkout: {sys.executable} -m pip install '.[{self._extra}]'", 2)
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


def _lazy_group(commands: Mapping[str, str]) -> type[TyperGroup]:
    class LazyCommands(TyperGroup):
        """The commands, imported one by one on demand."""

        def list_commands(self, ctx: Any) -> list[str]:
            return list(commands)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if cmd_name not in commands:
                raise unknown_name("command", cmd_name, commands)
            group = typer.main.get_group(import_module(commands[cmd_name]).app)
            group.name = cmd_name
            return group.commands.get(cmd_name, group)

    return LazyCommands


def _print_version(wanted: bool) -> None:
    if wanted:
        from talaria import __version__

        typer.echo(__version__)
        raise typer.Exit()


def _options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """What every program takes before its command."""


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
