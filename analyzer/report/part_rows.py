"""The rows of report.json by part of the model: layer, kind and phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import BUCKETS, Bucket
from stepsplit.analyzer.parts.part import NO_LAYER, UNPLACED, Part
from stepsplit.analyzer.parts.part_times import Evidence, RankParts
from stepsplit.analyzer.report.headline import divide_parts
from stepsplit.analyzer.report.step_rows import StepRow, select_full_steps


class PartRow(Struct, frozen=True):
    """The mean time of a part of the model in a full step, in ns; the rows add up to the mean step,
    and each column to its buckets.

    Attributes:
        layer: number of the layer; None outside of the layers.
        part: what it does: "embedding", "attention", "mlp", "router", "experts", "norm", "head",
            "loss", "optimizer", "gradient_reduction" or "other".
        phase: "forward", "backward" or "recompute"; "other" outside of the passes.
        compute_ns: compute.
        exposed_ns: exposed communication: transfers, and waits for ranks of the same stage.
        bubble_ns: waits for ranks of another stage.
        copy_ns: memory copies.
        idle_ns: idle time, until this part's work starts.
        ranks: number of ranks with it.
        slowest_rank: rank on which it computes longest.
        slowest_compute_ns: its compute in a mean full step of that rank.
        median_compute_ns: median of that over the ranks with this part.
    """

    layer: int | None
    part: str
    phase: str
    compute_ns: int
    exposed_ns: int
    bubble_ns: int
    copy_ns: int
    idle_ns: int
    ranks: int = 1
    slowest_rank: int = 0
    slowest_compute_ns: int = 0
    median_compute_ns: int = 0

    @property
    def total_ns(self) -> int:
        """Its time in the mean step."""
        return self.compute_ns + self.exposed_ns + self.bubble_ns + self.copy_ns + self.idle_ns


class PartEvidence(Struct, frozen=True):
    """How the parts of the model were found.

    Attributes:
        evidence: "modules": ranges of modules; "sequence": the repeating sequence of ops, or
            that of kernels without any; "ranges": other ranges, and the names of ops and kernels,
            which say kinds and no layers; "none".
        layers: number of distinct layers.
        unplaced_share: share of the mean step that nothing places, 0..1; a part of "other".
        ranks: number of ranks with this evidence.
    """

    evidence: Evidence
    layers: int
    unplaced_share: float
    ranks: int


def build_part_rows(
    parts: Sequence[RankParts], steps: Sequence[StepRow]
) -> tuple[tuple[PartRow, ...], PartEvidence | None]:
    """The parts of the mean full step, and how they were found; parts has one entry per rank."""
    counted = {(row.rank, row.step) for row in select_full_steps(steps)}
    numbers: dict[int, list[int]] = defaultdict(list)
    for row in steps:
        numbers[row.rank].append(row.step)
    sums: dict[Part, np.ndarray] = {}
    by_rank: dict[Part, dict[int, float]] = defaultdict(dict)
    for one in parts:
        chosen = [(one.rank, step) in counted for step in numbers[one.rank]]
        if not any(chosen):
            continue
        total = one.ns[np.array(chosen, dtype=np.bool_)].sum(axis=0)
        for place in np.flatnonzero(total.any(axis=1)).tolist():
            part = one.parts[place]
            sums[part] = sums.get(part, 0) + total[place]
            compute_ns = int(total[place, Bucket.COMPUTE]) / sum(chosen)
            by_rank[part][one.rank] = by_rank[part].get(one.rank, 0.0) + compute_ns
    if not sums:
        return (), None
    ordered = sorted(sums)
    # In the order of the buckets, as the mean step is divided, so that they add up to it.
    means = divide_parts(
        [int(sums[part][bucket]) for bucket in range(len(BUCKETS)) for part in ordered],
        len(counted),
    )
    columns = np.array(means, dtype=np.int64).reshape(len(BUCKETS), len(ordered))
    exposed = columns[[Bucket.COLLECTIVE, Bucket.P2P, Bucket.SKEW]].sum(axis=0)
    rows = []
    for place, part in enumerate(ordered):
        own = by_rank[part]
        slowest = max(own, key=lambda rank: (own[rank], -rank))
        rows.append(
            PartRow(
                layer=None if part.layer == NO_LAYER else part.layer,
                part=part.kind.label,
                phase=part.phase.label,
                compute_ns=int(columns[Bucket.COMPUTE, place]),
                exposed_ns=int(exposed[place]),
                bubble_ns=int(columns[Bucket.BUBBLE, place]),
                copy_ns=int(columns[Bucket.COPY, place]),
                idle_ns=int(columns[Bucket.IDLE, place]),
                ranks=len(own),
                slowest_rank=slowest,
                slowest_compute_ns=int(own[slowest]),
                median_compute_ns=int(np.median(list(own.values()))),
            )
        )
    step_ns = sum(row.total_ns for row in rows)
    unplaced_ns = int(sums[UNPLACED].sum()) if UNPLACED in sums else 0
    evidence = [one.evidence for one in parts]
    most = max(sorted(set(evidence)), key=evidence.count)
    return tuple(rows), PartEvidence(
        evidence=most,
        layers=len({part.layer for part in ordered} - {NO_LAYER}),
        unplaced_share=unplaced_ns / (step_ns * len(counted)) if step_ns else 0.0,
        ranks=evidence.count(most),
    )


# Names and words for people.

LEAST_EXCESS = 0.002
"""Share of the step from which a rank that computes longer than the others is named."""

_EVIDENCE = {
    "modules": "by the ranges of modules",
    "ranges": "by the names of ranges, ops and kernels; record --modules for layers",
    "sequence": "by the sequence of ops; record --modules to be sure",
}

PART_NAMES = {"mlp": "MLP", "gradient_reduction": "gradient reduction"}
"""Display names of parts, if different from the identifier."""


def name_part(part: str) -> str:
    """The display name of a part."""
    return PART_NAMES.get(part, part)


def describe_evidence(evidence: PartEvidence) -> str:
    """How the parts were found, and how much of the step is in none."""
    plural = "s" if evidence.layers > 1 else ""
    layers = f", {evidence.layers} layer{plural}" if evidence.layers else ""
    unplaced = f"; {units.format_percent(evidence.unplaced_share)} of the step not placed"
    return f"{_EVIDENCE.get(evidence.evidence, '')}{layers}{unplaced}"
