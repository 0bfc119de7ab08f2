"""What a cause is: one thing that costs steps time, how it is found, and what would fix it.

A cause is one module of this folder with one entry, a CauseEntry, which __init__.py lists. What
ranks and prints findings asks the entry, and never which cause it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.diagnose.graph.dependency_graph import DependencyGraph
from stepsplit.analyzer.diagnose.graph.replay import Change
from stepsplit.analyzer.report.report import EventRef, Finding
from stepsplit.analyzer.trace import Bool


class Remedy(Struct, frozen=True):
    """A finding and the change of the graph that would fix it.

    Attributes:
        finding: The finding, with the gain of this change alone.
        change: The change; None where the saving is computed and not replayed.
        as_set: What ranks with it are, where several mask each other ("ranks 1 and 2 are ...").
    """

    finding: Finding
    change: Change | None
    as_set: str = ""

    def apply(self, graph: DependencyGraph) -> DependencyGraph:
        """The graph with the cause fixed."""
        return self.change(graph) if self.change is not None else graph


@dataclass(frozen=True, slots=True)
class CauseEntry:
    """An entry of CAUSES.

    Attributes:
        code: The code of its findings in report.json.
        find: Finds it in a recording; a remedy for each place, in any order. Those that gain too
            little are left out afterwards. The findings need no code.
        as_set: What ranks or links with it are called where several of them mask each other; ""
            for what costs the whole job, which is not tried in sets.
        with_profiler: Whether the profiler itself adds to its time on a GPU, as it does to the
            host's for each op and launch.
        last_on_cpu: Whether its findings come last in a run without devices.
        of_peers: Whether it compares ranks with their peers. One that rests on a single step says
            so.
        explained_by: The code of a cause that, where it costs more, is the reason for this one.
        note_below: Whether one that gains too little for a finding is a note of the report.
    """

    code: str
    find: Callable[[CauseContext], Iterable[Remedy]]
    as_set: str = ""
    with_profiler: bool = False
    last_on_cpu: bool = False
    of_peers: bool = False
    explained_by: str = ""
    note_below: bool = False

    def list_remedies(self, context: CauseContext) -> list[Remedy]:
        """What was found, under the code of this entry."""
        return [
            Remedy(replace(one.finding, code=self.code), one.change, self.as_set)
            for one in self.find(context)
        ]


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
    gain_ns: int | None = None,
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
        gain_ns: what the replay says, if it is known already.
    """
    if gain_ns is None:
        gain_ns = context.compute_gain_ns(change(context.graph))
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
    )
    return Remedy(finding, change)
