"""The pytest fixture comm_budget, available wherever stepsplit is installed.

    def test_step(comm_budget):
        with comm_budget("exposed_comm:10%,1pt", "calls:exact") as run:
            for _ in range(run.total_steps):
                train_step()
                run.step()

Runs in one process, or in one per rank under torchrun. Each block is one run. After the test its
runs are compared with the baseline in comm_budgets/ next to the test file: regressed fails the
test, inconclusive skips it. The rest of stepsplit is imported only when a test uses the fixture.
"""

from __future__ import annotations

import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from io import StringIO
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec
import pytest

if TYPE_CHECKING:
    from stepsplit.analyzer.regression.metrics import RunMetrics
    from stepsplit.collectors.profiler import ProfiledRun
    from stepsplit.collectors.record.user_spec import MeshLike


# The ranks of a test communicate through the store of the job, without a collective.

PATIENCE_S, POLL_S = 300.0, 0.05
"""Timeout and polling interval of a rank that waits for another to pack its files."""

_STARTED: Counter[str] = Counter()
"""How often each test was started: a repeated test has messages of its own."""


class Outcome(msgspec.Struct, frozen=True):
    """The result of a test's runs: that of the check, "updated" for a new baseline, or "error"."""

    answer: str
    words: str


class RankFailedError(Exception):
    """The test failed on another rank; the message says on which and why."""


@dataclass
class Ranks:
    """The ranks of the job that runs a test; a single rank if there is no job.

    test: names the test and its start in the job's store, equally on all ranks. All waits end with
    RankFailedError once a rank has called tell_failure.
    """

    test: str = ""
    _numbers: Iterator[int] = field(default_factory=count)

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return int(os.environ.get("RANK", "0")) == 0

    def share_folder(self, own: Path) -> Path:
        """The folder of rank 0, which all ranks record into; returns once all ranks ask for it.

        So no rank begins a step whose collectives another rank never calls.
        """
        self.wait_for_peers()
        shared = self._share_from_rank0(str(own))
        return own if shared is None else Path(shared)

    def tell_failure(self, error: BaseException) -> None:
        """Tells the other ranks that the test does not go on here."""
        if "torch.distributed" not in sys.modules:
            return
        from stepsplit.collectors.job import job_store, process_groups

        rank, _, backend = process_groups.read_job()
        if backend != "none":
            what = "was skipped" if isinstance(error, pytest.skip.Exception) else "failed"
            lines = str(error).strip().splitlines() or [type(error).__name__]
            job_store.set_store_value(
                self._failed, f"the test {what} on rank {rank}: {lines[0][:_MAX_REASON]}"
            )

    @property
    def _failed(self) -> str:
        return f"comm_budget/{self.test}/failed"

    def wait_for_peers(self) -> None:
        """On rank 0, waits for a call of this method on every other rank."""
        from stepsplit.collectors.job import job_store, process_groups

        rank, world_size, backend = process_groups.read_job()
        number = next(self._numbers)
        if backend == "none":
            return
        if not self.first:
            job_store.set_store_value(f"comm_budget/{self.test}/{number}/{rank}", "reached")
            return
        for peer in range(1, world_size):
            self._wait_for(f"{number}/{peer}")

    def _wait_for(self, message: str) -> str | None:
        """The value of the message; None on timeout. Raises RankFailedError."""
        from stepsplit.collectors.job import job_store

        keys = (self._failed, f"comm_budget/{self.test}/{message}")
        found = job_store.wait_for_first(keys, PATIENCE_S, POLL_S)
        if found is not None and found[0] == self._failed:
            raise RankFailedError(found[1])
        return None if found is None else found[1]

    def share_outcome(self, own: Outcome | None) -> Outcome:
        """The outcome of rank 0, shared with all ranks."""
        from stepsplit.collectors.job import process_groups

        shared = self._share_from_rank0(None if own is None else msgspec.json.encode(own).decode())
        if shared is not None:
            return msgspec.json.decode(shared, type=Outcome)
        if process_groups.read_job()[2] == "none":
            return Outcome("pass", "checked on rank 0")
        return Outcome("error", f"no result from rank 0 within {PATIENCE_S:.0f} s")

    def _share_from_rank0(self, own: str | None) -> str | None:
        """The message of rank 0; None on timeout, or on other ranks if there is no job."""
        from stepsplit.collectors.job import job_store, process_groups

        number = next(self._numbers)
        if process_groups.read_job()[2] == "none":
            return own if self.first else None
        if self.first and own is not None:
            job_store.set_store_value(f"comm_budget/{self.test}/{number}", own)
            return own
        return self._wait_for(str(number))


FOLDER = "comm_budgets"

_UNSAFE = re.compile(r"[^A-Za-z0-9._\[\]-]+")

FIXTURE = "comm_budget"

_BUDGET, _RANKS = pytest.StashKey["CommBudget"](), pytest.StashKey[Ranks]()

# It travels through the job's store to each rank, where it is one line of the report.
_MAX_REASON = 300


def pytest_addoption(parser: pytest.Parser) -> None:
    """--stepsplit-update and --stepsplit-strict."""
    group = parser.getgroup("stepsplit", "communication budgets")
    update = "save the runs of comm_budget tests as their new baselines"
    group.addoption("--stepsplit-update", action="store_true", help=update)
    strict = "fail tests whose runs are too noisy for a result, instead of skipping them"
    group.addoption("--stepsplit-strict", action="store_true", help=strict)


def _name_baseline(node: pytest.Item) -> str:
    """The test's name with its module and classes, as a file name that no other test has."""
    whole = ".".join((node.path.stem, *node.nodeid.split("::")[1:-1], node.name))
    name = _UNSAFE.sub("-", whole)
    if name == whole:
        return name
    # Two parameters may differ only in what a file name cannot have.
    return f"{name}-{zlib.crc32(whole.encode()):08x}"


@pytest.fixture
def comm_budget(request: pytest.FixtureRequest, tmp_path: Path) -> CommBudget:
    """Records blocks of the test and checks them against their budgets after the test."""
    node = request.node
    baseline = node.path.parent / FOLDER / f"{_name_baseline(node)}.json"
    budget = CommBudget(baseline, tmp_path, ranks=node.stash[_RANKS])
    node.stash[_BUDGET] = budget
    return budget


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Tells the other ranks if the test cannot begin on this one."""
    if FIXTURE not in getattr(item, "fixturenames", ()):
        return (yield)
    _STARTED[item.nodeid] += 1
    item.stash[_RANKS] = Ranks(f"{item.nodeid}#{_STARTED[item.nodeid]}")
    with _telling_failure(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Checks the runs as part of the test, so that a regression fails it."""
    __tracebackhide__ = True
    with _telling_failure(item):
        result = yield
    if (budget := item.stash.get(_BUDGET, None)) is not None:
        with _telling_failure(item):
            # Rank 0 checks the runs only if no rank fails after its last block.
            budget.ranks.wait_for_peers()
        if budget.recordings:
            _judge(budget, item.config)
    return result


@contextmanager
def _telling_failure(item: pytest.Item) -> Iterator[None]:
    """Tells the other ranks of a failure here, and fails here with the reason of another rank."""
    __tracebackhide__ = True
    try:
        yield
    except RankFailedError as error:
        pytest.fail(str(error), pytrace=False)
    except BaseException as error:
        if (ranks := item.stash.get(_RANKS, None)) is not None:
            ranks.tell_failure(error)
        raise


def _judge(budget: CommBudget, config: pytest.Config) -> None:
    __tracebackhide__ = True
    outcome = budget.evaluate(config.getoption("stepsplit_update"))
    strict = config.getoption("stepsplit_strict")
    if outcome.answer in ("regressed", "error") or (outcome.answer == "inconclusive" and strict):
        pytest.fail(outcome.words, pytrace=False)
    if outcome.answer == "inconclusive":
        pytest.skip(outcome.words)


# The communication budget of a test: its steps are recorded and compared with a baseline.

DEFAULT_RULES = ("calls:exact", "bytes:exact")
"""The default budgets: the same on every machine and free of noise."""

WAIT = 1


@dataclass
class CommBudget:
    """The fixture: each block that it records is a run of the test.

    baseline is the file that the runs are compared with; scratch is the folder of the recordings.
    """

    baseline: Path
    scratch: Path
    recordings: list[Path] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    ranks: Ranks = field(default_factory=Ranks)

    def __call__(
        self, *budgets: str, mesh: MeshLike = None, steps: int = 3, warmup: int = 1
    ) -> RecordedBlock:
        """Starts a block to record.

        budgets: rules such as "exposed_comm:10%,1pt"; by default calls and bytes exact. mesh: as
        for profile_run. steps: number of steps to record after `warmup` steps.
        """
        self.rules += budgets
        return RecordedBlock(self, mesh, steps, warmup)

    def recorded(self, recording: str | Path, *budgets: str) -> None:
        """Adds a recording that the test made itself, such as one by torchrun, as a run."""
        self.rules += budgets
        self.recordings.append(Path(recording))

    def evaluate(self, update: bool) -> Outcome:
        """Checks the runs so far; with update, saves them as the baseline instead.

        Returns the same outcome on every rank; its answer is "error" if the check fails to run.
        """
        try:
            own = self._check_runs(update) if self.ranks.first else None
            return self.ranks.share_outcome(own)
        except RankFailedError as error:
            return Outcome("error", str(error))

    def _check_runs(self, update: bool) -> Outcome:
        from stepsplit.analyzer.errors import StepsplitError, UsageError, write
        from stepsplit.analyzer.regression.checks import parse_budgets
        from stepsplit.analyzer.regression.judge import check_candidate
        from stepsplit.analyzer.regression.metrics import read_baseline, to_json
        from stepsplit.collectors.safe_io.safe_text import escape_controls

        try:
            budgets = parse_budgets(self.rules or DEFAULT_RULES)
            baseline: tuple[RunMetrics, ...] = ()
            if update:
                write(self.baseline, to_json(self._facts))
                return Outcome("updated", f"{self.baseline}: {len(self._facts)} run(s)")
            if any(budget.against == "baseline" for budget in budgets):
                if not self.baseline.exists():
                    hint = "no baseline yet; create it with --stepsplit-update"
                    raise UsageError(f"{self.baseline}: {hint}")
                baseline = read_baseline(self.baseline)
            verdict = check_candidate(self._facts, baseline, budgets)
            return Outcome(verdict.answer, _format_verdict(verdict))
        except StepsplitError as error:
            return Outcome("error", escape_controls(str(error)))

    @cached_property
    def _facts(self) -> Sequence[RunMetrics]:
        from stepsplit.analyzer.analysis import read_run_metrics

        return [facts for recording in self.recordings for facts in read_run_metrics(recording)]


class RecordedBlock:
    """Records steps of a test: call step() at the end of each of them.

    total_steps is the number of steps to run until all are recorded.
    """

    def __init__(self, budget: CommBudget, mesh: MeshLike, steps: int, warmup: int) -> None:
        self.total_steps = WAIT + warmup + steps
        self._budget, self._mesh, self._steps, self._warmup = budget, mesh, steps, warmup
        self._run: ProfiledRun | None = None

    def step(self) -> None:
        """Ends a training step."""
        if self._run is not None:
            self._run.step()

    def __enter__(self) -> Self:
        from stepsplit.collectors.profiler import profile_run

        budget = self._budget
        folder = budget.ranks.share_folder(budget.scratch / f"run{len(budget.recordings)}")
        budget.recordings.append(folder)
        self._run = profile_run(
            folder, mesh=self._mesh, wait=WAIT, warmup=self._warmup, active=self._steps
        ).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.stop(failed=kind is not None)
        if kind is None:
            # Every rank has written its files now.
            self._budget.ranks.wait_for_peers()


def _format_verdict(verdict: Any) -> str:
    from stepsplit.dashboard.reporters.console import SafeConsole
    from stepsplit.dashboard.reporters.verdict import build_verdict_screen

    screen = StringIO()
    SafeConsole(screen, width=120, color_system=None).print(build_verdict_screen(verdict))
    return screen.getvalue().rstrip()
