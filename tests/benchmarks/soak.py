"""The dashboard under load for a long time: python tests/benchmarks/soak.py [--minutes 30]

Viewers open pages, uploaders send recordings with `stepsplit upload`'s client, and a process of the
server is killed every now and then. Prints latency, memory and handles over time, and ends with 1
where an upload was lost, a finished run has another report than the others, or the last quarter
holds more memory or handles than the second.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from pathlib import Path
from random import Random

import numpy as np

if not __package__:  # run as a file: its folder is no place to import from, the one above is
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from support.dashboard_processes import Dashboard, open_store, running_dashboard
from support.waiting import until

from benchmarks.dashboard import PAGES, Viewer
from benchmarks.table import in_markdown
from stepsplit.analyzer.errors import StepsplitError
from stepsplit.dashboard.connection import Connection
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.upload import Sender
from stepsplit.dashboard.upload_files import collect_files

SAMPLE = Path(__file__).parents[2] / "sample_traces" / "pp2_m2"
VIEWERS, UPLOADERS = 64, 8
PAUSE_S = 2.0
"""A viewer looks at a page for about this long."""
UPLOAD_PAUSE_S = 15.0
KILL_EVERY_S = 20.0
MEASURE_EVERY_S = 5.0
MOST_GROWTH = 1.15


@dataclass
class Observed:
    """What viewers, uploaders and the killer met; times in seconds since the begin."""

    begin_s: float = field(default_factory=time.monotonic)
    waited_s: list[tuple[float, float]] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    uploaded: list[str] = field(default_factory=list)
    killed: Counter[str] = field(default_factory=Counter)
    held: list[Held] = field(default_factory=list)

    def compute_elapsed_s(self) -> float:
        return time.monotonic() - self.begin_s


@dataclass(frozen=True)
class Held:
    """What all processes of the dashboard hold at a time."""

    at_s: float
    resident_bytes: int
    handles: int
    processes: int


def main() -> int:
    """0 where nothing was lost and nothing grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    minutes = parser.parse_args().minutes
    with tempfile.TemporaryDirectory() as folder:
        seen, problems = soak(Path(folder), minutes * 60)
    print(in_markdown(tabulate(seen)))  # noqa: T201
    print(f"{len(seen.waited_s)} pages, not answered {dict(seen.failed)}; "  # noqa: T201
          f"{len(seen.uploaded)} uploads; killed {dict(seen.killed)}")  # fmt: skip
    for problem in problems:
        print(f"PROBLEM: {problem}")  # noqa: T201
    return int(bool(problems))


def soak(folder: Path, seconds: float) -> tuple[Observed, list[str]]:
    """Runs everybody for that long, waits until all uploads are analyzed, and lists problems."""
    ended, seen = threading.Event(), Observed()
    with running_dashboard(folder, "--workers", "2") as dashboard, open_store(folder) as store:
        first = upload(dashboard.url, "first")
        until(lambda: is_done(store, first), within_s=120)
        seen.uploaded.append(first)
        everybody: list[Callable[[], None]] = [
            *(partial(view_pages, dashboard, seen, ended, Random(n)) for n in range(VIEWERS)),
            *(partial(upload_runs, dashboard, seen, ended, n) for n in range(UPLOADERS)),
            partial(kill_processes, dashboard, seen, ended, Random(1)),
            partial(measure_processes, dashboard, seen, ended),
        ]
        threads = [threading.Thread(target=person) for person in everybody]
        for thread in threads:
            thread.start()
        ended.wait(seconds)
        ended.set()
        for thread in threads:
            thread.join()
        with suppress(TimeoutError):
            until(lambda: all(is_done(store, one) for one in seen.uploaded), within_s=600)
        return seen, [*find_losses(store, seen), *find_growth(seen)]


# Everybody who uses the dashboard.


def view_pages(
    dashboard: Dashboard, seen: Observed, ended: threading.Event, random: Random
) -> None:
    """Opens a page of a run every few seconds until the end."""
    while not ended.wait(random.uniform(0, 2 * PAUSE_S)):
        viewer = Viewer(dashboard.url, random.choice(seen.uploaded))
        at_s = seen.compute_elapsed_s()
        try:
            took_ms, _ = viewer.page(random.choice(PAGES))
        except (OSError, HTTPException, AssertionError) as error:
            seen.failed[type(error).__name__] += 1
        else:
            seen.waited_s.append((at_s, took_ms / 1e3))


def upload_runs(dashboard: Dashboard, seen: Observed, ended: threading.Event, number: int) -> None:
    """Uploads a recording again and again; what broke off is sent again by the client."""
    random = Random(1000 + number)
    while not ended.wait(random.uniform(0, 2 * UPLOAD_PAUSE_S)):
        seen.uploaded.append(upload(dashboard.url, f"soak {number}"))


def upload(url: str, name: str) -> str:
    sender = Sender(Connection(url, None))
    run_id = sender.create(name, {})
    for item in collect_files([SAMPLE]):
        sender.send(run_id, item)
    sender.finish(run_id)
    return run_id


def kill_processes(
    dashboard: Dashboard, seen: Observed, ended: threading.Event, random: Random
) -> None:
    """Kills a process that answers or analyzes, never one that has others below it."""
    while not ended.wait(random.uniform(0, 2 * KILL_EVERY_S)):
        kind = random.choice(("server", "worker"))
        running = dashboard.server() if kind == "server" else dashboard.workers()
        single = [pid for pid in running if not list_children(pid)]
        if single:
            with suppress(ProcessLookupError):
                os.kill(random.choice(single), signal.SIGKILL)
                seen.killed[kind] += 1


def measure_processes(dashboard: Dashboard, seen: Observed, ended: threading.Event) -> None:
    while not ended.wait(MEASURE_EVERY_S):
        processes = [dashboard.process.pid, *dashboard.processes()]
        resident, handles = 0, 0
        for pid in processes:
            with suppress(FileNotFoundError, ProcessLookupError):
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                resident += pages * os.sysconf("SC_PAGE_SIZE")
                handles += len(list(Path(f"/proc/{pid}/fd").iterdir()))
        seen.held.append(Held(seen.compute_elapsed_s(), resident, handles, len(processes)))


def list_children(pid: int) -> list[str]:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return []


# What must hold at the end.


def is_done(store: Store, run_id: str) -> bool:
    run = store.find_run(run_id)
    return run is not None and run.state == "done"


def find_losses(store: Store, seen: Observed) -> list[str]:
    """Uploads that are not analyzed, or otherwise than the first."""
    expected, problems = store.load_report(seen.uploaded[0]).steps, []
    for run_id in seen.uploaded:
        try:
            if not is_done(store, run_id):
                problems.append(f"run {run_id} is not analyzed")
            elif store.load_report(run_id).steps != expected:
                problems.append(f"run {run_id} has other steps than the first")
        except StepsplitError as error:
            problems.append(f"run {run_id}: {error}")
    return problems


def find_growth(seen: Observed) -> list[str]:
    """What the dashboard holds more of in the last quarter than in the second."""
    quarters = [list(part) for part in np.array_split(np.array(seen.held, dtype=object), 4)]
    problems = []
    for name in ("resident_bytes", "handles"):
        before, after = (np.median([getattr(one, name) for one in quarters[n]]) for n in (1, 3))
        if after > MOST_GROWTH * before:
            problems.append(f"{name} grew from {before:,.0f} to {after:,.0f}")
    return problems


def tabulate(seen: Observed, parts: int = 6) -> list[Sequence[str]]:
    """Latency, memory and handles in each part of the time."""
    end_s = seen.held[-1].at_s if seen.held else 1.0
    rows: list[Sequence[str]] = [("time", "pages", "median", "p95", "longest", "memory", "handles")]
    for part in range(parts):
        begin, end = end_s * part / parts, end_s * (part + 1) / parts
        waited = [took for at, took in seen.waited_s if begin <= at < end] or [0.0]
        held = [one for one in seen.held if begin <= one.at_s <= end] or seen.held[-1:]
        rows.append((
            f"{begin / 60:.1f} to {end / 60:.1f} min",
            str(len(waited)),
            *(f"{np.percentile(waited, q):.2f} s" for q in (50, 95, 100)),
            f"{np.median([one.resident_bytes for one in held]) / 1e6:.0f} MB",
            f"{np.median([one.handles for one in held]):.0f}",
        ))  # fmt: skip
    return rows


if __name__ == "__main__":
    sys.exit(main())
