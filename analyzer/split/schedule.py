"""The pipeline schedule: by its name in run.json or torch, or from the slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median

from msgspec import Struct

from stepsplit.analyzer.split.microbatch_slots import MicrobatchSlot

Line = Sequence[Sequence[MicrobatchSlot]]
"""The slots of one step for each rank of a pipeline, by pp coordinate; empty for missing ranks."""

_SPELLED = {
    "none": "naive",
    "interleaved1f1b": "interleaved",
    "1f1binterleaved": "interleaved",
    "loopedbfs": "interleaved",
    "zbh1": "zb-h1",
    "zb1p": "zb-h1",
    "interleavedzerobubble": "zb-h1",
    "zbh2": "zb-h2",
    "zb": "zerobubble",
    "zbv": "zb-v",
    "zbvzerobubble": "zb-v",
    "dualpipev": "dualpipe-v",
}


class DetectedSchedule(Struct, frozen=True):
    """The schedule detected from the slots; name is None for an unknown order.

    times_ns: forward, input-gradient and weight-gradient time of one microbatch on a stage; None if
    the backward is not split.
    """

    name: str | None
    microbatches: int
    chunks: int
    times_ns: tuple[float, float, float] | None


def normalize_schedule(name_in_config: str) -> str:
    """The schedule name of the model, from a user's spelling or a torch class name.

    torch's interleaved zero bubble is ZB1P of the paper, which is ZB-H1; a breadth-first loop
    (LoopedBFS) has the bubble of the interleaved schedule.
    """
    name = name_in_config.lower().replace("_", "").replace("-", "").replace(" ", "")
    name = name.removeprefix("schedule")
    return _SPELLED.get(name, name)


def detect_schedule(steps: Sequence[Line]) -> DetectedSchedule:
    """The schedule of most steps, among those with the most slots."""
    sizes = [sum(len(boxes) for boxes in line) for line in steps]
    whole = [line for line, size in zip(steps, sizes, strict=True) if size == max(sizes)]
    names = [classify_schedule(line) for line in whole]
    name = Counter(names).most_common(1)[0][0]
    line = whole[names.index(name)]
    return DetectedSchedule(
        name=name,
        # dualpipe has its microbatches in both directions, each once per rank.
        microbatches=max(
            len(_list_microbatches(boxes, "forward"))
            if name == "dualpipe"
            else len({box.microbatch for box in boxes})
            for boxes in line
        ),
        chunks=max(len(_list_stages(boxes)) for boxes in line),
        times_ns=_measure_times_ns(line),
    )


def classify_schedule(line: Line) -> str | None:
    """The schedule, from the stages of each rank, the split of the backward, and the warmup.

    One of naive, gpipe, 1f1b, interleaved, zb-h1, zb-h2, zerobubble (other placement of the weight
    gradients), zb-v, dualpipe, dualpipe-v; None for another. Identical orders count as 1f1b: with
    one microbatch it equals naive and gpipe.
    """
    p, present = len(line), {rank: boxes for rank, boxes in enumerate(line) if boxes}
    if not present:
        return None
    stages_by_rank = {rank: _list_stages(boxes) for rank, boxes in present.items()}
    split = any(box.phase == "weight" for boxes in present.values() for box in boxes)
    if all(len(stages) == 1 for stages in stages_by_rank.values()):
        # The schedule by the number of forwards before the first backward of each rank; one stage
        # per rank.
        m = max(len({box.microbatch for box in boxes}) for boxes in present.values())
        warmup = {rank: _count_warmup(boxes) for rank, boxes in present.items()}
        expected: dict[str, Callable[[int], int]] = {
            "1f1b": lambda rank: min(m, p - rank),
            "gpipe": lambda rank: m,
            "naive": lambda rank: 1,
        }
        if split:
            expected = {"zb-h1": expected["1f1b"], "zb-h2": lambda rank: min(m, 2 * (p - rank) - 1)}
        fits = [
            name
            for name, forwards in expected.items()
            if all(found == forwards(rank) for rank, found in warmup.items())
        ]
        if split:
            return fits[0] if len(fits) == 1 else "zerobubble"
        return fits[0] if fits else None
    if all(len(stages) == 2 and stages == {r, p - 1 - r} for r, stages in stages_by_rank.items()):
        return "dualpipe"
    if all(stages == {r, 2 * p - 1 - r} for r, stages in stages_by_rank.items()):
        # The schedule for stages r and 2p-1-r on rank r: a V of one model, or two opposite
        # directions. ZB-V splits every backward, DualPipeV only some.
        if all(_is_bidirectional(boxes) for boxes in present.values()):
            return "dualpipe"
        if not split:
            return None
        slots = [box for rank in present.values() for box in rank]
        backwards, weights = (
            _list_microbatches(slots, "backward"),
            _list_microbatches(slots, "weight"),
        )
        return "zb-v" if backwards == weights else "dualpipe-v"
    if all(stage % p == r for r, stages in stages_by_rank.items() for stage in stages):
        return "zb-h1" if split else "interleaved"
    return None


def _is_bidirectional(slots: Sequence[MicrobatchSlot]) -> bool:
    """Whether no microbatch passes both stages of the rank."""
    passes = {(box.stage, box.microbatch) for box in slots}
    return len(passes) == len({box.microbatch for box in slots})


def _count_warmup(slots: Sequence[MicrobatchSlot]) -> int:
    phases = [box.phase for box in sorted(slots, key=lambda box: box.start_ns)]
    before = phases[: phases.index("backward")] if "backward" in phases else phases
    return before.count("forward")


def _list_stages(slots: Sequence[MicrobatchSlot]) -> set[int]:
    return {box.stage for box in slots}


def _list_microbatches(slots: Sequence[MicrobatchSlot], phase: str) -> set[tuple[int, int]]:
    return {(box.stage, box.microbatch) for box in slots if box.phase == phase}


def _measure_times_ns(line: Line) -> tuple[float, float, float] | None:
    """Medians over the slots that did not overlap with another slot of their rank."""
    weights = {at for boxes in line for at in _list_microbatches(boxes, "weight")}
    alone = []
    for boxes in line:
        # Combined actions have slots with identical times, whose single durations are unknown.
        at_once = Counter((box.start_ns, box.end_ns) for box in boxes)
        alone += [box for box in boxes if at_once[box.start_ns, box.end_ns] == 1]
    split = [box for box in alone if (box.stage, box.microbatch) in weights]
    durations = [
        [box.end_ns - box.start_ns for box in among if box.phase == phase]
        for among, phase in ((alone, "forward"), (split, "backward"), (split, "weight"))
    ]
    if not all(durations):
        return None
    forward, inputs, weight = (float(median(times)) for times in durations)
    return forward, inputs, weight
