"""A comparison as JSON, in and out: schema "stepsplit.compare/1".

baseline, candidate   a run each: name, steps (how many full ones), median_ns, low_ns and high_ns of
                      them, mean (the split: seven buckets and the memos), bubble_fraction,
                      peak_allocated_bytes and mfu, null where unknown
step                  of the median step: difference_ns (candidate - baseline), ratio (candidate /
                      baseline), within_noise (null: too few steps to say)
settings              name, baseline, candidate: what is set differently, null where unknown
buckets               bucket, baseline_ns, candidate_ns, difference_ns: means a step and rank; the
                      differences add up to that of the mean step
exposed               axis, bucket, baseline_ns, candidate_ns: means a step and rank
collectives           axis, op, dtype, message_bytes; baseline and candidate with count (calls a
                      step and rank), transfer_ns, wait_ns and busbw_bytes_per_s, null on the side
                      that has no such calls
kernels               family, baseline_ns, candidate_ns, baseline_count, candidate_count: a step and
                      rank

Rows are ordered by what changed most.
"""

from __future__ import annotations

import msgspec

from stepsplit.analyzer.compare.runs.comparison import SCHEMA, BucketChange, RunComparison
from stepsplit.analyzer.errors import DataError

_MEND = "compare the runs again"


class _Step(msgspec.Struct, frozen=True):
    difference_ns: int
    ratio: float | None
    within_noise: bool | None


class _Bucket(msgspec.Struct, frozen=True):
    bucket: str
    baseline_ns: int
    candidate_ns: int
    difference_ns: int


def to_json(found: RunComparison) -> bytes:
    """The comparison as JSON text."""
    told = msgspec.to_builtins(found)
    sides = {"baseline": told.pop("baseline"), "candidate": told.pop("candidate")}
    step = _Step(found.difference_ns, found.ratio, found.within_noise)
    settings, buckets = told.pop("settings"), [_bucket(row) for row in found.buckets]
    body = {"schema": SCHEMA, **sides, "step": step, "settings": settings, "buckets": buckets}
    return msgspec.json.format(msgspec.json.encode(body | told), indent=1) + b"\n"


def from_json(text: bytes, source: object = "compare.json") -> RunComparison:
    """The comparison of the text. Raises DataError where the text is none of this schema."""
    try:
        schema = msgspec.json.decode(text, type=_Named).schema
        if schema == SCHEMA:
            return msgspec.json.decode(text, type=RunComparison)
    except (msgspec.DecodeError, UnicodeDecodeError, AssertionError) as error:
        raise DataError(source, f"not a stepsplit comparison ({error})", _MEND) from None
    raise DataError(source, f"of schema {schema}, not {SCHEMA}", _MEND)


class _Named(msgspec.Struct, frozen=True):
    schema: str


def _bucket(row: BucketChange) -> _Bucket:
    return _Bucket(row.bucket, row.baseline_ns, row.candidate_ns, row.difference_ns)
