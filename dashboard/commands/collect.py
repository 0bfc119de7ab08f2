"""stepsplit record, attach and gather: the collectors' own commands, which need no click."""

from __future__ import annotations

import click

from stepsplit.collectors.__main__ import main


def collectors_command(verb: str, summary: str) -> click.Command:
    """The verb as `python -m stepsplit.collectors` has it, with its own help and errors."""

    @click.command(
        verb,
        help=summary,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    @click.pass_context
    def command(context: click.Context, arguments: tuple[str, ...]) -> None:
        context.exit(main([verb, *arguments]))

    return command
