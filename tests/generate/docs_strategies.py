"""Runs every example and writes docs/strategies.md: python -m generate.docs_strategies"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from support.example_runs import JOBS, Example, Outcome, outcome, record_example

from stepsplit.analyzer import Report, analyze

PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"
HEAD = """# Every strategy, run for real

`python -m generate.docs_strategies` (in tests/) runs every script of `examples/` (gloo on CPU, a
GPT of 0.9 million parameters), splits its steps, deletes run.json and the ranks' records, and
writes this page; `tests/collectors/test_examples.py` holds its rows.

- **steps**: full steps that were recorded, of all ranks together; the seven buckets of each add up
  to it to the nanosecond.
- **recognized**, **mesh**: what the traces alone tell.
- **calls**, **bytes**: what a rank sends and receives in a step, measured beside predicted,
  compared exactly for each pipeline stage, axis and op. Losses, norms and flags (up to 1 KiB) are
  left out.

| run | ranks | steps | recognized | mesh | calls: measured = model | bytes: measured = model |
|---|---|---|---|---|---|---|
"""


def main() -> None:
    rows = []
    for example in JOBS:
        with tempfile.TemporaryDirectory() as folder:
            record_example(example, Path(folder))
            report = analyze(folder)
            rows.append(_row(example, report, outcome(example, Path(folder))))
            sys.stderr.write(f"{rows[-1]}\n")
    PAGE.write_text(HEAD + "\n".join(rows) + "\n")


def _row(example: Example, report: Report, found: Outcome) -> str:
    full = sum(step.kind == "full" for step in report.steps)
    rows = found.messages.rows
    calls = _sides([row.measured.count for row in rows], [row.predicted.count for row in rows])
    sizes = _sides(
        [row.measured.bytes or 0 for row in rows], [row.predicted.bytes or 0 for row in rows]
    )
    equal = "" if found.messages.equal else " **differs**"
    cells = (
        example.name, str(example.ranks), str(full), ", ".join(found.strategies),
        found.mesh or "unknown", calls + equal, sizes,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _sides(measured: list[int], predicted: list[int]) -> str:
    sign = "=" if measured == predicted else "!="
    return f"{sum(measured):,} {sign} {sum(predicted):,}"


if __name__ == "__main__":
    main()
