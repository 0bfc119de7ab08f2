"""Files in, Report out. Needs neither torch nor a display."""

from stepsplit.analyzer.analyze import Analysis, analyze, examine
from stepsplit.analyzer.errors import DataError, StepsplitError, UsageError
from stepsplit.analyzer.report.report import Report

__all__ = ["Analysis", "DataError", "Report", "StepsplitError", "UsageError", "analyze", "examine"]
