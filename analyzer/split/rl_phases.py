"""The phase of the RL step in which a rank is at each instant, by the marks of its framework."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import Intervals, union
from stepsplit.analyzer.split.call_purposes import ENGINE
from stepsplit.analyzer.trace import Bool, Category, Int64, RankTrace
from stepsplit.collectors.formats.rl_marks import (
    PHASES,
    find_phase_of_mark,
    is_telling_mark,
    is_whole_mark,
    read_decode_step,
)

NO_MARKS = re.compile(
    r"^(?:ProfilerStep#|Optimizer\.|DistributedDataParallel\.|FSDP::|FullyShardedDataParallel\._"
    r"|nn\.Module: |nccl:|gloo:|c10d|hccl[:_]|stepsplit::|\[param\||## |PP:|Torch-Compiled Region"
    r"|TorchDynamo|PyTorch Profiler|Iteration Start: |enumerate\(DataLoader\))"
    r"| \(dynamo_timed\)$"
)
"""Ranges of torch, of the communication libraries and of the recorder: no marks of the job."""

_OF_RL = frozenset({"generation", "reward", "reference", "weight_sync"})
"""The phases that other trainings do not have."""

_OF_OPTIMIZERS = "update_weights"
"""A mark of a weight synchronization that in other trainings is an optimizer's."""

MOST_MARKS = 24
"""The marks of no known phase that a role's table has: as many as a terminal has lines. Of a job
that names each request or sample there are thousands."""

OTHER_MARKS = "other marks"
"""The phase of the marks beyond these."""

_OPTIMIZER = "Optimizer.step#"

_NUMBER = re.compile(r"\d+")


class DecodeSteps(Struct, frozen=True):
    """The decode steps of an engine, in the order of their start; shape (n,) each.

    sequences is the number that each decodes for.
    """

    start_ns: Int64
    end_ns: Int64
    sequences: Int64


def has_rl_phases(trace: RankTrace) -> bool:
    """Whether the rank marks what only an RL step has.

    That is a mark that only an RL framework has, or two different phases of RL. One ordinary word,
    such as "gen" or "values", shows nothing, nor do decode steps, as an engine that only serves has
    them, but of a rank with a role.
    """
    events = trace.events
    of_rl = tuple(_find_phase(name) in _OF_RL or is_telling_mark(name) for name in events.names)
    if not any(of_rl):
        # Of most recordings the names say so, before any of their millions of events is looked at.
        return False
    ids = np.unique(events.name_id[_mask_marks(trace) & events.name_mask(of_rl)])
    names = [events.names[number] for number in ids.tolist()]
    if trace.role:
        return bool(names)
    if any(map(is_telling_mark, names)):
        return True
    return len({_find_phase(name) for name in names if name != _OF_OPTIMIZERS}) > 1


def list_phases_of_steps(trace: RankTrace, begins: Sequence[int]) -> list[frozenset[str]]:
    """The phases that are marked in each of the steps that begin at these times."""
    events = trace.events
    phase_of_name = [_find_phase(name) for name in events.names]
    known = events.name_mask(tuple(map(bool, phase_of_name)))
    rows = np.flatnonzero(known & events.is_category(Category.ANNOTATION))
    step_of = np.searchsorted(begins, events.start_ns[rows], side="right") - 1
    found: list[set[str]] = [set() for _ in begins]
    for step, name in zip(step_of.tolist(), events.name_id[rows].tolist(), strict=True):
        if step >= 0:
            found[step].add(phase_of_name[name])
    return [frozenset(one) for one in found]


def find_phases(traces: Sequence[RankTrace]) -> list[Mapping[str, Intervals]]:
    """The time of each phase on each rank of a role, in its own ns; no two of a rank overlap.

    The innermost mark of a known phase counts, but of whole marks the outermost. Elsewhere it is
    the optimizer and the backward that torch marks itself, which are training, and else the
    innermost mark, by its name without numbers: of these, the MOST_MARKS with most time on all
    ranks, and the others as OTHER_MARKS.
    """
    labels: dict[str, int] = {}
    painted = [_paint_marks(trace, labels) for trace in traces]
    total_ns = np.zeros(len(labels), dtype=np.int64)
    for edges, label in painted:
        np.add.at(total_ns, label, np.diff(edges, append=edges[-1:]) * (label >= 0))
    unknown = sorted(
        (number for name, number in labels.items() if name not in PHASES),
        key=lambda number: -total_ns[number],
    )
    names = [*labels, OTHER_MARKS]
    kept = np.arange(len(names))
    kept[unknown[MOST_MARKS:]] = labels.get(OTHER_MARKS, len(labels))
    found: list[Mapping[str, Intervals]] = []
    for edges, label in painted:
        own = np.where(label >= 0, kept[label], -1)
        of_rank = {}
        for number in np.unique(own[own >= 0]).tolist():
            chosen = np.flatnonzero(own == number)
            of_rank[names[number]] = union(edges[chosen], edges[chosen + 1])
        found.append(of_rank)
    return found


def _paint_marks(trace: RankTrace, labels: dict[str, int]) -> tuple[Int64, Int64]:
    """The instants at which the phase of the rank changes, and the label of the one from each on,
    -1 for none; labels gets those that are new."""
    events = trace.events
    rows = np.flatnonzero(_mask_marks(trace))
    name_ranks, name_labels = np.zeros((2, len(events.names)), dtype=np.int64)
    for number in np.unique(events.name_id[rows]).tolist():
        name = events.names[number]
        phase = _find_phase(name)
        # What is painted later covers what is painted before.
        name_ranks[number] = 3 if is_whole_mark(name) else 2 if phase else 0
        name_labels[number] = labels.setdefault(phase or _NUMBER.sub("#", name), len(labels))
    training = events.match_prefix(ENGINE) | events.match_prefix(_OPTIMIZER)
    torch_own = union(events.start_ns[training], events.ends_of(training))
    start = np.concatenate((events.start_ns[rows], torch_own.start_ns))
    end = np.concatenate((events.ends_of(rows), torch_own.end_ns))
    name_id = events.name_id[rows]
    rank = np.concatenate((name_ranks[name_id], np.ones(len(torch_own), dtype=np.int64)))
    own_label = np.full(len(torch_own), labels.setdefault("training", len(labels)))
    label = np.concatenate((name_labels[name_id], own_label))
    # By rank, and of equal rank from the outermost to the innermost.
    order = np.lexsort((-end, start, rank))
    edges = np.unique(np.concatenate((start, end)))
    first, last = np.searchsorted(edges, start), np.searchsorted(edges, end)
    painted = np.full(len(edges), -1, dtype=np.int64)
    whole_until = -1
    for row in order.tolist():
        if rank[row] == 3:
            # Within another one of its kind, it is part of that.
            if last[row] <= whole_until:
                continue
            whole_until = last[row]
        painted[first[row] : last[row]] = label[row]
    return edges, painted


def find_generation_marks(trace: RankTrace) -> Intervals:
    """The time of the marks of a generation as a whole, in the rank's own ns."""
    events = trace.events
    named = events.name_mask(tuple(find_phase_of_mark(one) == "generation" for one in events.names))
    mask = named & events.is_category(Category.ANNOTATION)
    return union(events.start_ns[mask], events.ends_of(mask))


def find_decode_steps(trace: RankTrace) -> DecodeSteps:
    """The decode steps that say how many sequences they have; of a batch without one it is 0."""
    events = trace.events
    counts = [read_decode_step(name) for name in events.names]
    known = events.name_mask(tuple(count is not None for count in counts))
    rows = np.flatnonzero(known & events.is_category(Category.ANNOTATION))
    sequences = np.array([count or 0 for count in counts], dtype=np.int64)
    return DecodeSteps(events.start_ns[rows], events.ends_of(rows), sequences[events.name_id[rows]])


def _mask_marks(trace: RankTrace) -> Bool:
    events = trace.events
    return events.is_category(Category.ANNOTATION) & ~events.match_names(NO_MARKS)


@lru_cache(1 << 14)
def _find_phase(name: str) -> str:
    """The phase of a mark; "" if it is of no framework."""
    if read_decode_step(name) is not None:
        return "generation"
    return find_phase_of_mark(name) or ""
