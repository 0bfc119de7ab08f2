"""Page: a run of Flight Recorder dumps, which rank a hanging job waits for."""

from __future__ import annotations

from collections.abc import Sequence

from dash import html

from stepsplit.analyzer.diagnose.hang.result import STUCK, Hang, Stuck
from stepsplit.analyzer.diagnose.hang.sentences import format_ranks, format_verdict
from stepsplit.dashboard.pages.components import build_collapsed, build_section
from stepsplit.dashboard.pages.run_actions import RunRights, build_run_actions, build_run_labels
from stepsplit.dashboard.pages.tables import Cell, build_size_cell, build_table, format_hidden_rows
from stepsplit.dashboard.store.run_row import RunRow

_REMEDIES = {
    "not_called": "Look at the stack of {ranks}: what the code does there instead of the missing "
    "call, such as a branch that only some ranks take, data that ran out, or an exception.",
    "unfinished": "Look at the older call in which {ranks} wait: the others wait only for them.",
    "no_dump": "Look whether the processes of {ranks} still run, and at their logs: they may have "
    "ended. Collect their dumps if there are any.",
    "mismatch": "Compare the code and the data of {ranks} with those of the other ranks: all must "
    "make the same call with the same dtype and size.",
    "deadlock": "Let {ranks} make their calls in one order, or send and receive as one batch.",
    "order": "Find what lets {ranks} leave the usual order of calls, such as a condition that "
    "differs between ranks.",
    "members_unknown": "Collect the dumps of all ranks of the group.",
    "not_ending": "All ranks have made this call: look at the network, the GPUs and NCCL's log of "
    "{ranks}.",
    "ended": "Look at the log of {ranks}: the process has ended.",
    "raised": "Fix the exception of {ranks}.",
    "stopped": "Let the process of {ranks} go on (SIGCONT), or find what stopped it.",
    "silent": "Look at the hosts of {ranks}: the processes do not answer.",
    "late": "Wait, or look at the stack of {ranks}: it still computes.",
}
"""What to do about each cause of a culprit."""

MAX_FRAMES = 12


def build_hang_page(hang: Hang, run: RunRow, rights: RunRights) -> html.Div:
    """The page of a run that has Flight Recorder dumps and no traces."""
    data = html.A("hang.json", href=f"/api/v1/runs/{run.id}/hang.json")
    links = html.Span([data, *build_run_actions(run, rights)], className="heading-links")
    lines = [hang.note, *format_verdict([one.message for one in hang.culprits])]
    dumps = [f"{len(hang.ranks):,} dump{'' if len(hang.ranks) == 1 else 's'}"]
    if hang.no_dump:
        dumps.append(f"none of {format_ranks(hang.no_dump)}")
    title = "Which rank the job waits for" if hang.condition == STUCK else "State of the calls"
    # Several ranks may hang for one cause, whose remedy is said once.
    items = dict.fromkeys(
        _REMEDIES[one.cause].format(ranks=format_ranks(one.ranks))
        for one in hang.culprits
        if one.cause in _REMEDIES
    )
    remedies = [build_section("What to do", "", html.Ul([html.Li(one) for one in items]))]
    remedies = remedies if items else []
    return html.Div(
        [
            html.Div([html.H1(run.name), links], className="heading"),
            *build_run_labels(run, rights),
            build_section(
                title, "; ".join(dumps), *(html.P(html.B(line)) for line in lines if line)
            ),
            *remedies,
            *_build_calls(hang),
            *_build_ranks(hang),
            *_build_notes(hang),
        ]
    )


def _build_calls(hang: Hang) -> list[html.Section]:
    """The calls that do not end, those that explain most first: who waits, and who is missing."""
    if not hang.stuck:
        return []
    rows = [
        [
            Cell(call.group.in_words),
            Cell(f"{call.op} {call.seq}"),
            build_size_cell(call.message_bytes),
            Cell(_name(call.waiting)),
            Cell(_name([one.rank for one in call.missing])),
            Cell(_name(call.no_dump)),
            Cell(_name(call.completed)),
        ]
        for call in hang.stuck
    ]
    heads = ("group", "call", "size", "waiting", "missing", "no dump", "completed")
    note = "those that explain most first" + format_hidden_rows(hang.stuck)
    return [build_section("Calls that do not end", note, build_table(heads, rows))]


def _name(ranks: Sequence[int]) -> str:
    return format_ranks(ranks) if ranks else ""


def _build_ranks(hang: Hang) -> list[html.Section]:
    """The state of every rank, with its stack if that was recorded; culprits first."""
    to_blame = {rank for one in hang.culprits for rank in one.ranks}
    states = {one.rank: one for one in hang.states}
    last = {one.rank: one for one in hang.last_calls}
    ranks = sorted({*hang.ranks, *hang.no_dump, *states}, key=lambda n: (n not in to_blame, n))
    rows = []
    for rank in ranks:
        now, call = states.get(rank), last.get(rank)
        words = [_describe_rank(rank, hang, rank in to_blame)]
        if now is not None:
            words = [now.condition, *([now.error] if now.error else []), *words]
        called = ""
        if call is not None:
            called = f"{call.op} {call.seq} of {call.group.in_words}: {call.state}"
        stack = (now.stack if now else ()) or (call.stack if call else ())
        frames = [f"{one.file}:{one.line} {one.function}" for one in stack[:MAX_FRAMES]]
        rows.append(
            [
                Cell(html.Span(f"rank {rank}", className="whole")),
                Cell("; ".join(word for word in words if word)),
                Cell(called),
                # The innermost call, which says where it hangs; the rest opens on a click.
                Cell(build_collapsed(frames[0], html.Pre("\n".join(frames))) if frames else ""),
            ]
        )
    if not rows:
        return []
    heads = ("rank", "state", "last call", "stack, innermost first")
    note = "the ranks to look at first" + format_hidden_rows(rows)
    return [build_section("Ranks", note, build_table(heads, rows))]


def _describe_rank(rank: int, hang: Hang, is_to_blame: bool) -> str:
    """What the rank does in the first open call that it waits in, else blocks, else has ended; of a
    rank to blame the call that it blocks is first."""
    if rank in hang.no_dump:
        return "no dump"
    words: dict[str, Stuck] = {}
    for call in hang.stuck:
        if any(one.rank == rank for one in call.missing):
            words.setdefault("has not called", call)
        elif rank in call.waiting:
            words.setdefault("waits in", call)
        elif rank in call.completed:
            words.setdefault("has completed", call)
    verbs = ("waits in", "has not called", "has completed")
    for verb in (verbs[1], *verbs) if is_to_blame else verbs:
        if verb in words:
            return f"{verb} {words[verb].op} {words[verb].seq} of {words[verb].group.in_words}"
    return "in no call that is open"


def _build_notes(hang: Hang) -> list[html.Section]:
    notes = [
        *(f"rank {one.rank}: {one.message}" if one.rank is not None else one.message
          for one in hang.warnings),
        *(f"NCCL RAS: {sentence}" for sentence in hang.ras),
    ]  # fmt: skip
    if not notes:
        return []
    return [build_section("Notes", "", html.Ul([html.Li(one) for one in notes]))]
