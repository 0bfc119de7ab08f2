"""Numbers in other tools, each read back by its own API: names, units, values, and errors."""

from __future__ import annotations

import json
import re
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.watch_builders import MS, batch, minutes_ago, rank_sample, sample, window

from stepsplit.analyzer import analyze
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.report.step_rows import compute_step_median_ns
from stepsplit.analyzer.watch.records import WatchBatch
from stepsplit.collectors.record.log_to import SINK_KINDS, STEP, SinkName, parse_sinks
from stepsplit.dashboard import cli
from stepsplit.dashboard.sinks.log_to import open_sink
from stepsplit.dashboard.sinks.mlflow import MOST_METRICS
from stepsplit.dashboard.sinks.point_logger import MOST_POINTS, PointLogger
from stepsplit.dashboard.sinks.scalars import (
    EXPOSED,
    METRICS,
    SHARE,
    ScalarPoint,
    SinkError,
    build_batch_points,
    build_report_points,
)

ROOT = Path(__file__).parents[2]
TRACES = ROOT / "sample_traces" / "tp2_pp2"
SECOND_NS = 10**9


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def _read_values(point: ScalarPoint) -> dict[str, float]:
    return {one.name: one.value for one in point.scalars}


def _close_batch(number: int = 1, **parts: Any) -> WatchBatch:
    """A batch of the host of rank 0, with one sample."""
    at = minutes_ago(1)
    waits = (0, 30 * MS)
    usual = {
        "id": str(number), "overhead": 0.004, "world_size": 2,
        "windows": tuple(
            replace(window(rank, at, (100 + 10 * rank) * MS), local_ns=(40 + 25 * rank) * MS)
            for rank in range(2)
        ),
        "samples": (sample(7, at, *(rank_sample(rank, waits[rank]) for rank in range(2))),),
    }  # fmt: skip
    return batch(**{**usual, **parts})


# Points.


def test_the_point_of_a_recording_has_the_numbers_of_its_report() -> None:
    report = analyze(TRACES)

    (point,) = build_report_points(report)

    values = _read_values(point)
    assert values["stepsplit/step_time_s"] * 1e9 == compute_step_median_ns(report.steps)
    assert values["stepsplit/step_time_max_s"] * 1e9 == max(row.step_ns for row in report.steps)
    rows = [row for row in report.steps if row.step == point.step]
    total = sum(row.step_ns for row in rows)
    for name in BUCKETS:
        share = sum(getattr(row, f"{name}_ns") for row in rows) / total
        assert values[f"stepsplit/{name}_share"] == pytest.approx(share)
    tp = [row for row in report.exposed if row.step == point.step and row.axis == "tp"]
    exposed_ns = sum(row.collective_ns + row.p2p_ns + row.skew_ns for row in tp) / len(rows)
    assert values["stepsplit/exposed_tp_s"] == pytest.approx(exposed_ns / 1e9)
    assert {point.run} == {report.run.name}
    first_ns = int(report.run.t0_unix_ns)
    assert first_ns < point.unix_ns < first_ns + 60 * SECOND_NS


def test_the_points_of_a_batch_are_its_step_times_and_its_samples() -> None:
    no_data = sample(9, minutes_ago(1), no_data="the profiler was in use")
    one = _close_batch()

    sampled, timed = build_batch_points(_close_batch(samples=(*one.samples, no_data)))

    assert (sampled.step, timed.step) == (7, 20)
    values = _read_values(sampled)
    assert values["stepsplit/compute_share"] == 0.7
    assert values["stepsplit/exposed_dp_s"] == pytest.approx(0.014)
    assert values["stepsplit/overhead_ratio"] == 0.004
    assert values["stepsplit/caused_wait_rank"] == 1
    assert values["stepsplit/caused_wait_s"] == 0.03
    assert _read_values(timed) == {
        "stepsplit/step_time_min_s": 0.099,
        "stepsplit/step_time_s": 0.1,
        "stepsplit/step_time_max_s": 0.111,
        "stepsplit/late_s": pytest.approx(0.025),
        "stepsplit/worst_rank": 1,
    }


def test_an_axis_with_odd_characters_and_communication_without_one_have_plain_names() -> None:
    ranks = [rank_sample(0)]
    exposed = {"": MS, "tp x dp'": MS}
    odd = sample(7, minutes_ago(1), *(_replace(one, exposed_ns=exposed) for one in ranks))

    point, _ = build_batch_points(_close_batch(samples=(odd,)))

    names = [name for name in _read_values(point) if "exposed" in name]
    assert names == ["stepsplit/exposed_unknown_s", "stepsplit/exposed_tp_x_dp__s"]


def _replace(one: Any, **values: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(one, **values)


def test_the_docs_have_every_metric_with_its_names_and_unit() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs" / "integrations.md").read_text().splitlines()
        if "`stepsplit_watch_" in line and line.startswith("|")
    ]
    written = {
        re.sub(r"\{.*", "", served.strip("`")): (otlp.partition("`")[2].partition("`")[0], unit)
        for _, otlp, served, unit, _ in rows
    }
    assert written == {one.prometheus: (one.otlp, one.unit) for one in METRICS}
    trackers = " ".join(row[0] for row in rows)
    (sampled, timed) = build_batch_points(_close_batch())
    names = {
        one.metric: one.name.removeprefix("stepsplit/")
        for one in (*sampled.scalars, *timed.scalars)
    }
    patterns = {SHARE: "idle_share", EXPOSED: "exposed_AXIS_s"}
    assert all(patterns.get(metric, name) in trackers for metric, name in names.items())


# TensorBoard.


def test_tensorboard_reads_each_scalar_at_its_step(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    sink = open_sink(SinkName("tensorboard", str(tmp_path)))
    points = [build_batch_points(_close_batch(1)), build_batch_points(_close_batch(2))]
    for part in points:
        sink.write(part)
    sink.close()

    events = event_accumulator.EventAccumulator(
        str(tmp_path / "stepsplit"), size_guidance={"tensors": 0}
    )
    events.Reload()

    found: dict[str, list[tuple[int, float, float]]] = {
        tag: [
            (e.step, e.wall_time, float(e.tensor_proto.float_val[0])) for e in events.Tensors(tag)
        ]
        for tag in events.Tags()["tensors"]
    }
    wanted: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for point in (*points[0], *points[1]):
        for one in point.scalars:
            when = pytest.approx(point.unix_ns / 1e9, abs=1e-6)
            wanted[one.name].append((point.step, when, pytest.approx(one.value)))
    assert found == wanted


# JSON lines.


def test_analyze_logs_a_recording_and_appends_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "numbers.jsonl"
    for _ in range(2):
        assert cli.run(["analyze", str(TRACES), "--log-to", f"json:{file}"]) == 0

    first, second = map(json.loads, file.read_text().splitlines())

    (point,) = build_report_points(analyze(TRACES))
    assert first == second
    assert first == {
        "run": point.run, "unix_ns": point.unix_ns, STEP: point.step, **_read_values(point),
    }  # fmt: skip


# OpenTelemetry and MLflow, over HTTP.


@contextmanager
def _running_server(answer: Any = None, port: int = 0) -> Iterator[tuple[str, list[Any]]]:
    """A server that keeps what it is sent: path, headers and body."""
    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, dict(self.headers), body))
            found = answer(self.path) if callable(answer) else answer or {}
            content = json.dumps(found).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_otlp_is_what_the_official_message_type_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    json_format = pytest.importorskip("google.protobuf.json_format")
    service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "llama night")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=infra,service.name=x,cluster=a%2Cb")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=s%3Dcret")
    points = build_batch_points(_close_batch())
    with _running_server() as (url, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        sink = open_sink(SinkName("otlp"))
        sink.write(points)
        sink.close()

    ((path, headers, body),) = received
    assert (path, headers["api-key"]) == ("/v1/metrics", "s=cret")
    message = json_format.Parse(body, service.ExportMetricsServiceRequest())
    (of_resource,) = message.resource_metrics
    resource = {one.key: one.value.string_value for one in of_resource.resource.attributes}
    assert resource == {"service.name": "llama night", "team": "infra", "cluster": "a,b"}
    (scope,) = of_resource.scope_metrics
    units = {metric.otlp: metric.unit for metric in METRICS}
    found = {}
    for metric in scope.metrics:
        assert metric.unit == units[metric.name]
        for one in metric.gauge.data_points:
            labels = {each.key: each.value.string_value for each in one.attributes}
            key = next((value for label, value in labels.items() if label != "run"), "")
            found[metric.name, labels["run"], key, one.time_unix_nano] = one.as_double
    assert found == {
        (one.metric.otlp, point.run, one.key, point.unix_ns): one.value
        for point in points
        for one in point.scalars
    }
    assert ("stepsplit.step.duration", "night", "0.5", points[1].unix_ns) in found


def test_otlp_points_that_the_collector_refuses_are_an_error() -> None:
    refusal = {"partialSuccess": {"rejectedDataPoints": "3", "errorMessage": "too\nold"}}
    with _running_server(refusal) as (url, _):
        sink = open_sink(SinkName("otlp", url))
        with pytest.raises(SinkError, match=f"otlp:{url}: .* refuses points: too old"):
            sink.write(build_batch_points(_close_batch()))
        sink.close()


def test_mlflow_has_one_run_and_batches_of_a_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    answers = {
        "get-by-name": {"experiment": {"experiment_id": "4"}},
        "search": {},
        "create": {"run": {"info": {"run_id": "r1"}}},
    }
    points = build_batch_points(_close_batch()) * 80

    def answer(path: str) -> Any:
        return next((found for name, found in answers.items() if name in path), {})

    with _running_server(answer) as (url, received):
        sink = open_sink(SinkName("mlflow", url))
        sink.write(points)
        sink.write(points[:1])
        sink.close()

    calls = [path.rpartition("/2.0/mlflow/")[2].partition("?")[0] for path, _, _ in received]
    logged = [json.loads(body)["metrics"] for path, _, body in received if "log-batch" in path]
    total = sum(len(point.scalars) for point in points)
    assert [len(part) for part in logged] == [
        MOST_METRICS, total - MOST_METRICS, len(points[0].scalars),
    ]  # fmt: skip
    assert calls[:3] == ["experiments/get-by-name", "runs/search", "runs/create"]
    assert calls[-1] == "runs/update"
    assert len(calls) == 3 + len(logged) + 1
    assert all(headers["Authorization"] == "Bearer secret" for _, headers, _ in received)
    first = points[0].scalars[0]
    assert logged[0][0] == {
        "key": first.name, "value": first.value, "step": points[0].step,
        "timestamp": points[0].unix_ns // 10**6,
    }  # fmt: skip


def test_mlflow_logs_to_the_run_that_is_stated_and_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "r7")
    with _running_server() as (url, received):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url.replace("://", "://me:secret@"))
        sink = open_sink(SinkName("mlflow"))
        sink.write(build_batch_points(_close_batch()))
        sink.close()

    ((path, headers, body),) = received
    assert path == "/api/2.0/mlflow/runs/log-batch"
    assert json.loads(body)["run_id"] == "r7"
    assert headers["Authorization"] == "Basic bWU6c2VjcmV0"
    assert sink.name == f"mlflow:{url}"


# W&B's file of a run without a connection.


def read_wandb_records(file: Path) -> Iterator[Any]:
    """The records of a run's file: blocks of 32 KiB, after a header of 7 bytes."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32_768 - at % 32_768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield pb.Record.FromString(whole)
            whole = b""


def read_wandb_history(file: Path) -> list[dict[str, float]]:
    """What was logged, by step of the run."""
    return [
        {
            "/".join(one.nested_key) or one.key: json.loads(one.value_json)
            for one in record.history.item
        }
        for record in read_wandb_records(file)
        if record.WhichOneof("record_type") == "history"
    ]


@pytest.mark.slow
def test_wandb_offline_has_a_run_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    points = build_batch_points(_close_batch())
    sink = open_sink(SinkName("wandb", "trainings"))
    sink.write(points)
    sink.close()

    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    logged = [
        {name: value for name, value in row.items() if name.startswith("stepsplit/")}
        for row in read_wandb_history(file)
    ]

    assert logged == [{STEP: point.step, **_read_values(point)} for point in points]
    records = list(read_wandb_records(file))
    (run,) = (each.run for each in records if each.WhichOneof("record_type") == "run")
    assert (run.project, run.display_name) == ("trainings", "night")
    (metric,) = (each.metric for each in records if each.WhichOneof("record_type") == "metric")
    assert (metric.glob_name, metric.step_metric) == ("stepsplit/*", STEP)


# Errors, and sinks that cannot be reached.


def test_numbers_that_wandb_loses_at_the_end_are_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb = pytest.importorskip("wandb")

    class LostRun:
        """A run whose service has ended."""

        def log(self, values: object) -> None: ...

        def define_metric(self, name: str, step_metric: str) -> None: ...

        def finish(self) -> None:
            raise wandb.errors.CommError("the service\nis gone")

    monkeypatch.setattr(wandb, "init", lambda **_: LostRun())
    assert cli.run(["analyze", str(TRACES), "--log-to", "wandb:trainings"]) == 2
    assert capsys.readouterr().err == (
        "stepsplit: wandb:trainings: the numbers were not sent: the service is gone\n"
    )


@pytest.mark.parametrize(
    ("sink", "words"),
    [
        ("influx:http://x", ["influx", *(kind.usage for kind in SINK_KINDS.values())]),
        ("tensorboard", ["tensorboard:DIR"]),
        ("json", ["json:FILE"]),
        ("otlp", ["OTEL_EXPORTER_OTLP_ENDPOINT"]),
        ("mlflow", ["MLFLOW_TRACKING_URI"]),
        ("otlp:collector", ["otlp:collector", "http://host:5000"]),
        ("tensorboard:/proc/nowhere", ["/proc/nowhere", "choose a place"]),
        ("json:/proc/nowhere", ["/proc/nowhere", "choose a place"]),
    ],
)
def test_a_sink_that_cannot_be_opened_is_one_line_before_anything_is_read(
    sink: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["analyze", "nowhere", "--log-to", sink]) == 2
    error = capsys.readouterr().err
    assert error.startswith("stepsplit: ")
    assert error.count("\n") == 1
    assert all(word in error for word in words)


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_one_line_that_names_the_extra(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stepsplit.dashboard.sinks.log_to.find_spec", lambda name: None)
    assert cli.run(["analyze", "nowhere", "--log-to", f"{package}:x"]) == 2
    assert f"pip install 'stepsplit[{package}]'" in capsys.readouterr().err


def test_a_server_that_cannot_be_reached_is_one_line_after_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "numbers.jsonl"
    dead = [
        "--log-to",
        "otlp:http://me:secret@127.0.0.1:9",
        "--log-to",
        "mlflow:http://127.0.0.1:9",
    ]
    assert cli.run(["analyze", str(TRACES), *dead, "--log-to", f"json:{file}"]) == 2

    printed = capsys.readouterr()
    assert "compute" in printed.out
    assert printed.err == "stepsplit: otlp:http://127.0.0.1:9/v1/metrics: Connection refused\n"
    # The others have the numbers all the same.
    assert file.read_text().count("\n") == 1


def test_log_to_of_a_recording_takes_one_sink_or_several() -> None:
    assert parse_sinks(None) == ()
    assert parse_sinks("wandb") == (SinkName("wandb"),)
    both = parse_sinks(["tensorboard:logs", "otlp:http://c:4318"])
    assert list(map(str, both)) == ["tensorboard:logs", "otlp:http://c:4318"]
    with pytest.raises(ValueError, match=re.escape("log_to: 'csv:x' is not one of")):
        parse_sinks("csv:x")
    with pytest.raises(ValueError, match=r"log_to .* stepsplit watch"):
        parse_sinks("wandb", has_samples=True)


def test_a_watch_keeps_the_newest_points_for_a_sink_that_is_away(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with _running_server() as (url, received):
        pass
    logger = PointLogger([SinkName("otlp", url)])
    for number in range(MOST_POINTS):
        logger.add(_close_batch(number))
        logger.write()
    logger.write(is_last=True)
    assert received == []
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert f"stepsplit: otlp:{url}/v1/metrics: Connection refused; it is tried again" in errors

    port = int(url.rpartition(":")[2])
    with _running_server(port=port) as (_, received):
        logger.write()
        assert received == []
        logger.write(is_last=True)
        logger.close()
    ((_, _, body),) = received
    metrics = json.loads(body)["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]
    times = next(one for one in metrics if one["name"] == "stepsplit.step.duration")
    assert len(times["gauge"]["dataPoints"]) == 3 * MOST_POINTS // 2
    assert capsys.readouterr().err == ""


def test_only_the_host_of_rank_0_logs_a_watch(tmp_path: Path) -> None:
    file = tmp_path / "numbers.jsonl"
    logger = PointLogger([SinkName("json", str(file))])
    logger.add(_close_batch(windows=(window(1, minutes_ago(1)),)))
    logger.write()
    assert not file.exists()
    logger.add(_close_batch(2))
    logger.write()
    assert file.read_text().count("\n") == 2
