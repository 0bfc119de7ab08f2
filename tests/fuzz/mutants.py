"""Recordings that are whole files with odd content: one to three mutations by chance of a seed."""

from __future__ import annotations

import copy
import functools
import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

_SAMPLES = Path(__file__).parents[2] / "sample_traces"
_SEEDS = ("built_ddp_host_stall", "built_fsdp_four_hosts", "built_zero_bubble", "pp2_m2", "dp4",
          "tp2_pp2")  # fmt: skip
_STEPS = 2
_PLAIN_OPS = ("aten::", "autograd::", "torch::", "fwdbwd", "PythonSubclass")
_KEPT_PLAIN_OPS = 8
_JOB = {
    "model": {"layers": 4, "hidden": 256, "heads": 8, "ffn": 1024, "vocab": 32},
    "parallel": {"tp": 1, "pp": 2, "dp": 2},
    "training": {"seq_len": 64, "micro_batch": 4, "global_batch": 16},
    "hardware": {"preset": "h100-sxm"},
}
_ODD_NUMBERS = (float("nan"), float("inf"), -float("inf"), -1, 0, 1e308, 2**63, 2**53 + 1, "x",
                None, [], {"a": 1}, True, "-5", 0.001)  # fmt: skip
_ODD_VALUES = (*_ODD_NUMBERS, "", "\ud800", "a\nb", [1, "b"], [[]], {}, False, 10**30, 1.5)

Event = dict[str, Any]


@dataclass
class Recorded:
    """The parsed traces of a recording by file name, its run.json and its job.toml."""

    traces: dict[str, dict[str, Any]]
    run: dict[str, Any] | None
    job: dict[str, Any] | None = None

    def write(self, folder: Path) -> Path:
        """Writes the files to a folder of their own."""
        folder.mkdir(parents=True)
        for name, body in self.traces.items():
            (folder / name).write_text(json.dumps(body))
        if self.run is not None:
            (folder / "run.json").write_text(json.dumps(self.run))
        if self.job is not None:
            lines = [f"{key} = {_format_toml(value)}\n" for key, value in self.job.items()]
            (folder / "job.toml").write_bytes("".join(lines).encode(errors="surrogatepass"))
        return folder


def _format_toml(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)} = {_format_toml(one)}" for key, one in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_format_toml, value))}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)


def read_sample(name: str) -> Recorded:
    """A sample's first steps, with an eighth of its plain ops, and its run.json."""
    traces, run = json.loads(_read_sample_text(name))
    return Recorded(traces, run)


@functools.cache
def _read_sample_text(name: str) -> str:
    # As text, which is parsed in less time than objects are copied.
    folder, traces = _SAMPLES / name, {}
    for file in sorted(folder.glob("rank*_trace.json.gz")):
        body = json.loads(gzip.decompress(file.read_bytes()))
        body["traceEvents"] = _shorten(body["traceEvents"])
        traces[file.name.removesuffix(".gz")] = body
    return json.dumps([traces, json.loads((folder / "run.json").read_text())])


def _shorten(events: list[Event]) -> list[Event]:
    """The metadata, and the events of the first steps without flows and most plain ops."""
    marks = {event["name"]: event["ts"] for event in events[::-1] if _is_step(event)}
    end = sorted(marks.values())[_STEPS]
    kept = [event for event in events if event.get("ph") == "M" or event.get("ts", 0) < end]
    kept = [event for event in kept if event.get("ph") not in ("s", "f", "i")]
    plain = [event for event in kept if str(event.get("name")).startswith(_PLAIN_OPS)]
    dropped = {id(event) for at, event in enumerate(plain) if at % _KEPT_PLAIN_OPS}
    return [event for event in kept if id(event) not in dropped]


def _is_step(event: Event) -> bool:
    return str(event.get("name")).startswith("ProfilerStep")


# Mutations: each changes the recording in place.


def _choose_trace(random: Random, recorded: Recorded) -> list[Event]:
    body = recorded.traces[random.choice(sorted(recorded.traces))]
    if not isinstance(body.get("traceEvents"), list) or not body["traceEvents"]:
        body["traceEvents"] = [{"ph": "X", "name": "x", "ts": 1, "dur": 1, "cat": "cpu_op"}]
    events: list[Event] = body["traceEvents"]
    return events


def drop_events(random: Random, recorded: Recorded) -> None:
    events = _choose_trace(random, recorded)
    share = random.choice((0.01, 0.5, 0.99))
    events[:] = [event for event in events if random.random() > share]


def drop_kind(random: Random, recorded: Recorded) -> None:
    events = _choose_trace(random, recorded)
    kinds = sorted({str(event.get("cat")) for event in events})
    kind = random.choice(kinds or [""])
    events[:] = [event for event in events if str(event.get("cat")) != kind]


def keep_kind(random: Random, recorded: Recorded) -> None:
    """Only one category and, half of the time, the step marks remain."""
    events, marks = _choose_trace(random, recorded), random.random() < 0.5
    kind = random.choice(sorted({str(event.get("cat")) for event in events}) or [""])
    events[:] = [e for e in events if str(e.get("cat")) == kind or (marks and _is_step(e))]


def swap_times(random: Random, recorded: Recorded) -> None:
    events = _choose_trace(random, recorded)
    for _ in range(random.choice((1, 20, 500))):
        one, other = random.choice(events), random.choice(events)
        one["ts"], other["ts"] = other.get("ts", 0), one.get("ts", 0)


def repeat_events(random: Random, recorded: Recorded) -> None:
    events = _choose_trace(random, recorded)
    part = random.sample(events, min(len(events), random.choice((1, 50, 2000))))
    events.extend(copy.deepcopy(part))


def empty_trace(random: Random, recorded: Recorded) -> None:
    events = _choose_trace(random, recorded)
    events[:] = [event for event in events if _is_step(event)] if random.random() < 0.7 else []


def odd_number(random: Random, recorded: Recorded) -> None:
    events = _choose_trace(random, recorded)
    field = random.choice(("ts", "dur", "pid", "tid", "id", "ph", "name", "cat"))
    for _ in range(random.choice((1, 5, 100))):
        random.choice(events)[field] = _choose_odd(random)


def odd_argument(random: Random, recorded: Recorded) -> None:
    events = _choose_trace(random, recorded)
    having = [event for event in events if isinstance(event.get("args"), dict) and event["args"]]
    for event in random.sample(having, min(len(having), random.choice((1, 10, 300)))):
        event["args"][random.choice(sorted(event["args"]))] = _choose_odd(random)


def zero_durations(random: Random, recorded: Recorded) -> None:
    for event in _choose_trace(random, recorded):
        if random.random() < 0.5:
            event["dur"] = 0


def zero_steps(random: Random, recorded: Recorded) -> None:
    marks = [event for event in _choose_trace(random, recorded) if _is_step(event)]
    for event in marks if random.random() < 0.5 else marks[: random.randrange(3)]:
        event["dur"] = random.choice((0, 0, 0.001, -1))


def move_steps(random: Random, recorded: Recorded) -> None:
    """The steps of one rank are before, after or partly outside of its events."""
    shift = random.choice((-1e12, -1e6, -1e4, 1e4, 1e6, 1e12))
    for event in _choose_trace(random, recorded):
        if _is_step(event) and isinstance(event.get("ts"), int | float):
            event["ts"] += shift


def rename_steps(random: Random, recorded: Recorded) -> None:
    names = ("ProfilerStep#7", "ProfilerStep#-1", "ProfilerStep#", "ProfilerStep#99999999999999")
    name, offset = random.choice((*names, "")), random.choice((1, 1000))
    marks = [event for event in _choose_trace(random, recorded) if _is_step(event)]
    for at, event in enumerate(marks):
        event["name"] = name or f"ProfilerStep#{at + offset}"


def drop_steps(random: Random, recorded: Recorded) -> None:
    events = _choose_trace(random, recorded)
    kept = random.randrange(2)
    marks = [event for event in events if _is_step(event)][kept:]
    events[:] = [event for event in events if not any(event is mark for mark in marks)]


def overlap_steps(random: Random, recorded: Recorded) -> None:
    factor = random.choice((0.1, 1.5, 10))
    for event in _choose_trace(random, recorded):
        if _is_step(event) and isinstance(event.get("dur"), int | float):
            event["dur"] *= factor


def shift_rank(random: Random, recorded: Recorded) -> None:
    by = random.choice((-1e15, -1e9, 1e6, 1e9, 1e15))
    for event in _choose_trace(random, recorded):
        if isinstance(event.get("ts"), int | float):
            event["ts"] += by


def move_threads(random: Random, recorded: Recorded) -> None:
    for event in _choose_trace(random, recorded):
        if random.random() < 0.1:
            event["tid"] = random.choice((0, 1, 7, "stream 7", 2**40))


def mix_runs(random: Random, recorded: Recorded) -> None:
    other = read_sample(random.choice(_SEEDS))
    names = sorted(other.traces)
    for name in random.sample(names, random.randint(1, len(names))):
        recorded.traces[name] = other.traces[name]
    if random.random() < 0.3:
        recorded.run = other.run


def swap_ranks(random: Random, recorded: Recorded) -> None:
    names = sorted(recorded.traces)
    one, other = random.choice(names), random.choice(names)
    recorded.traces[one], recorded.traces[other] = recorded.traces[other], recorded.traces[one]


def drop_rank(random: Random, recorded: Recorded) -> None:
    if len(recorded.traces) > 1:
        del recorded.traces[random.choice(sorted(recorded.traces))]


def drop_run(random: Random, recorded: Recorded) -> None:
    recorded.run = None


def wrong_mesh(random: Random, recorded: Recorded) -> None:
    if recorded.run is None:
        return
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    size = recorded.run.get("world_size")
    chosen = random.choice(axes)
    recorded.run["mesh"] = [{"axis": chosen, "size": size}]
    if random.random() < 0.3:
        recorded.run["mesh"].append({"axis": random.choice(axes), "size": random.choice((1, 2))})


def odd_run(random: Random, recorded: Recorded) -> None:
    """Values anywhere in run.json are odd."""
    for _ in range(random.choice((1, 1, 3))):
        recorded.run = _replace_one(random, recorded.run)


def odd_job(random: Random, recorded: Recorded) -> None:
    """Values of a job.toml are odd, or its job is another one."""
    recorded.job = recorded.job or copy.deepcopy(_JOB)
    if random.random() < 0.3:
        recorded.job["parallel"] = {random.choice(("tp", "pp", "dp", "cp")): random.choice((1, 4))}
        return
    for _ in range(random.choice((1, 1, 3))):
        recorded.job = _replace_one(random, recorded.job)


def odd_header(random: Random, recorded: Recorded) -> None:
    name = random.choice(sorted(recorded.traces))
    body = recorded.traces[name]
    header = {key: value for key, value in body.items() if key != "traceEvents"}
    recorded.traces[name] = {**_replace_one(random, header), "traceEvents": body["traceEvents"]}


def _choose_odd(random: Random) -> Any:
    """A copy of one of the odd values, which may be replaced in turn."""
    return copy.deepcopy(random.choice(_ODD_VALUES))


def _replace_one(random: Random, value: Any) -> Any:
    """The value with one entry below replaced, never the value itself."""
    keys: Sequence[Any] = (
        sorted(value) if isinstance(value, dict) else range(len(value or ()))
        if isinstance(value, list) else ()
    )  # fmt: skip
    if not keys:
        return value
    key = random.choice(keys)
    nested = isinstance(value[key], dict | list) and value[key] and random.random() < 0.8
    if nested:
        value[key] = _replace_one(random, value[key])
    elif random.random() < 0.1:
        del value[key]
    else:
        value[key] = _choose_odd(random)
    return value


Mutation = Callable[[Random, Recorded], None]
MUTATIONS: tuple[Mutation, ...] = (
    drop_events, drop_kind, keep_kind, swap_times, repeat_events, empty_trace, odd_number,
    odd_argument, zero_durations, zero_steps, move_steps, rename_steps, drop_steps, overlap_steps,
    shift_rank, move_threads, mix_runs, swap_ranks, drop_rank, drop_run, wrong_mesh, odd_run,
    odd_job, odd_header,
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A mutated sample, and the names of the sample and of its one to three mutations."""

    sample: str
    mutations: tuple[str, ...]
    recorded: Recorded


def mutate(random: Random) -> Mutant:
    sample = random.choice(_SEEDS)
    recorded = read_sample(sample)
    if random.random() < 0.5:
        recorded.job = copy.deepcopy(_JOB)
    chosen = [random.choice(MUTATIONS) for _ in range(random.choice((1, 1, 2, 3)))]
    for mutation in chosen:
        mutation(random, recorded)
    return Mutant(sample, tuple(mutation.__name__ for mutation in chosen), recorded)
