"""What a pipeline schedule costs even when every stage is equally fast."""

from __future__ import annotations

Times = tuple[float, float, float]
"""One microbatch on one stage: its forward, input gradient and weight gradient, in one unit."""


def ideal_bubble_fraction(
    schedule: str,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    times_ns: Times | None = None,
) -> float | None:
    """Holes / window of the schedule with equal stages and no communication, a ratio.

    stages counts the ranks of a pipeline (p), chunks the stages on each (v); microbatches (m) are
    those of both directions in dualpipe. The window begins with the first forward of any rank and
    ends with the last backward of any. None for a schedule not modelled, and where it splits the
    backward and times_ns is not known.
    """
    if min(stages, microbatches, chunks) < 1:
        return None
    passes = _holes_in_passes(schedule, stages, microbatches, chunks)
    if passes is not None:
        return passes / (chunks * microbatches + passes)
    if times_ns is None or sum(times_ns) <= 0:
        return None
    holes_ns = _holes_ns(schedule, stages, microbatches, times_ns)
    if holes_ns is None:
        return None
    each = {"zb-v": 2, "dualpipe-v": 2, "dualpipe": 1}.get(schedule, chunks)
    return holes_ns / (each * microbatches * sum(times_ns) + holes_ns)


def _holes_in_passes(schedule: str, p: int, m: int, v: int) -> int | None:
    """A rank's holes, in forward and backward passes of one stage; None for other schedules.

    Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM, SC'21: sections 2.2.1 (GPipe and 1F1B: p-1) and 2.2.2 (interleaved: p-1 passes of
    a stage that is v times smaller). Fewer microbatches than ranks leave a hole in each further
    round of chunks. naive runs one microbatch at a time: each rank works 1/p of the time.
    """
    match schedule:
        case "naive":
            return (p - 1) * v * m
        case "gpipe" | "1f1b":
            return p - 1
        case "interleaved":
            return p - 1 + (v - 1) * max(0, p - m)
    return None


def _holes_ns(schedule: str, p: int, m: int, times_ns: Times) -> float | None:
    """A rank's holes where the backward is split; None for schedules that are not modelled.

    Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241: table 2 (ZB-H1: (p-1)(F+I-W),
    ZB-H2: (p-1)(F+I-2W)), appendix H (m <= p), section 6 (ZB-V: none where F = I = W). DeepSeek,
    README of DualPipe: (p/2-1)(F&B + B - 3W) with B = I + W and F&B the time of both at once, which
    end together; here nothing is gained by that, so F&B = F + B. DualPipeV folds its p stages onto
    p/2 ranks.
    These count each rank from its own first forward. The window is the whole pipeline's, so that
    the farthest rank's holes are at least the forwards it waits for.
    """
    forward, inputs, weights = times_ns
    match schedule:
        case "zb-h1" | "zb-h2":
            spare = p - 1 if schedule == "zb-h1" else 2 * (p - 1)
            holes = (p - 1) * (forward + inputs) - min(m - 1, spare) * weights
            return max((p - 1) * forward, holes)
        case "zb-v":
            return (p - 1) * forward
        case "dualpipe" | "dualpipe-v":
            far = p - 1 if schedule == "dualpipe-v" else p // 2 - 1
            return far * max(forward, forward + 2 * inputs - weights)
    return None
