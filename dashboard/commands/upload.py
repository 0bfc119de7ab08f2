"""stepsplit upload: a recording to a dashboard that others see too."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import click

from stepsplit.analyzer import StepsplitError, UsageError
from stepsplit.dashboard.reporters.progress import sending_bar
from stepsplit.dashboard.upload.chosen import Chosen, chosen
from stepsplit.dashboard.upload.connection import Connection
from stepsplit.dashboard.upload.send import GaveUp, Sender

ASK_EVERY_S = 1.0


@click.command()
@click.argument("places", nargs=-1, required=True, metavar="PATH...",
                type=click.Path(path_type=Path))  # fmt: skip
@click.option("--to", "url", required=True, metavar="URL", help="Address of the dashboard.")
@click.option("--name", metavar="NAME", help="What the run is called; by default as its files.")
@click.option("--tag", "tags", metavar="KEY=VALUE", multiple=True,
              help="What to find the run by, such as branch=main; may be repeated.")  # fmt: skip
@click.option("--token", metavar="TOKEN", envvar="STEPSPLIT_TOKEN",
              help="What the dashboard lets you in by; STEPSPLIT_TOKEN by default.")  # fmt: skip
@click.option("--resume", metavar="ID", help="Go on with this run's upload.")
@click.option("--wait", is_flag=True, help="Stay until the run is analyzed.")
def command(
    places: tuple[Path, ...],
    url: str,
    name: str | None,
    tags: tuple[str, ...],
    token: str | None,
    resume: str | None,
    wait: bool,
) -> None:
    """Send a recording to a dashboard, and print the address of its page.

    PATH is a file or a folder. What breaks off on the way goes on by itself.
    """
    files, pairs = chosen(places), dict(_pair(tag) for tag in tags)
    connection = Connection(url, token)
    with closing(connection), sending_bar(sum(one.size_bytes for one in files)) as sent:
        sender = Sender(connection, sent)
        run_id = resume or sender.create(name or _name(files), pairs)
        try:
            for one in files:
                sender.send(run_id, one)
            sender.finish(run_id)
        except (GaveUp, KeyboardInterrupt) as error:
            raise _broken_off(error, places, url, run_id) from None
    click.echo(f"{connection.url}/run/{run_id}")
    if wait:
        _wait(sender, run_id)


def _pair(tag: str) -> tuple[str, str]:
    key, equals, value = tag.partition("=")
    if not key or not equals:
        raise UsageError(f"--tag {tag}: write KEY=VALUE, such as branch=main")
    return key, value


def _name(files: Sequence[Chosen]) -> str:
    first = files[0].path.partition("/")[0]
    alone = len(files) == 1 or "/" in files[0].path
    return first if alone else f"{first} and {len(files) - 1} more"


def _broken_off(
    error: BaseException, places: Sequence[Path], url: str, run_id: str
) -> StepsplitError:
    named = shlex.join(str(place) for place in places)
    why = str(error) or "interrupted"
    return UsageError(f"{why}; go on with: stepsplit upload {named} --to {url} --resume {run_id}")


def _wait(sender: Sender, run_id: str) -> None:
    while True:
        run = sender.state(run_id)
        if run["state"] == "done":
            return
        if run["state"] == "failed":
            raise StepsplitError(f"the analysis failed: {run['error']}")
        time.sleep(ASK_EVERY_S)
