"""A test's budget of communication: its steps are recorded, and held against a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from stepsplit.dashboard.comm_budget_ranks import Outcome, Ranks

if TYPE_CHECKING:
    from stepsplit.analyzer.regression.metrics import RunFacts
    from stepsplit.collectors.profiler import MeshLike, ProfiledRun

COUNTED = ("calls:exact", "bytes:exact")
"""What a test is held to where it names no budget: the same on every machine, and never by chance.
"""
WAIT = 1


@dataclass
class CommBudget:
    """The fixture: each block that it records is a run of the test.

    baseline is the file that the runs are held against; recordings are made under scratch.
    """

    baseline: Path
    scratch: Path
    recordings: list[Path] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    ranks: Ranks = field(default_factory=Ranks)

    def __call__(
        self, *budgets: str, mesh: MeshLike = None, steps: int = 3, warmup: int = 1
    ) -> Block:
        """A block to record, with these budgets (calls and bytes exact where none is named).

        mesh is as for profile_run; so many steps are recorded after the warm-up.
        """
        self.rules += budgets
        return Block(self, mesh, steps, warmup)

    def recorded(self, recording: str | Path, *budgets: str) -> None:
        """Takes a recording that the test has made itself, such as one by torchrun, for a run."""
        self.rules += budgets
        self.recordings.append(Path(recording))

    def outcome(self, update: bool) -> Outcome:
        """What the runs so far come to; with update they become the baseline. The same on every
        rank of the job, an answer "error" where they cannot be judged."""
        return self.ranks.outcome(self._tried(update) if self.ranks.first else None)

    def give_up(self) -> None:
        """The test has failed by itself: the other ranks need not wait for what it comes to."""
        if self.ranks.first:
            self.ranks.outcome(Outcome("error", "the test failed on rank 0"))

    def _tried(self, update: bool) -> Outcome:
        from stepsplit.analyzer import StepsplitError

        try:
            return self._outcome(update)
        except StepsplitError as error:
            return Outcome("error", str(error))

    def _outcome(self, update: bool) -> Outcome:
        if update:
            return self._updated()
        from stepsplit.analyzer.regression.budgets import budgets_of
        from stepsplit.analyzer.regression.judge import judge

        budgets = budgets_of(self.rules or COUNTED)
        needed = any(budget.against == "baseline" for budget in budgets)
        verdict = judge(self._facts, self._before() if needed else (), budgets)
        return Outcome(verdict.answer, _in_words(verdict))

    def _before(self) -> tuple[RunFacts, ...]:
        from stepsplit.analyzer import UsageError
        from stepsplit.analyzer.regression.metrics import read_baseline

        if not self.baseline.exists():
            raise UsageError(f"{self.baseline}: no baseline yet; make it with --stepsplit-update")
        return read_baseline(self.baseline)

    def _updated(self) -> Outcome:
        from stepsplit.analyzer.errors import write
        from stepsplit.analyzer.regression.metrics import to_json

        write(self.baseline, to_json(self._facts))
        return Outcome("updated", f"{self.baseline}: {len(self._facts)} run(s)")

    @cached_property
    def _facts(self) -> Sequence[RunFacts]:
        from stepsplit.analyzer.analysis import facts_at

        return [facts for recording in self.recordings for facts in facts_at(recording)]


class Block:
    """Steps of a test under the recorder: call step() at the end of each of them.

    total_steps is how many it takes until all are recorded.
    """

    def __init__(self, budget: CommBudget, mesh: MeshLike, steps: int, warmup: int) -> None:
        self.total_steps = WAIT + warmup + steps
        self._budget, self._mesh, self._steps, self._warmup = budget, mesh, steps, warmup
        self._run: ProfiledRun | None = None

    def step(self) -> None:
        """Ends a step of the training."""
        if self._run is not None:
            self._run.step()

    def __enter__(self) -> Self:
        from stepsplit.collectors.profiler import profile_run

        budget = self._budget
        folder = budget.ranks.folder(budget.scratch / f"run{len(budget.recordings)}")
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
        self._budget.ranks.written()


def _in_words(verdict: Any) -> str:
    from rich.console import Console

    from stepsplit.dashboard.reporters.verdict import screen

    console = Console(width=120, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(screen(verdict))
    return captured.get().rstrip()
