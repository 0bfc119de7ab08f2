"""Which pipeline schedule ran: as a person or torch names it, or as the boxes show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from stepsplit.analyzer.split.pipeline.marked import Box

Line = Sequence[Sequence[Box]]
"""The boxes of one step: of each rank of a pipeline, by pp coordinate, none where it is absent."""
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


@dataclass(frozen=True, slots=True)
class SeenSchedule:
    """What the boxes show. times_ns: one microbatch's forward, input and weight gradient on a
    stage; None where the backward is not split. name is None where the order is no known one.
    """

    name: str | None
    microbatches: int
    chunks: int
    times_ns: tuple[float, float, float] | None


def schedule_named(stated: str) -> str:
    """The schedule's name as the model knows it, of what a person or torch's class calls it.

    torch's interleaved zero bubble is the ZB1P of the paper, which is ZB-H1; a breadth-first loop
    (LoopedBFS) has the bubble of the interleaved schedule.
    """
    name = stated.lower().replace("_", "").replace("-", "").replace(" ", "")
    name = name.removeprefix("schedule")
    return _SPELLED.get(name, name)


def schedule_seen(steps: Sequence[Line]) -> SeenSchedule:
    """The schedule of most of the steps, of which those with the most boxes are whole."""
    sizes = [sum(len(boxes) for boxes in line) for line in steps]
    whole = [line for line, size in zip(steps, sizes, strict=True) if size == max(sizes)]
    names = [schedule_of(line) for line in whole]
    name = Counter(names).most_common(1)[0][0]
    line = whole[names.index(name)]
    return SeenSchedule(
        name=name,
        microbatches=_microbatches(line, name),
        chunks=max(len(_stages(boxes)) for boxes in line),
        times_ns=_times_ns(line),
    )


def schedule_of(line: Line) -> str | None:
    """The schedule by where the stages sit, how the backward is split, and what comes before it.

    naive, gpipe, 1f1b, interleaved, zb-h1, zb-h2, zerobubble (its weight gradients follow neither),
    zb-v, dualpipe, dualpipe-v; None for another. Orders that coincide count as 1f1b: one microbatch
    is that of naive and gpipe too.
    """
    p, present = len(line), {rank: boxes for rank, boxes in enumerate(line) if boxes}
    if not present:
        return None
    held = {rank: _stages(boxes) for rank, boxes in present.items()}
    split = any(box.phase == "weight" for boxes in present.values() for box in boxes)
    if all(len(stages) == 1 for stages in held.values()):
        return _by_warmup(present, p, split)
    if all(len(stages) == 2 and stages == {r, p - 1 - r} for r, stages in held.items()):
        return "dualpipe"
    if all(stages == {r, 2 * p - 1 - r} for r, stages in held.items()):
        return _folded(present, split)
    if all(stage % p == r for r, stages in held.items() for stage in stages):
        return "zb-h1" if split else "interleaved"
    return None


def _by_warmup(present: Mapping[int, Sequence[Box]], p: int, split: bool) -> str | None:
    """By how many forwards each rank does before its first backward; one stage a rank."""
    m = max(len({box.microbatch for box in boxes}) for boxes in present.values())
    warmup = {rank: _warmup(boxes) for rank, boxes in present.items()}
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


def _folded(present: Mapping[int, Sequence[Box]], split: bool) -> str | None:
    """Stages r and 2p-1-r: of one model in a V, or of two that are passed in opposite directions.

    ZB-V splits every backward, DualPipeV only some.
    """
    if all(_apart(boxes) for boxes in present.values()):
        return "dualpipe"
    if not split:
        return None
    boxes = [box for rank in present.values() for box in rank]
    backwards, weights = _work(boxes, "backward"), _work(boxes, "weight")
    return "zb-v" if backwards == weights else "dualpipe-v"


def _apart(boxes: Sequence[Box]) -> bool:
    """Whether no microbatch passes both stages of the rank."""
    passes = {(box.stage, box.microbatch) for box in boxes}
    return len(passes) == len({box.microbatch for box in boxes})


def _warmup(boxes: Sequence[Box]) -> int:
    phases = [box.phase for box in sorted(boxes, key=lambda box: box.start_ns)]
    before = phases[: phases.index("backward")] if "backward" in phases else phases
    return before.count("forward")


def _stages(boxes: Sequence[Box]) -> set[int]:
    return {box.stage for box in boxes}


def _work(boxes: Sequence[Box], phase: str) -> set[tuple[int, int]]:
    return {(box.stage, box.microbatch) for box in boxes if box.phase == phase}


def _microbatches(line: Line, name: str | None) -> int:
    """How many pass the pipeline; those of dualpipe in both directions, each once on a rank."""
    if name == "dualpipe":
        return max(len(_work(boxes, "forward")) for boxes in line)
    return max(len({box.microbatch for box in boxes}) for boxes in line)


def _times_ns(line: Line) -> tuple[float, float, float] | None:
    """Medians over the boxes that had their rank for themselves."""
    weights = {at for boxes in line for at in _work(boxes, "weight")}
    alone = [box for boxes in line for box in _alone(boxes)]
    split = [box for box in alone if (box.stage, box.microbatch) in weights]
    found = [
        [box.end_ns - box.start_ns for box in among if box.phase == phase]
        for among, phase in ((alone, "forward"), (split, "backward"), (split, "weight"))
    ]
    if not all(found):
        return None
    forward, inputs, weight = (float(median(times)) for times in found)
    return forward, inputs, weight


def _alone(boxes: Sequence[Box]) -> list[Box]:
    """Two actions at once are boxes of the same time, which tells of neither how long it takes."""
    at = Counter((box.start_ns, box.end_ns) for box in boxes)
    return [box for box in boxes if at[box.start_ns, box.end_ns] == 1]
