"""The points of a watch for all of its sinks, kept while one cannot be reached."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from stepsplit.analyzer.errors import StepsplitError
from stepsplit.analyzer.watch.records import WatchBatch
from stepsplit.collectors.guard import warn
from stepsplit.collectors.record.log_to import SinkName
from stepsplit.dashboard.outage import Outage, choose_pause_s
from stepsplit.dashboard.sinks.log_to import open_sink
from stepsplit.dashboard.sinks.scalars import ScalarPoint, Sink, build_batch_points

MOST_POINTS = 1_000
"""Points that are kept for a sink while it cannot be reached, the newest."""


class PointLogger:
    """Logs the points of a watch to sinks, on the host of rank 0.

    A sink that fails costs one line; its points are kept in memory, and it is tried again after
    longer and longer pauses.
    """

    def __init__(self, sinks: Sequence[SinkName]) -> None:
        self._feeds = [_SinkFeed(sink) for sink in sinks]
        self._has_rank_0 = False

    def add(self, batch: WatchBatch) -> None:
        """Adds the points of a batch."""
        self._has_rank_0 |= any(window.rank == 0 for window in batch.windows)
        if self._feeds and self._has_rank_0:
            points = build_batch_points(batch)
            for feed in self._feeds:
                feed.points.extend(points)

    def write(self, is_last: bool = False) -> None:
        """Writes what is new. is_last: tries once more also within a pause."""
        for feed in self._feeds:
            feed.write(is_last)

    def close(self) -> None:
        """Ends the connections."""
        for feed in self._feeds:
            feed.close()


class _SinkFeed:
    """The points for one sink that are not written yet."""

    def __init__(self, name: SinkName) -> None:
        self.points: deque[ScalarPoint] = deque(maxlen=MOST_POINTS)
        self._name = name
        self._sink: Sink | None = None
        self._outage, self._failures, self._next_s = Outage(), 0, 0.0

    def write(self, is_last: bool) -> None:
        if not self.points or (time.monotonic() < self._next_s and not is_last):
            return
        try:
            self._sink = self._sink or open_sink(self._name)
            self._sink.write(tuple(self.points))
        except Exception as error:  # noqa: BLE001 - a library's failure must not end the watch
            text = str(error) if isinstance(error, StepsplitError) else f"{self._name}: {error!r}"
            self._outage.report(f"{text}; it is tried again, with the newest {MOST_POINTS} points")
            self._next_s = time.monotonic() + choose_pause_s(self._failures)
            self._failures += 1
            return
        self.points.clear()
        self._outage.end()
        self._failures, self._next_s = 0, 0.0

    def close(self) -> None:
        if self._sink is None:
            return
        try:
            self._sink.close()
        except StepsplitError as error:
            warn(str(error))
