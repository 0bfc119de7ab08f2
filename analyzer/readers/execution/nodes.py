"""The nodes of a PyTorch execution trace, one by one as its text is read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from stepsplit.analyzer.readers.unpack import Unpacked

BLOCK_BYTES = 1 << 20
MOST_NODE_BYTES = 4 << 20
"""A node beyond this size is damage."""
NODES = re.compile(rb'"nodes"\s*:\s*\[')

NUMBERS = ("rf_id", "fw_parent", "seq_id", "scope", "tid", "fw_tid")
_TEXT = rb'"(?:[^"\\]++|\\.)*+"'
_FLAT = rb'\{(?:[^{}"]++|' + _TEXT + rb")*+\}"
_DEEP = rb'\{(?:[^{}"]++|' + _TEXT + rb"|" + _FLAT + rb")*+\}"
_NODE = re.compile(rb'\{(?:[^{}"]++|' + _TEXT + rb"|" + _DEEP + rb")*+\}", re.DOTALL)
_BEGIN = re.compile(rb'\{\s*"(?:id"|name"\s*:\s*"[^"]*"\s*,\s*"id")')
_BETWEEN = re.compile(rb"[\s,]*+")


class Attribute(Struct):
    """A named value of a node."""

    name: str
    value: Any = None


class Node(Struct):
    """A node as the file has it: attributes stand in attrs, before Chakra in the node itself."""

    id: int
    name: str = ""
    ctrl_deps: int | list[int] | None = None
    parent: int | None = None
    attrs: list[Attribute] = []
    inputs: msgspec.Raw = msgspec.Raw()
    outputs: msgspec.Raw = msgspec.Raw()
    input_types: msgspec.Raw = msgspec.Raw()
    output_types: msgspec.Raw = msgspec.Raw()
    rf_id: int = -1
    fw_parent: int = -1
    seq_id: int = -1
    scope: int = -1
    tid: int = -1
    fw_tid: int = -1

    def numbers(self) -> tuple[int, ...]:
        """The values of NUMBERS, -1 where one is not told."""
        if not self.attrs:
            return tuple(known(getattr(self, name)) for name in NUMBERS)
        told = {attribute.name: attribute.value for attribute in self.attrs}
        return tuple(known(told.get(name)) for name in NUMBERS)

    def number(self, name: str) -> int:
        """The attribute of that name, -1 where it is not told."""
        return known(self._value(name))

    def text(self, name: str) -> str:
        """The attribute of that name, "" where it is not told."""
        value = self._value(name)
        return value if isinstance(value, str) else ""

    def _value(self, name: str) -> Any:
        return next((a.value for a in self.attrs if a.name == name), None)

    @property
    def parent_id(self) -> int:
        """The node that called this one, -1 where it is not told."""
        deps = self.ctrl_deps if self.parent is None else self.parent
        return known(deps[0] if isinstance(deps, list) and deps else deps)


class Envelope(Struct):
    """What stands around the nodes."""

    schema: str = ""
    pid: int = -1


NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_DECODER = msgspec.json.Decoder(Node)


class NodeStream:
    """The nodes of a trace; iterate once.

    Memory is bounded by a block and a node. Afterwards skipped counts what is no node, whole says
    whether there was a list of nodes and it was closed, and envelope is what stands around it.
    """

    def __init__(self, content: Unpacked) -> None:
        self._content = content
        self.skipped = 0
        self.whole = False
        self.envelope = Envelope()

    def __iter__(self) -> Iterator[Node]:
        text = self._begin()
        opened = NODES.search(text)
        if opened is None:
            return
        before, at = text[: opened.end() - 1], opened.end()
        while at >= 0:
            at = _end(_BETWEEN.match(text, at))
            if text.startswith(b"]", at):
                break
            node = _NODE.match(text, at)
            if node is None and (more := self._more(len(text) - at)):
                text, at = text[at:] + more, 0
            elif node is not None and (decoded := _decoded(node[0])):
                yield decoded
                at = node.end()
            else:
                at = self._skip(text, at, node)
        self.whole = at >= 0
        after = text[at:] + self._content.read(BLOCK_BYTES) if self.whole else b"]}"
        self.envelope = _envelope(before + b"[" + after)

    def _begin(self) -> bytes:
        """The text up to the list of nodes and a little more; all of it where none is near."""
        text = b""
        while len(text) < MOST_NODE_BYTES and (block := self._content.read(BLOCK_BYTES)):
            text += block
            if NODES.search(text):
                break
        return text

    def _more(self, size: int) -> bytes:
        return self._content.read(BLOCK_BYTES) if size < MOST_NODE_BYTES else b""

    def _skip(self, text: bytes, at: int, odd: re.Match[bytes] | None) -> int:
        """Where to go on after what is no node: at the next beginning; -1 where none follows."""
        begin = _BEGIN.search(text, at + 1)
        if begin is None and odd is None:
            return -1
        self.skipped += 1
        return begin.start() if begin is not None else _end(odd)


def known(value: object) -> int:
    """The value where it is a number that a column holds, else -1."""
    return value if isinstance(value, int) and -1 <= value < 1 << 63 else -1


def _end(match: re.Match[bytes] | None) -> int:
    assert match is not None
    return match.end()


def _decoded(text: bytes) -> Node | None:
    try:
        return _DECODER.decode(text)
    except UnicodeDecodeError:
        return _decoded(text.decode(errors="replace").encode())
    except NOT_JSON:
        return None


def _envelope(text: bytes) -> Envelope:
    try:
        return msgspec.json.decode(text, type=Envelope)
    except NOT_JSON:
        return Envelope()
