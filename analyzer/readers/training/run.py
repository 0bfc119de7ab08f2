"""What one line of a training log says of the run: arguments, mesh, errors, who spoke and when."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

_DEEPSPEED = re.compile(r"\[INFO\] \[\w+\.py:\d+:\w+\]")
_TITAN_SIGNS = ("[titan] ", "device mesh with parallelism:", "D device mesh with ")
_TRANSFORMERS = re.compile(r"(?:^|[\])>|]:?)\s*\{'(?:loss|train_runtime)': .*'epoch': ")
_MEGATRON_SIGNS = ("using world size:", " tensor_model_parallel_size ...")


def framework_in(text: str) -> str:
    """The framework that starts up with such a line, "" for none."""
    if any(sign in text for sign in _MEGATRON_SIGNS):
        return "megatron"
    if any(sign in text for sign in _TITAN_SIGNS):
        return "torchtitan"
    if "'epoch': " in text and _TRANSFORMERS.search(text):
        return "transformers"
    return "deepspeed" if "[INFO] [" in text and _DEEPSPEED.search(text) else ""


_ARGUMENT = re.compile(r"(?:^|[\]:])\s*(\w+) \.{3,} (?!\[(?:NO|YES|OKAY|FAIL)\])(\S.*)")
_TRAINER = re.compile(r"((?:local|global) batch size|sequence length) (\d+)")


def arguments_in(text: str) -> tuple[tuple[str, str], ...]:
    """The arguments that a line prints, by their names in the log."""
    if " ..." in text and (found := _ARGUMENT.search(text)):
        return ((found[1], found[2].rstrip()),)
    if "Trainer is initialized with" in text:
        return tuple(_TRAINER.findall(text))
    return ()


_TITAN_MESH = re.compile(
    r"Building \d+-D device mesh with [\[(]([^\])]{0,200})[\])], \[([\d, ]+)\]"
)
_TITAN_SIZES = re.compile(r"\b(pp|dp_replicate|dp_shard|cp|tp|ep)=(\d{1,9})\b")
_MEGATRON_SIZES = re.compile(
    r"(?<!encoder-)(pipeline-model|data|context|tensor-model)-parallel[- ]size: (\d{1,9})"
)
_AXIS = {"pipeline-model": "pp", "data": "dp", "context": "cp", "tensor-model": "tp"}
_OUTERMOST_FIRST = ("pp", "dp", "cp", "tp")


def mesh_in(text: str) -> tuple[tuple[str, int], ...]:
    """The mesh that a line states, outermost axis first, ep beside it; () where it states none."""
    if "using world size:" in text:
        sizes = {_AXIS[name]: int(size) for name, size in _MEGATRON_SIZES.findall(text)}
        return tuple((axis, sizes[axis]) for axis in _OUTERMOST_FIRST if axis in sizes)
    if "device mesh with parallelism:" in text:
        return tuple((axis, int(size)) for axis, size in _TITAN_SIZES.findall(text))
    if "device mesh with" in text and (found := _TITAN_MESH.search(text)):
        names, counts = re.findall(r"\w+", found[1]), re.findall(r"\d{1,9}", found[2])
        return tuple((name, int(size)) for name, size in zip(names, counts, strict=False))
    return ()


_ARGUMENT_OF = {
    "pp": ("pipeline_model_parallel_size", "pipe_parallel_size"),
    "dp": ("data_parallel_size",),
    "cp": ("context_parallel_size",),
    "tp": ("tensor_model_parallel_size", "model_parallel_size"),
    "ep": ("expert_model_parallel_size",),
}


def mesh_of(arguments: tuple[tuple[str, str], ...]) -> tuple[tuple[str, int], ...]:
    """The mesh that Megatron's arguments tell, outermost axis first, ep beside it; () for none."""
    told = dict(arguments)
    # With this argument dp is laid around pp; else pp is outermost.
    around = ("dp", "pp") if told.get("use_tp_pp_dp_mapping") == "True" else ("pp", "dp")
    sizes = {
        axis: int(told[name])
        for axis, names in _ARGUMENT_OF.items()
        for name in names
        if re.fullmatch(r"[1-9]\d{0,8}", told.get(name, ""))
    }
    return tuple((axis, sizes[axis]) for axis in (*around, "cp", "tp", "ep") if axis in sizes)


_WORLD_SIZE = re.compile(r"(?:using world size: |dist_world_size=)(\d{1,9})")


def world_size_in(text: str) -> int:
    """The world size that a launcher's or Megatron's line states, -1 for none."""
    found = "world" in text and _WORLD_SIZE.search(text)
    return int(found[1]) if found else -1


_FAILURES = (
    "Traceback (most recent call last)", "out of memory", "OutOfMemoryError",
    "collective operation timeout", "ChildFailedError", "Segmentation fault", "Bus error",
    "Fatal Python error", "oom-kill", "oom_kill", "NCCL error", "srun: error:",
)  # fmt: skip


def is_failure(text: str) -> bool:
    """Whether a line says that the run broke."""
    return any(failure in text for failure in _FAILURES)


def is_cancellation(text: str) -> bool:
    """Whether a line says that the scheduler ended the job: by a person's wish, or out of time."""
    return "slurmstepd: error:" in text and "CANCELLED" in text


_RAISED = re.compile(r"(?:^|[\s:\]])((?:\w+\.)*\w*(?<!ChildFailed)(?:Error|Exception): .+)")
_DEATHS = ("out of memory", "operation timeout", "oom-kill", "oom_kill")


def cause_in(text: str) -> str:
    """The error that a line names, "" where it names none or only says that there was one."""
    if "Error: " in text or "Exception: " in text:
        found = _RAISED.search(text)
        return found[1].strip() if found else ""
    return text.strip() if any(death in text for death in _DEATHS) else ""


_CLOCK = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)[,.](\d{3,6})")
_EPOCH = datetime(1970, 1, 1)


def clock_ns_in(text: str) -> int:
    """The time stamp of a line, ns of the log's local time; -1 for none, or for whole seconds."""
    found = _CLOCK.search(text)
    if found is None:
        return -1
    try:
        at = datetime.fromisoformat(f"{found[1]}T{found[2]}.{found[3][:6].ljust(6, '0')}")
    except ValueError:
        return -1
    return (at - _EPOCH) // timedelta(microseconds=1) * 1000


_PRINTER = re.compile(r"(?:\s*(?:\[[A-Za-z]+ ?\d+\]|\d+): ?|[\w.-]+: (?=\[\d{4}-))*")


def printer_of(text: str) -> str:
    """Who printed a line, by what a launcher put before it; "" where it put nothing."""
    found = _PRINTER.match(text)
    return found[0].strip() if found else ""
