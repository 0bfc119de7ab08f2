"""Mutants of blocks through the scanner alone: python scanner_blocks.py LIBRARY FIRST_SEED END.

For a library with sanitizers, which end the process at the first read outside of a block: each
block is in memory of exactly its size.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from random import Random

import numpy as np

if not __package__:  # run as a file: its folder is no place to import from, the one above is
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from support.compiled_scanner import load_scanner

from fuzz.damage import POISON, VALUES, damaged, traces

_BETWEEN = re.compile(rb"\}\s*,\s*\{")

_ARGUMENTS = (
    b'"Input Dims": [[', b'"c10::Half"', b'"grid": [1', b'"stream": -7', b'"pid": "', b'"args": {',
    b'"ph": "X"', b'"ts": 1.0000000000000005', b'"dur": 2305843009213693.0005', b'""', b"1" * 17,
)  # fmt: skip


def list_blocks() -> list[bytes]:
    """Arrays of three to forty entries of small traces."""
    blocks = []
    for text in traces():
        array = text[text.index(b"[", text.index(b'"traceEvents"')) :]
        cuts = [match.start() + 1 for match in _BETWEEN.finditer(array)]
        for count in (3, 10, 40):
            begin = len(cuts) // 2
            end = min(begin + count, len(cuts) - 1)
            blocks.append(b"[" + array[cuts[begin] + 1 : cuts[end]] + b"]")
    return blocks


def mutate(random: Random, block: bytes) -> bytes:
    """The block after one to eight damages, most of them within a value."""
    for _ in range(random.choice((1, 1, 2, 8))):
        if random.random() < 0.3:
            block = damaged(random, block)
        at = random.randrange(len(block))
        end = at + random.choice((0, 1, 4, 20))
        block = block[:at] + random.choice(POISON + VALUES + _ARGUMENTS)[:1000] + block[end:]
        if random.random() < 0.1:
            block = block[:at] + b"]"
    return block


def main(library: str, first: str, end: str) -> None:
    """Prints how many mutants were scanned and how many not."""
    scan, blocks, scanned = load_scanner(Path(library)).scan, list_blocks(), 0
    for block in blocks:
        assert scan(block) is not None
    for seed in range(int(first), int(end)):
        random = Random(seed)
        text = mutate(random, random.choice(blocks))
        scanned += scan(np.array(np.frombuffer(text, dtype=np.uint8))) is not None
    sys.stdout.write(f"{scanned} of {int(end) - int(first)} scanned\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
