"""The option --log-to: the sinks that it names are opened, and points written to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from stepsplit.analyzer.errors import UsageError
from stepsplit.collectors.record.log_to import EXAMPLES, SinkName, parse_sink

if TYPE_CHECKING:
    from stepsplit.analyzer.report.report import Report
    from stepsplit.dashboard.sinks.scalars import Sink

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}
"""The package and the extra of a kind of sink that needs one."""


def build_log_option(text: str) -> Callable[[Any], Any]:
    """The option --log-to of a command, which may be repeated."""
    kinds = ", ".join(EXAMPLES.values())
    return click.option(
        "--log-to", "log_to", metavar="SINK", multiple=True, help=f"{text} SINK is one of {kinds}."
    )


def parse_log_to(texts: Sequence[str]) -> tuple[SinkName, ...]:
    """The sinks that the option names. Raises UsageError, also if a package is missing."""
    try:
        sinks = tuple(parse_sink(text) for text in texts)
    except ValueError as error:
        raise UsageError(f"--log-to: {error}") from None
    for sink in sinks:
        package = _PACKAGES.get(sink.kind)
        if package is not None and find_spec(package) is None:
            install = f"pip install 'stepsplit[{package}]'"
            raise UsageError(f"--log-to {sink}: needs {package}; install it with: {install}")
    return sinks


def open_sink(sink: SinkName) -> Sink:
    """Opens a sink. Raises UsageError if its address or place is invalid."""
    from stepsplit.dashboard.sinks import kinds

    opened: dict[str, Callable[[str], Sink]] = {
        "tensorboard": kinds.TensorBoardSink, "wandb": kinds.WandbSink,
        "mlflow": kinds.MlflowSink, "otlp": kinds.OtlpSink, "json": kinds.JsonSink,
    }  # fmt: skip
    return opened[sink.kind](sink.place)


def check_log_to(texts: Sequence[str]) -> tuple[str, ...]:
    """What was given for the option. Raises UsageError if a sink cannot be opened.

    No server is asked yet.
    """
    for sink in parse_log_to(texts):
        open_sink(sink).close()
    return tuple(texts)


def open_sinks(sinks: Sequence[SinkName]) -> tuple[Sink, ...]:
    """Opens the sinks. Raises UsageError."""
    return tuple(open_sink(sink) for sink in sinks)


def log_report(sinks: Sequence[Sink], report: Report) -> None:
    """Writes the point of a recording to each sink and closes it.

    Raises UsageError, that of the first sink that fails.
    """
    if not sinks:
        return
    from stepsplit.dashboard.sinks.scalars import SinkError, build_report_points

    points = build_report_points(report)
    failures = []
    for sink in sinks:
        try:
            with closing(sink):
                sink.write(points)
        except SinkError as error:
            failures.append(error)
    if failures:
        raise failures[0]
