"""Types of a check: its budgets, as rules and as TOML, and its result with its JSON."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.regression.metrics import (
    METRICS,
    Metric,
    Setup,
    Unit,
    meaning_of,
    metric_named,
)

# Budgets in TOML: a table [budgets] of metric = "limit".


def budgets_of(rules: Sequence[str]) -> tuple[Budget, ...]:
    """The budgets of rules and of files that hold rules; of two for one metric the last counts.

    Raises UsageError, and DataError for a file that is none of budgets.
    """
    found: dict[str, Budget] = {}
    for rule in rules:
        read = [parse_budget(rule)] if ":" in rule else read_budgets(Path(rule))
        found |= {budget.metric: budget for budget in read}
    return tuple(found.values())


def read_budgets(path: Path) -> list[Budget]:
    """The budgets of the file. Raises UsageError and DataError."""
    try:
        body = tomllib.loads(path.read_text())
    except OSError as error:
        hint = 'name a TOML file, or write a rule such as "exposed_comm:5%"'
        raise UsageError(f"{path}: {error.strerror or 'unreadable'}; {hint}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(path, f"no TOML ({error})", 'write [budgets] and exposed_comm = "5%"') \
            from None  # fmt: skip
    table = body.get("budgets")
    if not isinstance(table, dict) or not table:
        raise DataError(path, "has no table [budgets]", 'write [budgets] and exposed_comm = "5%"')
    return [_budget(path, name, limit) for name, limit in table.items()]


def _budget(path: Path, name: str, limit: object) -> Budget:
    if not isinstance(limit, str):
        raise DataError(path, f"the limit of {name} is no text", f'write {name} = "5%"')
    try:
        return budget_of(name, limit)
    except UsageError as error:
        raise DataError(path, str(error), "see stepsplit check --help") from None


# How much worse a candidate may be: "exposed_comm:5%", in words that TOML files use too.
#
# 5%        by so much of the baseline's value
# 2pt       by so many points of the step (shares only)
# 3ms 1GiB  by so much (times; bytes; GB/s; a bare number for counts)
# 5%,1pt    by whichever allows more
# <=10%     never more than that, whatever the baseline (>= where less is worse)
# model+20% never more than that above the model's prediction (model-20% where less is worse)
# exact     not at all, and without statistics (counts and bytes only)

Against = Literal["baseline", "limit", "model"]

_SCALES: dict[Unit, dict[str, float]] = {
    "share": {"%": 0.01, "pt": 0.01},
    "ns": {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9},
    "bytes": {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20,
              "GiB": 2.0**30},
    "bytes_per_s": {"MB/s": 1e6, "GB/s": 1e9},
    "count": {"": 1.0},
}  # fmt: skip

_NUMBER = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z%/]*)$")


@dataclass(frozen=True, slots=True)
class Budget:
    """How much worse one metric may be.

    Against the baseline: by ratio of its value or by amount, whichever allows more; by neither
    where exact. Against a limit: never worse than amount. Against the model: never worse than its
    value by ratio.
    """

    metric: str
    text: str
    against: Against
    ratio: float = 0.0
    amount: float = 0.0

    @property
    def meaning(self) -> Metric:
        """The metric that is meant."""
        return meaning_of(self.metric)


def parse_budget(rule: str) -> Budget:
    """The budget of "METRIC:LIMIT". Raises UsageError."""
    name, colon, limit = (part.strip() for part in rule.partition(":"))
    if not colon:
        raise UsageError(f"budget {rule!r} names no limit; write exposed_comm:5%")
    return budget_of(name, limit)


def budget_of(name: str, limit: str) -> Budget:
    """The budget of the metric and its limit. Raises UsageError."""
    metric = metric_named(name)
    if metric is None:
        known = ", ".join(one.name for one in METRICS)
        raise UsageError(f"no metric is called {name!r}; there are {known}")
    text = limit.strip()
    if text == "exact":
        if not metric.exact:
            raise UsageError(f"{name} is measured, not counted: it cannot be exact; write 5%")
        return Budget(name, text, "baseline")
    bound, model = {1: "<=", -1: ">="}[metric.worse], {1: "model+", -1: "model-"}[metric.worse]
    if text.startswith(bound):
        return Budget(name, text, "limit", amount=_amount(metric, text[2:], name))
    if text.startswith(model):
        return Budget(name, text, "model", ratio=_ratio(text[len(model) :], name))
    parts = [part.strip() for part in text.split(",")]
    ratios = [_ratio(part, name) for part in parts if part.endswith("%")]
    amounts = [_amount(metric, part, name) for part in parts if not part.endswith("%")]
    return Budget(name, text, "baseline", max(ratios, default=0.0), max(amounts, default=0.0))


def _ratio(text: str, name: str) -> float:
    found = _NUMBER.match(text.strip())
    if found is None or found[2] != "%":
        raise _senseless(name, text)
    return float(found[1]) / 100


def _amount(metric: Metric, text: str, name: str) -> float:
    found = _NUMBER.match(text.strip())
    scale = None if found is None else _SCALES[metric.unit].get(found[2])
    if found is None or scale is None:
        raise _senseless(name, text)
    value = float(found[1]) * scale
    assert math.isfinite(value)
    return value


def _senseless(name: str, text: str) -> UsageError:
    metric = meaning_of(name)
    units = " ".join(unit or "4" for unit in _SCALES[metric.unit])
    bound = "<=" if metric.worse > 0 else ">="
    return UsageError(
        f"budget of {name}: {text.strip()!r} is no limit; write 5%, 5%,1pt or {bound}10% "
        f"(its units: {units})"
    )


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
