"""Page: a job of several roles, what each did in the RL steps on one clock."""

from __future__ import annotations

from collections.abc import Sequence, Sized

from dash import dcc, html
from dash.development.base_component import Component

from stepsplit.analyzer.report.headline import round_shares
from stepsplit.analyzer.report.rl_step import RoleTime, name_phase
from stepsplit.analyzer.report.roles import PathLink, RoleJob, RoleRow
from stepsplit.analyzer.units import format_milliseconds, format_number_list, format_percent
from stepsplit.dashboard.figures.roles import MAX_ROWS, draw_batches, draw_phases
from stepsplit.dashboard.pages.address import AddressQuery, build_page_url
from stepsplit.dashboard.pages.components import (
    build_card,
    build_collapsed,
    build_graph,
    build_menu,
    build_section,
)
from stepsplit.dashboard.pages.run_actions import RunRights, build_run_actions, build_run_labels
from stepsplit.dashboard.pages.tables import (
    Cell,
    build_name_cell,
    build_number_cell,
    build_share_cell,
    build_table,
    build_time_cell,
    format_hidden_rows,
)
from stepsplit.dashboard.store.run_row import RunRow

_PARTS = {
    "compute": "compute_ns",
    "transfer": "transfer_ns",
    "copy": "copy_ns",
    "waits": "wait_ns",
    "idle": "idle_ns",
    "not recorded": "unrecorded_ns",
}

_MOST_LINES = 5

_MOST_LACKS = 12


def build_roles_page(
    job: RoleJob, run: RunRow, rights: RunRights, chosen: AddressQuery
) -> html.Div:
    """The page of a run of several roles; its roles have the pages of a run each."""
    data = f"/api/v1/runs/{run.id}"
    links = html.Span(
        [
            html.A("roles.json", href=f"{data}/roles.json"),
            html.A("download as HTML", href=f"{data}/report.html"),
            *build_run_actions(run, rights),
        ],
        className="heading-links",
    )
    return html.Div(
        [
            html.Div([html.H1(run.name), links], className="heading"),
            *build_run_labels(run, rights),
            *build_roles_content(job, chosen, run.id),
        ]
    )


def build_roles_content(
    job: RoleJob, chosen: AddressQuery | None = None, run_id: str = ""
) -> list[Component]:
    """What the page shows of the job; without a run_id, as in a file, nothing leads elsewhere."""
    counted = [one for one in job.steps if one.is_counted]
    n_ranks = sum(len(role.ranks) for role in job.roles)
    known = (
        f"{len(job.roles)} roles",
        f"{n_ranks:,} rank{'s' * (n_ranks > 1)}",
        f"{len(counted):,} RL step{'s' * (len(counted) > 1)}, those of {job.step_role}",
    )
    return [
        html.P("  ·  ".join(known), className="subtitle"),
        *_build_lacks(job),
        _build_cards(job),
        *_build_clock(job, chosen or AddressQuery(), run_id),
        _build_roles(job, run_id),
        *_build_path(job),
        *_build_waits(job),
        *_build_phases(job),
        *_build_tails(job),
    ]


def _build_lacks(job: RoleJob) -> list[Component]:
    if not job.lacks:
        return []
    items = [html.Li(one) for one in job.lacks[:_MOST_LACKS]]
    more = len(job.lacks) - len(items)
    items += [html.Li(f"and {more:,} more, in roles.json")] if more > 0 else []
    return [build_section("Not known", "", html.Ul(items))]


def _build_cards(job: RoleJob) -> html.Div:
    cards = [build_card("RL step", format_milliseconds(job.step_ns), "mean")]
    first = job.held[0] if job.held else None
    if first is not None:
        said = f"all others wait for it: {job.describe_held_time(first)}"
        cards.append(build_card("look first at", f"{first.role}/{first.rank}", said))
    if job.path:
        longest = job.path[0]
        share = format_percent(round_shares([row.time.window_ns for row in job.path])[0])
        where = f"{name_phase(longest.phase)} of {longest.role}"
        cards.append(build_card("longest on the critical path", share, where))
    idlest = max(job.roles, key=lambda role: _count_lost_ns(role) / (role.time.window_ns or 1))
    lost = _count_lost_ns(idlest) / (idlest.time.window_ns or 1)
    cards.append(
        build_card("least busy", idlest.name, f"idle or waiting {format_percent(lost)} of its time")
    )
    return html.Div(cards, className="cards")


def _count_lost_ns(role: RoleRow) -> int:
    return role.time.wait_ns + role.time.idle_ns


def _build_roles(job: RoleJob, run_id: str) -> html.Section:
    """A row for each role, which leads to its pages, and its first finding; ranks on demand."""
    rows, ranks = [], []
    for number, role in enumerate(job.roles):
        name: Component | str = role.name
        if run_id:
            url = build_page_url(f"{run_id}.{number}")
            name = dcc.Link(role.name, href=url, className="run-link")
        rows.append(
            [
                Cell(name),
                Cell(format_number_list(role.ranks)),
                *_build_shares(role.time),
                build_name_cell(role.finding or "no bottleneck found"),
            ]
        )
        ranks += [
            [Cell(f"{role.name}/{rank}", head=True), *_build_shares(time)]
            for rank, time in zip(role.ranks, role.rank_times, strict=True)
        ]
    table = build_table(("role", "ranks", *_PARTS, "first finding of its own"), rows)
    each = build_table(("rank", *_PARTS), ranks)
    note = "share of the GPU time of each role, in the mean of the RL steps" + _format_hidden(rows)
    return build_section(
        "Roles", note, table, build_collapsed("each rank" + _format_hidden(ranks), each)
    )


def _build_shares(time: RoleTime) -> list[Cell]:
    """The parts of a time; as printed they add up to 100 %."""
    return _build_parts([getattr(time, field) for field in _PARTS.values()])


def _build_parts(parts_ns: Sequence[int]) -> list[Cell]:
    """The share of each part in their sum; as printed they add up to 100 %."""
    whole_ns = sum(parts_ns) or 1
    return [
        build_number_cell(format_percent(share), ns / whole_ns, "ratio")
        for share, ns in zip(round_shares(parts_ns), parts_ns, strict=True)
    ]


def _format_hidden(rows: Sized) -> str:
    return format_hidden_rows(rows, rest="more rows in roles.json")


def choose_step(job: RoleJob, asked: int | None) -> int:
    """The RL step to show: the one asked for, else the one whose length is closest to the mean."""
    if any(one.step == asked for one in job.steps):
        assert asked is not None
        return asked
    counted = [one for one in job.steps if one.is_counted]
    return min(counted, key=lambda one: abs(one.step_ns - job.step_ns)).step


def _build_clock(job: RoleJob, chosen: AddressQuery, run_id: str) -> list[Component]:
    step = choose_step(job, chosen.parse_int("step"))
    usual = choose_step(job, None)
    n_ranks = sum(len(role.ranks) for role in job.roles)
    note = f"RL step {step}"
    note += f", {MAX_ROWS} of {n_ranks:,} ranks" if n_ranks > MAX_ROWS else ""
    parts: list[Component] = []
    if run_id and len(job.steps) > 1:
        steps = {
            str(one.step): f"{one.step}: {format_milliseconds(one.step_ns)}" for one in job.steps
        }
        parts.append(build_menu("step", steps, str(step), str(usual), "RL step"))
    parts.append(build_graph("role-phases", draw_phases(job, step)))
    links = [one for one in job.path_links if one.step == step]
    heads = ("role/rank", "phase", "from", "time", "of the step", "what its ranks do")
    shares = _build_parts([one.time.window_ns for one in links])
    rows = [
        [
            Cell(f"{one.role}/{one.rank}", head=True),
            Cell(name_phase(one.phase)),
            build_time_cell(one.start_ns - links[0].start_ns),
            build_time_cell(one.time.window_ns),
            share,
            Cell(_describe_link(one)),
        ]
        for one, share in zip(links, shares, strict=True)
    ]
    if rows:
        title = "the critical path of this step, from its start" + _format_hidden(rows)
        parts.append(build_collapsed(title, build_table(heads, rows)))
    return [build_section("Phases on one clock", note, *parts)]


def _describe_link(link: PathLink) -> str:
    """What most of the link is, and what another program does meanwhile."""
    parts = {name: getattr(link.time, field) for name, field in _PARTS.items()}
    most = max(parts, key=lambda name: parts[name])
    return f"{most}, while {link.meanwhile}" if link.meanwhile else most


def _build_path(job: RoleJob) -> list[Component]:
    if not job.path:
        return []
    shares = _build_parts([row.time.window_ns for row in job.path])
    rows = [
        [
            Cell(row.role, head=True),
            Cell(name_phase(row.phase)),
            Cell(f"{row.role}/{row.rank}"),
            build_time_cell(row.time.window_ns),
            share,
        ]
        for row, share in zip(job.path, shares, strict=True)
    ]
    heads = ("role", "phase", "mostly on", "time", "of the step")
    note = "mean of the RL steps; a step is as long as all of it" + _format_hidden(rows)
    return [build_section("Critical path across roles", note, build_table(heads, rows))]


def _build_waits(job: RoleJob) -> list[Component]:
    items = [html.Li(job.describe_held(one)) for one in job.held[:_MOST_LINES]]
    parts: list[Component] = []
    if items:
        note = "per RL step; they wait in communication"
        parts.append(build_section("Who holds up all others", note, html.Ul(items)))
    rows = [
        [
            Cell(row.role, head=True),
            Cell(row.owner),
            build_time_cell(row.wait_ns),
            build_share_cell(row.wait_ns / job.step_ns),
        ]
        for row in job.waits
    ]
    if rows:
        heads = ("role", "waits for", "time", "of the step")
        note = "in communication, per RL step and rank" + _format_hidden(rows)
        parts.append(build_section("Waits between roles", note, build_table(heads, rows)))
    return parts


def _build_phases(job: RoleJob) -> list[Component]:
    rows = []
    for role in dict.fromkeys(row.role for row in job.phases):
        own = [row for row in job.phases if row.role == role]
        # Of a role all parts of all phases are the step; that of a phase is the sum of its parts.
        parts_ns = [getattr(row.time, field) for row in own for field in _PARTS.values()]
        printed, cells = round_shares(parts_ns), _build_parts(parts_ns)
        for at, row in enumerate(own):
            part = slice(at * len(_PARTS), (at + 1) * len(_PARTS))
            ratio = row.time.window_ns / (sum(parts_ns) or 1)
            rows.append(
                [
                    Cell(row.role, head=True),
                    Cell(name_phase(row.phase)),
                    build_time_cell(row.time.window_ns),
                    build_number_cell(format_percent(sum(printed[part])), ratio, "ratio"),
                    *cells[part],
                ]
            )
    if not rows:
        return []
    heads = ("role", "phase", "time", "of the step", *_PARTS)
    note = "mean of the ranks and the RL steps" + _format_hidden(rows)
    return [build_section("Phases of each role", note, build_table(heads, rows))]


def _build_tails(job: RoleJob) -> list[Component]:
    if not job.tails:
        return []
    rows, worst = [], []
    for tail in job.tails:
        last = f"its last {tail.last}" if tail.last > 1 else "its last one"
        rows.append(
            [
                Cell(tail.role, head=True),
                build_time_cell(tail.decode_ns),
                build_time_cell(tail.tail_ns),
                Cell(
                    f"{tail.role}/{tail.longest_rank}: {format_milliseconds(tail.longest_ns)} for"
                    f" {last} of {tail.sequences:,}"
                ),
                build_share_cell(tail.empty),
                build_time_cell(tail.saved_ns),
            ]
        )
        own = [
            one
            for one in job.tail_rows
            if (one.role, one.rank) == (tail.role, tail.longest_rank) and one.batch
        ]
        worst += [max(own, key=lambda one: one.tail_ns)] if own else []
    heads = ("role", "decoding", "for the last sequences", "longest", "empty places in the batch",
             "RL step shorter without it, about")  # fmt: skip
    parts: list[Component] = [build_table(heads, rows)]
    if worst:
        parts.append(build_graph("role-batches", draw_batches(worst)))
    return [build_section("Long tail of generation", "per RL step", *parts)]
