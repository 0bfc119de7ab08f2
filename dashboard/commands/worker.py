"""stepsplit worker: analyzes what was uploaded, on this or another machine than the dashboard."""

from __future__ import annotations

import os
import signal
import socket
from types import FrameType
from typing import TYPE_CHECKING

import click

from stepsplit.dashboard.commands.store_options import (
    artifacts_option,
    log_option,
    open_store,
    store_option,
)

if TYPE_CHECKING:
    from stepsplit.dashboard.store.log_lines import LogFormat


@click.command()
@store_option
@artifacts_option
@click.option("--limit", type=click.FloatRange(min=1), metavar="MINUTES", default=60.0,
              show_default=True, help="An analysis that takes longer fails.")  # fmt: skip
@click.option("--name", hidden=True, help="What the queue knows this worker by.")
@click.option("--parent", type=int, hidden=True, help="End when this process is gone.")
@log_option
def command(
    url: str,
    artifacts: str,
    limit: float,
    name: str | None,
    parent: int | None,
    log_format: LogFormat,
) -> None:
    """Analyze uploads, one after the other, until Ctrl-C.

    A dashboard starts one by itself; more of them share the work, on any machine that reaches
    the same store and artifacts.
    """
    store = open_store(url, artifacts)
    from stepsplit.dashboard.store.log_lines import set_up_logs
    from stepsplit.dashboard.store.worker import Terms, work

    set_up_logs(log_format)
    signal.signal(signal.SIGTERM, _leave)
    own = name or f"{socket.gethostname()}-{os.getpid()}"
    work(store, Terms(own, limit_s=60 * limit, parent=parent))


def _leave(number: int, frame: FrameType | None) -> None:
    """What is under way goes back into the queue."""
    raise SystemExit(0)
