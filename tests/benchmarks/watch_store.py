"""What watched runs cost in a store: python tests/benchmarks/watch_store.py [--out DIR]

Fills a SQLite store with 64 ranks and 10,000 samples, and with 1,024 ranks over 30 days, as their
hosts would send them, and prints how many batches a second it takes, its size on disk, and how long
the data of each range of the live page takes. Ends with 1 where a page's p95 is over a second.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

if not __package__:  # run as a file: its folder is no place to import from, the one above is
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from flask.testing import FlaskClient

from benchmarks.table import in_markdown
from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.watch.records import RankSample, WatchBatch, WatchSample, encode_batch
from stepsplit.collectors.formats.watch_notes import RankWindow
from stepsplit.dashboard.pages.watch_range import RANGES
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.server import create_server

SECOND_NS, STEP_NS, P95_MS = 10**9, 480_000_000, 1_000
VIEWS = 20
_PROPERTIES = [("page", "children"), ("zone", "hidden"), ("tick", "disabled"), ("mark", "data")]


@dataclass(frozen=True)
class Job:
    """A watched job: a batch a minute of each host, with a sample each so many minutes."""

    name: str
    ranks: int
    hosts: int
    minutes: int
    minutes_per_batch: int
    minutes_per_sample: int
    sampled: int
    minutes_per_window: int = 1

    def list_batches(self, now_ns: int) -> Iterator[WatchBatch]:
        """The batches in the order of time; the last one is closed now."""
        rng = np.random.default_rng(1)
        for minute in range(0, self.minutes, self.minutes_per_batch):
            at = now_ns - (self.minutes - minute - self.minutes_per_batch) * 60 * SECOND_NS
            for host in range(self.hosts):
                yield self._close_batch(rng, minute, host, at)

    def _close_batch(self, rng: np.random.Generator, minute: int, host: int, at: int) -> WatchBatch:
        size = self.ranks // self.hosts
        own = range(size * host, size * host + size)
        times = rng.normal(STEP_NS, STEP_NS / 50, (self.minutes_per_batch, size)).astype(int)
        spread = rng.uniform(5e6, 3e7, (2, self.minutes_per_batch, size)).astype(int)
        windows = tuple(
            RankWindow(
                rank=rank, first_step=1, last_step=minute * 125 + 125,
                start_unix_ns=at - (past + 1) * 60 * SECOND_NS,
                end_unix_ns=at - past * 60 * SECOND_NS, steps=125,
                min_step_ns=int(times[past, i] - spread[0, past, i]),
                median_step_ns=int(times[past, i]),
                max_step_ns=int(times[past, i] + spread[1, past, i]),
            )
            for past in range(0, self.minutes_per_batch, self.minutes_per_window)
            for i, rank in enumerate(own)
        )  # fmt: skip
        samples = ()
        if minute % self.minutes_per_sample == 0:
            samples = self._take_samples(rng, minute, host, at, own)
        return WatchBatch(
            id=f"{host}-{minute}", run=self.name, incarnation=0, host=f"node{host:03d}",
            world_size=self.ranks, unix_ns=at, interval_steps=1_250, budget=0.005, overhead=0.003,
            windows=windows, samples=samples,
        )  # fmt: skip

    def _take_samples(
        self, rng: np.random.Generator, minute: int, host: int, at: int, own: range
    ) -> tuple[WatchSample, ...]:
        """The sample of this host: its ranks in a cross that rotates."""
        first = (minute // self.minutes_per_sample) * 37 % self.ranks
        cross = {(first + i) % self.ranks for i in range(self.sampled)} & set(own)
        if not cross:
            return ()
        parts = rng.uniform(0.8e7, 9e7, (len(cross), 7)).astype(int).tolist()
        waits = rng.uniform(0, 3e7, len(cross)).astype(int).tolist()
        ranks = tuple(
            RankSample(
                rank=rank, split=Split(*part), caused_wait_ns=wait,
                exposed_ns={"tp": part[1], "dp": part[2] + part[3], "pp": part[4]},
            )
            for rank, part, wait in zip(sorted(cross), parts, waits, strict=True)
        )  # fmt: skip
        return (
            WatchSample(
                id=f"0-{minute}-{host}", step=minute * 125, steps=2, unix_ns=at, pivot=first,
                ranks=ranks, cost_ns=1_800_000_000,
            ),
        )  # fmt: skip


JOBS = (
    Job("64 ranks x 10,000 samples", 64, 2, 10_000, 1, 1, 64),
    # A minute and host a batch would be 5.5 million batches: 30 days come in batches of an hour of
    # all ranks. In the longer slots they are the same; of a minute there are a tenth.
    Job("1,024 ranks x 30 days", 1_024, 1, 30 * 1_440, 60, 60, 150, 10),
    Job("1,024 ranks on 128 hosts", 1_024, 128, 60, 1, 10, 150),
)


def fill_store(folder: Path, job: Job) -> tuple[Store, float, int]:
    """A store of the job, the batches a second that it took, and its bytes."""
    store = Store.open(f"sqlite:///{folder}/runs.db", folder / "artifacts")
    spent, number = 0.0, 0
    for batch in job.list_batches(time.time_ns()):
        begin = time.perf_counter()
        store.watches.add_batch(batch)
        spent += time.perf_counter() - begin
        number += 1
    size = sum(path.stat().st_size for path in folder.glob("runs.db*"))
    return store, number / spent, size


def time_page(client: FlaskClient, name: str, range_name: str) -> tuple[np.ndarray, int]:
    """The ms of each request for a page's data, and its bytes."""
    values = (f"/watch/{name}", f"?range={range_name}", 0)
    keys = (("url", "pathname"), ("url", "search"), ("tick", "n_intervals"))
    body = {
        "output": "..page.children...zone.hidden...tick.disabled...mark.data..",
        "outputs": [{"id": part, "property": prop} for part, prop in _PROPERTIES],
        "inputs": [
            {"id": part, "property": prop, "value": value}
            for (part, prop), value in zip(keys, values, strict=True)
        ],
        "state": [{"id": "mark", "property": "data", "value": ""}],
        "changedPropIds": ["url.pathname"],
    }
    spent, size = [], 0
    for _ in range(VIEWS):
        begin = time.perf_counter()
        answer = client.post("/_dash-update-component", json=body)
        spent.append(1e3 * (time.perf_counter() - begin))
        assert answer.status_code == 200 and "Step time" in answer.text
        size = len(answer.data)
    return np.array(spent), size


def time_ingest(client: FlaskClient, job: Job) -> float:
    """Batches a second through the API, from one client."""
    batches = [encode_batch(one) for one in islice(job.list_batches(time.time_ns()), 1_280)]
    begin = time.perf_counter()
    for body in batches:
        assert client.post("/api/v1/watch", data=body).json == {"accepted": True}
    return len(batches) / (time.perf_counter() - begin)


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="also write the numbers as JSON")
    out = parser.parse_args().out
    stores, pages, worst = [], [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(f"sqlite:///{folder}/runs.db", Path(folder) / "artifacts")
        rate = time_ingest(create_server(store).test_client(), JOBS[2])
        stores.append((JOBS[2].name, f"{rate:,.0f} by HTTP", ""))
        store.close()
    for job in JOBS[:2]:
        with tempfile.TemporaryDirectory() as folder:
            store, rate, size = fill_store(Path(folder), job)
            client = create_server(store).test_client()
            stores.append((job.name, f"{rate:,.0f}", f"{size / 1e6:,.0f} MB"))
            for name in RANGES:
                ms, answer = time_page(client, job.name, name)
                worst = max(worst, float(np.percentile(ms, 95)))
                pages.append(
                    (job.name, name, f"{np.median(ms):.0f} ms", f"{np.percentile(ms, 95):.0f} ms",
                     f"{answer / 1e3:,.0f} kB")
                )  # fmt: skip
            store.close()
        _print_table(("store", "batches/s", "on disk"), stores)
        _print_table(("store", "range", "median", "p95", "answer"), pages)
    if out is not None:
        out.write_text(json.dumps({"stores": stores, "pages": pages}, indent=1))
    return int(worst > P95_MS)


def _print_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    sys.stdout.write(in_markdown([head, *rows]) + "\n\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
