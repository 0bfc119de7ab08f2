"""Published layouts of large models: predicted step against the published one, and their rank.

python tests/benchmarks/published_layouts.py [--plan] [--name WORD]

Prints the table of docs/model.md. --plan also searches all layouts of each model on its GPUs, and
names the rank of the published split among the best 8 and what the search took.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

from stepsplit.analyzer.model.plan import plan
from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.model.prediction import Prediction
from stepsplit.analyzer.validation.published_runs import REPORTS_TABLE, build_training_report
from stepsplit.analyzer.validation.tables import Case, Published, PublishedRow

TOP = 8
"""Splits of the GPUs that the search returns."""

LAYOUTS = {
    "bloom-176b-384": "BLOOM 176B, 384 A100",
    "opt-175b-992": "OPT-175B, 992 A100",
    "falcon-180b-4096": "Falcon-180B, 4,096 A100 40 GB",
    "nemotron-4-340b-1536": "Nemotron-4 340B, 1,536 H100",
    "nemotron-4-340b-6144": "Nemotron-4 340B, 6,144 H100",
    "llama-3-405b-8192-8k": "Llama 3 405B, 8,192 H100, 8k",
    "llama-3-405b-16384-131k": "Llama 3 405B, 16,384 H100, 131k",
    "deepseek-v3-2048": "DeepSeek-V3, 2,048 H800",
}
"""Rows of training_reports.csv, and their names in the table."""


def describe(row: PublishedRow, search: bool) -> str:
    """A row of the table."""
    (case,) = build_training_report(row)
    found, published_s = predict(case.job), case.step_ns / 1e9
    step_s = found.split.step_ns / 1e9
    cells = [
        LAYOUTS[row.read_text("case")], f"{published_s:.2f} s", f"{step_s:.2f} s",
        f"{step_s / published_s - 1:+.1%}", _describe_band(found, published_s),
        "yes" if found.fits else "no",
    ]  # fmt: skip
    cells += _describe_rank(case, found) if search else []
    return f"| {' | '.join([*cells, row.read_text('source')])} |"


def _describe_band(found: Prediction, published_s: float) -> str:
    low, high = found.low_ns / 1e9, found.high_ns / 1e9
    inside = "inside" if low <= published_s <= high else "outside"
    return f"{low:.1f} to {high:.1f} s: {inside}"


def _describe_rank(case: Case, found: Prediction) -> list[str]:
    """The rank of the published split in plan's result, how much its best is faster, and the CPU
    time of the search."""
    layout, started = case.job.parallel, time.process_time()
    best = plan(case.job, layout.world_size, top=TOP)
    spent_s = time.process_time() - started
    candidates = [best.best, *(each.candidate for each in best.runners_up)]
    axes = [(each.choice.tp, each.choice.pp, each.choice.cp, each.choice.ep) for each in candidates]
    own = layout.tp, layout.pp, layout.cp, layout.ep
    rank = str(axes.index(own) + 1) if own in axes else f"above {len(axes)}"
    behind = found.split.step_ns / best.best.step_ns - 1
    return [f"{rank} ({behind:+.1%})", f"{spent_s:.0f} s"]


def list_rows(search: bool, word: str) -> Iterator[str]:
    heads = ["run", "published", "predicted", "error", "band", "fits"]
    heads += ["rank in plan (own settings over its best)", "search, CPU"] if search else []
    yield f"| {' | '.join([*heads, 'source'])} |"
    yield "|---" * (len(heads) + 1) + "|"
    for row in Published().read_records(REPORTS_TABLE):
        name = LAYOUTS.get(row.read_text("case"))
        if name is not None and word in name:
            yield describe(row, search)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--plan", action="store_true")
    options.add_argument("--name", default="")
    given = options.parse_args()
    for line in list_rows(given.plan, given.name):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
