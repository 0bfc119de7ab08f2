"""Where a number comes from: its meaning, its formula and the rows of a report behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.ops import COLLECTIVES, format_factors
from stepsplit.analyzer.report.headline import Summary, summarize
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.step_rows import select_full_steps
from stepsplit.dashboard.agents.answers import pick

Terms = Callable[[Report], Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class NumberEntry:
    """A number of a report.

    Attributes:
        meaning: what it is.
        formula: how it is computed.
        rows: the rows of report.json or of its tables that it is computed from.
        page: the page of the docs with the method.
        terms: the terms of the formula in a report; None if the rows are the terms.
    """

    meaning: str
    formula: str
    rows: str
    page: str
    terms: Terms | None = None


def _get_summary(report: Report) -> Summary | None:
    return report.summary or summarize(report.steps, report.exposed)


def _list_split_terms(report: Report) -> Mapping[str, object]:
    summary = _get_summary(report)
    if summary is None:
        return {}
    own = {f"{one.bucket}_ns": one.mean_ns for one in summary.buckets}
    return {
        "step_ns": summary.step_ns,
        **own,
        "rows_of_steps": len(select_full_steps(report.steps)),
    }


def _list_bucket_terms(bucket: str, report: Report) -> Mapping[str, object]:
    rows = select_full_steps(report.steps)
    if not rows:
        return {}
    summary = _get_summary(report)
    own = [one for one in summary.buckets if one.bucket == bucket] if summary else []
    return {
        f"sum_{bucket}_ns": sum(getattr(row, f"{bucket}_ns") for row in rows),
        "rows_of_steps": len(rows),
        f"mean_{bucket}_ns": own[0].mean_ns if own else None,
        "share": own[0].share if own else None,
    }


def _list_exposed_terms(report: Report) -> Mapping[str, object]:
    summary = _get_summary(report)
    if summary is None:
        return {}
    own = {f"{one.bucket}_ns": one.mean_ns for one in summary.buckets if one.bucket in _EXPOSED}
    return {"exposed_comm_ns": sum(own.values()), **own}


_EXPOSED = ("collective", "p2p", "skew")


def _list_bubble_terms(report: Report) -> Mapping[str, object]:
    one = report.pipeline
    if one is None:
        return {}
    shares = pick(one, "bubble_fraction", "ideal_bubble_fraction", "bubble_overhead")
    return {**shares, "stages": len(one.stages), **pick(one, "microbatches", "schedule")}


def _list_mfu_terms(report: Report) -> Mapping[str, object]:
    one, summary = report.prediction, _get_summary(report)
    if one is None or summary is None:
        return {}
    work = pick(one, "model_flops", "hardware_flops", "convention")
    return {**pick(report, "mfu", "hfu"), **work, "step_ns": summary.step_ns}


_MEANINGS = {
    "compute": "at least one compute kernel runs",
    "collective": "no compute kernel runs, and a collective moves data: every member has arrived",
    "p2p": "no compute kernel runs, and a message moves data: both ends have arrived",
    "skew": "no compute kernel runs, and a collective or message waits for a rank of the same"
    " pipeline stage (a straggler, imbalance)",
    "bubble": "no compute kernel runs, and a collective or message waits for a rank of another"
    " pipeline stage",
    "copy": "none of these, and a memcpy or memset runs",
    "idle": "nothing runs: host-bound, data loading, synchronization",
}

_STEPS = "steps of report.json whose kind is full (all if none is): the tool steps"

_BUCKET_ENTRIES = {
    bucket: NumberEntry(
        f"the time of a step in which {_MEANINGS[bucket]}; every instant is in the first bucket of"
        f" {', '.join(BUCKETS)} that applies",
        f"of a run: the sum of {bucket}_ns over ranks and full steps / the number of these rows",
        _STEPS,
        "docs/method.md",
        partial(_list_bucket_terms, bucket),
    )
    for bucket in BUCKETS
}

NUMBERS: Mapping[str, NumberEntry] = _BUCKET_ENTRIES | {
    "step": NumberEntry(
        "the time of an optimizer step on a rank, from the previous step's end to its own: the"
        " later of the end of the last kernel that it launched on a main stream and of its own"
        " annotation on the host",
        " + ".join(f"{bucket}_ns" for bucket in BUCKETS),
        _STEPS,
        "docs/method.md",
        _list_split_terms,
    ),
    "median": NumberEntry(
        "the median length of a step; a median has no parts, so that buckets and shares are means",
        "median of step_ns over ranks and full steps",
        _STEPS,
        "docs/method.md",
    ),
    "exposed_comm": NumberEntry(
        "communication that compute does not hide, with the waits for ranks of the same stage",
        "collective_ns + p2p_ns + skew_ns",
        "steps; by axis and phase: exposed",
        "docs/method.md",
        _list_exposed_terms,
    ),
    "overlapped": NumberEntry(
        "communication that ran under compute; it is part of compute and costs no time of its own",
        "the time in which compute and communication run at once",
        "steps; by op and axis: overlap",
        "docs/method.md",
    ),
    "bubble_covered": NumberEntry(
        "communication inside the pipeline bubble: removing it gains nothing",
        "transfers while the rank would wait for another stage anyway",
        "steps",
        "docs/method.md",
    ),
    "ambiguous": NumberEntry(
        "gaps of compute for which the accuracy of the timestamps does not decide whether"
        " communication held them up",
        "gaps whose communication ends 5 to 20 us after the next kernel starts",
        "steps",
        "docs/method.md#gaps-of-compute",
    ),
    "bubble_fraction": NumberEntry(
        "how much of the pipeline's time a stage has neither forward nor backward; it is not"
        " bubble_ns, which is waiting",
        "(window - forwards and backwards) / window; window: first forward to last backward over"
        " all stages; ideal for p equal stages and m microbatches (p - 1) / (m + p - 1)",
        "pipeline; the slots: tables/boxes.parquet",
        "docs/method.md",
        _list_bubble_terms,
    ),
    "bubble_overhead": NumberEntry(
        "the same bubble against useful time",
        "(window - forwards and backwards) / forwards and backwards; ideal (p - 1) / m, interleaved"
        " with v chunks (p - 1) / (v m)",
        "pipeline",
        "docs/method.md",
        _list_bubble_terms,
    ),
    "transfer": NumberEntry(
        "the time in which a call moves data, without waiting for members",
        "from the last member's arrival to the end; of a rank whose peers are not recorded: the"
        " usual time of such a call, marked as an estimate",
        "collectives (medians), tables/slices.parquet (each call)",
        "docs/method.md#transfer-and-waiting",
    ),
    "wait": NumberEntry(
        "the time in which a rank has arrived at a call and another has not",
        "last arrival - own arrival, on the common clock",
        "waits, tables/waits.parquet",
        "docs/method.md#transfer-and-waiting",
    ),
    "algbw": NumberEntry(
        "bandwidth of a call as nccl-tests counts it; a straggler does not make it smaller",
        "message_bytes / transfer_ns",
        "collectives",
        "docs/method.md#transfer-and-waiting",
    ),
    "busbw": NumberEntry(
        "bandwidth that the links carry, comparable between ops and numbers of ranks",
        "algbw x factor: "
        + "; ".join(f"{', '.join(ops)} {factor}" for factor, ops in format_factors(COLLECTIVES)),
        "collectives",
        "docs/method.md#transfer-and-waiting",
    ),
    "calls_per_step": NumberEntry(
        "calls of this kind in most full steps: collectives of one group, each counted once for its"
        " members; sends and receives of all ranks of a group. 0 if only some steps have them",
        "calls of all members in most full steps / members; of messages without the division",
        "step_calls, collectives",
        "docs/method.md#transfer-and-waiting",
    ),
    "caused": NumberEntry(
        "waiting of others that one rank caused, each instant once; a rank that waits itself passes"
        " the blame on. Rank null: the schedule's ideal bubble, variation, or unknown",
        "caused_skew_ns + caused_bubble_ns; over all rows they are the sums of skew and bubble",
        "blame: the tool waits",
        "docs/method.md#blame",
    ),
    "gain": NumberEntry(
        "by how much the mean step would be shorter without one cause; gains of several findings"
        " do not add up",
        "mean full step - mean full step of a replay of the dependency graph without the cause",
        "findings",
        "docs/causes.md",
    ),
    "critical_path": NumberEntry(
        "the chain of work and transfers that ends last; shortening anything else gains nothing",
        "back from the last end of a step over all ranks: at each wait to the rank waited for",
        "critical_path, path_kernels",
        "docs/method.md#the-end-of-a-step",
    ),
    "mfu": NumberEntry(
        "model FLOPs utilization, without recomputation; hfu counts recomputation",
        "model_flops / (step time x dense peak of the ranks at the training dtype)",
        "prediction and steps; needs a model comparison",
        "docs/model.md#flops-and-mfu",
        _list_mfu_terms,
    ),
    "hfu": NumberEntry(
        "hardware FLOPs utilization: as mfu, with recomputation",
        "hardware_flops / (step time x dense peak of the ranks at the training dtype)",
        "prediction and steps; needs a model comparison",
        "docs/model.md#flops-and-mfu",
        _list_mfu_terms,
    ),
    "slowdown": NumberEntry(
        "cost of stragglers as a ratio (metric S of Lin et al., arXiv:2505.05713)",
        "step / step in which all ranks and stages have equal compute and no call transfers longer"
        " than the median of its op and size, both without idle hosts",
        "what_if",
        "docs/causes.md#what-if",
    ),
    "offset": NumberEntry(
        "how far the clock of a rank is off the common clock",
        "t_report = t - offset_ns - drift; from the ends of calls that end together, bounded by"
        " causality",
        "clocks",
        "docs/method.md#clock-alignment",
    ),
    "harm": NumberEntry(
        "by how much the candidate is worse, in the unit of the metric; negative if better",
        "candidate - baseline, or the reverse where more is better; regressed if the confidence"
        " interval is above allowed, pass if below, else inconclusive",
        "gated rows of check",
        "docs/check.md#how-it-decides",
    ),
}
"""Entries by name, without the unit."""

_ALIASES = {
    "exposed": "exposed_comm", "exposed_communication": "exposed_comm", "p2p_time": "p2p",
    "straggler": "caused", "blame": "caused", "saving": "gain", "step_time": "step",
    "bandwidth": "busbw", "ideal_bubble_fraction": "bubble_fraction", "drift": "offset",
    "clock": "offset", "overlap": "overlapped", "detectable": "harm", "allowed": "harm",
}  # fmt: skip

_UNITS = ("_bytes_per_s", "_per_s", "_ns", "_bytes", "_median", "_mean", "_fraction", "_share")


def find_number(name: str) -> tuple[str, NumberEntry] | None:
    """The entry of a number, however its unit is written: "busbw_bytes_per_s", "mean_ns"; None if
    it has none."""
    # However an agent writes it: "Mean step", "mean-step", "mean_step_ns".
    plain = "_".join(name.strip().lower().replace("-", "_").split())[:80]
    tried = [plain]
    # Twice: a name may end in two of them, as in transfer_ns_median.
    for unit in (*_UNITS, *_UNITS):
        tried += [one.removesuffix(unit) for one in tried]
    tried += [one.removeprefix("mean_").removeprefix("total_") for one in tried]
    for one in tried:
        found = _ALIASES.get(one, one)
        if found in NUMBERS:
            return found, NUMBERS[found]
    return None
