"""Span logs of torchtitan and OpenTelemetry: the ledger of a job by them, and beside a watch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.role_builders import make_trainer

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.report.ledger import Ledger
from stepsplit.analyzer.watch import span_logs
from stepsplit.analyzer.watch.ledger import read_ledger
from stepsplit.analyzer.watch.span_folders import is_span_folder
from stepsplit.analyzer.watch.span_logs import read_span_logs
from stepsplit.collectors.formats.watch_notes import NoteFile, RankEnded, RankStarted, RankWindow
from stepsplit.dashboard.commands.analyze import analyze_command
from stepsplit.dashboard.commands.check import check_command

S = 1_000_000_000
T0 = 1_800_000_000 * S

Entry = tuple[str, float, float, int | None]
"""A span: its name, begin, end in s, and step."""


def _show(ledger: Ledger) -> dict[str, tuple[float, int]]:
    return {row.kind: (round(row.ns / S, 3), row.count) for row in ledger.rows}


def _write_titan(
    folder: Path, entries: Iterable[Entry], rank: int = 0, pid: int = 7, source: str = "training"
) -> Path:
    """Lines as torchtitan's TraceJsonlFormatter writes them: one when a span begins, one when it
    ends."""
    lines = []
    for name, begin, end, step in entries:
        for suffix, at in (("start", begin), ("end", end)):
            line: dict[str, Any] = {
                "delta_ms": 0.1, "tid": pid, "rank": rank, "global_rank": rank, "source": source,
                "host_name": "h", "pid": pid, "time_us": T0 // 1000 + round(at * 1e6),
                "log_type": "event", "log_type_name": f"{name}_{suffix}", "event_name": None,
                "caller": "trainer.py:1033:train", "message": f"[step {step}] {name}",
            }  # fmt: skip
            line |= {} if step is None else {"step": step}
            line |= {"value": 1000 * (end - begin)} if suffix == "end" else {}
            lines.append((line["time_us"], json.dumps(line)))
    path = folder / f"{source}.global_rank_{rank}.20261130-13{pid:04}-ABCDEF.jsonl"
    folder.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(line + "\n" for _, line in sorted(lines)))
    return path


def _list_first() -> list[Entry]:
    """Ten steps of 1 s, of which the fifth has a checkpoint of 2 s and an evaluation of 1 s."""
    entries: list[Entry] = [("torch_distributed_init", 0, 1, None), ("checkpoint_load", 1, 3, None)]
    at = 4.0
    for step in range(1, 11):
        took = 4.0 if step == 5 else 1.0
        entries += [("step", at, at + took, step), ("fwd_bwd", at, at + 0.5, step)]
        if step == 5:
            entries += [("checkpoint_save", at + 1, at + 3, step), ("eval", at + 3, at + 4, step)]
        at += took
    return entries


def test_the_ledger_of_a_job_by_torchtitans_log_alone(tmp_path: Path) -> None:
    first, again = _list_first(), [("step", 25.0 + n, 26.0 + n, 8 + n) for n in range(6)]
    for rank in range(2):
        _write_titan(tmp_path, first, rank)
        end = ("torch_distributed_teardown", 31.0, 32.0, None)
        _write_titan(tmp_path, [("checkpoint_load", 24.0, 25.0, None), *again, end], rank, 8)
    _write_titan(tmp_path, [("vllm_engine_step", 0, 99, 1)], 0, 9, "generator")
    ledger = read_ledger(tmp_path)
    assert ledger.wall_ns == 32 * S
    assert _show(ledger) == {
        # Steps 8 to 10 (numbered from 1) twice; the first step of a start is start-up.
        "train": (9 + 3.0, 9 + 3),
        "redone": (2.0, 2),
        "evaluation": (1.0, 1),
        "checkpoint": (2.0, 1),
        "process_group": (1.0, 1),
        "load": (3.0, 2),
        "startup": (3.0, 2),
        "restart_gap": (7.0, 1),
        "shutdown": (1.0, 0),
    }
    assert sum(row.ns for row in ledger.rows) == ledger.wall_ns
    assert [(one.first_step, one.last_step, one.ending) for one in ledger.incarnations] == [
        (0, 9, "lost"), (7, 12, "ended"),
    ]  # fmt: skip
    assert ledger.is_goodput_bound and "span logs" in ledger.lacks[0]


@pytest.mark.slow
def test_torchtitans_own_writer_is_read(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan.observability.structured_logger")
    script = """
import sys, time
from torchtitan.observability import structured_logger as sl
sl.init_structured_logger(source="training", output_dir=sys.argv[1])
with sl.log_trace_span("torch_distributed_init"):
    time.sleep(0.3)
for step in range(1, 31):
    sl.set_step(step)
    with sl.log_trace_span("step"):
        sl.log_trace_scalar({"local_valid_tokens": 1000})
        time.sleep(0.01)
        if step == 20:
            with sl.log_trace_span("checkpoint_save"):
                time.sleep(0.5)
with sl.log_trace_span("torch_distributed_teardown"):
    pass
"""
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], check=True, env={**os.environ, "RANK": "3"}
    )
    ledger = read_ledger(tmp_path / "structured_logs")
    rows = _show(ledger)
    assert rows["checkpoint"] == (pytest.approx(0.5, abs=0.1), 1)
    assert rows["process_group"] == (pytest.approx(0.3, abs=0.1), 1)
    assert rows["train"][1] == 29
    (start,) = ledger.incarnations
    assert (start.ranks, start.last_step, start.ending) == ((3,), 29, "ended")
    assert [lack for lack in ledger.lacks if "lines" in lack] == []


_MEGATRON: list[tuple[str, float, float, int | None]] = [
    ("megatron.startup.imports", 0, 2, None),
    ("megatron.checkpoint.load", 3, 4, None),
    *[("megatron.train.iteration", 5.0 + n, 6.0 + n, n) for n in range(4)],
    ("megatron.checkpoint.save", 9, 11, 3),
    ("megatron.train.iteration", 11, 12, 4),
    ("megatron.evaluate", 12, 13.5, None),
    ("megatron.train.iteration", 13.5, 14.5, 5),
]


def _export_megatron(rank: int) -> tuple[list[str], dict[str, Any]]:
    """The spans as OpenTelemetry's SDK writes them, and as OTLP."""
    pytest.importorskip("opentelemetry.sdk.trace")
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    named = {"dl.rank": rank, "dl.world_size": 2, "host.name": "h", "process.pid": 7}
    provider = TracerProvider(resource=Resource(named))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("nemo.lens")
    for name, begin, end, step in _MEGATRON:
        own = {} if step is None else {"megatron.iteration": step}
        span = tracer.start_span(name, start_time=T0 + int(begin * S), attributes=own)
        span.end(end_time=T0 + int(end * S))
    spans = exporter.get_finished_spans()
    return [one.to_json(indent=None) for one in spans], MessageToDict(encode_spans(spans))


@pytest.mark.parametrize("form", ["sdk", "otlp"])
def test_megatrons_opentelemetry_spans_are_read(tmp_path: Path, form: str) -> None:
    for rank in range(2):
        lines, otlp = _export_megatron(rank)
        text = "\n".join(lines) if form == "sdk" else json.dumps(otlp, separators=(",", ":"))
        (tmp_path / f"spans{rank}.jsonl").write_text(text + "\n")
    assert is_span_folder(tmp_path)
    ledger = read_ledger(tmp_path)
    assert _show(ledger) == {
        "train": (5.0, 5),
        "evaluation": (1.5, 1),
        "checkpoint": (2.0, 1),
        "imports": (2.0, 1),
        "load": (1.0, 1),
        "startup": (3.0, 1),
    }
    (start,) = ledger.incarnations
    assert (start.ranks, start.world_size, start.last_step) == ((0, 1), 2, 5)


def test_marks_beside_a_watch_are_of_the_start_in_which_they_lie(tmp_path: Path) -> None:
    def start(number: int, at: int) -> RankStarted:
        t = T0 + at * S
        return RankStarted(0, 1, "h", 1, number, 0.005, t + 2 * S, t, t + S, t + 2 * S, number)

    def window(first: int, begin: int, end: int) -> RankWindow:
        return RankWindow(0, first, first + 9, T0 + begin * S, T0 + end * S, 10, S, S, S, 0, ())

    NoteFile(tmp_path, 0).write([
        start(0, 0), window(1, 2, 12), start(1, 20), window(11, 22, 32),
        RankEnded(0, 21, T0 + 32 * S),
    ])  # fmt: skip
    _write_titan(
        tmp_path / "structured_logs",
        [("checkpoint_save", 5, 7, 3), ("eval", 25, 26, 14), ("eval", 15, 16, 14),
         ("step", 2, 3, 2)],
    )  # fmt: skip
    # Other files may lie in the folder that a job writes to.
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1}\n')
    ledger = read_ledger(tmp_path)
    rows = _show(ledger)
    assert (rows["checkpoint"], rows["evaluation"]) == ((2.0, 1), (2.0, 2))
    assert rows["train"] == (17.0, 20)
    # Whoever evaluates from 15 to 16 s is there until then.
    assert (rows["unknown"][0], rows["restart_gap"]) == (3.0, (4.0, 1))
    assert ledger.lacks == ()


def test_marks_of_a_later_job_are_not_of_a_watch_that_has_ended(tmp_path: Path) -> None:
    """It logs to the same folder a day later."""
    for name, ends in (("ended", [RankEnded(0, 21, T0 + 22 * S)]), ("lost", [])):
        folder = tmp_path / name
        start = RankStarted(0, 1, "h", 1, 0, 0.005, T0 + 2 * S, T0, T0 + S, T0 + 2 * S, 0)
        window = RankWindow(0, 1, 20, T0 + 2 * S, T0 + 22 * S, 20, S, S, S, 0, ())
        NoteFile(folder, 0).write([start, window, *ends])
        alone = read_ledger(folder)
        _write_titan(folder, [("checkpoint_save", 86_400, 86_410, 5)])
        ledger = read_ledger(folder)
        assert (ledger.wall_ns, ledger.rows) == (22 * S, alone.rows)
        assert ledger.lacks == (
            "1 marks of span logs are left out, the first one a checkpoint of rank 0: when they"
            " began, no process of the watch was there",
            *alone.lacks,
        )


def _otlp(name: str, begin: float, end: float, **attributes: Any) -> dict[str, Any]:
    named = [{"key": key.replace("_", "."), "value": {"intValue": value}}
             for key, value in attributes.items()]  # fmt: skip
    times = {"startTimeUnixNano": T0 + int(begin * S), "endTimeUnixNano": T0 + int(end * S)}
    return {"name": name, **times, "attributes": named}


def _write_otlp(folder: Path, *spans: dict[str, Any], **resource: int) -> None:
    named = [{"key": key, "value": {"intValue": value}} for key, value in resource.items()]
    part = {"resource": {"attributes": named}, "scopeSpans": [{"spans": list(spans)}]}
    text = json.dumps({"resourceSpans": [part]}, separators=(",", ":"))
    (folder / "spans.jsonl").write_text(text + "\n")


def _list_iterations(first: int, last: int, at: float) -> list[dict[str, Any]]:
    """Iterations of 0.9 s each second."""
    return [
        _otlp("megatron.train.iteration", at + n, at + n + 0.9, megatron_iteration=first + n)
        for n in range(last - first)
    ]


def test_without_numbered_steps_goodput_is_not_known(tmp_path: Path) -> None:
    """As Megatron logs by default: marks, and the whole of the training."""
    _write_otlp(
        tmp_path,
        _otlp("megatron.pretrain", 0, 100),
        _otlp("megatron.checkpoint.save", 20, 30),
    )
    ledger = read_ledger(tmp_path)
    assert _show(ledger) == {"checkpoint": (10.0, 1), "unknown": (90.0, 0)}
    assert (ledger.goodput, ledger.is_goodput_bound) == (0.9, True)
    assert ledger.lacks[0].startswith(
        "no numbered step of rank 0 is logged, so that goodput is not"
    )
    (start,) = ledger.incarnations
    assert (start.last_step, start.ending) == (None, "ended")


def test_steps_whose_lines_are_lost_count_in_the_most_that_goodput_can_be(tmp_path: Path) -> None:
    path = _write_titan(tmp_path, [("step", float(n), n + 1.0, n + 1) for n in range(100)])
    lines = path.read_text().splitlines(keepends=True)
    # Of 40 steps in the middle and 10 at the end.
    path.write_text("".join([*lines[:80], *(["torn\n"] * 80), *lines[160:180], "torn\n"]))
    ledger = read_ledger(tmp_path)
    assert _show(ledger) == {"train": (89.0, 89), "startup": (1.0, 1)}
    assert ledger.goodput == 1.0 and ledger.is_goodput_bound


@pytest.mark.parametrize(
    "odd",
    [
        {"name": "x", "startTimeUnixNano": "0", "endTimeUnixNano": "0"},
        {**_otlp("x", 0, 1), "attributes": [{"key": "dl.iteration", "value": {"doubleValue": 9}}]},
        {"name": "x"},
        "no span",
    ],
)
def test_an_odd_span_does_not_take_its_line_with_it(tmp_path: Path, odd: Any) -> None:
    _write_otlp(tmp_path, *_list_iterations(0, 40, 0), odd)
    path = tmp_path / "spans.jsonl"
    path.write_text(path.read_text().replace('"doubleValue":9', '"doubleValue":1e999'))
    ledger = read_ledger(tmp_path)
    assert _show(ledger)["train"] == (39.0, 39)
    assert "spans.jsonl: 1 lines or spans are torn or of another format" in ledger.lacks


def test_a_refusal_says_why_no_span_can_be_used(tmp_path: Path) -> None:
    for size in (10**30, 10**9, -5):
        _write_otlp(tmp_path, *_list_iterations(0, 40, 0), **{"dl.world_size": size})
        problem = r"no span of its span logs can be used \(spans.jsonl: 40 lines or spans are torn"
        with pytest.raises(DataError, match=problem):
            read_ledger(tmp_path)


@pytest.mark.parametrize("load", [False, True])
def test_a_start_with_the_same_pid_is_another_one(tmp_path: Path, load: bool) -> None:
    """As in a container, in which each process has the pid 1."""
    loads = [_otlp("megatron.checkpoint.load", 150, 155)] * load
    others = [_otlp("megatron.checkpoint.save", 100, 104), _otlp("other", 0, 199.9)]
    _write_otlp(
        tmp_path, *_list_iterations(0, 100, 0), *_list_iterations(60, 100, 160), *loads, *others,
        **{"process.pid": 1},
    )  # fmt: skip
    ledger = read_ledger(tmp_path)
    rows = _show(ledger)
    assert (rows["train"], rows["redone"]) == ((99.0, 99), (39.0, 39))
    assert rows["restart_gap"] == (46.0 if load else 56.0, 1)
    assert (rows["checkpoint"], "stall" in rows) == ((4.0, 1), False)
    assert [(one.first_step, one.last_step) for one in ledger.incarnations] == [(0, 99), (60, 99)]


def test_beside_a_watch_only_marks_are_kept(tmp_path: Path) -> None:
    _write_titan(tmp_path, _list_first())
    (spans,) = read_span_logs(tmp_path, is_watch=True).spans.values()
    assert {one.kind for one in spans} == {"process_group", "load", "checkpoint", "evaluation"}


def test_files_that_are_refused_are_one_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = _write_titan(tmp_path, _list_first())
    whole = read_ledger(tmp_path)
    line = json.loads(good.read_text().splitlines()[-1])
    wrong = [
        {**line, "rank": "x"}, {**line, "rank": -1}, {**line, "rank": 10**30},
        {**line, "time_us": -5}, {**line, "time_us": 1e300}, {**line, "value": -1e9},
        {**line, "value": 1e308}, {**line, "step": 1 << 62}, {**line, "message": "x" * 300_000},
        [1], "text", None,
    ]  # fmt: skip
    with good.open("a") as file:
        file.write("".join(json.dumps(one) + "\n" for one in wrong))
        deep = '{"rank": 0, "time_us": 1, "log_type_name": "x", "z": ' + "[" * 200_000
        monkeypatch.setattr(span_logs, "MAX_LINE_BYTES", len(deep) + 2)
        file.write('{"value": NaN}\n' + "[" * 900 + "\n" + deep + "\n" + '{"torn')
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "odd\x1b[31m\n.jsonl").write_bytes(os.urandom(100))
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    ledger = read_ledger(tmp_path)
    assert ledger.rows == whole.rows
    refused = [lack for lack in ledger.lacks if lack not in whole.lacks]
    assert len(refused) == 6
    assert f"{good.name}: 15 lines or spans are torn or of another format" in refused
    assert all("\n" not in lack and "\x1b" not in lack for lack in refused)


def test_what_is_nested_too_deep_is_of_another_format(tmp_path: Path) -> None:
    good = _write_titan(tmp_path, _list_first())
    whole = read_ledger(tmp_path)
    with good.open("a") as file:
        file.write('{"rank": 0, "other": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    ledger = read_ledger(tmp_path)
    assert ledger.rows == whole.rows
    assert f"{good.name}: 1 lines or spans are torn or of another format" in ledger.lacks


@pytest.mark.slow
def test_a_sparse_log_takes_seconds(tmp_path: Path) -> None:
    good = _write_titan(tmp_path, _list_first())
    whole = read_ledger(tmp_path)
    os.truncate(good, 20 << 30)
    begin = time.process_time()
    ledger = read_ledger(tmp_path)
    assert time.process_time() - begin < 10
    assert ledger.rows == whole.rows
    assert f"{good.name}: what follows lines without an end is left out" in ledger.lacks


@pytest.mark.slow
def test_a_mark_is_of_one_start_where_clocks_were_set_back(tmp_path: Path) -> None:
    def start(number: int, at: int) -> RankStarted:
        t = T0 + at * S
        return RankStarted(0, 1, "h", 1, number, 0.005, t + S, t, t + S, t + S, number)

    NoteFile(tmp_path, 0).write([start(n, 100 * (n % 2)) for n in range(1000)])
    _write_titan(tmp_path, [("eval", 5 + n / 1e4, 5 + n / 1e4, 1) for n in range(20_000)])
    begin = time.process_time()
    read_ledger(tmp_path)
    assert time.process_time() - begin < 20


def test_a_folder_without_a_span_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"loss": 1}\n')
    assert not is_span_folder(tmp_path)
    with pytest.raises(DataError):
        read_ledger(tmp_path)
    _write_titan(tmp_path, [("vllm_engine_step", 0, 9, 1)], source="generator")
    with pytest.raises(DataError, match="no"):
        read_ledger(tmp_path)


def test_traces_beside_span_logs_are_analyzed_and_checked(tmp_path: Path) -> None:
    dump, runner = tmp_path / "outputs", CliRunner()
    traces = dump / "profile_traces" / "iteration_10"
    traces.mkdir(parents=True)
    make_trainer().write(traces)
    budget = [str(dump), "--baseline", str(dump), "--budget", "exposed_comm:5%"]

    def run() -> list[Any]:
        return [runner.invoke(analyze_command, [str(dump)]), runner.invoke(check_command, budget)]

    before = run()
    logs = _write_titan(dump / "structured_logs", _list_first()).parent
    for one, known in zip(run(), before, strict=True):
        # Each line of before, and one that the logs are no trace.
        assert one.exit_code == known.exit_code == 0
        assert {*known.stdout.splitlines()} <= {*one.stdout.splitlines()}
        assert f"stepsplit analyze {logs}" in one.output
    page = tmp_path / "x.html"
    assert runner.invoke(analyze_command, [str(dump), "--html", str(page)]).exit_code == 0
    assert page.exists()
    assert "wall clock" in runner.invoke(analyze_command, [str(logs)]).stdout
    # A trace that is torn is said, and not passed over.
    (torn,) = traces.iterdir()
    torn.write_bytes(torn.read_bytes()[:40])
    assert runner.invoke(analyze_command, [str(dump)]).exit_code != 0


def test_spans_beyond_the_limit_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_logs, "MAX_SPANS", 5)
    _write_titan(tmp_path, _list_first())
    assert any("is left out" in lack for lack in read_span_logs(tmp_path).lacks)
