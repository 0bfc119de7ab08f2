"""stepsplit upload: sends a recording to a dashboard."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from stepsplit.analyzer.errors import StepsplitError, UsageError
from stepsplit.dashboard.commands.common import parse_mesh, parse_tag, print_line, token_option

if TYPE_CHECKING:
    from stepsplit.dashboard.connection import Connection
    from stepsplit.dashboard.upload_files import LeftOut

ASK_EVERY_S = 1.0


@click.command()
@click.argument("places", nargs=-1, required=True, metavar="PATH...",
                type=click.Path(path_type=Path))  # fmt: skip
@click.option("--to", "url", required=True, metavar="URL", help="Address of the dashboard.")
@click.option("--name", metavar="NAME", help="Name of the run; by default the name of its files.")
@click.option("--tag", "tags", metavar="KEY=VALUE", multiple=True,
              help="Tag of the run, such as branch=main; may be repeated.")  # fmt: skip
@click.option("--mesh", metavar="AXES",
              help="The job's mesh, outermost axis first, such as pp=2,dp=2,tp=2; by default from "
                   "run.json, else inferred.")  # fmt: skip
@token_option
@click.option("--resume", metavar="ID", help="Resume the upload of this run.")
@click.option("--redact", is_flag=True,
              help="Upload a copy without hosts, users, paths and names.")  # fmt: skip
@click.option("--each", is_flag=True,
              help="Upload each of several recordings in PATH as a run of its own.")  # fmt: skip
@click.option("--wait", is_flag=True, help="Wait until the run is analyzed.")
def upload_command(
    places: tuple[Path, ...],
    url: str,
    name: str | None,
    tags: tuple[str, ...],
    mesh: str | None,
    token: str | None,
    resume: str | None,
    redact: bool,
    each: bool,
    wait: bool,
) -> None:
    """Upload a recording to a dashboard and print its URL.

    PATH is a file or a folder. Interrupted transfers are resumed automatically.
    """
    from stepsplit.dashboard.connection import Connection
    from stepsplit.dashboard.upload_files import collect_files, split_recordings

    parse_mesh(mesh)
    pairs, connection = dict(parse_tag(tag) for tag in tags), Connection(url, token)

    def warn(one: LeftOut) -> None:
        print_line(f"stepsplit: {one.path} is not uploaded: it is {one.reason}", err=True)

    several = split_recordings(collect_files(places, warn))
    if several and not each:
        named = ", ".join(one.folder for one in several)
        raise UsageError(
            f"these are {len(several)} recordings: {named}; upload one of the folders, "
            "or each as a run of its own with --each"
        )
    if several and resume:
        raise UsageError("--resume is for one run; upload the folder of that recording")
    with closing(connection):
        if not several:
            _send_run(connection, places, name, pairs, mesh, resume, redact=redact, wait=wait)
        for one in several:
            own = None if name is None else f"{name} {one.folder.rpartition('/')[2]}"
            _send_run(connection, one.places, own, pairs, mesh, None, redact=redact, wait=wait)


def _send_run(
    connection: Connection,
    places: Sequence[Path],
    name: str | None,
    tags: Mapping[str, str],
    mesh: str | None,
    resume: str | None,
    *,
    redact: bool,
    wait: bool,
) -> None:
    """Uploads one recording and prints the address of its run."""
    from stepsplit.collectors.formats.run_spec import MESH_FILE
    from stepsplit.dashboard.reporters.progress import show_sending_bar
    from stepsplit.dashboard.upload import RetriesExhausted, Sender
    from stepsplit.dashboard.upload_files import choose_run_name, collect_files

    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="stepsplit-")))
        given = [*places]
        if redact:
            from stepsplit.analyzer.redact import redact_recording

            # The same recording gives the same bytes, so that its upload can be resumed.
            given = [folder / "redacted"]
            redact_recording(places, given[0])
        if mesh:
            given.append(folder / MESH_FILE)
            given[-1].write_text(mesh)
        files = collect_files(given)
        sent = stack.enter_context(show_sending_bar(sum(one.size_bytes for one in files)))
        sender = Sender(connection, sent)
        named = name or choose_run_name([one.path for one in files])
        run_id = resume or sender.create(named, tags)
        try:
            for one in files:
                sender.send(run_id, one)
            sender.finish(run_id)
        except (RetriesExhausted, KeyboardInterrupt) as error:
            words = [*map(str, places), *(["--mesh", mesh] if mesh else [])]
            words += ["--redact"] if redact else []
            raise UsageError(
                f"{str(error) or 'interrupted'}; resume with: stepsplit upload {shlex.join(words)}"
                f" --to {connection.url} --resume {run_id}"
            ) from None
    print_line(f"{connection.url}/run/{run_id}")
    while wait:
        run = sender.fetch_run(run_id)
        if run["state"] == "done":
            return
        if run["state"] == "failed":
            raise StepsplitError(f"the analysis failed: {run['error']}")
        time.sleep(ASK_EVERY_S)
