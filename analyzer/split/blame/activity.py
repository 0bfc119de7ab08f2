"""How much time a rank had spent in each bucket up to an instant."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.trace import Int64, UInt8


@dataclass(frozen=True, slots=True)
class Activity:
    """A band of buckets, sorted and disjoint; sums_ns[i] is what was spent before its i-th part."""

    start_ns: Int64
    end_ns: Int64
    bucket: UInt8
    sums_ns: Int64

    @classmethod
    def of(cls, start_ns: Int64, end_ns: Int64, bucket: UInt8) -> Activity:
        """The activity of such a band, of one part at least."""
        spent = np.zeros((len(start_ns) + 1, len(BUCKETS)), dtype=np.int64)
        spent[np.arange(1, len(start_ns) + 1), bucket] = end_ns - start_ns
        return cls(start_ns, end_ns, bucket, np.cumsum(spent, axis=0))

    def spent_ns(self, at_ns: Int64) -> Int64:
        """For each instant the time spent in each bucket before it: (instants, buckets)."""
        part = np.clip(np.searchsorted(self.start_ns, at_ns, side="right") - 1, 0, None)
        spent = self.sums_ns[part].copy()
        within = np.clip(at_ns, self.start_ns[part], self.end_ns[part]) - self.start_ns[part]
        spent[np.arange(len(at_ns)), self.bucket[part]] += within
        return spent
