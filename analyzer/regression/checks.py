"""Types of the check: budgets (as rules or TOML) and the result with its JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import msgspec
from msgspec import Struct

from stepsplit.analyzer.errors import DataError, UsageError, read_toml
from stepsplit.analyzer.regression.metrics import (
    METRICS,
    PART,
    PHASE,
    Metric,
    Setup,
    Unit,
    find_metric,
    require_metric,
    split_role,
)
from stepsplit.analyzer.report.io import Document
from stepsplit.collectors.formats.run_spec import SHORTHAND

# Budgets in TOML: a table [budgets] with metric = "limit".


def parse_budgets(rules: Sequence[str]) -> tuple[Budget, ...]:
    """Parse rules and files with rules; the last budget of a metric takes precedence.

    Raises UsageError for an invalid rule, DataError for an invalid file.
    """
    budgets: list[Budget] = []
    for rule in rules:
        is_file = ":" not in rule or Path(rule).is_file()
        budgets += _read_budgets(Path(rule)) if is_file else [parse_budget(rule)]
    return keep_last(budgets)


def keep_last(budgets: Iterable[Budget]) -> tuple[Budget, ...]:
    """One budget of each metric, the last, in the order of their first ones."""
    return tuple({budget.metric: budget for budget in budgets}.values())


def _read_budgets(path: Path) -> Iterator[Budget]:
    if not path.is_file():
        hint = 'pass a TOML file or a rule such as "exposed_comm:5%"'
        raise UsageError(f"{path}: no such file; {hint}")
    body = read_toml(path, 'write [budgets] and exposed_comm = "5%"')
    table = body.get("budgets")
    if not isinstance(table, dict) or not table:
        raise DataError(path, "has no table [budgets]", 'write [budgets] and exposed_comm = "5%"')
    for name, limit in table.items():
        if not isinstance(limit, str):
            raise DataError(path, f"the limit of {name} must be a string", f'write {name} = "5%"')
        try:
            yield build_budget(name, limit)
        except UsageError as error:
            raise DataError(path, str(error), "see stepsplit check --help") from None


# How much worse a candidate may be, such as "exposed_comm:5%"; the same syntax as in TOML files.
#
# 5%        relative to the baseline
# 2pt       percentage points of the step (shares only)
# 3ms 1GiB  absolute amount (times; bytes; GB/s; a plain number for counts)
# 5%,1pt    the larger of both
# 95%       of goodput: as >=95%
# <=10%     absolute limit, independent of the baseline (>= for metrics where less is worse)
# model+20% limit relative to the prediction of the model (model-20% if less is worse)
# exact     no change allowed, compared without statistics (counts and bytes only)

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

    against "baseline": by ratio of its value or by amount, whichever is larger (both 0 for exact).
    against "limit": not worse than amount. against "model": not worse than the prediction by ratio.
    """

    metric: str
    text: str
    against: Against
    ratio: float = 0.0
    amount: float = 0.0

    @property
    def meaning(self) -> Metric:
        """The metric of the budget."""
        return require_metric(self.metric)


def parse_budget(rule: str) -> Budget:
    """Parse "METRIC:LIMIT"; a part of the model is "part:NAME:LIMIT" too, and so is a phase. Raises
    UsageError."""
    if split_role(rule.strip().partition(":")[0])[1] in (PART, PHASE):
        rule = rule.replace(":", ".", 1)
    name, colon, limit = (part.strip() for part in rule.partition(":"))
    if not colon:
        raise UsageError(f"budget {rule!r} has no limit; write for example exposed_comm:5%")
    return build_budget(name, limit)


def build_budget(name: str, limit: str) -> Budget:
    """Build the budget of a metric from the text of its limit. Raises UsageError."""
    name = ".".join(SHORTHAND.get(part, part) for part in name.split("."))
    metric = find_metric(name)
    if metric is None:
        known = ", ".join(one.name for one in METRICS)
        raise UsageError(f"unknown metric {name!r}; use one of {known}")
    text = limit.strip()
    if text == "exact":
        if not metric.exact:
            raise UsageError(f"{name} is a measured metric and cannot be exact; write 5%")
        return Budget(name, text, "baseline")
    if metric.of_job and text.endswith("%") and text[:1].isdigit() and "," not in text:
        # It is asked for by itself: of two jobs with other faults none is the baseline.
        text = f">={text}"
    bound, model = {1: "<=", -1: ">="}[metric.worse], {1: "model+", -1: "model-"}[metric.worse]
    if text.startswith(bound):
        amount = _parse_amount(metric, text[2:], name)
        if metric.of_job and amount > 1:
            raise UsageError(f"{name}: no job has more than 100%; write for example {name}:95%")
        return Budget(name, text, "limit", amount=amount)
    if text.startswith(model):
        return Budget(name, text, "model", ratio=_parse_ratio(text[len(model) :], name))
    parts = [part.strip() for part in text.split(",")]
    ratios = [_parse_ratio(part, name) for part in parts if part.endswith("%")]
    amounts = [_parse_amount(metric, part, name) for part in parts if not part.endswith("%")]
    return Budget(name, text, "baseline", max(ratios, default=0.0), max(amounts, default=0.0))


def _parse_ratio(text: str, name: str) -> float:
    match = _NUMBER.match(text.strip())
    if match is None or match[2] != "%":
        raise _build_limit_error(name, text)
    return float(match[1]) / 100


def _parse_amount(metric: Metric, text: str, name: str) -> float:
    match = _NUMBER.match(text.strip())
    scale = None if match is None else _SCALES[metric.unit].get(match[2])
    if match is None or scale is None:
        raise _build_limit_error(name, text)
    value = float(match[1]) * scale
    assert math.isfinite(value)
    return value


def _build_limit_error(name: str, text: str) -> UsageError:
    metric = require_metric(name)
    units = " ".join(unit or "4" for unit in _SCALES[metric.unit])
    bound = "<=" if metric.worse > 0 else ">="
    return UsageError(
        f"budget of {name}: invalid limit {text.strip()!r}; write 5%, 5%,1pt or {bound}10% "
        f"(units: {units})"
    )


# The result of a check.

SCHEMA = "stepsplit.verdict/1"

Answer = Literal["pass", "regressed", "inconclusive"]
ANSWERS: tuple[Answer, ...] = get_args(Answer)


class CheckedSide(Struct, frozen=True):
    """The runs of one side of a check.

    Attributes:
        runs: names of the runs.
        steps: number of steps of each run over which its values are medians.
        setup: configuration of the first run.
    """

    runs: tuple[str, ...]
    steps: tuple[int, ...]
    setup: Setup


class CheckedMetric(Struct, frozen=True):
    """One metric compared with its budget, in the unit of the metric (share, ns, bytes, bytes/s).

    Attributes:
        metric: name of the metric.
        budget: text of the limit.
        answer: "pass", "regressed" or "inconclusive".
        baseline: mean over the baseline runs; None if unknown.
        candidate: mean over the candidate runs; None if unknown.
        harm: how much worse the candidate is; negative if it is better.
        allowed: how much worse it may be.
        low: lower bound of the 96 % confidence interval of harm.
        high: upper bound of the interval.
        p: p-value, adjusted over all checked metrics (Holm).
        detectable: minimum detectable change at 80 % power. low, high, p and detectable are None
            for counted metrics, and if there are too few runs to estimate the noise.
        note: further explanation, "" if none.
        runs_needed: runs per side that would decide at this noise; None if the result is not
            inconclusive, the noise is not known, or more than 200 would be needed.
        decidable: the smallest budget that as many runs per side as now would decide; None as
            above.
        kind: for "step.other", which steps these are and what they do more than the others, in
            words; "" for what is measured over the headline's steps.
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
    runs_needed: int | None = None
    decidable: float | None = None
    kind: str = ""


class ShiftedMetric(Struct, frozen=True):
    """A significant change of a metric without a budget, in the unit of the metric.

    Attributes:
        metric: name of the metric.
        baseline: mean over the baseline runs.
        candidate: mean over the candidate runs.
        harm: how much worse the candidate is; negative if it is better.
        low: lower bound of the 96 % confidence interval of harm.
        high: upper bound of the interval.
        kind: as in CheckedMetric.
    """

    metric: str
    baseline: float
    candidate: float
    harm: float
    low: float
    high: float
    kind: str = ""


class CallsDelta(Struct, frozen=True):
    """Calls of one op, dtype and size on one axis, per step over all recorded ranks.

    Attributes:
        axis: mesh axis, or the name of the groups.
        op: operation, such as "all_reduce".
        dtype: data type; None if unknown.
        message_bytes: size of one call; None if unknown.
        baseline: calls per step in the baseline.
        candidate: calls per step in the candidate.
        baseline_ns: time of these calls per step (transfer and wait, from medians of one call).
        candidate_ns: the same for the candidate.
    """

    axis: str
    op: str
    dtype: str | None
    message_bytes: int | None
    baseline: int
    candidate: int
    baseline_ns: int
    candidate_ns: int


class Cause(Struct, frozen=True):
    """A likely cause of a regression.

    Attributes:
        bucket: bucket that grew; None if the number of calls changed.
        axis: mesh axis, or of calls the name of their groups; None if it is not a single axis.
        op: operation; None if unknown.
        message_bytes: size of one call; None if unknown.
        rank: rank that the others wait for; None if unknown.
        group: ranks of the group of that rank.
        moved_ns: increase of the mean step of a rank, in ns.
        message: the cause in one sentence.
    """

    bucket: str | None
    axis: str | None
    op: str | None
    message_bytes: int | None
    rank: int | None
    group: tuple[int, ...]
    moved_ns: int
    message: str


class CheckResult(Struct, frozen=True):
    """The result of a check.

    Attributes:
        answer: "regressed" if any metric regressed, else "inconclusive" if any is, else "pass".
        baseline: baseline runs; None without a baseline.
        candidate: candidate runs.
        gated: metrics with a budget.
        causes: likely causes of the regressions.
        calls: calls whose number changed.
        others: other significant changes, without a budget.
        warnings: differences in configuration.
        low_confidence: whether a measured metric was checked with a single run on a side.
        compare_url: page with the comparison of both sides; None if there is none.
        schema: version of the JSON, "stepsplit.verdict/1".
    """

    answer: Answer
    baseline: CheckedSide | None
    candidate: CheckedSide
    gated: tuple[CheckedMetric, ...]
    causes: tuple[Cause, ...] = ()
    calls: tuple[CallsDelta, ...] = ()
    others: tuple[ShiftedMetric, ...] = ()
    warnings: tuple[str, ...] = ()
    low_confidence: bool = False
    compare_url: str | None = None
    schema: str = SCHEMA


# JSON with the schema "stepsplit.verdict/1".


def to_json(result: CheckResult) -> bytes:
    """The result as JSON text."""
    return msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n"


def from_json(text: bytes, source: object = "verdict.json") -> CheckResult:
    """Decode a result. Raises DataError if the text does not have this schema."""
    document = Document(CheckResult, SCHEMA, "a result of stepsplit check", "run the check again")
    return document.decode(text, source)
