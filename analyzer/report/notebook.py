"""A report as a notebook shows it: the split as a bar, the first findings, and a table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from stepsplit.analyzer import units
from stepsplit.analyzer.bucket_styles import BUCKET_STYLES
from stepsplit.analyzer.report.headline import (
    BucketMean,
    Summary,
    describe_lacks,
    round_parts,
    round_shares,
)
from stepsplit.collectors.safe_io.safe_text import escape_controls

_FIRST = 3
"""Findings that are shown."""

_DARK = (
    "body[data-jp-theme-light='false']",  # JupyterLab
    "body.vscode-dark",
    "html[theme='dark']",  # Colab
    "html[data-theme='dark']",
)
"""How notebooks say that their page is dark, whatever the system prefers."""

_STYLE = """\
.stepsplit-report { max-width: 60em; %(light)s }
.stepsplit-report .bar { display: flex; height: 1.6em; border-radius: 4px; overflow: hidden; }
.stepsplit-report .bar span { display: block; }
.stepsplit-report .key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; }
.stepsplit-report .waits { background-image: repeating-linear-gradient(45deg,
  transparent 0 3px, rgba(255, 255, 255, .45) 3px 5px); }
.stepsplit-report .lacks { font-weight: bold; }
.stepsplit-report table { border-collapse: collapse; margin-top: .6em; }
.stepsplit-report table.split :is(td, th) { padding: .15em .8em .15em 0; text-align: left; }
.stepsplit-report table.split td.number { text-align: right; }
%(dark)s
"""


def build_html(
    run: Sequence[str], summary: Summary | None, findings: Sequence[tuple[int, str]]
) -> str:
    """A report as HTML without scripts, readable on light and dark pages.

    run: what it is of, the name first. findings: each with its gain in ns.
    """
    name, *others = map(_escape, run)
    parts = [f"<p><b>{name}</b>, {', '.join(others)}</p>"]
    if lacks := describe_lacks(summary.lacks if summary else ()):
        parts.append(f'<p class="lacks">{_escape(lacks)}</p>')
    if summary is None:
        parts.append("<p>no step in the recording</p>")
    else:
        parts += [_build_bar(summary), _build_findings(findings), _build_table(summary)]
    return f'<div class="stepsplit-report">{_build_style()}{"".join(parts)}</div>'


def _build_style() -> str:
    light = " ".join(f"--{one.bucket}: {one.color.light};" for one in BUCKET_STYLES)
    dark = " ".join(f"--{one.bucket}: {one.color.dark};" for one in BUCKET_STYLES)
    rules = [f"{page} .stepsplit-report {{ {dark} }}" for page in _DARK]
    # A page that says nothing, such as a saved one, follows the system.
    said = ":not([data-jp-theme-light]):not(.vscode-light):not(.vscode-dark)"
    plain = f"html:not([theme]):not([data-theme]) body{said} .stepsplit-report"
    rules.append(f"@media (prefers-color-scheme: dark) {{ {plain} {{ {dark} }} }}")
    return f"<style>{_STYLE % {'light': light, 'dark': chr(10).join(rules)}}</style>"


def _build_bar(summary: Summary) -> str:
    unit_ns = units.choose_part_unit_ns(summary.step_ns)
    times = _round_times(summary.buckets, unit_ns)
    looks = {one.bucket: one for one in BUCKET_STYLES}
    pieces = []
    for row, time in zip(summary.buckets, times, strict=True):
        look = looks.get(row.bucket)
        if look is None or not row.mean_ns:
            continue
        waits = ' class="waits"' if look.hatched else ""
        pieces.append(
            f'<span{waits} style="width: {100 * row.share:.2f}%;'
            f' background-color: var(--{look.bucket}, {look.color.light})"'
            f' title="{look.bucket} {units.format_parts(time, unit_ns)}"></span>'
        )
    (step,) = round_parts([summary.step_ns], unit_ns)
    head = (
        f"<p>step {units.format_parts(step, unit_ns)}, mean over ranks and {summary.steps:,} full"
        f" step{'s' if summary.steps != 1 else ''}</p>"
    )
    return f'{head}<div class="bar">{"".join(pieces)}</div>'


def _round_times(buckets: tuple[BucketMean, ...], unit_ns: int) -> list[int]:
    return round_parts([one.mean_ns for one in buckets], unit_ns)


def _build_findings(findings: Sequence[tuple[int, str]]) -> str:
    if not findings:
        return ""
    items = "".join(
        f"<li>{units.format_milliseconds(gain_ns)}: {_escape(message)}</li>"
        for gain_ns, message in findings[:_FIRST]
    )
    more = len(findings) - _FIRST
    note = f"; {more} more in findings_frame()" if more > 0 else ""
    return f"<p>Estimated saving per step (not additive{note}):</p><ol>{items}</ol>"


def _build_table(summary: Summary) -> str:
    unit_ns = units.choose_part_unit_ns(summary.step_ns)
    times = _round_times(summary.buckets, unit_ns)
    shares = round_shares([one.mean_ns for one in summary.buckets])
    looks = {one.bucket: one for one in BUCKET_STYLES}
    rows = []
    for row, time, share in zip(summary.buckets, times, shares, strict=True):
        (worst,) = round_parts([row.worst_ns], unit_ns)
        look = looks.get(row.bucket)
        waits = " waits" if look is not None and look.hatched else ""
        # The name of a bucket in a report from elsewhere may be anything, and is no style.
        color = f"var(--{look.bucket}, {look.color.light})" if look is not None else "gray"
        key = f"background-color: {color}"
        rows.append(
            f'<tr><td><span class="key{waits}" style="{key}"></span> {_escape(row.bucket)}</td>'
            f'<td class="number">{units.format_parts(time, unit_ns)}</td>'
            f'<td class="number">{units.format_percent(share)}</td>'
            f"<td>{row.worst_rank} ({units.format_parts(worst, unit_ns)})</td></tr>"
        )
    heads = "".join(f"<th>{one}</th>" for one in ("bucket", "mean", "share", "worst rank"))
    return f'<table class="split"><tr>{heads}</tr>{"".join(rows)}</table>'


def _escape(text: str) -> str:
    return escape(escape_controls(text))
