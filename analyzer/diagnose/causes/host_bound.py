"""Host-bound: the idle time that hosts cause on all ranks alike."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from stepsplit.analyzer import units
from stepsplit.analyzer.diagnose.causes.cause import CauseEntry, Remedy, replay_remedy
from stepsplit.analyzer.diagnose.causes.code_places import describe_place
from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.diagnose.causes.host_time import compute_rank_means, compute_step_median
from stepsplit.analyzer.diagnose.graph.dependency_graph import DependencyGraph
from stepsplit.analyzer.diagnose.graph.replay import measure_excess, reduce_work
from stepsplit.analyzer.report.explain import explain_idle


def find_host_bound(context: CauseContext) -> Iterator[Remedy]:
    """Find the idle time that all ranks have in common."""
    host = context.host
    common = compute_step_median(context, host.sum_rest_ns(context))
    idle = replace(context, graph=host.rest).sum_work_ns("idle")
    cut_ns = measure_excess(host.rest, "idle", np.maximum(idle - common, 0))
    share = float(common[context.counted].mean()) / context.mean_ns
    on_device = context.split.ranks[0].trace.on_device
    what = "GPU idle" if on_device else "idle"
    limit = "; on a CPU most of it usually stays: an upper limit, no saving to expect"
    recorded = context.ranks[np.unique(context.graph.steps.rank[context.counted])].tolist()
    where = {1: "", 2: " on both ranks"}.get(len(context.ranks), " on most ranks")
    if len(recorded) < min(len(context.ranks), 3):
        where = f" on rank{'s' if recorded[1:] else ''} {units.format_number_list(recorded)}"
    causes = [one for causes in context.split.detail.idle for one in causes]
    rest = host.select_rest().list_spans(len(context.ranks))

    def remove(graph: DependencyGraph) -> DependencyGraph:
        return reduce_work(graph, "idle", cut_ns)

    # Also in a pipeline, where stages idle in turn, no more than the idle time that is shown.
    idle_ns = context.select_bucket_ns("idle").astype(np.float64)
    most_ns = round(float(compute_rank_means(context, idle_ns).max()))
    yield replay_remedy(
        context,
        remove,
        bucket="idle",
        measured_ns=idle[context.counted].mean(),
        predicted_ns=None,
        rows=context.counted,
        message=(
            f"{what} {units.format_percent(share)} of the step{where} (host-bound); "
            f"{explain_idle(host.list_causes(causes))}{describe_place(context, rest, common=True)}"
            f"{'' if on_device else limit}"
        ),
        at_most_ns=most_ns,
        gain_kind="alone" if on_device else "upper_limit",
    )


HOST_BOUND = CauseEntry("host_bound", find_host_bound, basis="measured", with_profiler=True)
