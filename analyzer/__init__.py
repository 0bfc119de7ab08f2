"""Files in, Report out. Needs neither torch nor a display.

The names below are imported when they are first used, so that a worker process or a model's
prediction loads only what it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepsplit.analyzer.analysis import Analysis, analyze, examine
    from stepsplit.analyzer.compare.calibrate.calibrate import calibrate
    from stepsplit.analyzer.compare.runs.comparison import RunComparison
    from stepsplit.analyzer.compare.verdict.verdict import Verdict
    from stepsplit.analyzer.compare.what_if.what_if import WhatIfs, what_if
    from stepsplit.analyzer.errors import DataError, StepsplitError, UsageError
    from stepsplit.analyzer.gate import check_runs
    from stepsplit.analyzer.hang.find import find_hang
    from stepsplit.analyzer.hang.hang import Hang
    from stepsplit.analyzer.model.config import Job
    from stepsplit.analyzer.model.config_file import read_job
    from stepsplit.analyzer.model.plan import plan
    from stepsplit.analyzer.model.plan_space import Plan
    from stepsplit.analyzer.model.predict import predict, read_rates
    from stepsplit.analyzer.model.prediction import Prediction
    from stepsplit.analyzer.readers.kernel_rules import Rules, read_rules
    from stepsplit.analyzer.readers.registry import FileRead, read_files
    from stepsplit.analyzer.report.report import Report
    from stepsplit.analyzer.two_runs import compare_runs
    from stepsplit.analyzer.validation import validate

__all__ = [
    "Analysis",
    "DataError",
    "FileRead",
    "Hang",
    "Job",
    "Plan",
    "Prediction",
    "Report",
    "Rules",
    "RunComparison",
    "StepsplitError",
    "UsageError",
    "Verdict",
    "WhatIfs",
    "analyze",
    "calibrate",
    "check_runs",
    "compare_runs",
    "examine",
    "find_hang",
    "plan",
    "predict",
    "read_files",
    "read_job",
    "read_rates",
    "read_rules",
    "validate",
    "what_if",
]

_HOME = {
    "Analysis": "analysis",
    "DataError": "errors",
    "FileRead": "readers.registry",
    "Hang": "hang.hang",
    "Job": "model.config",
    "Plan": "model.plan_space",
    "Prediction": "model.prediction",
    "Report": "report.report",
    "Rules": "readers.kernel_rules",
    "RunComparison": "compare.runs.comparison",
    "StepsplitError": "errors",
    "UsageError": "errors",
    "Verdict": "compare.verdict.verdict",
    "WhatIfs": "compare.what_if.what_if",
    "analyze": "analysis",
    "calibrate": "compare.calibrate.calibrate",
    "check_runs": "gate",
    "compare_runs": "two_runs",
    "examine": "analysis",
    "find_hang": "hang.find",
    "plan": "model.plan",
    "predict": "model.predict",
    "read_files": "readers.registry",
    "read_job": "model.config_file",
    "read_rates": "model.predict",
    "read_rules": "readers.kernel_rules",
    "validate": "validation",
    "what_if": "compare.what_if.what_if",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
