"""Untrusted pickles: plain values are read, no code runs, and resources are bounded."""

from __future__ import annotations

import copyreg
import datetime
import os
import pickle
import struct
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from stepsplit.analyzer import DataError
from stepsplit.analyzer.readers import pickle as walkable
from stepsplit.analyzer.readers.pickle import is_pickle, load_plain_value

PLAIN: list[Any] = [
    {}, [], {"a": 1}, [1, [2, [3]]], {"t": (), "u": (1,), "v": (1, 2), "w": (1, 2, 3, 4)},
    {"n": None, "yes": True, "no": False, "f": -0.5, "s": "é\n\\", "long": "x" * 70_000},
    {"ints": [0, 255, 256, 65_535, 65_536, -1, -(2**31), 2**31, 2**63, -(2**80)]},
    [{"same": 1}] * 3, list(range(3000)), {str(i): i for i in range(3000)}, {1: "a", None: "b"},
]  # fmt: skip
PLAIN_SINCE_4: list[Any] = [{"b": b"\x00\xff", "big": b"x" * 70_000}, [{1, "a"}, frozenset({2})]]


def refused(data: bytes) -> str:
    with pytest.raises(DataError) as caught:
        load_plain_value(data, "rank0.pickle")
    line = str(caught.value)
    assert line.startswith("rank0.pickle: ")
    assert "\n" not in line
    return caught.value.problem


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("value", PLAIN, ids=range(len(PLAIN)))
def test_plain_values_come_back(value: object, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert is_pickle(data)
    assert load_plain_value(data, "here") == value


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("value", PLAIN_SINCE_4)
def test_bytes_and_sets_are_plain_since_protocol_4(value: object, protocol: int) -> None:
    assert load_plain_value(pickle.dumps(value, protocol), "here") == value


def test_skipped_keys_are_dropped() -> None:
    data = pickle.dumps([{"size": 1, "frames": [{"name": "f"}]}, {"frames": []}])
    assert load_plain_value(data, "here", frozenset({"frames"})) == [{"size": 1}, {}]


class Runs:
    """Whoever unpickles this with Python's own loader makes a folder."""

    def __init__(self, call: Any, *args: object) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> Any:
        return self.call, self.args


CODE = "a pickle that requires code execution is not loaded"


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "value",
    [
        Runs(os.mkdir, "gotcha"),
        Runs(eval, "__import__('os').mkdir('gotcha')"),
        {"entries": [Runs(os.mkdir, "gotcha")]},
        os.system, dict, OrderedDict(a=1), datetime.date(2026, 1, 1), 1j,
    ],
)  # fmt: skip
def test_a_pickle_that_requires_code_is_refused_and_does_not_run(
    value: object, protocol: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(pickle.dumps(value, protocol)) == CODE
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "data",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"(S'true'\nios\nsystem\n.".replace(b"S'true'\n", b"N"),
        b"(cos\nsystem\nNo.",
        b"(NNo.",
        b"\x80\x02}N\x81.",
        b"\x80\x04})}\x92.",
        b"\x80\x02}}b.",
        b"\x80\x02}}R.",
        b"Pname\n.",
        b"NQ.",
    ],
)
def test_every_opcode_that_could_run_something_is_refused(data: bytes) -> None:
    assert refused(data) == CODE


def test_an_extension_that_python_has_cached_is_refused_too() -> None:
    copyreg.add_extension(os.system.__module__, "system", 0x7E)
    try:
        data = pickle.dumps(os.system, 2)
        assert b"\x82\x7e" in data
        assert pickle.loads(data) is os.system
        assert refused(data) == CODE
    finally:
        copyreg.remove_extension(os.system.__module__, "system", 0x7E)
        copyreg.clear_extension_cache()


def test_a_truncated_pickle_is_an_error(subtests: pytest.Subtests) -> None:
    data = pickle.dumps({"version": "2.9", "entries": [{"a": (1, 2)}, "é" * 9]}, 2)
    for cut in range(0, 60, 3):
        with subtests.test(cut=cut):
            assert refused(data[:cut]) == "the pickle is cut off or damaged"


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x05\x8e" + struct.pack("<Q", 1 << 62) + b".",
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
        b"\x80\x04\x8d" + struct.pack("<Q", (1 << 64) - 1) + b".",
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 60),
        b"\x80\x02]r\xff\xff\xff\xff0j\xff\xff\xff\xfe.",
        b"\x80\x02]p99999999999999999\n0g1\n.",
        b"\x80\x02\x8b\xff\xff\xff\x7f\x01.",
        b"\x80\x02I" + b"9" * 10_000 + b"\n.",
    ],
)
def test_a_length_beyond_the_file_allocates_nothing(data: bytes) -> None:
    assert refused(data) == "the pickle is cut off or damaged"


def test_a_few_bytes_that_represent_too_many_values_are_refused() -> None:
    doubled = b"\x80\x02]" + b"q\x00]h\x00ah\x00aq\x00" * 40 + b"."
    assert refused(doubled) == f"more than {walkable.MOST_VALUES:,} values"
    assert refused(b"\x80\x02" + b"]" * 70 + b"a" * 69 + b".") == "nested deeper than 64"
    assert refused(b"\x80\x02]q\x00h\x00a.") == "a pickle that contains itself"


def test_keys_whose_hash_takes_forever_are_refused() -> None:
    doubled_tuple = b"\x80\x02}N" + b"2\x86" * 60 + b"Ns."
    assert refused(doubled_tuple) == "the pickle is cut off or damaged"
    assert refused(pickle.dumps({2**61 - 1: 1})) == "the pickle is cut off or damaged"


def test_more_opcodes_than_any_file_needs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepsplit.analyzer.readers.pickle.MOST_VALUES", 100)
    assert "values" in refused(pickle.dumps(list(range(1000))))


@pytest.mark.parametrize(
    "data", [b"", b"{", b'{"a": 1}', b"\x1f\x8b\x08\x00", b"\x80", b"\x80\x06}.", b"[1, 2]", b"]\n"]
)
def test_other_files_are_not_recognized_as_pickles(data: bytes) -> None:
    assert not is_pickle(data)


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_random_bytes_raise_nothing_but_dataerror(data: bytes) -> None:
    is_pickle(data)
    for begun in (data, b"\x80\x02" + data, b"\x80\x04}]((" + data):
        try:
            load_plain_value(begun, "here")
        except DataError as error:
            assert "\n" not in str(error)


@given(
    st.sampled_from([pickle.dumps(value, p) for value in PLAIN[:7] for p in (0, 1, 2, 4)]),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4),
)
@settings(max_examples=300, deadline=None)
def test_mutated_pickles_raise_nothing_but_dataerror(
    data: bytes, changes: list[tuple[float, int]]
) -> None:
    changed = bytearray(data)
    for place, byte in changes:
        changed[int(place * len(changed))] = byte
    try:
        load_plain_value(bytes(changed), "here")
    except DataError as error:
        assert "\n" not in str(error)
