"""Numbers of a watched run over time: arrays over ranks in slots of a minute up to a day."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.trace import Int64
from stepsplit.analyzer.watch.records import RankSample
from stepsplit.collectors.formats.watch_notes import RankWindow

# Slots of time, and how long they are kept.

MINUTE_S, TEN_MINUTES_S, HOUR_S, DAY_S = 60, 600, 3_600, 86_400

LEVELS_S = (MINUTE_S, TEN_MINUTES_S, HOUR_S, DAY_S)
"""Lengths of a slot in s; the slots of a level are made of those of the level before."""

KEPT_S = {MINUTE_S: 4 * DAY_S + HOUR_S, TEN_MINUTES_S: 14 * DAY_S, HOUR_S: 100 * DAY_S}
"""How long the slots of a level are kept, by the newest time of the run; those of a day stay."""


def compute_slot_start(unix_ns: int, level_s: int) -> int:
    """The start of the slot of this time, in s since 1970."""
    return unix_ns // 1_000_000_000 // level_s * level_s


# Packed arrays: columns of int64, a row per rank or per part of a rank's steps.

Columns = npt.NDArray[np.int64]
"""Integers by column and row."""


def pack_columns(columns: Columns) -> bytes:
    """The columns as compressed bytes; bytes of one significance stand together, since the upper
    ones are nearly all the same."""
    plain = np.ascontiguousarray(columns, dtype="<i8").view(np.uint8)
    return zlib.compress(plain.reshape(len(columns), -1, 8).transpose(0, 2, 1).tobytes(), 1)


_MOST_BYTES = 1 << 28
"""More than any array has: those of a stranger's store might take all memory."""


def unpack_columns(packed: bytes, number: int) -> Columns:
    """So many columns, of what pack_columns returned."""
    whole = zlib.decompressobj()
    content = whole.decompress(packed, _MOST_BYTES)
    if not whole.eof:
        raise UsageError("the store has an array that stepsplit does not write; choose another one")
    plain = np.frombuffer(content, np.uint8).reshape(number, 8, -1)
    rows: Columns = np.ascontiguousarray(plain.transpose(0, 2, 1)).view("<i8")[:, :, 0]
    return rows.astype(np.int64, copy=False)


# Step times: rank, steps, min, median, max.

_STEP_COLUMNS = 5


def build_step_columns(windows: Iterable[RankWindow]) -> Columns:
    """The step times of some windows."""
    rows = [(w.rank, w.steps, w.min_step_ns, w.median_step_ns, w.max_step_ns) for w in windows]
    return np.array(rows, dtype=np.int64).reshape(-1, _STEP_COLUMNS).T


def pack_steps(columns: Columns) -> bytes:
    """As pack_columns, with the times as differences, which are small."""
    rank, steps, low, median, high = columns
    return pack_columns(np.stack([rank, steps, median - low, median, high - median]))


def unpack_steps(packed: bytes) -> Columns:
    """The columns that pack_steps took."""
    rank, steps, below, median, above = unpack_columns(packed, _STEP_COLUMNS)
    return np.stack([rank, steps, median - below, median, median + above])


def merge_steps(parts: Columns) -> Columns:
    """One row per rank of all of its parts.

    Numbers of steps add up; the shortest and the longest step are those of all parts; the median is
    the median of the parts' medians, weighted by their steps (the lower one of two).
    """
    if not parts.shape[1]:
        return parts
    rank, steps, low, median, high = parts[:, np.lexsort((parts[3], parts[0]))]
    first = np.flatnonzero(np.concatenate([[True], rank[1:] != rank[:-1]]))
    total = np.add.reduceat(steps, first)
    sizes = np.diff(np.append(first, len(rank)))
    # The steps so far within the rank: the sum over all ranks, less that of the ranks before.
    running = np.cumsum(steps) - np.repeat(np.cumsum(total) - total, sizes)
    is_half = 2 * running >= np.repeat(total, sizes)
    # The first part of each rank by which half of its steps is reached; rows of other parts count
    # as beyond the end.
    place = np.minimum.reduceat(np.where(is_half, np.arange(len(rank)), len(rank)), first)
    lowest, highest = np.minimum.reduceat(low, first), np.maximum.reduceat(high, first)
    return np.stack([rank[first], total, lowest, median[place], highest])


@dataclass(frozen=True, slots=True)
class StepSummary:
    """Step times of all ranks in a slot of time, in ns.

    steps is that of the rank with most; the median is the median over ranks of their medians;
    slowest_rank has the largest median of its own.
    """

    steps: int
    ranks: int
    min_step_ns: int
    median_step_ns: int
    max_step_ns: int
    slowest_rank: int
    slowest_median_ns: int


def summarize_steps(parts: Columns) -> StepSummary:
    """The summary of the parts of one slot, of which there is at least one."""
    rank, steps, low, median, high = merge_steps(parts)
    slowest = int(np.argmax(median))
    # The lower one of two, so that the median is a time that a rank has had.
    middle = np.sort(median)[(len(median) - 1) // 2]
    return StepSummary(
        int(steps.max()), len(rank), int(low.min()), int(middle), int(high.max()),
        int(rank[slowest]), int(median[slowest]),
    )  # fmt: skip


# Sums by rank: rank, number of what is added up, sum in ns.

_SUM_COLUMNS = 3


def build_wait_sums(ranks: Sequence[RankSample]) -> Columns:
    """The waits that the ranks of one sample caused."""
    rows = [(one.rank, 1, one.caused_wait_ns) for one in ranks]
    return np.array(rows, dtype=np.int64).reshape(-1, _SUM_COLUMNS).T


def build_local_sums(windows: Iterable[RankWindow]) -> Columns:
    """The local times of some windows, with their steps; without those that are unknown."""
    rows = [(w.rank, w.steps, w.steps * w.local_ns) for w in windows if w.local_ns]
    return merge_sums(np.array(rows, dtype=np.int64).reshape(-1, _SUM_COLUMNS).T)


def merge_sums(parts: Columns) -> Columns:
    """One row per rank, with the sums of its parts."""
    if not parts.shape[1]:
        return parts
    rank, number, sum_ns = parts[:, np.argsort(parts[0], kind="stable")]
    first = np.flatnonzero(np.concatenate([[True], rank[1:] != rank[:-1]]))
    return np.stack([rank[first], np.add.reduceat(number, first), np.add.reduceat(sum_ns, first)])


def unpack_sums(packed: bytes | None) -> Columns:
    """The rank, number and sum in ns of packed sums; of None there are none."""
    if packed is None:
        return np.empty((_SUM_COLUMNS, 0), dtype=np.int64)
    return unpack_columns(packed, _SUM_COLUMNS)


@dataclass(frozen=True, slots=True)
class RankGrid:
    """A mean for each rank in bins of time, in ns.

    mean_ns: bins of time by rank from 0 on; NaN where the rank has no data.
    """

    start_unix_s: Int64
    bin_s: int
    mean_ns: npt.NDArray[np.float64]


def build_rank_grid(
    slots: Iterable[tuple[int, bytes | None]], first_s: int, last_s: int, bin_s: int
) -> RankGrid:
    """The grid from the first to the last time, of slots with their start in s and packed sums."""
    bins = (last_s - first_s) // bin_s + 1
    parts = [((start - first_s) // bin_s, unpack_sums(packed)) for start, packed in slots]
    ranks = max((int(own[0].max(initial=-1)) for _, own in parts), default=-1) + 1
    number, total = np.zeros((ranks, bins)), np.zeros((ranks, bins))
    for at, (rank, count, sum_ns) in parts:
        if 0 <= at < bins:
            # Each rank once: slots are merged before they are packed.
            number[rank, at] += count
            total[rank, at] += sum_ns
    with np.errstate(invalid="ignore"):
        means = np.where(number > 0, total / number, np.nan)
    return RankGrid(first_s + bin_s * np.arange(bins, dtype=np.int64), bin_s, means)


def subtract_usual(grid: RankGrid) -> RankGrid:
    """The grid as excess over the lower median of the ranks in each bin; 0 for ranks below it."""
    # NaN sorts behind all numbers, so that the first ones of a column are the known ones.
    known = np.isfinite(grid.mean_ns).sum(axis=0)
    ordered = np.sort(grid.mean_ns, axis=0)
    usual = np.full(known.shape, np.nan)
    some = np.flatnonzero(known)
    usual[some] = ordered[(known[some] - 1) // 2, some]
    return replace(grid, mean_ns=np.maximum(grid.mean_ns - usual, 0.0))


# Splits of a sample by rank: rank, buckets and memos, caused wait, whether it is estimated.

_SPLIT_FIELDS = tuple(Split.__dataclass_fields__)

_SPLIT_COLUMNS = len(_SPLIT_FIELDS) + 3


def pack_splits(ranks: Sequence[RankSample]) -> bytes:
    """The splits and waits of the ranks of a sample."""
    rows = [
        (
            one.rank, *(getattr(one.split, name) for name in _SPLIT_FIELDS),
            one.caused_wait_ns, one.estimated,
        )
        for one in ranks
    ]  # fmt: skip
    return pack_columns(np.array(rows, dtype=np.int64).reshape(-1, _SPLIT_COLUMNS).T)


def unpack_splits(packed: bytes) -> tuple[RankSample, ...]:
    """The ranks of a sample, without exposed communication by axis."""
    return tuple(
        RankSample(
            rank=row[0], split=Split(*row[1:-2]), caused_wait_ns=row[-2], estimated=bool(row[-1])
        )
        for row in unpack_columns(packed, _SPLIT_COLUMNS).T.tolist()
    )
