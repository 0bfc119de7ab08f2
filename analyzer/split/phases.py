"""The phase of the step in which each call was issued."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stepsplit.analyzer.arrays import is_inside, union
from stepsplit.analyzer.split.call_purposes import DDP_FORWARD, ENGINE, find_issue_ns
from stepsplit.analyzer.split.mesh import DATA_AXES, RankLayout
from stepsplit.analyzer.split.microbatch_marks import parse_marks
from stepsplit.analyzer.split.steps import StepWindow
from stepsplit.analyzer.trace import OP_CODE, OPS, Bool, Category, RankTrace


def infer_phases(trace: RankTrace, windows: Sequence[StepWindow], layout: RankLayout) -> list[str]:
    """The phase of each call: forward, backward, grad_sync, optimizer or other.

    A call belongs to the phase in which the host issued it; a pipeline message is classified by its
    direction.
    """
    calls, events = trace.calls, trace.events
    when = find_issue_ns(trace)
    on_host = events.is_category(Category.OP, Category.ANNOTATION)

    def is_issued_in(prefix: str, microbatch_phase: str = "") -> Bool:
        """Which calls were issued in a range with this prefix, or in a microbatch's phase."""
        mask = events.match_prefix(prefix)
        if microbatch_phase:
            marks = [[mark.phase for mark in parse_marks(name, 0)] for name in events.names]
            mask = mask | events.name_mask(tuple(microbatch_phase in phases for phases in marks))
        mask = mask & on_host
        return is_inside(union(events.start_ns[mask], events.ends_of(mask)), when)

    optimizer = is_issued_in("Optimizer.step#")
    backward = is_issued_in(ENGINE, "backward")
    forward = is_issued_in(DDP_FORWARD, "forward")
    # Before the first backward of their step.
    engine_ns = events.start_ns[events.match_prefix(ENGINE)]
    early = np.zeros(len(when), dtype=np.bool_)
    for window in windows:
        first = int(np.searchsorted(engine_ns, window.start_ns))
        limit = int(engine_ns[first]) if first < len(engine_ns) else window.start_ns
        early |= (when >= window.start_ns) & (when < min(limit, window.end_ns))
    # Activations go to later stages of the pipeline, gradients to earlier ones.
    peers, place = np.unique(calls.peer, return_inverse=True)
    own_stage = layout.find_stage(trace.rank)
    ahead = np.array(
        [layout.find_stage(peer) - own_stage if peer >= 0 else 0 for peer in peers.tolist()],
        dtype=np.int64,
    )[place]
    sends, receives = calls.op == OP_CODE["send"], calls.op == OP_CODE["recv"]
    syncs = [list_gradient_sync_ops(layout.find_axes(group)) for group in trace.groups]
    table = np.array([[op in of_group for op in OPS] for of_group in (*syncs, frozenset())])
    reduces_gradients = table[calls.group_id, calls.op]
    # A device runs behind its host: there, calls before the first backward of a window may be those
    # that end the step before it.
    own_early = early & (not trace.on_device)
    phase_names = np.select(
        [
            sends & (ahead > 0) | receives & (ahead < 0),
            sends & (ahead < 0) | receives & (ahead > 0),
            # An optimizer that is given a closure, as by Lightning, runs the passes itself.
            optimizer & ~forward & ~backward,
            ~forward & ~own_early & reduces_gradients,
            backward,
            forward | early,
        ],
        ["forward", "backward", "optimizer", "grad_sync", "backward", "forward"],
        "other",
    )
    phases: list[str] = phase_names.tolist()
    return phases


def list_gradient_sync_ops(axes: frozenset[str]) -> frozenset[str]:
    """The ops that reduce gradients on a group of these axes.

    Data and context parallel ranks have the same weights. On cp alone, reduce_scatter belongs to
    attention.
    """
    if not axes or not axes <= DATA_AXES:
        return frozenset()
    return frozenset({"all_reduce"} if axes == {"cp"} else {"all_reduce", "reduce_scatter"})
