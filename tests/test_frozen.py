"""What a change of the code's shape must not move: numbers, screens, pages, --help, the public API.

The files under tests/golden/ hold what is compared, byte for byte; of modelled times and rates,
three digits. `python -m pytest tests/test_frozen.py --update-golden` rewrites them; the diff is
then what a change has moved.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import hashlib
import html
import importlib
import importlib.util
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.published_checks import validate_published
from support.reading import rounded

from stepsplit.analyzer import validation
from stepsplit.collectors.safe_io.atomic_file import write_whole
from stepsplit.dashboard import cli

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden"
SAMPLES = ROOT / "sample_traces"
NAMES = sorted(path.name for path in SAMPLES.iterdir() if path.is_dir())
JOBS = sorted(path.stem for path in (GOLDEN / "jobs").glob("*.toml") if path.stem != "plan")
EXPLAINED = ("gpt3_interleaved", "deepseek_experts")
VERDICT_FILES = (
    "json", "junit", "summary", "markdown", "codequality", "openmetrics", "bencher",
    "benchmark-action",
)  # fmt: skip
COMMANDS = {
    "analyze_run_auto": "analyze tp2_pp2 --job auto --json analyze_run_auto.json",
    "analyze_run_file": "analyze dp4 --job dp4.toml --json analyze_run_file.json",
    "baseline": "baseline fsdp4 --out baseline.json",
    "baseline_of_two": "baseline pp2_m2 pp2_m8 --out baseline_of_two.json",
    "calibrate": "calibrate tp2_pp2 dp4 --json calibrate.json --out calibrate.toml",
    "check_inconclusive": "check fsdp4 --baseline fsdp4 --budget exposed_comm:5%"
                          " --json check_inconclusive.json",
    "check_limits": "check fsdp4 --budget exposed_comm:<=10% --budget step:<=1s",
    "check_model": "check tp2_pp2 --job auto --budget step:model+20%",
    "check_pass": "check built_tp_pp_dp_slow_rank --baseline built_tp_pp_dp_slow_rank"
                  " --budget calls:exact",
    "check_refused": "check tp2_pp2 --baseline tp2_pp2_dp2",
    "check_regressed": "check pp2_m8 --baseline pp2_m2 --across-setups --budget calls:exact"
                       + "".join(f" --{one} check_regressed.{one}" for one in VERDICT_FILES),
    "compare": "compare pp2_m2 pp2_m8 --json compare.json",
    "compare_layouts": "compare tp2_pp2 tp2_pp2_dp2 --json compare_layouts.json",
    "hang": "analyze dp4/rank0_flight.json.gz dp4/rank2_flight.json.gz --json hang.json",
    "plan": "plan jobs/plan.toml --gpus 64 --json plan.json",
    "plan_keep": "plan jobs/mixtral_expert_tensor.toml --gpus 32 --top 3 --keep pp --keep ep"
                 " --keep cp",
    "validate": "validate --json validate.json",
    "what_if": "what-if tp2_pp2 --json what_if.json",
    "what_if_slow_rank": "what-if built_tp_pp_dp_slow_rank --json what_if_slow_rank.json",
    **{f"model_{job}": f"model jobs/{job}.toml --json model_{job}.json" for job in JOBS},
    **{f"explain_{job}": f"model jobs/{job}.toml --explain" for job in EXPLAINED},
}  # fmt: skip
"""Each is run in a folder that holds the samples and the jobs, and may write files there."""
DP4_JOB = """\
[training]
recompute = "none"
"""
PUBLIC = ("stepsplit.analyzer", "stepsplit.collectors")
BY_PATH = (
    "stepsplit.analyzer.hta:open_in_hta",
    "stepsplit.collectors.integrations.accelerate:profile_accelerator",
    "stepsplit.collectors.integrations.calls:profile_calls",
    "stepsplit.collectors.integrations.deepspeed:profile_engine",
    "stepsplit.collectors.integrations.lightning:StepsplitCallback",
    "stepsplit.collectors.integrations.torchtitan:StepsplitProfiler",
    "stepsplit.collectors.integrations.transformers:StepsplitCallback",
)
"""What the docs import from a module of its own; read as text, for some need a library."""
MEASURED = ("docs/accuracy.md", "docs/check.md")
"""Docs whose tables are results that tests or benchmarks computed."""
ROUNDED = ("report.json", "analyze_run_auto.json", "analyze_run_file.json", "calibrate.json")
"""The last digits of numpy's logarithms and least squares depend on the processor."""

MODELLED = re.compile(r"(model_.*|plan|validate)\.json")
"""Files of predictions: when a constant is fitted anew, the last digits of all of them move."""

Keep = Callable[[str, str | bytes], None]


@pytest.fixture
def keep(request: pytest.FixtureRequest) -> Keep:
    """Compares what was found with the golden file of a name, or rewrites that."""
    update = request.config.getoption("--update-golden")

    def compared(name: str, found: str | bytes) -> None:
        content = found.encode() if isinstance(found, str) else found
        path = GOLDEN / name
        known = path.read_bytes() if path.is_file() else b""
        if update:
            if known != content:
                write_whole(path, content)
        else:
            same = content == known or (path.name in ROUNDED and rounded(content) == rounded(known))
            assert same, difference(name, known.decode(), content.decode())

    return compared


def format_modelled(content: bytes) -> str:
    """A file of predictions for the eye and for diffs: a record a line, three digits of what is
    computed from rates. Counts and the sizes of messages are exact."""
    lines = []
    for key, value in json.loads(content).items():
        records = value if isinstance(value, list) else [value]
        for record in records:
            rows = record.pop("rows", []) if isinstance(record, dict) else []
            lines.append(f"{key}: {_format_record(record)}")
            lines += [f"  {' | '.join(rows[0])}"] if rows else []
            lines += ["  " + " | ".join(_format_record(v, k) for k, v in r.items()) for r in rows]
    return "\n".join([*lines, ""])


def _format_record(record: object, key: str = "") -> str:
    if isinstance(record, dict):
        return ", ".join(f"{k} {_format_record(v, k)}" for k, v in record.items())
    if isinstance(record, list):
        return "[" + "; ".join(_format_record(each, key) for each in record) + "]"
    is_exact = isinstance(record, int) and not re.search(r"_ns|_low$|_high$", key)
    if isinstance(record, bool | str) or record is None or is_exact:
        return str(record)
    return f"{record:.3g}"


def difference(name: str, known: str, found: str) -> str:
    """The first changed lines, and whether any number is among what changed."""
    same = numbers(known) == numbers(found)
    lines = difflib.unified_diff(known.split("\n"), found.split("\n"), name, "found", n=1)
    shown = [line[:300] for line, _ in zip(lines, range(60), strict=False)]
    verdict = "all numbers are the same, the words differ" if same else "numbers differ"
    return "\n".join([f"{name}: {verdict}; --update-golden rewrites it", *shown])


def numbers(text: str) -> list[str]:
    """The numbers of the text in their order, signs and fractions included."""
    return re.findall(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?", text)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in that holds the samples and jobs; a terminal of 100 columns."""
    for name in NAMES:
        (tmp_path / name).symlink_to(SAMPLES / name)
    (tmp_path / "jobs").symlink_to(GOLDEN / "jobs")
    (tmp_path / "dp4.toml").write_text(DP4_JOB)
    monkeypatch.chdir(tmp_path)
    as_plain_terminal(monkeypatch, 100)
    return tmp_path


def as_plain_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")


def session(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """A command, what it printed and how it ended, as a terminal would show it."""
    capsys.readouterr()
    status = cli.run(words)
    printed = capsys.readouterr()
    lines = [line.rstrip() for line in (printed.out + printed.err).splitlines()]
    return "\n".join([f"$ stepsplit {' '.join(words)}", *lines, f"[exit {status}]", ""])


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_gives_its_screen_its_report_and_its_tables(
    name: str,
    desk: Path,
    keep: Keep,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    keep(f"screens/analyze_{name}.txt", session(["analyze", name, "--out", "out"], capsys))
    # tests/report/test_samples.py keeps report.json's values; this is its text.
    keep(f"../../sample_traces/{name}/report.json", (desk / "out" / "report.json").read_bytes())
    assert cli.run(["export", "out", "--perfetto", "trace.pftrace"]) == 0
    digests = {
        "perfetto": digest((desk / "trace.pftrace").read_bytes()),
        **{path.stem: dict(columns(path)) for path in sorted((desk / "out/tables").iterdir())},
    }
    keep(f"tables/{name}.json", json.dumps(digests, indent=1) + "\n")


def columns(path: Path) -> Iterator[tuple[str, int | str]]:
    """How many rows a Parquet file has, and each column's type with a digest of its values."""
    table = pq.read_table(path)
    yield "rows", len(table)
    for name in table.column_names:
        column = table.column(name)
        if pa.types.is_integer(column.type):
            content = column.to_numpy().tobytes()
        else:
            content = "\0".join(map(str, column.to_pylist())).encode()
        yield name, f"{column.type} {digest(content)}"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("name", NAMES)
def test_the_pages_of_a_sample_say_what_they_did(
    name: str, desk: Path, keep: Keep, capsys: pytest.CaptureFixture[str]
) -> None:
    job = [] if name.startswith("built_") else ["--job", "auto"]
    assert cli.run(["analyze", name, *job, "--html", "pages.html"]) == 0
    page = (desk / "pages.html").read_text()
    body = page[page.index("</head><body>") : page.index("<script", page.index("<body>"))]
    words = [line.strip() for line in html.unescape(re.sub(r"<[^>]+>", "\n", body)).split("\n")]
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.S)
    assert found is not None
    traces = [trace for figure in json.loads(found[1]) for trace in figure["data"]]
    drawn = [f"{each['type']} {each.get('name', '')}: {points(each)}" for each in traces]
    keep(f"pages/{name}.txt", "\n".join([*filter(None, words), "", "# charts", *drawn, ""]))


def points(trace: dict[str, Any]) -> str:
    """Which points a trace of a chart has, as a digest."""
    values = {key: trace.get(key) for key in ("x", "y", "z", "base", "text", "customdata")}
    return digest(json.dumps(values, sort_keys=True).encode())[:16]


@pytest.mark.parametrize(
    "name",
    [
        # Five seconds; the other plan is as good for words and columns.
        pytest.param(name, marks=(pytest.mark.slow, pytest.mark.in_turn("analyzer/model")))
        if name == "plan" else name
        for name in COMMANDS
    ],
)  # fmt: skip
def test_a_command_prints_and_writes_what_it_did(
    name: str,
    desk: Path,
    keep: Keep,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Tests of validation compute the same checks.
    monkeypatch.setattr(validation, "validate", lambda _: validate_published())
    before = {path.name for path in desk.iterdir()}
    keep(f"screens/{name}.txt", session(COMMANDS[name].split(" "), capsys))
    for path in sorted(desk.iterdir()):
        if MODELLED.fullmatch(path.name):
            keep(f"files/{path.stem}.txt", format_modelled(path.read_bytes()))
        elif path.name not in before:
            keep(f"files/{path.name}", path.read_bytes())


def test_the_help_of_every_command(
    keep: Keep, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_plain_terminal(monkeypatch, 80)
    verbs = [[], *([verb] for verb in cli.COMMANDS)]
    verbs += [["token", verb] for verb in ("create", "list", "revoke")]
    keep("help.txt", "\n".join(session([*words, "--help"], capsys) for words in verbs))


def test_the_names_that_others_import(keep: Keep) -> None:
    pytest.importorskip("torch")
    parts = [line for module in PUBLIC for line in public(module)]
    keep("api.txt", "\n".join([*parts, *(by_path(place) for place in BY_PATH)]))


def public(module: str) -> Iterator[str]:
    """A paragraph of each name that the module exports; inner modules are not named."""
    found = importlib.import_module(module)
    for name in sorted(found.__all__):
        one = getattr(found, name)
        yield "\n".join([f"# {module}", *lines_of(name, one), ""])


def lines_of(name: str, one: Any) -> Iterable[str]:
    """A class with its fields and methods, a constant with its value, or a function."""
    if inspect.isclass(one):
        return class_lines(one)
    is_function = inspect.isfunction(one)
    return [f"def {name}{signature(one)}"] if is_function else [f"{name} = {one!r}"]


def class_lines(kind: type) -> Iterator[str]:
    bases = ", ".join(base.__name__ for base in kind.__bases__ if base is not object)
    yield f"class {kind.__name__}({bases})"
    yield from (f"    {line}" for line in fields_of(kind))
    if issubclass(kind, BaseException) and "__init__" in vars(kind):
        yield f"    def __init__{signature(kind.__init__)}"
    for name, value in sorted(vars(kind).items()):
        if name.startswith("_"):
            continue
        if isinstance(value, property):
            yield f"    property {name}{signature(value.fget)}"
        elif isinstance(value, cached_property):
            yield f"    property {name}{signature(value.func)}"
        elif isinstance(value, (classmethod, staticmethod)):
            yield f"    {type(value).__name__} {name}{signature(value.__func__)}"
        elif inspect.isfunction(value):
            yield f"    def {name}{signature(value)}"


def fields_of(kind: type) -> Iterator[str]:
    """The fields of a dataclass or a msgspec struct, each with its type as it is written."""
    if dataclasses.is_dataclass(kind):
        for field in dataclasses.fields(kind):
            optional = field.default is not dataclasses.MISSING
            made = field.default_factory is not dataclasses.MISSING
            usual = f" = {as_written(field.default)}" if optional else " = ..." if made else ""
            yield f"{field.name}: {annotation(field.type)}{usual}"
    elif hasattr(kind, "__struct_fields__"):
        types: dict[str, object] = {}
        for one in reversed(kind.__mro__):
            types |= inspect.get_annotations(one)
        names, defaults = kind.__struct_fields__, kind.__struct_defaults__
        required = len(names) - len(defaults)
        for name, default in zip(names, (msgspec.NODEFAULT,) * required + defaults, strict=True):
            made = type(default).__name__ == "Factory"
            has_usual = default is not msgspec.NODEFAULT and not made
            usual = f" = {as_written(default)}" if has_usual else " = ..." if made else ""
            yield f"{name}: {annotation(types[name])}{usual}"


def signature(function: Callable[..., object]) -> str:
    """The parameters with their types as they are written, defaults and what is returned."""
    found = inspect.signature(function)
    parameters = [
        one.replace(
            annotation=shown(one.annotation, annotation), default=shown(one.default, as_written)
        )
        for one in found.parameters.values()
    ]
    returned = shown(found.return_annotation, annotation)
    return str(inspect.Signature(parameters, return_annotation=returned))


def shown(value: object, write: Callable[[object], str]) -> object:
    """The value as inspect is to print it; what is not stated stays so."""
    return value if value is inspect.Parameter.empty else Text(write(value))


class Text:
    """What inspect prints as it stands."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def annotation(kind: object) -> str:
    """A type as it is written, without the modules that it is from."""
    text = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", text)


def as_written(value: object) -> str:
    """A default that is a number, a text or nothing; of any other only its type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, tuple) and all(isinstance(each, (int, str)) for each in value):
        return repr(value)
    return f"<{type(value).__name__}>"


def by_path(place: str) -> str:
    """What a module defines by a name, read from its source without importing it."""
    module, name = place.split(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, place
    (found,) = (
        node
        for node in ast.parse(Path(spec.origin).read_text()).body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name
    )
    if isinstance(found, ast.FunctionDef):
        return "\n".join([f"# {module}", f"def {name}{parsed(found)}", ""])
    methods = [
        f"    def {node.name}{parsed(node)}"
        for node in found.body
        if isinstance(node, ast.FunctionDef)
        and (node.name == "__init__" or not node.name.startswith("_"))
    ]
    return "\n".join([f"# {module}", f"class {name}", *methods, ""])


def parsed(node: ast.FunctionDef) -> str:
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(node.args)}){returned}"


def test_the_measured_tables_of_the_docs(keep: Keep) -> None:
    found = {
        name: [{"numbers": len(each), "sha256": digest(" ".join(each).encode())} for each in tables]
        for name in MEASURED
        if (tables := [each for each in numbers_of_tables(ROOT / name) if len(each) > 20])
    }
    assert set(found) == set(MEASURED)
    keep("docs.json", json.dumps(found, indent=1) + "\n")


def numbers_of_tables(page: Path) -> Iterator[list[str]]:
    """The numbers of each table of the page below its head."""
    for table in re.findall(r"(?:^\|.*\n)+", page.read_text(), flags=re.M):
        yield numbers("".join(table.splitlines(keepends=True)[2:]))


def test_no_golden_file_is_left_over_or_large() -> None:
    files = [path for path in GOLDEN.rglob("*") if path.is_file()]
    screens = {path.stem for path in files if path.parent.name == "screens"}
    assert screens == {*COMMANDS, *(f"analyze_{name}" for name in NAMES)}
    for folder in ("tables", "pages"):
        assert {path.stem for path in files if path.parent.name == folder} == set(NAMES)
    written = {word for words in COMMANDS.values() for word in words.split(" ")}
    written |= {f"{Path(word).stem}.txt" for word in written if MODELLED.fullmatch(word)}
    assert {path.name for path in files if path.parent.name == "files"} <= written
    assert sum(path.stat().st_size for path in files) < 1_650_000
