"""What a cause is: one thing that costs steps time, how it is found, and what would fix it.

A cause is one module of this folder with one entry, a CauseEntry, which __init__.py lists. What
ranks and prints findings asks the entry, and never which cause it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer import units
from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.diagnose.graph.dependency_graph import DependencyGraph
from stepsplit.analyzer.diagnose.graph.replay import Change, StepGains
from stepsplit.analyzer.report.report import (
    MIN_GAIN_SHARE,
    Basis,
    BasisKind,
    EventRef,
    Finding,
    GainKind,
    Settle,
)
from stepsplit.analyzer.trace import Bool, Float, Int64

_NEARLY_ALL, _SEVERAL = 0.9, 3
"""Nearly all of what happened in a step, of several, is named with it."""

_APART = 5
"""Two steps or more with nearly all of a saving are named if each has so many times that of any
other: noise, which has two signs, does not look so."""

SIGMAS = 2.0
"""A saving is known if it exceeds so many of its standard errors."""


class Remedy(Struct, frozen=True):
    """A finding and the change of the graph that would fix it.

    Attributes:
        finding: The finding, with the gain of this change alone.
        change: The change; None where the saving is computed and not replayed.
        as_set: What ranks with it are, where several mask each other ("ranks 1 and 2 are ...").
        is_doubtful: Whether what it says is inferred, as the recording has no evidence of it.
        names_steps: Whether its message says in which steps it is.
        does_more: Whether it is seen to do more than its peers: on a CPU, longer may also be that
            another process ran.
    """

    finding: Finding
    change: Change | None
    as_set: str = ""
    is_doubtful: bool = False
    names_steps: bool = False
    does_more: bool = False

    def apply(self, graph: DependencyGraph) -> DependencyGraph:
        """The graph with the cause fixed."""
        return self.change(graph) if self.change is not None else graph


class CauseEntry(Struct, frozen=True):
    """An entry of CAUSES.

    Attributes:
        code: The code of its findings in report.json.
        basis: How it is known that it costs time. A finding with a doubt may say less.
        find: Finds it in a recording; a remedy for each place, in any order. Those that gain too
            little are left out afterwards. The findings need no code.
        as_set: What ranks or links with it are called where several of them mask each other; ""
            for what costs the whole job, which is not tried in sets, unless a remedy says its own.
        with_profiler: Whether the profiler itself adds to its time on a GPU, as it does to the
            host's for each op and launch.
        of_peers: Whether it compares ranks with their peers: in a single step of a CPU run it is a
            note of the report, unless a rank is seen to do more.
        explained_by: The code of a cause that, where it costs more, is the reason for this one.
        note_below: Whether one that gains too little for a finding is a note of the report.
    """

    code: str
    find: Callable[[CauseContext], Iterable[Remedy]]
    basis: BasisKind
    as_set: str = ""
    with_profiler: bool = False
    of_peers: bool = False
    explained_by: str = ""
    note_below: bool = False

    def list_remedies(self, context: CauseContext) -> list[Remedy]:
        """What was found, under the code of this entry."""
        remedies = []
        for one in self.find(context):
            basis = one.finding.basis or Basis(self.basis, 0, 0)
            if not one.is_doubtful:
                basis = replace(basis, kind=self.basis)
            finding = replace(one.finding, code=self.code, basis=basis)
            remedies.append(replace(one, finding=finding, as_set=one.as_set or self.as_set))
        return remedies


def replay_remedy(
    context: CauseContext,
    change: Change,
    *,
    bucket: str,
    measured_ns: float,
    predicted_ns: float | None,
    rows: Bool,
    message: str,
    ranks: tuple[int, ...] = (),
    events: tuple[EventRef, ...] = (),
    gains: StepGains | None = None,
    at_most_ns: int | None = None,
    gain_kind: GainKind = "alone",
    would_settle: tuple[Settle, ...] = (),
    is_doubtful: bool = False,
    names_steps: bool = False,
) -> Remedy:
    """The remedy whose gain a replay of the changed graph says.

    Args:
        context: the recording.
        change: what would fix it.
        bucket: the bucket of the lost time.
        measured_ns: what it takes of a step.
        predicted_ns: what it would take after the fix; None if unknown.
        rows: the steps of ranks that have it, of the graph's.
        message: the finding in one sentence.
        ranks: the ranks to blame; () for all.
        events: examples to look at.
        gains: what the replay says, if it is known already.
        at_most_ns: what the gain cannot exceed; None for no limit.
        gain_kind: what the gain is.
        would_settle: what would settle its doubts.
        is_doubtful: whether it is inferred for want of evidence.
        names_steps: whether the message says in which steps it is.
    """
    if gains is None:
        gains = context.compute_step_gains(change(context.graph))
    gain_ns = gains.mean_ns if at_most_ns is None else min(gains.mean_ns, at_most_ns)
    by_step, numbers = gains.by_step, gains.numbers
    spread_ns = None
    if len(by_step) > 1:
        spread_ns = round(float(by_step.std(ddof=1)))
        # Steps with nearly all of it are named; less than its spread is not known. Of what a replay
        # alone hardly changes, as where another cause masks it, neither is said.
        dominant = _find_dominant_steps(by_step)
        least_ns = MIN_GAIN_SHARE * context.mean_ns
        if names_steps or len(by_step) < _SEVERAL or gain_ns < least_ns:
            pass
        elif len(dominant):
            named = units.format_number_list(sorted(numbers[dominant].tolist()))
            message += f"; nearly all of it in step{'s' if len(dominant) > 1 else ''} {named}"
            names_steps = True
        elif gain_ns < SIGMAS * spread_ns / math.sqrt(len(by_step)):
            message += f"; within its spread between steps ({units.format_milliseconds(spread_ns)})"
            would_settle = (*would_settle, "more_steps")
    finding = Finding(
        code="",
        bucket=bucket,
        gain_ns=gain_ns,
        measured_ns=int(measured_ns),
        predicted_ns=None if predicted_ns is None else int(predicted_ns),
        ranks=ranks,
        steps=context.list_steps(rows),
        events=events,
        message=message,
        basis=Basis(
            "inferred",
            len(context.list_steps(rows)),
            len(by_step),
            repeats=int((rows & context.counted).sum()),
            spread_ns=spread_ns,
            would_settle=would_settle,
        ),
        gain_kind=gain_kind,
    )
    return Remedy(finding, change, is_doubtful=is_doubtful, names_steps=names_steps)


def _find_dominant_steps(saved_ns: Float) -> Int64:
    """The fewest steps with nearly all of a saving, at most half of them; none if it is spread out,
    or if several are not well above all others. saved_ns has an element for each step."""
    largest_first = np.argsort(-saved_ns, kind="stable")
    total_ns = np.maximum(saved_ns, 0).sum()
    for count in range(1, max(1, len(saved_ns) // 2) + 1):
        steps, others = largest_first[:count], largest_first[count:]
        if saved_ns[steps].sum() >= _NEARLY_ALL * total_ns > 0:
            is_apart = saved_ns[steps].min() >= _APART * np.abs(saved_ns[others]).max()
            return steps if count == 1 or is_apart else largest_first[:0]
    return largest_first[:0]
