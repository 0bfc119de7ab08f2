"""The complete events of a block of a trace as columns, whatever has parsed it.

msgspec decodes any block to an object per entry. The compiled scanner, where it was built, gives
the columns of the blocks that it can scan (event_scanner.c says which), and the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from msgspec import Raw, Struct

from stepsplit.analyzer.arrays import list_distinct
from stepsplit.analyzer.readers.kernel_rules import Rules
from stepsplit.analyzer.readers.kineto import schema
from stepsplit.analyzer.readers.kineto.scanned_block import ScannedBlock
from stepsplit.analyzer.trace import GRID, MAX_NAME_LENGTH, Bool, Category, Int32, Int64, UInt8

# What is numbered: names, categories, lanes and shapes.

OLD_OP = len(Category)
"""The category Operator of torch before 1.10: ops, and ranges that the host marked."""

CATEGORIES = {
    "cpu_op": Category.OP,
    "operator": OLD_OP,
    "user_annotation": Category.ANNOTATION,
    "kernel": Category.KERNEL,
    "mtia_ccp_events": Category.KERNEL,
    "hpu_op": Category.KERNEL,
    "privateuse1": Category.KERNEL,
    "gpu_user_annotation": Category.GPU_ANNOTATION,
    "python_function": Category.PYTHON,
    "cuda_sync": Category.SYNC,
}

SUFFIX_CATEGORIES = {
    "runtime": Category.RUNTIME,
    "driver": Category.RUNTIME,
    "memcpy": Category.MEMCPY,
    "memset": Category.MEMSET,
}
"""Suffixes of categories such as "cuda_runtime", "xpu_driver", "gpu_memcpy", "Runtime" (2020)."""

PARAM_COMMS = "record_param_comms"

_RANGE_PREFIXES = (
    "ProfilerStep#", "Optimizer.", "enumerate(DataLoader)#", "DataParallel.",
    "DistributedDataParallel.",
)  # fmt: skip
"""Ranges that some versions of torch and torch_npu write as ops."""

_BARE_OPS = (PARAM_COMMS, "detach", "detach_")
"""Ops without a namespace in their name, apart from the autograd nodes."""

_DIMS = b'"Input Dims"'

_SHORT_TYPE = b'"c10::'
"""How the names of types in "Input type" begin, except those of float, double and integers."""

_SHORT_DTYPES = (
    (b"c10::Float8", b"fp8"),
    (b"c10::BFloat16", b"bf16"),
    (b"c10::Half", b"fp16"),
)

_DTYPE_MARK = b"\0"

_SAMPLES = 32
"""Number of ops of a block that are searched for shapes."""

LaneKey = tuple[int | str, int | str] | tuple[int | str, int | str, int, int]
"""A thread, or with device and stream a stream."""


class NameNumbers(dict[str, int]):
    """Numbers distinct names in order of appearance.

    noted: whether a name is communication; is_range: whether an event of the category of ops, or
    of the old one, is a range by its name.
    """

    def __init__(self, rules: Rules) -> None:
        self.noted: list[bool] = []
        self.is_range: list[tuple[bool, bool]] = []
        self._texts, self._asked, self._rules = list[str](), set[int](), rules

    def __missing__(self, name: str) -> int:
        self[name] = number = len(self)
        self.noted.append(name == PARAM_COMMS or name.startswith(("c10d::", "gloo:")))
        is_range = name.startswith(_RANGE_PREFIXES)
        is_op = "::" in name or "Backward" in name or name in _BARE_OPS
        self.is_range.append((is_range, is_range or not is_op))
        self._texts.append(name[:MAX_NAME_LENGTH])
        return number

    @property
    def texts(self) -> tuple[str, ...]:
        """The names, cut to the length that rules look at."""
        return tuple(self._texts)

    def note_of_device(self, numbers: Int32) -> None:
        """Marks which of these kernel and copy names are communication, once per name."""
        for number in set(list_distinct(numbers).tolist()) - self._asked:
            self.noted[number] |= self._rules.is_communication(self._texts[number])
            self._asked.add(number)


class LaneNumbers(dict[LaneKey, int]):
    """Numbers distinct lanes."""

    def __missing__(self, key: LaneKey) -> int:
        self[key] = number = len(self)
        return number


class ShapeNumbers(dict[tuple[int, ...] | bytes, int]):
    """Numbers distinct launch grids and input shapes; -1 for text without numbers: no tensors."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def __missing__(self, shape: tuple[int, ...] | bytes) -> int:
        if isinstance(shape, bytes):
            dims, _, dtype = shape.partition(_DTYPE_MARK)
            text = dims[dims.find(b"[") : dims.rfind(b"]") + 1].decode(errors="replace")
            text = f"{''.join(text.split()).replace(',', ', ')} {dtype.decode()}".rstrip()
        else:
            text = f"{GRID}{list(shape)}"
        known = any(map(str.isdecimal, text))
        self[shape] = number = self._numbers.setdefault(text, len(self.texts)) if known else -1
        if number == len(self.texts):
            self.texts.append(text)
        return number


class CategoryCodes(dict[str, int]):
    """Category codes by name, including the names of old torch versions."""

    def __missing__(self, name: str) -> int:
        lowered = name.lower()
        by_end = SUFFIX_CATEGORIES.get(lowered.rpartition("_")[2], Category.OTHER)
        self[name] = code = int(CATEGORIES.get(lowered, by_end))
        return code


class Numbers:
    """What the events of all blocks have in common: each distinct value has a number."""

    def __init__(self, rules: Rules) -> None:
        self.names, self.categories = NameNumbers(rules), CategoryCodes()
        self.lanes, self.shapes = LaneNumbers(), ShapeNumbers()


# The events of a block.


class DeviceColumns(Struct, frozen=True):
    """Arguments of launches and device events: the lane of the stream, the number of the launch
    grid (-1 for none), and whether the event names its collective."""

    correlation: Int64
    lane: Int32
    grid: Int32
    communicates: Bool


class BlockEvents(Protocol):
    """The complete events of a block, in its order; category has the codes of CategoryCodes."""

    start_ns: Int64
    dur_ns: Int64
    name_id: Int32
    category: UInt8
    lane: Int32

    def copy_args(self, row: int) -> bytes:
        """The text of the arguments of an event."""
        ...

    def may_state(self, text: re.Pattern[bytes], rows: Int64) -> bool:
        """Whether the arguments of one of these events may contain the text."""
        ...

    def read_device_args(self, rows: Int64, is_kernel: Bool) -> DeviceColumns:
        """The arguments of these events; the grids of kernels alone."""
        ...

    def read_sequences(self, ops: Int64) -> Int64:
        """The numbers of these ops in the graph of autograd; below 0 for none."""
        ...

    def read_shapes(self, ops: Int64) -> Int32 | None:
        """The numbers of the input shapes of these ops; None if shapes were not recorded."""
        ...


class DecodedEvents:
    """Events that msgspec has decoded."""

    def __init__(
        self, events: Sequence[schema.Complete], start_ns: Int64, dur_ns: Int64, numbers: Numbers
    ) -> None:
        names, categories, lanes = numbers.names, numbers.categories, numbers.lanes
        self.start_ns, self.dur_ns = start_ns, dur_ns
        self.name_id = np.array([names[e.name] for e in events], dtype=np.int32)
        self.category = np.array([categories[e.cat] for e in events], dtype=np.uint8)
        self.lane = np.array([lanes[e.pid, e.tid] for e in events], dtype=np.int32)
        self._events, self._numbers = events, numbers

    def copy_args(self, row: int) -> bytes:
        return bytes(self._events[row].args)

    def may_state(self, text: re.Pattern[bytes], rows: Int64) -> bool:
        return any(text.search(bytes(self._events[row].args)) for row in rows.tolist())

    def read_device_args(self, rows: Int64, is_kernel: Bool) -> DeviceColumns:
        events, lanes, shapes = self._events, self._numbers.lanes, self._numbers.shapes
        placed = rows.tolist()
        decoded = schema.decode_device_args([events[row].args for row in placed])
        on_stream = [i for i, args in enumerate(decoded) if args.stream >= 0]
        lane, grid = self.lane[rows], np.full(len(rows), -1, dtype=np.int32)
        lane[on_stream] = [
            lanes[events[row].pid, events[row].tid, args.device, args.stream]
            for row, args in ((placed[i], decoded[i]) for i in on_stream)
        ]
        kernels = np.flatnonzero(is_kernel)
        grid[kernels] = [shapes[decoded[i].grid] for i in kernels.tolist()]
        communicates = [
            # Most events have no such argument, and the property takes longer.
            args.collective is not schema.MISSING and args.communicates
            for args in decoded
        ]
        correlation = np.array([args.correlation for args in decoded], dtype=np.int64)
        return DeviceColumns(correlation, lane, grid, np.array(communicates, dtype=np.bool_))

    def read_sequences(self, ops: Int64) -> Int64:
        decoded = schema.decode_op_args([self._events[row].args for row in ops.tolist()])
        return np.array([args.sequence for args in decoded], dtype=np.int64)

    def read_shapes(self, ops: Int64) -> Int32 | None:
        events, shapes = self._events, self._numbers.shapes
        if not any(_DIMS in bytes(events[row].args) for row in _choose_samples(ops).tolist()):
            return None
        dims = (_cut_dims(events[row].args) for row in ops.tolist())
        return np.array([shapes[each] for each in dims], dtype=np.int32)


class ScannedEvents:
    """Events that the compiled scanner has found."""

    def __init__(self, block: ScannedBlock, numbers: Numbers) -> None:
        names, categories, lanes = numbers.names, numbers.categories, numbers.lanes
        self._block, self._numbers, events = block, numbers, block.events
        self.start_ns, self.dur_ns = events["start_ns"], events["dur_ns"]
        number = np.array([names[text] for text in block.list_names()], dtype=np.int32)
        self.name_id = number[events["name"]]
        code = np.array([categories[name] for name in block.list_categories()], dtype=np.uint8)
        self.category = code[events["category"]]
        self._threads = block.list_threads()
        number = np.array([lanes[thread] for thread in self._threads], dtype=np.int32)
        self.lane = number[events["thread"]]

    def copy_args(self, row: int) -> bytes:
        begin, end = self._block.events["args"][row].tolist()
        return bytes(self._block.text[begin:end]) if end else bytes(schema.NO_ARGS)

    def may_state(self, text: re.Pattern[bytes], rows: Int64) -> bool:
        return text.search(self._block.text) is not None

    def read_device_args(self, rows: Int64, is_kernel: Bool) -> DeviceColumns:
        events, lanes, shapes = self._block.events, self._numbers.lanes, self._numbers.shapes
        streams, place = self._block.list_streams(), events["place"][rows]
        lane = self.lane[rows]
        number = _number_in_order(
            place, [(*self._threads[thread], *stream) for thread, *stream in streams], lanes
        )
        lane[place >= 0] = number[place >= 0]
        grids = self._block.list_grids()
        grid = _number_in_order(np.where(is_kernel, events["grid"][rows], -1), grids, shapes)
        communicates = events["names_collective"][rows] != 0
        return DeviceColumns(events["correlation"][rows], lane, grid, communicates)

    def read_sequences(self, ops: Int64) -> Int64:
        found: Int64 = self._block.events["sequence"][ops]
        return found

    def read_shapes(self, ops: Int64) -> Int32 | None:
        events, shapes = self._block.events, self._numbers.shapes
        dims = events["dims"]
        if not (dims[_choose_samples(ops)] >= 0).any():
            return None
        types = len(_SHORT_DTYPES) + 1
        kind = dims[ops] * types + events["short_type"][ops] + 1
        marks = [b"", *(_DTYPE_MARK + dtype for _, dtype in _SHORT_DTYPES)]
        texts = [text + mark for text in self._block.list_dims() for mark in marks]
        return _number_in_order(np.where(dims[ops] < 0, -1, kind), texts, shapes)


def _number_in_order(ids: Int32, values: Sequence[Any], numbers: Mapping[Any, int]) -> Int32:
    """The numbers of the values with these indices, given in the order of the events; -1 stays."""
    first = np.full(len(values) + 1, len(ids))
    first[ids[::-1]] = np.arange(len(ids))[::-1]
    used = np.argsort(first[:-1], kind="stable")
    used = used[: int((first[:-1] < len(ids)).sum())]
    number = np.full(len(values) + 1, -1, dtype=np.int32)
    number[used] = [numbers[values[i]] for i in used.tolist()]
    return number[ids]


def _choose_samples(ops: Int64) -> Int64:
    """Ops of a block that tell whether shapes were recorded: then most ops have them."""
    return ops[:: len(ops) // _SAMPLES + 1]


def _cut_dims(args: Raw) -> bytes:
    """The text between the name of the shapes and the next name, and a dtype of less than 32 bits;
    decoding it would take longer. Empty without shapes: a dtype alone is none."""
    text = bytes(args)
    if _DIMS not in text:
        return b""
    dims = text.rpartition(_DIMS)[2].partition(b'"')[0]
    if _SHORT_TYPE not in text:
        return dims
    dtype = next((dtype for name, dtype in _SHORT_DTYPES if name in text), b"")
    return dims + _DTYPE_MARK + dtype
