"""Files in, Report out. Needs neither torch nor a display.

The names below are imported when they are first used, so that a worker process or a model's
prediction loads only what it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepsplit.analyzer.analysis import Analysis, analyze, check_runs, compare_runs, examine
    from stepsplit.analyzer.diagnose.hang import find_hang
    from stepsplit.analyzer.diagnose.hang_progress import Hang
    from stepsplit.analyzer.diagnose.what_if import WhatIfs, what_if
    from stepsplit.analyzer.errors import DataError, StepsplitError, UsageError
    from stepsplit.analyzer.gap.calibrate import calibrate
    from stepsplit.analyzer.model.config import JobConfig
    from stepsplit.analyzer.model.config_file import read_job
    from stepsplit.analyzer.model.plan import plan
    from stepsplit.analyzer.model.plan_space import Plan
    from stepsplit.analyzer.model.predict import predict, read_rates
    from stepsplit.analyzer.model.prediction import Prediction
    from stepsplit.analyzer.readers.kernel_rules import Rules, read_rules
    from stepsplit.analyzer.readers.registry import FileRead, read_files
    from stepsplit.analyzer.regression.checks import Verdict
    from stepsplit.analyzer.regression.compare import RunComparison
    from stepsplit.analyzer.report.report import Report
    from stepsplit.analyzer.validation import validate

__all__ = [
    "Analysis",
    "DataError",
    "FileRead",
    "Hang",
    "JobConfig",
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
    "Hang": "diagnose.hang_progress",
    "JobConfig": "model.config",
    "Plan": "model.plan_space",
    "Prediction": "model.prediction",
    "Report": "report.report",
    "Rules": "readers.kernel_rules",
    "RunComparison": "regression.compare",
    "StepsplitError": "errors",
    "UsageError": "errors",
    "Verdict": "regression.checks",
    "WhatIfs": "diagnose.what_if",
    "analyze": "analysis",
    "calibrate": "gap.calibrate",
    "check_runs": "analysis",
    "compare_runs": "analysis",
    "examine": "analysis",
    "find_hang": "diagnose.hang",
    "plan": "model.plan",
    "predict": "model.predict",
    "read_files": "readers.registry",
    "read_job": "model.config_file",
    "read_rates": "model.predict",
    "read_rules": "readers.kernel_rules",
    "validate": "validation",
    "what_if": "diagnose.what_if",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
