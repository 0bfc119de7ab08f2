"""The composition root: one verb a file, loaded when called; only here errors are printed."""

from __future__ import annotations

import importlib
import io
import sys
import tempfile
import traceback
from pathlib import Path

import click

from stepsplit.analyzer.errors import StepsplitError

VERBS = {
    "analyze": ("analyze", "Split every step of a recording."),
    "attach": ("record", "Record some steps of a job that runs."),
    "baseline": ("check", "Keep what a gate needs of some runs in a small file, fit for git."),
    "calibrate": ("model", "Fit the model's constants to recorded runs of your own."),
    "check": (
        "check",
        "Say whether runs stay within their budgets: pass, regressed or inconclusive.",
    ),
    "compare": ("check", "Say what differs between two runs, and by how much."),
    "dashboard": ("server", "Serve the pages: runs, uploads, and where each step of a run went."),
    "demo": (
        "record",
        "Train a small GPT on this machine, record it, split its steps, and show where they went.",
    ),
    "export": (
        "analyze",
        "Write all ranks of a recording, on one clock, for the page ui.perfetto.dev.",
    ),
    "gather": ("record", "Bring together what the hosts of a run wrote."),
    "model": ("model", "Predict one training step: time, split, memory and messages."),
    "plan": ("model", "Find the fastest layout that fits, and say why the others lose."),
    "record": ("record", "Run a training as it is and record some of its steps."),
    "token": ("server", "Let scripts into a dashboard, and out again."),
    "upload": ("server", "Send a recording to a dashboard, and print the address of its page."),
    "validate": (
        "model",
        "Hold the analytical model against published figures, and say how far off it is.",
    ),
    "what-if": ("model", "Replay a recording with something changed: how long were a step?"),
    "worker": ("server", "Analyze uploads, one after the other, until Ctrl-C."),
}
"""The module of commands/ that each verb is in, and its line in the list of commands."""
BAD_INPUT, INTERNAL = 2, 4


class _Verbs(click.Group):
    """The commands by name; a verb's module is imported only when it runs or explains itself."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"stepsplit.dashboard.commands.{VERBS[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name.replace('-', '_')}_command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing their modules."""
        limit = formatter.width - 6 - max(map(len, VERBS))
        lines = [click.Command(verb, help=line) for verb, (_, line) in VERBS.items()]
        with formatter.section("Commands"):
            formatter.write_dl([(str(one.name), one.get_short_help_str(limit)) for one in lines])


@click.group(cls=_Verbs, invoke_without_command=True)
@click.version_option(package_name="stepsplit", message="stepsplit %(version)s")
@click.pass_context
def stepsplit(context: click.Context) -> None:
    """Where every training step went: compute, collective and pipeline-bubble time, exactly."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main() -> None:
    """Runs the command line; ends the process with the exit status that DESIGN.md fixes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """The exit status of one command: 0 fine, 2 usage or bad data, 4 an error of our own; what a
    command of its own answers with (1 regressed, 3 inconclusive) stands."""
    try:
        status = stepsplit.main(arguments, prog_name="stepsplit", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.exceptions.Exit as done:
        return done.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except click.ClickException as error:
        return _told(error.format_message())
    except StepsplitError as error:
        return _told(str(error))
    except BrokenPipeError:
        return 0
    except OSError as error:
        return _told(f"{error.filename or 'standard output'}: {error.strerror or error}")
    except Exception as error:  # noqa: BLE001 - the last resort: one line, and where the rest is
        return _internal(error)


def _told(message: str) -> int:
    click.echo(f"stepsplit: {' '.join(message.split())}", err=True)
    return BAD_INPUT


def _internal(error: Exception) -> int:
    with tempfile.NamedTemporaryFile(
        "w", prefix="stepsplit-error-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        traceback.print_exception(error, file=file)
    where = Path(file.name)
    click.echo(
        f"stepsplit: internal error ({type(error).__name__}); please report {where}", err=True
    )
    return INTERNAL
