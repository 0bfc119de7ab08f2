"""Names and lines of any content are searched in linear time."""

from __future__ import annotations

import importlib
import pkgutil
import re
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

import stepsplit.analyzer
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, compile_pattern
from stepsplit.analyzer.trace import MAX_NAME_LENGTH

_parser: Any = importlib.import_module("re._parser")

SLOW_S = 0.03
"""Patterns that need less for the longest name are not looked at more closely."""
SHORTER = 16
MOST_GROWTH = 64
"""16 times the length takes 16 times as long, 256 times if it is quadratic."""


def list_patterns() -> dict[str, re.Pattern[Any]]:
    """Every pattern of a module of the analyzer, and of the built-in rules, by its place."""
    found = {f"rules.toml: {rule.match}": compile_pattern(rule.match)
             for rule in (*BUILT_IN.kernels, *BUILT_IN.families)}  # fmt: skip
    for module in pkgutil.walk_packages(stepsplit.analyzer.__path__, "stepsplit.analyzer."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, re.Pattern):
                found[f"{module.name}.{name}"] = value
    return found


def list_literals(parsed: Iterable[Any]) -> Iterator[str]:
    """The runs of literal characters in a parsed pattern, and one character of each set."""
    run = ""
    for op, argument in parsed:
        if str(op) == "LITERAL":
            run += chr(argument)
            continue
        if run:
            yield run
        run = ""
        if str(op) == "IN":
            yield from (chr(code) for kind, code in argument if str(kind) == "LITERAL")
        elif isinstance(argument, tuple | list):
            for part in argument:
                yield from list_nested(part)
        else:
            yield from list_nested(argument)
    if run:
        yield run


def list_nested(part: Any) -> Iterator[str]:
    if isinstance(part, _parser.SubPattern):
        yield from list_literals(part)
    elif isinstance(part, list):
        for one in part:
            yield from list_nested(one)


def list_attacks(pattern: re.Pattern[Any]) -> list[str]:
    """What the pattern looks for, again and again: alone, in pairs and with a letter between."""
    text = pattern.pattern
    parsed = _parser.parse(text, pattern.flags & ~re.UNICODE if isinstance(text, bytes) else 0)
    literals = sorted(set(list_literals(parsed)), key=lambda text: (-len(text), text))
    own = sorted({*literals[:12], "a", "1", " ", "_", "x1", "a."})
    return [*own, *(a + b for a in own for b in own if a != b)]


def measure_s(pattern: re.Pattern[Any], unit: str, length: int) -> float:
    """CPU seconds to search the repeated unit, at best of three."""
    text = (unit * (length // len(unit) + 1))[:length]
    subject = text.encode("latin1", "replace") if isinstance(pattern.pattern, bytes) else text
    spent = []
    for _ in range(3):
        begin = time.thread_time()
        pattern.search(subject)
        spent.append(time.thread_time() - begin)
        if spent[0] < SLOW_S:
            break
    return min(spent)


@pytest.mark.slow
def test_no_pattern_takes_quadratic_time() -> None:
    """A pattern that is only matched at the begin of a text says so by \\A."""
    quadratic = []
    for place, pattern in list_patterns().items():
        for unit in list_attacks(pattern):
            long_s = measure_s(pattern, unit, MAX_NAME_LENGTH)
            if long_s < SLOW_S:
                continue
            if long_s > MOST_GROWTH * measure_s(pattern, unit, MAX_NAME_LENGTH // SHORTER):
                quadratic.append((place, unit, long_s))
                break
    assert not quadratic, quadratic


def test_a_pattern_that_scans_from_each_of_its_begins_is_seen() -> None:
    quadratic = re.compile(r"[nrsp]ccl\w*kernel")
    assert "ccl" in list_attacks(quadratic)
    assert measure_s(quadratic, "nccl", MAX_NAME_LENGTH) > MOST_GROWTH * measure_s(
        quadratic, "nccl", MAX_NAME_LENGTH // SHORTER
    )
