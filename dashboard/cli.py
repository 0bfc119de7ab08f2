"""The command line: loads the module of a command when it is called, and prints all errors."""

from __future__ import annotations

import codecs
import gc
import io
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import click

from stepsplit.analyzer.errors import StepsplitError
from stepsplit.collectors.safe_io.safe_text import SafeStream, guard_output
from stepsplit.dashboard.commands import COMMANDS, load_command
from stepsplit.dashboard.commands.common import print_line

# 1 and 3 are results: regressed and inconclusive, or a job that hangs.
BAD_INPUT, INTERNAL = 2, 4

_COLLECT_EVERY = 100_000
"""Objects between two searches for cyclic garbage: modules and reports live until the end, and with
Python's 700 the searches take a tenth of a short analysis."""


class _LazyGroup(click.Group):
    """A command group that imports a command's module only when it runs or prints its help."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Runs a command; what it prints is safe for a terminal and a CI log."""
        if "_STEPSPLIT_COMPLETE" in os.environ:
            # click writes its completions as bytes: names of commands and options, all of our own.
            return super().main(*arguments, **options)
        with guard_output():
            return super().main(*arguments, **options)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list of commands without importing their modules."""
        limit = formatter.width - 6 - max(map(len, COMMANDS))
        lines = [click.Command(name, help=one.summary) for name, one in COMMANDS.items()]
        with formatter.section("Commands"):
            formatter.write_dl([(str(one.name), one.get_short_help_str(limit)) for one in lines])


@click.group(cls=_LazyGroup, invoke_without_command=True)
@click.version_option(package_name="stepsplit", message="stepsplit %(version)s")
@click.pass_context
def stepsplit(context: click.Context) -> None:
    """Split training steps into compute, communication, pipeline bubble and idle time."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())  # noqa: TID251 - a text of our own


def main() -> None:
    """Runs the command line and exits with the status of `run`."""
    codecs.register_error(_PLAIN, _replace_by_plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_PLAIN)
    # A job that is cancelled, or `timeout`: temporary files are removed, as after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    gc.set_threshold(_COLLECT_EVERY)
    status = run(sys.argv[1:])
    # Python's end searches all objects for cyclic garbage, though the memory is given back anyway:
    # an eighth of a short analysis.
    gc.freeze()
    sys.exit(status)


_PLAIN, _PLAIN_MARKS = "stepsplit-plain", str.maketrans("✓✗µ█▉▊▋▌▍▎▏", "+xu#####   ")


def _replace_by_plain(error: UnicodeError) -> tuple[str, int]:
    """Letters that the terminal's encoding lacks: the marks and bars by plain ones, others by ?."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    plain = error.object[error.start : error.end].translate(_PLAIN_MARKS)
    return plain.encode("ascii", "replace").decode("ascii"), error.end


def run(arguments: list[str]) -> int:
    """Runs one command and returns its exit status.

    0 success, 2 usage or bad input, 4 internal error, 130 interrupted; SIGTERM ends with 143. A
    command may return a status of its own: check returns 1 for regressed and 3 for inconclusive.
    """
    try:
        status = stepsplit.main(arguments, prog_name="stepsplit", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.exceptions.Exit as done:
        return done.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except click.ClickException as error:
        return _print_error(" ".join(error.format_message().split()))
    except StepsplitError as error:
        return _print_error(str(error))
    except BrokenPipeError:
        return 0
    except OSError as error:
        return _print_error(f"{error.filename or 'standard output'}: {error.strerror or error}")
    except Exception as error:  # noqa: BLE001 - last resort: one line; the traceback is in a file
        return _report_internal_error(error)


def _print_error(message: str) -> int:
    print_line(f"stepsplit: {message}", err=True)
    return BAD_INPUT


def _report_internal_error(error: Exception) -> int:
    with tempfile.NamedTemporaryFile(
        "w", prefix="stepsplit-error-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        traceback.print_exception(error, file=SafeStream(file))
    traceback_file = Path(file.name)
    print_line(
        f"stepsplit: internal error ({type(error).__name__}); please report {traceback_file}",
        err=True,
    )
    return INTERNAL
