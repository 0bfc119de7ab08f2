"""Files in, Report out. Needs neither torch nor a display.

The names below are imported when they are first used, so that a worker process or a model's
prediction loads only what it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepsplit.analyzer.analysis import Analysis, analyze, examine
    from stepsplit.analyzer.errors import DataError, StepsplitError, UsageError
    from stepsplit.analyzer.hang.find import find_hang
    from stepsplit.analyzer.hang.hang import Hang
    from stepsplit.analyzer.readers.any_file import FileRead, read_files
    from stepsplit.analyzer.readers.rules import Rules
    from stepsplit.analyzer.readers.rules_file import read_rules
    from stepsplit.analyzer.report.report import Report

__all__ = [
    "Analysis",
    "DataError",
    "FileRead",
    "Hang",
    "Report",
    "Rules",
    "StepsplitError",
    "UsageError",
    "analyze",
    "examine",
    "find_hang",
    "read_files",
    "read_rules",
]

_HOME = {
    "Analysis": "analysis",
    "DataError": "errors",
    "FileRead": "readers.any_file",
    "Hang": "hang.hang",
    "Report": "report.report",
    "Rules": "readers.rules",
    "StepsplitError": "errors",
    "UsageError": "errors",
    "analyze": "analysis",
    "examine": "analysis",
    "find_hang": "hang.find",
    "read_files": "readers.any_file",
    "read_rules": "readers.rules_file",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
