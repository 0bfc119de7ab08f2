"""Writes the screen and the validation table of docs/model.md anew; run it from tests/.

cd tests && ../.venv/bin/python -m generate.docs_model
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from stepsplit.analyzer.validation import validate
from stepsplit.analyzer.validation.tables import Check

DOCS = Path(__file__).parents[2] / "docs"
HEAD = (
    "| check | rows | measure | bar | result | constant utilization | in band |\n"
    "|---|---|---|---|---|---|---|\n"
)


def main() -> None:
    page = (DOCS / "model.md").read_text()
    old = re.findall(r"^```\n(model .*?)^```$", page, flags=re.M | re.S)[0]
    before, _, after = page.replace(old, screen()).partition(HEAD)
    rest = after[after.index("\n\n") :]
    checks = validate()
    table = "\n".join(row(one) for one in checks if one.measure != "equality")
    page = before + HEAD + table + rest
    equalities = sum(len(one.reported) for one in checks if one.measure == "equality")
    page = re.sub(r"[\d,]+ numbers in all", f"{equalities} numbers in all", page)
    (DOCS / "model.md").write_text(page)


def screen() -> str:
    """What the command prints of the page's run at 80 columns."""
    command = [sys.executable, "-m", "stepsplit.dashboard", "model", str(DOCS / "job.toml")]
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


def row(one: Check) -> str:
    baseline = f"| {percents(one.baseline)} |" if one.baseline else "| |"
    inside = f" {one.inside} of {len(one.banded)} |" if one.banded else " |"
    measure, bar = one.measure.replace("/", " / "), percents(one.bar) if one.bar else "none"
    publishers = f" of {one.sources} publishers" if one.sources else ""
    cells = (one.name, f"{len(one.reported)}{publishers}", measure, bar, percents(one.result))
    return f"| {' | '.join(cells)} {baseline}{inside}"


def percents(ratios: tuple[float, ...]) -> str:
    return " / ".join(f"{100 * ratio:.1f}" for ratio in ratios) + " %"


if __name__ == "__main__":
    main()
