"""Frameworks and GPU families as data: a new one is an entry of a file."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepsplit import analyzer
from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.model import hardware_config, profile
from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.config_file import parse_job
from stepsplit.analyzer.model.hardware_config import list_families
from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.model.profile import Origin, load_frameworks
from stepsplit.analyzer.model.schedule_names import SCHEDULES

JOB = """
[model]
preset = "llama-3.1-8b"
[parallel]
dp = 8
zero = 1
[training]
seq_len = 4096
micro_batch = 1
global_batch = 16
{training}
[hardware]
preset = "h100-sxm"
{hardware}
"""


def job(training: str = "", hardware: str = "") -> JobConfig:
    return parse_job(JOB.format(training=training, hardware=hardware))


NEW = """
[mine]
source = "a framework of our own: as Megatron-LM, but with gradients in 16 bits"
aliases = ["our-own"]
same_layers_as = "megatron"
assumed = ["times.host_calls"]
[mine.defaults]
fused_loss = true
[mine.messages]
all_reduces = true
[mine.memory]
low = 0.9
high = 1.1
logits_saved = 4.0
logits_working = 2.0
logits_working_split = 2.0
[mine.times]
host_calls = 20
"""

Add = Callable[[str], None]


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Add]:
    """Adds entries to a copy of frameworks.toml, which is read instead of it."""

    def write(entries: str) -> None:
        copy = tmp_path / "frameworks.toml"
        copy.write_text(profile.FRAMEWORKS_FILE.read_text() + entries)
        monkeypatch.setattr(profile, "FRAMEWORKS_FILE", copy)
        load_frameworks.cache_clear()

    yield write
    load_frameworks.cache_clear()


def test_a_new_framework_is_one_entry(add: Add) -> None:
    megatron = job('framework = "megatron"')
    add(NEW)
    mine = job('framework = "our-own"')
    assert (mine.training.framework, mine.training.gradient_dtype) == ("mine", "bf16")
    assert mine.training.fused_loss
    ops = {each.message.op for each in predict(mine).communication}
    assert ops == {"all_reduce", "all_gather"}
    assert "reduce_scatter" in {each.message.op for each in predict(megatron).communication}
    (first,) = predict(mine).memory
    assert (first.total_bytes_low, first.total_bytes_high) == (
        round(0.9 * first.total_bytes),
        round(1.1 * first.total_bytes),
    )


def test_a_typo_in_an_entry_is_one_line_that_names_file_key_and_fix(add: Add) -> None:
    add(NEW.replace("all_reduces = true", "all_reduce = true"))
    message = "mine.messages.all_reduce: unknown key; write all_reduces"
    with pytest.raises(DataError, match=rf"frameworks\.toml: {re.escape(message)}") as caught:
        job('framework = "mine"')
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("host_calls = 20", "host_calls = -1", "mine.times.host_calls: -1 is not a valid count"),
        ("host_calls = 20", "zeroes_gradients = true", "mine.times.host_calls: missing"),
        ('source = "', 'sources = "', "mine.sources: unknown key; write"),
        ("times.host_calls", "times.hosts", "mine.assumed: 'times.hosts' is not a feature; write"),
        ('same_layers_as = "megatron"', "", "mine.saved: missing; give saved, or the framework"),
        ("host_calls = 20", 'host_calls = 1\naccumulation = "gem"', "'gem' is unknown; write gemm"),
    ],
)
def test_every_mistake_of_an_entry_is_named(add: Add, old: str, new: str, message: str) -> None:
    add(NEW.replace(old, new, 1))
    with pytest.raises(DataError, match=re.escape(message)):
        job('framework = "megatron"')


def test_a_framework_without_an_entry_suggests_similar_names() -> None:
    with pytest.raises(UsageError, match=r"^unknown framework 'megatorn'; write megatron, "):
        profile.load_framework("megatorn")
    with pytest.raises(DataError, match="'megatorn' is unknown; write megatron, "):
        job('framework = "megatorn"')


def test_a_constant_is_stated_if_it_is_not_that_of_the_family() -> None:
    gemm = hardware_config.load_efficiency("hopper").gemm
    for value, origin in ((gemm, Origin.FITTED), (0.5, Origin.STATED)):
        efficiency = job(hardware=f"efficiency.gemm = {value}").hardware.efficiency
        assert hardware_config.find_efficiency_origins("hopper", efficiency)["gemm"] is origin


def test_the_words_of_the_entries_are_known() -> None:
    known = load_frameworks().values()
    assert {name for one in known for name in one.search.schedules} <= set(SCHEDULES)
    kernels = {profile.load_device(family).attention_kernel for family in list_families()}
    assert kernels == {"flash-2", "aiter", "ck"}
    unnamed = [kind for one in known for kind in one.inferred]
    assert sorted(unnamed) == ["replicated", "sharded", "torch", "torch-replicas"]


PACKAGE = Path(analyzer.__file__).parent

NAMES = {*load_frameworks(), *list_families()}


@pytest.mark.parametrize("room", ["model", "gap"])
def test_no_code_asks_for_the_name_of_a_framework_or_family(room: str) -> None:
    asked = [
        f"{file.name}:{node.lineno}"
        for file in sorted((PACKAGE / room).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Compare | ast.match_case)
        and NAMES & {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
    ]
    assert asked == []
