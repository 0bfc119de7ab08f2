"""validate: the whole table of checks, on the product's own published rows or on other people's."""

from __future__ import annotations

from pathlib import Path

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.validate.busbw import busbw_checks
from stepsplit.analyzer.model.validate.calibrated import calibrated_checks
from stepsplit.analyzer.model.validate.collectives import collective_checks
from stepsplit.analyzer.model.validate.eager import eager_checks
from stepsplit.analyzer.model.validate.equality.activations import activation_checks
from stepsplit.analyzer.model.validate.equality.bubbles import bubble_checks
from stepsplit.analyzer.model.validate.equality.counts import count_checks
from stepsplit.analyzer.model.validate.equality.deepspeed import deepspeed_checks
from stepsplit.analyzer.model.validate.equality.rates import rate_checks
from stepsplit.analyzer.model.validate.equality.states import states_checks
from stepsplit.analyzer.model.validate.equality.wires import wire_checks
from stepsplit.analyzer.model.validate.ids import IDS
from stepsplit.analyzer.model.validate.memory import memory_checks
from stepsplit.analyzer.model.validate.records import PUBLISHED, Published
from stepsplit.analyzer.model.validate.step_time import step_time_checks
from stepsplit.analyzer.model.validate.tables import Check

GROUPS = (
    states_checks, deepspeed_checks, activation_checks, count_checks, rate_checks, bubble_checks,
    wire_checks, memory_checks, calibrated_checks, eager_checks, step_time_checks,
    collective_checks, busbw_checks,
)  # fmt: skip


def validate(folder: Path | None = None) -> tuple[Check, ...]:
    """Every check, in the order of GROUPS.

    folder holds CSV files with the names and columns of analyzer/model/published: more columns are
    ignored, a check whose file is absent has no rows. Raises UsageError where none of the files
    is there, DataError for a file that cannot be read.
    """
    published = Published(folder or PUBLISHED)
    if not any(map(published.has, IDS)):
        raise UsageError(
            f"{published.folder}: no published table here, such as {next(iter(IDS))}.csv"
        )
    return tuple(each for group in GROUPS for each in group(published))
