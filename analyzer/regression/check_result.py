"""The result of a check: its answers and causes, and its JSON."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.regression.metrics import Setup

# What the gate says of a candidate, and why.

SCHEMA = "stepsplit.verdict/1"

Answer = Literal["pass", "regressed", "inconclusive"]


class SideFacts(Struct, frozen=True):
    """The runs of one side, by name, and the steps that their values are medians of."""

    runs: tuple[str, ...]
    steps: tuple[int, ...]
    setup: Setup


class Judged(Struct, frozen=True):
    """One metric against its budget.

    baseline and candidate are means over runs, None where unknown. harm is how much worse the
    candidate is, in the metric's unit (a share, ns, bytes, bytes/s), negative where it is better;
    allowed is how much worse it may be. low, high: the 96 % interval of harm; p: how often runs
    that do not differ would show it, over all gated metrics (Holm); detectable: the smallest harm
    that would be found in 4 of 5 cases. Those four are None where the metric is counted, and where
    the runs do not tell their noise. note says what else there is to know.
    """

    metric: str
    budget: str
    answer: Answer
    baseline: float | None
    candidate: float | None
    harm: float | None
    allowed: float | None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    detectable: float | None = None
    note: str = ""


class Shifted(Struct, frozen=True):
    """A metric without a budget that moved by more than the noise of the runs; as in Judged."""

    metric: str
    baseline: float
    candidate: float
    harm: float
    low: float
    high: float


class CallsMoved(Struct, frozen=True):
    """Calls of one op, dtype and size on one axis: how many a step, of all recorded ranks, and the
    ns that all calls of a step take by the medians of one call, moving and waiting."""

    axis: str
    op: str
    dtype: str | None
    message_bytes: int | None
    baseline: int
    candidate: int
    baseline_ns: int
    candidate_ns: int


class Cause(Struct, frozen=True):
    """Something that moved: a bucket, where it lies, and by how much a rank's mean step is longer
    (ns, 0 where only counts moved). rank is who is waited for, group whom that rank shares the
    collective with."""

    bucket: str | None
    axis: str | None
    op: str | None
    message_bytes: int | None
    rank: int | None
    group: tuple[int, ...]
    moved_ns: int
    message: str


class Verdict(Struct, frozen=True):
    """The answer: regressed where one gated metric is, else inconclusive where one is, else pass.

    gated are the metrics with a budget, others what else moved by more than the noise of the runs.
    low_confidence: a side is of one run, and a gated metric has noise. compare_url leads to the
    page that shows both sides.
    """

    answer: Answer
    baseline: SideFacts | None
    candidate: SideFacts
    gated: tuple[Judged, ...]
    causes: tuple[Cause, ...] = ()
    calls: tuple[CallsMoved, ...] = ()
    others: tuple[Shifted, ...] = ()
    warnings: tuple[str, ...] = ()
    low_confidence: bool = False
    compare_url: str | None = None
    schema: str = SCHEMA


# A verdict as JSON, in and out: schema "stepsplit.verdict/1", the fields of Verdict.


def to_json(verdict: Verdict) -> bytes:
    """The verdict as JSON text."""
    return msgspec.json.format(msgspec.json.encode(verdict), indent=1) + b"\n"


def from_json(text: bytes, source: object = "verdict.json") -> Verdict:
    """The verdict of the text. Raises DataError where the text is none of this schema."""
    try:
        verdict = msgspec.json.decode(text, type=Verdict)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(source, f"not a stepsplit verdict ({error})", "check again") from None
    if verdict.schema != SCHEMA:
        raise DataError(source, f"of schema {verdict.schema}, not {SCHEMA}", "check again")
    return verdict
