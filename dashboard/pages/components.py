"""Shared page components: tables, cards, cells, links, and URLs of pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component
from plotly.graph_objects import Figure

from stepsplit.analyzer.bucket_styles import BUCKET_STYLES, BucketStyle
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.report.headline import round_parts, round_shares, summarize
from stepsplit.analyzer.report.report import (
    SCHEDULE_NAMES,
    Report,
    describe_ideal_bubble,
    format_hosts,
    format_world_size,
)
from stepsplit.analyzer.report.tables import Tables
from stepsplit.analyzer.units import (
    choose_part_unit_ns,
    format_milliseconds,
    format_parts,
    format_percent,
)
from stepsplit.dashboard.figures import theme
from stepsplit.dashboard.pages.address import AddressQuery, format_time
from stepsplit.dashboard.pages.tables import ChartData, Content
from stepsplit.dashboard.store.metrics import JobFingerprint
from stepsplit.dashboard.store.run_row import RunRow

# A finished run, as input of the pages.


@dataclass(frozen=True, slots=True)
class View:
    """A finished run: its name, report and tables (None if the tables were deleted).

    run_id is "" in an exported HTML file, where links to other pages are left out. offers_job:
    whether the user may describe the job of the run, which is then analyzed again. is_role: whether
    it is a role of a run, which has no job of its own.
    """

    name: str
    report: Report
    tables: Tables | None
    run_id: str = ""
    offers_job: bool = False
    is_role: bool = False


# Number of steps that the report's sums cover.


def count_summed_steps(report: Report) -> Counter[int]:
    """Number of steps in the sums of each rank: its full steps, or all steps if none is full."""
    full = Counter(row.rank for row in report.steps if row.kind == "full")
    return Counter(row.rank for row in report.steps if row.kind == "full" or not full[row.rank])


# The headline numbers of a run, as cards.

# The buckets of each headline share: compute, collective, bubble, other.
COMPUTE, COLLECTIVE = ("compute",), ("collective", "p2p", "skew")

BUBBLE, OTHER = ("bubble",), ("copy", "idle")


def format_mean_step(step_ns: int) -> str:
    """A mean step as its card has it."""
    unit_ns = choose_part_unit_ns(step_ns)
    return format_parts(round_parts([step_ns], unit_ns)[0], unit_ns)


def build_cards(report: Report) -> html.Div:
    """Cards with the mean step, its four shares, and the bubble fraction of a pipeline."""
    summary = summarize(report.steps, report.exposed)
    if summary is None:
        return html.Div([build_card("mean step", "none", "no steps found")], className="cards")
    full = any(row.kind == "full" for row in report.steps)
    note = f"over {_format_count(summary.steps, 'step')}" + ("" if full else ", none full")
    note += f"; median {format_milliseconds(summary.median_ns)}"
    unit_ns = choose_part_unit_ns(summary.step_ns)
    # Rounded together, so that the four shares add up to the step.
    means_ns = [row.mean_ns for row in summary.buckets]
    shares = dict(zip(BUCKETS, round_shares(means_ns), strict=True))

    def format_share(*buckets: str) -> str:
        return format_percent(sum(shares[bucket] for bucket in buckets))

    compute_ns = format_parts(round_parts(means_ns, unit_ns)[0], unit_ns)
    waits, idle = f"of which skew {format_share('skew')}", format_share("idle")
    if shares["p2p"] > shares["collective"]:
        waits = f"of which p2p {format_share('p2p')}, skew {format_share('skew')}"
    shown = [
        build_card("mean step", format_mean_step(summary.step_ns), note),
        build_card("compute", format_share(*COMPUTE), compute_ns, COLOR["compute"]),
        build_card("collective", format_share(*COLLECTIVE), waits, COLOR["collective"]),
        build_card(
            "bubble", format_share(*BUBBLE), "of the step, for other stages", COLOR["bubble"]
        ),
        build_card("other", format_share(*OTHER), f"of which idle {idle}", COLOR["copy"]),
    ]
    if report.pipeline is not None:
        ideal = report.pipeline.ideal_bubble_fraction
        note = "of the pipeline window"
        measured = report.pipeline.bubble_fraction
        note += "" if ideal is None else f"; {describe_ideal_bubble(measured, ideal)}"
        shown.append(build_card("pipeline bubble", format_percent(measured), note))
    if report.mfu is not None:
        shown.append(build_card("MFU", format_percent(report.mfu), "of the dense peak"))
    return html.Div(shown, className="cards")


def format_subtitle(report: Report) -> str:
    """One line on the run: ranks, hosts, mesh, versions; unknown values are left out."""
    run = report.run
    schedule = (report.pipeline.schedule if report.pipeline else None) or ""
    mesh = None if run.mesh is None else " ".join(f"{part.axis}{part.size}" for part in run.mesh)
    parts = [
        f"{len(run.ranks):,} of {format_world_size(report)} ranks",
        format_hosts(run),
        run.device,
        mesh if mesh is None else f"mesh {mesh} (from {run.mesh_source or 'unknown'})",
        SCHEDULE_NAMES.get(schedule, schedule),
        run.backend,
        None if run.torch is None else f"torch {run.torch}",
        None if run.nccl is None else f"NCCL {run.nccl}",
        _format_slowdown("profiled steps", run.profiling_slowdown),
        _format_slowdown("steps after profiling", run.slowdown_after_profiling),
    ]
    return "  ·  ".join(part for part in parts if part)


def _format_slowdown(which: str, slowdown: float | None) -> str | None:
    """Steps that were no slower than those before them are said to be so: less is noise."""
    if slowdown is None:
        return None
    return f"{which} {f'{format_percent(slowdown)} slower' if slowdown > 0 else 'not slower'}"


def _format_count(count: int, unit_name: str) -> str | None:
    return None if not count else f"{count:,} {unit_name}{'' if count == 1 else 's'}"


# Building blocks of pages: tables, cards, figures, share bars.

COLOR = {look.bucket: f"var(--{look.bucket})" for look in BUCKET_STYLES}
"""The color of each bucket in the theme of the page, as build_bucket_css defines it."""


def build_card(label: str, value: str, note: str = "", accent: str | None = None) -> html.Div:
    """A card with a label, a value and a note; accent is the color of its bucket."""
    mark = {"borderTopColor": accent} if accent else {}
    parts = [
        html.Div(label, className="label"),
        html.Div(value, className="value"),
        html.Div(note, className="note"),
    ]
    return html.Div(parts, className="card number", style=mark)


def build_section(title: str, note: str, *content: Component) -> html.Section:
    """A titled card."""
    head = [html.H2(title), html.Span(note, className="note")]
    return html.Section([html.Div(head, className="section-head"), *content], className="card")


def build_collapsed(summary: str, *content: Component) -> html.Details:
    """Content that is collapsed until the user opens it."""
    return html.Details([html.Summary(summary), *content], className="more")


def build_empty_card(title: str, message: str) -> html.Section:
    """A card in place of missing data, with a hint on how to get it."""
    return html.Section([html.H2(title), html.P(message)], className="card empty")


def build_menu(
    name: str,
    options: Mapping[str, str],
    value: str,
    default: str,
    label: str = "",
    *,
    is_list: bool = False,
) -> html.Label:
    """A menu bound to the URL parameter `name`, which is omitted at the default value.

    options: texts by value; label: by default the name; is_list: the choice is added to the list
    that the parameter is. assets/choose.js handles changes.
    """
    items = [html.Option(words, value=key, selected=key == value) for key, words in options.items()]
    attributes = _build_data_attributes(name, default)
    if is_list:
        attributes["data-list"] = "1"
    menu = html.Select(items, **attributes)
    shown = label or name.replace("_", " ")
    return html.Label([html.Span(shown, className="menu-label"), menu])


def build_text_field(name: str, value: str, label: str, hint: str = "") -> html.Label:
    """A text field bound to the URL parameter `name`; the label is visible only with a hint."""
    shown = "menu-label" if hint else "unseen"
    field = dcc.Input(id=f"choose-{name}", value=value, placeholder=hint or label, type="text")
    return html.Label(
        [html.Span(label, className=shown), html.Span(field, **_build_data_attributes(name, ""))]
    )


def build_time_fields(chosen: AddressQuery, first_s: float, last_s: float) -> list[html.Label]:
    """Fields of a range of time, from and to, with the shown one in s since 1970 as their hint."""
    return [
        build_text_field(key, chosen.find_text(key) or "", f"{key}, UTC", format_time(at_s))
        for key, at_s in (("from", first_s), ("to", last_s))
    ]


def _build_data_attributes(name: str, default: str) -> Any:
    return {"data-choice": name, "data-usual": default}


def build_choice_link(
    content: Any,
    url: str,
    name: str,
    default: str = "",
    *,
    css: str = "",
    title: str = "",
    **change: str,
) -> html.A:
    """A link that changes the URL parameter `name` and keeps all other choices.

    assets/choose.js changes the address as it is at the click: the page may still be that of the
    choice before. change is one of: value, which it sets; cycle, the values between "|" of which it
    sets the one after the current one; add or drop, an item of the list that the parameter is.

    url: where it leads from the page as it was built, as in a new tab.
    """
    ((how, what),) = change.items()
    attributes: Any = {**_build_data_attributes(name, default), f"data-{how}": what}
    return html.A(content, href=url, className=css, title=title or None, **attributes)


def build_aria_label(label: str) -> Any:
    """The element's label for screen readers."""
    return {"aria-label": label}


def build_progress_bar(share: float) -> html.Progress:
    """A progress bar, 0..1."""
    return html.Progress(value=f"{100 * share:.0f}", max="100", **build_aria_label("progress"))


def build_link(text: str, url: str | None) -> Content:
    """A link to another dashboard page, or plain text without a URL."""
    return text if url is None else dcc.Link(text, href=url)


def build_graph(name: str, figure: Figure, link: str | None = None) -> html.Div:
    """A figure on the page, and its numbers as a table; `name` is its HTML id.

    link: where its marks lead, an address in which assets/marks.js fills in what a mark stands for:
    {x}, {y}, {number} (the first number of x), {custom} or {key} (of meta.keys of its trace).
    """
    if link is not None:
        figure.update_layout(meta={"link": link})
    return html.Div([dcc.Graph(id=name, figure=figure, config=theme.GRAPH_CONFIG), ChartData(name)])


def build_share_bar(shares: Sequence[float]) -> html.Div:
    """The shares of the seven buckets as one stacked bar."""
    pieces = [
        html.Span(
            className=_choose_swatch_class(look),
            style={"width": f"{100 * share:.2f}%", "backgroundColor": COLOR[look.bucket]},
            title=f"{look.bucket} {format_percent(share)}",
        )
        for look, share in zip(BUCKET_STYLES, shares, strict=True)
        if share > 0
    ]
    return html.Div(pieces, className="share")


def build_legend() -> html.Div:
    """The color of each bucket."""
    keys = [
        html.Span(
            [
                html.I(
                    className=_choose_swatch_class(k), style={"backgroundColor": COLOR[k.bucket]}
                ),
                k.bucket,
            ]
        )
        for k in BUCKET_STYLES
    ]
    return html.Div(keys, className="legend")


def build_state_pill(run: RunRow) -> html.Span:
    """The state of the run as a pill; of one of Flight Recorder dumps that it is one,
    and of a job of several roles how many they are."""
    if run.is_hang:
        return html.Span("dumps", className="pill")
    if run.has_roles:
        count, _, names = run.roles_words.partition(": ")
        return html.Span(count, className="pill", title=names)
    return html.Span(run.state, className=f"pill {run.state}")


_PILL_STYLES = {"pass": "done", "regressed": "failed", "inconclusive": "running"}


def build_check_pill(run: RunRow) -> Content:
    """The run's check result as a pill with the headline as tooltip; "" without a result."""
    if run.verdict is None:
        return ""
    look = _PILL_STYLES.get(run.verdict.answer, "")
    return html.Span(run.verdict.answer, className=f"pill {look}", title=run.verdict.words)


UNKNOWN_JOB = "unknown job"


@dataclass(frozen=True, slots=True)
class JobRun:
    """The job of a run, None if unknown, and the name of the run."""

    job: JobFingerprint | None
    name: str


def label_jobs(runs: Iterable[JobRun]) -> dict[str, str]:
    """A name for each job by its key, "" for runs of unknown jobs; runs are newest first.

    Where several jobs have one label, the name of the newest run tells them apart, else the key.
    """
    newest: dict[str, JobRun] = {}
    for run in runs:
        newest.setdefault(run.job.key if run.job else "", run)
    labels = {key: run.job.label if run.job else UNKNOWN_JOB for key, run in newest.items()}
    for more in ({key: run.name for key, run in newest.items()}, {key: key for key in newest}):
        shared = Counter(labels.values())
        labels = {
            key: f"{label} · {more[key]}" if shared[label] > 1 else label
            for key, label in labels.items()
        }
    return labels


def _choose_swatch_class(look: BucketStyle) -> str:
    return "hatched" if look.hatched else ""
