"""The files of a verdict, each for another reader."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from stepsplit.analyzer.errors import unwritable, write
from stepsplit.analyzer.regression.check_result import Verdict
from stepsplit.collectors.run_spec import open_special
from stepsplit.dashboard.reporters.benchmarks import bencher, benchmark_action
from stepsplit.dashboard.reporters.github import summary
from stepsplit.dashboard.reporters.gitlab import code_quality, open_metrics
from stepsplit.dashboard.reporters.junit import junit
from stepsplit.dashboard.reporters.markdown import markdown


def write_files(verdict: Verdict, files: Mapping[str, Path | None], named: str) -> None:
    """Writes what was asked for, by the option's name; named is the file that issues are told of.

    A step's summary is added to. Raises UsageError where a file cannot be written.
    """
    for option, path in files.items():
        if path is None:
            continue
        if option == "summary":
            _add(path, verdict)
        else:
            write(path, _content(option, verdict, named))


def _content(option: str, verdict: Verdict, named: str) -> bytes:
    if option == "junit":
        return junit(verdict)
    if option == "markdown":
        return markdown(verdict).encode()
    if option == "codequality":
        return code_quality(verdict, named)
    if option == "openmetrics":
        return open_metrics(verdict).encode()
    if option == "bencher":
        return bencher(verdict)
    assert option == "benchmark_action", option
    return benchmark_action(verdict)


def _add(path: Path, verdict: Verdict) -> None:
    try:
        with open_special(path) or path.open("ab") as file:
            held_bytes = file.tell() if file.seekable() else 0
            file.write(summary(verdict, held_bytes).encode())
    except (OSError, ValueError) as error:
        raise unwritable(path, error) from None
