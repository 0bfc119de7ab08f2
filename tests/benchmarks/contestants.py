"""Who opens which file, and what each is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.inputs import Inputs

JSON, JSON_TWO, HTA, FLOOR, FLOOR_GZ = "json", "json_two", "hta", "floor", "floor_gz"
ONE, ONE_FIRST, TWO, TWO_FILES, AGAIN, ONE_GZ = (
    "one_worker", "one_worker_first_open", "two_workers", "two_workers_two_files", "opened_again",
    "one_worker_gz",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Contestant:
    """A program of benchmarks.opens with its arguments.

    json_load and floor are the contestants that its time is a ratio of; json_bytes the plain text
    that it opens; caches: whether stepsplit may keep what it reads, in a folder empty before; once:
    too slow to be repeated; of_which names each opening where it opens several times.
    """

    key: str
    title: str
    program: str
    arguments: tuple[str, ...]
    json_bytes: int
    json_load: str = JSON
    floor: str = ""
    caches: bool = False
    once: bool = False
    of_which: tuple[str, ...] = ("",)


def contestants(inputs: Inputs) -> tuple[Contestant, ...]:
    """All that can be run here; HTA only where it is installed."""
    others = (*_others(inputs), *([_hta(inputs)] if find_spec("hta") else []))
    return (*others, *_stepsplit(inputs), *_floors(inputs))


def _others(inputs: Inputs) -> tuple[Contestant, ...]:
    two, size = tuple(map(str, inputs.two)), _size(inputs.one)
    return (
        Contestant(JSON, "json.load", "with_json", (str(inputs.one),), size),
        Contestant(
            JSON_TWO, "json.load, two files in turn", "with_json", two, _size(*inputs.two), JSON_TWO
        ),
    )


def _hta(inputs: Inputs) -> Contestant:
    arguments, size = (str(inputs.one),), _size(inputs.one)
    return Contestant(HTA, "HTA, Trace.load_traces", "with_hta", arguments, size, once=True)


def _stepsplit(inputs: Inputs) -> tuple[Contestant, ...]:
    one, size, program = str(inputs.one), _size(inputs.one), "with_stepsplit"
    opens = tuple(f"stepsplit, one process: {nth} open" for nth in ("first", "second", "third"))
    return (
        Contestant(
            ONE, "stepsplit, one worker", program, ("1", "1", one), size, floor=FLOOR
        ),
        Contestant(
            ONE_FIRST, "stepsplit, one worker, writes its cache", program, ("1", "1", one), size,
            floor=FLOOR, caches=True,
        ),
        Contestant(TWO, "stepsplit, two workers", program, ("2", "1", one), size),
        Contestant(
            TWO_FILES, "stepsplit, two workers, two files", program,
            ("2", "1", str(inputs.two[0].parent)), _size(*inputs.two), JSON_TWO,
        ),
        Contestant(AGAIN, "", program, ("1", "3", one), size, caches=True, of_which=opens),
        Contestant(
            ONE_GZ, "stepsplit, one worker, .gz", program, ("1", "1", str(inputs.packed)), size,
            floor=FLOOR_GZ,
        ),
    )  # fmt: skip


def _floors(inputs: Inputs) -> tuple[Contestant, ...]:
    size = _size(inputs.one)
    return (
        Contestant(FLOOR, "floor: read and skip", "floor", (str(inputs.one),), size),
        Contestant(FLOOR_GZ, "floor, .gz: unpack and skip", "floor", (str(inputs.packed),), size),
    )


def _size(*paths: Path) -> int:
    return sum(path.stat().st_size for path in paths)
