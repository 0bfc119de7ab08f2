"""A verdict for services that keep histories of benchmarks: Bencher, github-action-benchmark."""

from __future__ import annotations

import msgspec

from stepsplit.analyzer.regression.check_result import Judged, Verdict
from stepsplit.analyzer.regression.metrics import meaning_of
from stepsplit.dashboard.reporters.verdict_words import one_line


class _Measure(msgspec.Struct):
    value: float


class _Benchmark(msgspec.Struct):
    name: str
    unit: str
    value: float
    extra: str


def bencher(verdict: Verdict) -> bytes:
    """Bencher Metric Format: the candidate's gated metrics as measures of one benchmark, which is
    named by where and on what mesh it ran."""
    measures = {
        one.metric.replace(".", "-"): _Measure(one.candidate)
        for one in verdict.gated
        if one.candidate is not None
    }
    return _text({_name(verdict): measures})


def benchmark_action(verdict: Verdict) -> bytes:
    """customSmallerIsBetter: the candidate's gated metrics of which less is better."""
    rows = [_row(one, verdict) for one in verdict.gated if _smaller_is_better(one)]
    return _text(rows)


def _row(one: Judged, verdict: Verdict) -> _Benchmark:
    assert one.candidate is not None
    name = f"{_name(verdict)}: {one.metric}"
    return _Benchmark(name, meaning_of(one.metric).unit, one.candidate, one_line(one))


def _smaller_is_better(one: Judged) -> bool:
    return meaning_of(one.metric).worse > 0 and one.candidate is not None


def _name(verdict: Verdict) -> str:
    setup = verdict.candidate.setup
    return f"stepsplit {setup.world_size} x {setup.device} {setup.mesh or ''}".strip()


def _text(body: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(body), indent=1) + b"\n"
