"""Fuzzing of the whole: mutated recordings through every command, page and export.

fuzz_recordings.py FILE FIRST LAST runs the mutants of these seeds and appends a line of JSON for
each to FILE; fuzz_recordings.py FILE prints the tables of docs/robustness.md. A failure is any
exception but a StepsplitError, a message of several lines, a report that cannot be read back, or a
page or route that fails.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import click
from support.store_builders import claimed, queued, state

from fuzz.mutants import mutate
from stepsplit.analyzer.analysis import examine
from stepsplit.analyzer.errors import StepsplitError
from stepsplit.analyzer.report.io import save
from stepsplit.dashboard.cli import stepsplit
from stepsplit.dashboard.pages.address import build_page_url
from stepsplit.dashboard.pages.run_pages import RUN_PAGES
from stepsplit.dashboard.pages.store_pages import parse_address
from stepsplit.dashboard.store.ingest import analyze_upload, process_job
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.page_builder import PageBuilder
from stepsplit.dashboard.web.report_cache import ReportCache
from stepsplit.dashboard.web.server import create_server

_PEER = Path(__file__).parents[2] / "sample_traces" / "built_zero_bubble"
_WINDOW = "timeline/window?from=0&to=1000000000&slots=100&ranks=0,1,2,3&open=0,1"
_ROUTES = ("timeline", _WINDOW, "perfetto", "report.json", "report.html")
_PROBLEMS = ("cannot be read", "cannot be shown", "does not expect")


@dataclass(frozen=True)
class Outcome:
    """What happened to a mutant: a count of each command and its exit status, and the failure."""

    seed: int
    sample: str
    mutations: tuple[str, ...]
    done: Counter[str] = field(default_factory=Counter)
    failure: str = ""


class Fuzzer:
    """Runs mutants against one store, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._peer = folder, folder / "peer"
        peer = examine([_PEER])
        save(self._peer, peer.report, peer.tables)
        self._store = Store.open(f"sqlite:///{folder}/runs.db", folder / "artifacts")
        self._client = create_server(self._store).test_client()
        self._pages = PageBuilder(self._store, ReportCache(self._store))

    def close(self) -> None:
        self._store.close()

    def run(self, seed: int) -> Outcome:
        """Mutates a sample by this seed and does all that users do with recordings."""
        random = Random(seed)
        mutant = mutate(random)
        done, failure = Counter[str](), ""
        home = self._folder / str(seed)
        try:
            recording = mutant.recorded.write(home / "recording")
            for command in self._list_commands(random, recording, home):
                done[f"{command[0]} {run_command(command)}"] += 1
            done[f"upload {self._upload(random, recording)}"] += 1
        except Exception as error:  # noqa: BLE001 - the outcome names its seed
            failure = repr(error)
        shutil.rmtree(home)
        return Outcome(seed, mutant.sample, mutant.mutations, done, failure)

    def _list_commands(self, random: Random, recording: Path, home: Path) -> Iterator[list[str]]:
        """What a user would run on a recording, with every kind of output."""
        saved, peer, job = home / "saved", str(self._peer), recording / "job.toml"
        plain = ["analyze", str(recording), "--workers", "1", "--out", str(saved)]
        # The page of a run that was uploaded is downloaded too.
        html = ["--html", str(home / "page.html")] if random.random() < 0.25 else []
        if random.random() < 0.5:
            yield [*plain, *html, "--job", str(job) if job.exists() else "auto"]
        if not saved.is_dir():
            yield [*plain, *html]

        def choose() -> str:
            # Mostly what was saved: the recording gives the same report, but takes longer.
            is_saved = saved.is_dir() and random.random() < 0.75
            return str(saved if is_saved else recording)

        yield ["compare", peer, choose()]
        yield ["compare", choose(), str(saved if saved.is_dir() else recording),
               "--json", str(home / "comparison.json")]  # fmt: skip
        yield ["check", choose(), "--baseline", peer, "--across-setups"]
        yield ["what-if", str(recording)]
        yield ["export", choose(), "--perfetto", str(home / "trace.pftrace")]

    def _upload(self, random: Random, recording: Path) -> str:
        """Uploads the recording, analyzes it as a worker does, opens all its pages, deletes it."""
        files = {file.name: file.read_bytes() for file in recording.iterdir()}
        run_id = queued(self._store, "mutant", **files)
        process_job(self._store, claimed(self._store), analyze_upload)
        run_state, error = state(self._store, run_id)
        assert "internal error" not in (error or ""), error
        if run_state != "failed":
            self._open_pages(random, run_id)
        self._store.delete(run_id)
        return run_state

    def _open_pages(self, random: Random, run_id: str) -> None:
        keys = ["", *(page.key for page in RUN_PAGES[1:])]
        urls = [(build_page_url(run_id, key), "") for key in keys]
        both = f"?baseline={run_id}&candidate={run_id}"
        for path, query in [*urls, ("/", ""), ("/compare", both), ("/history", "")]:
            content = str(self._pages.build_content(parse_address(path, query)).children)
            assert not any(problem in content for problem in _PROBLEMS), path
        # The downloaded page builds the same pages as above once more.
        for route in _ROUTES if random.random() < 0.25 else _ROUTES[:-1]:
            with self._client.get(f"/api/v1/runs/{run_id}/{route}", buffered=True) as answer:
                assert answer.status_code == 200, (route, answer.data[:300])


def run_command(command: Sequence[str]) -> int:
    """The exit status; other errors than those of stepsplit and click propagate."""
    try:
        status = stepsplit.main(list(command), standalone_mode=False)
    except (StepsplitError, click.ClickException) as error:
        assert "\n" not in str(error), str(error)
        return 2
    return status if isinstance(status, int) else 0


def run_seeds(file: Path, first: int, last: int) -> None:
    """Runs the mutants and appends their outcomes to the file."""
    warnings.simplefilter("error")
    with tempfile.TemporaryDirectory(prefix="stepsplit-fuzz-") as folder:
        fuzzer = Fuzzer(Path(folder))
        for seed in range(first, last):
            with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
                outcome = fuzzer.run(seed)
            with file.open("a") as lines:
                lines.write(json.dumps(vars(outcome)) + "\n")
        fuzzer.close()


def format_tables(file: Path) -> str:
    """The outcomes by mutation, and the exit statuses by command."""
    outcomes = [Outcome(**json.loads(line)) for line in file.read_text().splitlines()]
    rows = [f"{len(outcomes)} mutants", "", "| mutation | mutants | analyzed | refused | failed |"]
    rows.append("|---|---|---|---|---|")
    for name in sorted({name for one in outcomes for name in one.mutations}):
        own = [one for one in outcomes if name in one.mutations]
        analyzed, failed = (
            sum(one.done.get("analyze 0", 0) > 0 and not one.failure for one in own),
            sum(bool(one.failure) for one in own),
        )
        refused = len(own) - analyzed - failed
        rows.append(f"| {name} | {len(own)} | {analyzed} | {refused} | {failed} |")
    rows += ["", "| command and exit status | times |", "|---|---|"]
    statuses = sum((Counter(one.done) for one in outcomes), Counter[str]())
    rows += [f"| {status} | {number} |" for status, number in sorted(statuses.items())]
    return "\n".join(rows) + "\n"


def main() -> None:
    """Runs mutants, or prints what happened to them."""
    file, *seeds = sys.argv[1:]
    if seeds:
        run_seeds(Path(file), int(seeds[0]), int(seeds[1]))
    else:
        sys.stdout.write(format_tables(Path(file)))


if __name__ == "__main__":
    main()
