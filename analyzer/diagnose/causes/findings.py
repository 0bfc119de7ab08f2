"""The bottlenecks of a run: what CAUSES find, ranked."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer import units
from stepsplit.analyzer.diagnose.causes import CAUSES
from stepsplit.analyzer.diagnose.causes.cause import CauseEntry
from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.diagnose.causes.unmask import unmask
from stepsplit.analyzer.diagnose.counted_work import WorkLaw
from stepsplit.analyzer.diagnose.graph.dependency_graph import DependencyGraph
from stepsplit.analyzer.report.build import compute_profiling_slowdown
from stepsplit.analyzer.report.diagnosis_rows import SlowKernel
from stepsplit.analyzer.report.report import MIN_GAIN_SHARE, Basis, Finding, Settle, sort_findings
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.analyzer.trace import Lack, Note
from stepsplit.collectors.formats.rank_record import RankRecord

MAX_FINDINGS = 5

MAX_REPLAYED_CALLS, MAX_REPLAYED_CALLS_AT_ONCE = 1_500_000, 20_000_000
"""Upper limits of a replay, node by node and, of many ranks, by whole levels: a million calls take
about 60 s and 13 s."""


_TEARS = (Lack.FILE, Lack.DEVICE_END, Lack.KERNELS)
"""What makes a step end, or idle, where its rank lacks events."""


class Bottlenecks(Struct, frozen=True):
    """The bottlenecks of a recording, in the order of Report.findings; notes list analyses that
    were skipped."""

    findings: tuple[Finding, ...]
    notes: tuple[Note, ...] = ()


def find_bottlenecks(
    split: RunSplit,
    graph: DependencyGraph,
    origin_ns: int,
    records: Sequence[RankRecord],
    slow_kernels: Sequence[SlowKernel],
    law: WorkLaw | None = None,
) -> Bottlenecks:
    """Find the bottlenecks of a recording.

    A gain is the reduction of the mean full step if that one cause were fixed, estimated by a
    replay of the recording without it. Gains are not additive.

    Args:
        split: the split recording.
        graph: its dependency graph.
        origin_ns: the report's t0 on the common clock.
        records: what each rank recorded about its own device (clocks, throttling).
        slow_kernels: the kernels that are slower on one rank than on its peers.
        law: what the work that the job counted explains.
    """
    if not len(graph.steps.step):
        return Bottlenecks(())
    lacks = {(note.rank, note.lack) for note in split.notes}
    if not split.size.is_known:
        # More files would settle this, too, whether or not ranks are missing.
        lacks.add((None, Lack.RANKS))
    is_torn = any(lack in _TEARS for _, lack in lacks)
    if is_torn and not graph.steps.full.any():
        text = "bottlenecks not analyzed: no step is whole on any rank, as events are missing"
        return Bottlenecks((), (Note("no_whole_step", text),))
    calls = sum(len(rank.trace.calls) for rank in split.ranks)
    if calls > (MAX_REPLAYED_CALLS_AT_ONCE if graph.levels.is_wide else MAX_REPLAYED_CALLS):
        text = (
            f"bottlenecks not analyzed: {calls:,} calls are too many to replay; record fewer steps"
        )
        return Bottlenecks((), (Note("not_replayed", text),))
    context = CauseContext.build(split, graph, slow_kernels, origin_ns, records)
    if law is not None and law.uneven.any():
        context = replace(context, law=law)
    if context.mean_ns <= 0:
        return Bottlenecks(())
    found = [remedy for cause in CAUSES for remedy in cause.list_remedies(context)]
    # Causes of single ranks may mask each other; one of the whole job stands for itself.
    masking = unmask(context, [remedy for remedy in found if remedy.as_set])
    remedies = [*masking, *(one for one in found if not one.as_set)]
    most_ns: dict[str, int] = {}
    for one in remedies:
        most_ns[one.finding.code] = max(one.finding.gain_ns, most_ns.get(one.finding.code, 0))
    of_code = {cause.code: cause for cause in CAUSES}
    on_device = split.ranks[0].trace.on_device
    numbers = np.unique(graph.steps.step[context.counted])
    least_ns = MIN_GAIN_SHARE * context.mean_ns
    findings: list[Finding] = []
    notes: list[Note] = []
    # Of a truncated file, steps without all events are partial; other losses are within steps.
    lossy = {
        rank
        for rank, lack in lacks
        if rank is not None and lack is Lack.KERNELS and (rank, Lack.FILE) not in lacks
    }
    # Nothing says for whom a call without a counterpart waits, so that no replay shortens its wait.
    unknown_ns = 0.0
    for index, rank in enumerate(split.ranks):
        exposed = rank.attribution.exposed
        unknown = (split.matched.shared[split.matched.slice_trace(index)] < 0)[exposed.call]
        unknown_ns += (exposed.end_ns - exposed.start_ns)[unknown].sum() / len(rank.steps)
    unknown_ns /= len(split.ranks)
    slowdown = compute_profiling_slowdown(records) or 0.0
    for remedy in remedies:
        finding = remedy.finding
        cause = of_code[finding.code]
        ranks = finding.ranks or tuple(context.ranks.tolist())
        if finding.bucket == "idle" and 2 * len(lossy.intersection(ranks)) > len(ranks):
            which = units.format_number_list(sorted(lossy.intersection(ranks)))
            text = f"{finding.message}: cannot tell, as kernels of ranks {which} are missing"
            notes.append(Note("idle_or_lost", text))
            continue
        if cause.explained_by and finding.gain_ns <= most_ns.get(cause.explained_by, 0):
            continue
        # The profiler slows all the work of a CPU alike; on a device its time goes with it.
        if cause.with_profiler and on_device and slowdown > 0:
            own_ns = round(context.mean_ns * slowdown / (1 + slowdown))
            text = (
                f"the saving leaves out {units.format_milliseconds(own_ns)} of the profiler's own"
            )
            gain_ns = max(0, finding.gain_ns - own_ns)
            finding = replace(finding, gain_ns=gain_ns, message=f"{finding.message}; {text}")
        # What happened once may not happen again, whatever the cause.
        is_once = len(finding.steps or numbers) == 1 and not remedy.names_steps
        if is_once and cause.of_peers and not on_device and not remedy.does_more:
            if finding.gain_ns >= least_ns:
                text = (
                    f"{finding.message}: cannot tell whether this lasts, as on a CPU one step may"
                    " take longer on a rank because another process runs; record more steps"
                )
                notes.append(Note("single_step", text))
            continue
        if is_once:
            finding = replace(finding, message=f"{finding.message}; from a single step")
        if cause.of_peers and unknown_ns >= least_ns:
            text = "at least, as calls that are not matched across ranks may wait for it, too"
            finding = replace(finding, message=f"{finding.message}; {text}")
        if finding.gain_ns >= least_ns:
            finding = replace(finding, basis=_complete_basis(context, finding, cause, lacks))
            findings.append(finding)
        elif cause.note_below:
            saves = units.format_milliseconds(max(finding.gain_ns, 0))
            notes.append(Note(finding.code, f"{finding.message}; without it a step saves {saves}"))
    ranked = sort_findings(findings)
    shown = ranked[:MAX_FINDINGS]
    # The largest one is not left out because it comes last.
    largest = max(ranked, key=lambda one: one.gain_ns, default=None)
    if largest is not None and largest not in shown:
        shown = (*shown[:-1], largest)
    return Bottlenecks(shown, tuple(notes))


_SETTLES_LACK: tuple[tuple[Lack, Settle], ...] = (
    (Lack.RANKS, "missing_ranks"),
    (Lack.FILE, "whole_files"),
    (Lack.CLOCK, "clocks"),
)


def _complete_basis(
    context: CauseContext,
    finding: Finding,
    cause: CauseEntry,
    lacks: Collection[tuple[int | None, Lack | None]],
) -> Basis:
    """The basis of a finding, with what is missing of ranks that it compares or waits for."""
    numbers = np.unique(context.graph.steps.step[context.counted])
    basis = finding.basis or Basis(cause.basis, 0, 0)
    needs = dict.fromkeys(basis.would_settle)
    if len(numbers) == 1:
        needs["more_steps"] = None
    if cause.of_peers or finding.bucket in ("skew", "bubble", "collective", "p2p"):
        missing = {lack for _, lack in lacks}
        needs |= dict.fromkeys(settle for lack, settle in _SETTLES_LACK if lack in missing)
    # Of ranks that mask each other, all steps.
    return replace(
        basis,
        steps=len(finding.steps) or len(numbers),
        of_steps=basis.of_steps or len(numbers),
        repeats=basis.repeats or int(context.counted.sum()),
        would_settle=tuple(needs),
    )
