"""Reads the plain values of a pickle without executing code.

Python's own loader imports and calls whatever a file names. This one implements only the opcodes
that build None, bool, int, float, str, bytes, list, tuple, set, frozenset and dict, and checks
every length and memo index of the file before use.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable
from typing import Any

from stepsplit.analyzer.errors import RECORD_AGAIN, DataError
from stepsplit.analyzer.readers.compression import ByteReader

MAX_BYTES = 1 << 30
"""Of a file, which is in memory as a whole; chosen, not measured."""

# PROTO with a list, dict or object of protocols 2 to 5, or the first opcodes of protocol 0.
_PICKLE_START = re.compile(
    rb"\x80[\x02\x03][\](}c]|\x80[\x04\x05](\x95.{8})?[\](})\x8c\x8f]|\([dl]p0\n|[\]}]q\x00", re.S
)

# GLOBAL, INST, OBJ, REDUCE, BUILD, persistent ids, NEWOBJ and extensions.
_CODE_OPCODES = frozenset(b"cRbioPQ\x81\x82\x83\x84\x92\x93")

_STOP = ord(".")

_DAMAGED = (IndexError, KeyError, ValueError, TypeError, EOFError, struct.error)


def is_pickle(head: bytes) -> bool:
    """Whether the bytes are the beginning of a pickled list, dict or object, protocol 0 to 5."""
    return _PICKLE_START.match(head) is not None


def read_whole(content: ByteReader, where: object) -> bytes:
    """All bytes of the content. Raises DataError above MOST_BYTES."""
    blocks: list[bytes] = []
    n_read = 0
    while block := content.read(1 << 20):
        blocks.append(block)
        n_read += len(block)
        if n_read > MAX_BYTES:
            raise DataError(where, f"larger than {MAX_BYTES >> 30} GiB", "record fewer entries")
    return b"".join(blocks)


def load_plain_value(data: bytes, where: object, skip_keys: frozenset[str] = frozenset()) -> object:
    """The pickled value; the keys in `without` are dropped from all dicts.

    The value can be traversed in bounded time (require_walkable). Raises DataError for a pickle
    that requires code, is too large, truncated or damaged.
    """
    value = _PickleMachine(data, where, skip_keys).run()
    require_walkable(value, where)
    return value


class _PickleMachine:
    """The stack and memo of a pickle while its opcodes are executed."""

    def __init__(self, data: bytes, where: object, without: frozenset[str]) -> None:
        self._data, self._at, self._where, self._without = data, 0, where, without
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> object:
        """Executes the opcodes and returns the value on top of the stack."""
        data, steps = self._data, _STEPS
        try:
            for _ in range(MOST_VALUES):
                code = data[self._at]
                self._at += 1
                step = steps.get(code)
                if step is not None:
                    step(self)
                elif code == _STOP:
                    return self._stack.pop()
                elif code in _CODE_OPCODES:
                    problem = "a pickle that requires code execution is not loaded"
                    raise DataError(self._where, problem, "leave it out")
                else:
                    raise ValueError("not an opcode of a pickle")
        except _DAMAGED:
            raise DataError(self._where, "the pickle is cut off or damaged", RECORD_AGAIN) from None
        raise make_size_error(self._where)

    def push(self, value: object) -> None:
        self._stack.append(value)

    def pop(self) -> None:
        self._stack.pop() if self._stack else self.pop_to_mark()

    def repeat(self) -> None:
        self._stack.append(self._stack[-1])

    def mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def pop_to_mark(self) -> list[Any]:
        """Removes the values above the last mark, and the mark."""
        values, self._stack = self._stack, self._below.pop()
        return values

    def pop_last(self, count: int) -> list[Any]:
        """Removes the last values from the stack."""
        if len(self._stack) < count:
            raise IndexError("fewer values than the opcode takes")
        values = self._stack[-count:]
        del self._stack[-count:]
        return values

    def take(self, size: int) -> bytes:
        """Reads the next bytes of the file."""
        start, end = self._at, self._at + size
        if size < 0 or end > len(self._data):
            raise EOFError("fewer bytes than declared")
        self._at = end
        return self._data[start:end]

    def read_number(self, size: int) -> int:
        """Reads an unsigned number."""
        return int.from_bytes(self.take(size), "little")

    def read_line(self) -> bytes:
        """Reads the rest of the line."""
        end = self._data.index(b"\n", self._at)
        text = self.take(end - self._at)
        self._at += 1
        return text

    def read_long(self, size: int) -> int:
        """Reads a signed number of this many bytes, at most 255."""
        # No dump has one: a longer number would only be slow to print and to compare.
        if size > 255:
            raise ValueError("an integer of more than 255 bytes")
        return int.from_bytes(self.take(size), "little", signed=True)

    def read_text(self, size: int) -> str:
        return self.take(size).decode("utf-8", "replace")

    def append(self, values: Iterable[object]) -> None:
        """Appends the values to the list on top of the stack."""
        target = self._stack[-1]
        if type(target) is not list:
            raise TypeError("only a list is appended to")
        target.extend(values)

    def add(self, values: Iterable[object]) -> None:
        """Adds the values to the set on top of the stack."""
        target = self._stack[-1]
        if type(target) is not set:
            raise TypeError("only a set is added to")
        target.update(map(_check_hashable, values))

    def set_items(self, flat: list[Any]) -> None:
        """Adds alternating keys and values to the dict on top of the stack."""
        target = self._stack[-1]
        if type(target) is not dict:
            raise TypeError("only a dict takes items")
        target.update(self.build_items(flat))

    def build_items(self, flat: list[Any]) -> dict[Any, Any]:
        """The dict of alternating keys and values."""
        keys = flat[::2]
        # Nearly all dicts have texts as keys only.
        if set(map(type, keys)) != {str}:
            keys = [_check_hashable(key) for key in keys]
        pairs = dict(zip(keys, flat[1::2], strict=True))
        for key in self._without & pairs.keys():
            del pairs[key]
        return pairs

    def put(self, place: int) -> None:
        self._memo[place] = self._stack[-1]

    def get(self, place: int) -> None:
        self._stack.append(self._memo[place])

    def get_near(self) -> None:
        """Pushes one of the first 256 memo entries; the most frequent opcode of real files."""
        self._stack.append(self._memo[self._data[self._at]])
        self._at += 1


def _check_hashable(value: object) -> object:
    """The value if it is fast to hash, unlike nested tuples and huge integers."""
    if type(value) is int and abs(value) >> 32:
        raise ValueError("a key that a plain dict does not have")
    if value is not None and type(value) not in (str, bytes, int, bool):
        raise TypeError("a key that a plain dict does not have")
    return value


def _parse_int(line: bytes) -> int:
    """The number of opcode INT; 00 and 01 are False and True in protocol 0."""
    return line == b"01" if line in (b"00", b"01") else int(line)


_STEPS: dict[int, Callable[[_PickleMachine], object]] = {
    ord(code): step
    for code, step in {
        b"\x80": lambda m: m.take(1),
        b"\x95": lambda m: m.take(8),
        b"(": _PickleMachine.mark,
        b"0": _PickleMachine.pop,
        b"1": _PickleMachine.pop_to_mark,
        b"2": _PickleMachine.repeat,
        b"N": lambda m: m.push(None),
        b"\x88": lambda m: m.push(True),
        b"\x89": lambda m: m.push(False),
        b"I": lambda m: m.push(_parse_int(m.read_line())),
        b"L": lambda m: m.push(int(m.read_line().removesuffix(b"L"))),
        b"F": lambda m: m.push(float(m.read_line())),
        b"V": lambda m: m.push(m.read_line().decode("raw-unicode-escape")),
        b"J": lambda m: m.push(m.read_long(4)),
        b"K": lambda m: m.push(m.read_number(1)),
        b"M": lambda m: m.push(m.read_number(2)),
        b"\x8a": lambda m: m.push(m.read_long(m.read_number(1))),
        b"\x8b": lambda m: m.push(m.read_long(m.read_number(4))),
        b"G": lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
        b"U": lambda m: m.push(m.read_text(m.read_number(1))),
        b"T": lambda m: m.push(m.read_text(m.read_number(4))),
        b"X": lambda m: m.push(m.read_text(m.read_number(4))),
        b"\x8c": lambda m: m.push(m.read_text(m.read_number(1))),
        b"\x8d": lambda m: m.push(m.read_text(m.read_number(8))),
        b"C": lambda m: m.push(m.take(m.read_number(1))),
        b"B": lambda m: m.push(m.take(m.read_number(4))),
        b"\x8e": lambda m: m.push(m.take(m.read_number(8))),
        b"\x96": lambda m: m.push(m.take(m.read_number(8))),
        b")": lambda m: m.push(()),
        b"\x85": lambda m: m.push(tuple(m.pop_last(1))),
        b"\x86": lambda m: m.push(tuple(m.pop_last(2))),
        b"\x87": lambda m: m.push(tuple(m.pop_last(3))),
        b"t": lambda m: m.push(tuple(m.pop_to_mark())),
        b"]": lambda m: m.push([]),
        b"l": lambda m: m.push(m.pop_to_mark()),
        b"a": lambda m: m.append(m.pop_last(1)),
        b"e": lambda m: m.append(m.pop_to_mark()),
        b"}": lambda m: m.push({}),
        b"d": lambda m: m.push(m.build_items(m.pop_to_mark())),
        b"s": lambda m: m.set_items(m.pop_last(2)),
        b"u": lambda m: m.set_items(m.pop_to_mark()),
        b"\x8f": lambda m: m.push(set()),
        b"\x90": lambda m: m.add(m.pop_to_mark()),
        b"\x91": lambda m: m.push(frozenset(map(_check_hashable, m.pop_to_mark()))),
        b"p": lambda m: m.put(int(m.read_line())),
        b"q": lambda m: m.put(m.read_number(1)),
        b"r": lambda m: m.put(m.read_number(4)),
        b"\x94": lambda m: m.put(len(m._memo)),
        b"g": lambda m: m.get(int(m.read_line())),
        b"h": _PickleMachine.get_near,
        b"j": lambda m: m.get(m.read_number(4)),
    }.items()
}
"""The supported opcodes; strings of Python 2's protocol 0 are not supported."""


# Bounded traversal of nested values with shared parts.

MOST_VALUES = 1 << 26
"""The most values of a file, each counted as often as a traversal visits it."""

MAX_DEPTH = 64
"""Of containers in one another, far below Python's limit of recursion; chosen, not measured."""

_CONTAINERS = frozenset({list, tuple, dict})


def make_size_error(where: object) -> DataError:
    """The error for more than MOST_VALUES."""
    return DataError(where, f"more than {MOST_VALUES:,} values", "record fewer entries")


def require_walkable(root: object, where: object) -> None:
    """Raises DataError if a traversal of all values would take too long.

    A few hundred bytes of shared lists can represent more values than can ever be visited, so the
    size of each container is computed once, after those inside it.
    """
    weights: dict[int, int] = {}
    depths: dict[int, int] = {}
    entered: set[int] = set()
    pending = [root]
    while pending:
        node = pending[-1]
        if id(node) in weights:
            pending.pop()
            continue
        inner = {id(c): c for c in _list_members(node) if type(c) in _CONTAINERS}
        waiting = [c for place, c in inner.items() if place not in weights]
        if waiting:
            entered.add(id(node))
            if not entered.isdisjoint(map(id, waiting)):
                raise DataError(where, "a pickle that contains itself", "leave it out")
            pending.extend(waiting)
            continue
        entered.discard(id(node))
        weights[id(node)] = 1 + sum(
            weights[id(c)] if type(c) in _CONTAINERS else 1 for c in _list_members(node)
        )
        depths[id(node)] = 1 + max((depths[place] for place in inner), default=0)
        if weights[id(node)] > MOST_VALUES:
            raise make_size_error(where)
        if depths[id(node)] > MAX_DEPTH:
            raise DataError(where, f"nested deeper than {MAX_DEPTH}", "leave it out")


def _list_members(node: object) -> Iterable[object]:
    if type(node) is dict:
        return node.values()
    return node if isinstance(node, (list, tuple)) else ()
