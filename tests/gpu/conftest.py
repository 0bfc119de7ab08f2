"""The table of what was verified on this GPU."""

from __future__ import annotations

import pytest

_VERDICTS = {"passed": "verified", "failed": "WRONG", "error": "WRONG", "skipped": "not testable"}


def pytest_itemcollected(item: pytest.Item) -> None:
    """The line of the table is the argument of the test's marker."""
    for marker in item.iter_markers("gpu"):
        item.user_properties.append(("gpu", marker.args[0]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each check: number of the known risk, what must hold, the verdict, and why it
    could not be tested. Nothing without a GPU."""
    rows = []
    for outcome, verdict in _VERDICTS.items():
        for report in terminalreporter.stats.get(outcome, []):
            title = dict(getattr(report, "user_properties", ())).get("gpu")
            if title is not None and (report.when == "call" or outcome != "passed"):
                why = report.longrepr[2].removeprefix("Skipped: ") if outcome == "skipped" else ""
                rows.append((title, verdict, why))
    if any(not verdict.startswith("not") for _, verdict, _ in rows):
        terminalreporter.section("on this GPU")
        width = max(len(title) for title, _, _ in rows)
        for title, verdict, why in sorted(rows):
            terminalreporter.write_line(f"{title:{width}}  {verdict:12}  {why}".rstrip())
