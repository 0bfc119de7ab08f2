"""Whether a job can be: the first thing that cannot, with its arithmetic and mend."""

from __future__ import annotations

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.spec.axis_checks import AXIS_CHECKS
from stepsplit.analyzer.model.spec.batch_checks import BATCH_CHECKS
from stepsplit.analyzer.model.spec.fault import Fault
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.stage_checks import STAGE_CHECKS


def check(job: Job) -> None:
    """Raises UsageError for a job that cannot be: one line with the arithmetic and the mend."""
    fault = first_fault(job)
    if fault is not None:
        raise UsageError(f"{fault.problem}; {fault.mend}")


def first_fault(job: Job) -> Fault | None:
    """The first thing that cannot be, None where everything can."""
    found = (fault(job) for fault in (*AXIS_CHECKS, *BATCH_CHECKS, *STAGE_CHECKS))
    return next((fault for fault in found if fault is not None), None)
