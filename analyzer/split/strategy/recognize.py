"""Which strategies a recording shows, from what runs in its steps alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from stepsplit.analyzer.split.calls.match import Matched
from stepsplit.analyzer.split.mesh.layout import Layout
from stepsplit.analyzer.split.steps import Steps
from stepsplit.analyzer.split.strategy.data import data_strategies, sums_of, wrapped
from stepsplit.analyzer.split.strategy.model import model_strategies
from stepsplit.analyzer.split.strategy.named import named_strategies
from stepsplit.analyzer.split.strategy.precision import precisions
from stepsplit.analyzer.split.strategy.seen import Seen, seen_of
from stepsplit.analyzer.split.strategy.sparing import accumulated, offloaded, recomputed
from stepsplit.analyzer.split.strategy.strategy import NAMES, Strategy
from stepsplit.analyzer.trace import RankTrace


def strategies_of(
    traces: Sequence[RankTrace],
    steps: Sequence[Steps],
    matched: Matched,
    layout: Layout,
    schedule: str | None,
) -> tuple[Strategy, ...]:
    """The strategies of all ranks, each once; schedule is the pipeline's, None where unknown.

    What cannot be told is not named: no strategy is inferred from the mesh that run.json states.
    """
    found: list[Strategy] = []
    for i, (trace, windows) in enumerate(zip(traces, steps, strict=True)):
        leads = matched.leads[matched.of_trace(i)]
        found += set(_of_rank(seen_of(trace, windows, leads, layout)))
    sends = any(trace.calls.is_message.any() for trace in traces)
    stages = _pipelined(layout, schedule) if sends or schedule else []
    return _once_each([*found, *stages])


def _of_rank(seen: Seen) -> Iterator[Strategy]:
    if not len(seen.passes):
        yield from named_strategies(seen)
        return
    of_model = model_strategies(seen)
    taken = {one.group for one in of_model if one.strategies[0].name != "ep"}
    context = {one.group for one in of_model if one.strategies[0].name == "cp"}
    data = data_strategies(seen, taken)
    yield from (strategy for one in of_model for strategy in one.strategies)
    yield from data.strategies or wrapped(seen, context)
    yield from accumulated(seen, sums_of(seen, data.groups))
    yield from recomputed(seen)
    yield from offloaded(seen)
    yield from precisions(seen)


def _pipelined(layout: Layout, schedule: str | None) -> list[Strategy]:
    sizes = dict.fromkeys(len(line) for line in layout.pipelines)
    return [Strategy("pp", "pp", size, schedule or "") for size in sizes]


def _once_each(found: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """In the order of NAMES; where ranks differ in the detail alone, that of most of them."""
    counts = Counter(found)
    most: dict[tuple[str, str | None, int | None], Strategy] = {}
    for one in sorted(counts, key=lambda s: (-counts[s], s.detail)):
        most.setdefault((one.name, one.axis, one.size), one)
    return tuple(sorted(most.values(), key=lambda s: (NAMES.index(s.name), s.axis or "", s.detail)))
