"""The range of time that the page of a watched run shows, and the buttons and fields for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote

from dash import dcc, html
from dash.development.base_component import Component

from stepsplit.dashboard.pages.address import AddressQuery, format_query, format_time
from stepsplit.dashboard.pages.components import build_aria_label, build_time_fields
from stepsplit.dashboard.store.watch import WatchedRun, WatchRange
from stepsplit.dashboard.store.watch_slots import (
    DAY_S,
    HOUR_S,
    KEPT_S,
    LEVELS_S,
    MINUTE_S,
    compute_slot_start,
)

_SECOND_NS = 10**9

RANGES: Mapping[str, tuple[str, int]] = {
    "1h": ("1 h", HOUR_S), "1d": ("1 d", DAY_S), "7d": ("7 d", 7 * DAY_S),
    "30d": ("30 d", 30 * DAY_S), "1y": ("1 y", 365 * DAY_S),
}  # fmt: skip
"""Ranges that end now, or with the run: label and length in s."""

_MOST_SLOTS, _MOST_BINS = 800, 190
"""Slots of a line, and bars and columns of the charts by rank."""

SHORTEST_S = 5 * MINUTE_S
"""A shorter range is made so long: the shortest slot is a minute."""


@dataclass(frozen=True, slots=True)
class ShownRange:
    """The range of all charts of the page.

    Attributes:
        name: The key of RANGES; "" for one from a time to a time.
        label: In words.
        within: The range, with the level of the slots that are read.
        bin_s: The length of the bins of bars and of charts by rank.
    """

    name: str
    label: str
    within: WatchRange
    bin_s: int

    @property
    def level_s(self) -> int:
        """The length of a slot."""
        return self.within.level_s


def choose_range(run: WatchedRun, chosen: AddressQuery, now_unix_ns: int) -> ShownRange:
    """The range that the address names by "from" and "to" or by "range"; by default a day, or an
    hour for a young run. A run that has ended is shown until its end.

    The slots are the shortest that are kept for it and that are not too many.
    """
    begin_s, newest_s = run.starts[0].first_unix_ns // _SECOND_NS, run.newest_unix_ns // _SECOND_NS
    last_s = min(now_unix_ns // _SECOND_NS, newest_s + MINUTE_S)
    first_s, end_s = (chosen.parse_time_s(key) for key in ("from", "to"))
    if first_s is not None or end_s is not None:
        name, label = "", "range"
        last_s = last_s if end_s is None else end_s
        first_s = begin_s if first_s is None else first_s
        first_s = max(0, min(first_s, last_s - SHORTEST_S))
    else:
        name = chosen.find_text("range") or ""
        if name not in RANGES:
            name = "1h" if newest_s - begin_s < 2 * HOUR_S else "1d"
        label, length_s = RANGES[name]
        first_s = max(last_s - length_s, begin_s)
    length_s = max(last_s - first_s, SHORTEST_S)
    fits = (
        level_s for level_s in LEVELS_S
        if length_s <= _MOST_SLOTS * level_s
        and first_s >= newest_s - KEPT_S.get(level_s, newest_s)
    )  # fmt: skip
    level_s = next(fits, LEVELS_S[-1])
    bin_s = level_s * -(-length_s // (level_s * _MOST_BINS))
    # The first slot is whole.
    first_s = compute_slot_start(first_s * _SECOND_NS, level_s)
    return ShownRange(name, label, WatchRange(first_s, max(last_s, first_s), level_s), bin_s)


def build_range_url(run: str, chosen: AddressQuery, first_s: float, last_s: float) -> str:
    """The page with another range, of whole minutes; other choices stay."""
    first, last = first_s // MINUTE_S * MINUTE_S, -(-last_s // MINUTE_S) * MINUTE_S
    span = {"range": None, "from": format_time(first), "to": format_time(last)}
    return f"/watch/{quote(run)}{format_query({**chosen.values, **span})}"


def build_range_controls(
    run: WatchedRun, chosen: AddressQuery, shown: ShownRange, now_unix_ns: int
) -> html.Nav:
    """The ranges that end now, fields of a range from a time to a time, and links that move it."""
    links: list[Component] = []
    others = {**chosen.values, "from": None, "to": None}
    for name, (label, _) in RANGES.items():
        href = f"/watch/{quote(run.name)}{format_query({**others, 'range': name})}"
        is_current = name == shown.name
        seen = [html.Span(" (shown)", className="unseen")] if is_current else []
        look = "button on" if is_current else "button"
        links.append(dcc.Link([label, *seen], href=href, className=look))
    first_s, last_s = shown.within.first_unix_s, shown.within.last_unix_s
    length_s = max(last_s - first_s, SHORTEST_S)
    begin_s = run.starts[0].first_unix_ns // _SECOND_NS
    end_s = min(now_unix_ns // _SECOND_NS, run.newest_unix_ns // _SECOND_NS + MINUTE_S)
    # Where there is nothing more, no link leads.
    moves = []
    if first_s > begin_s:
        moves.append(("earlier", first_s - length_s, last_s - length_s))
    if last_s < end_s:
        moves.append(("later", first_s + length_s, last_s + length_s))
    if first_s > begin_s or last_s < end_s:
        moves.append(("zoom out", first_s - length_s // 2, min(last_s + length_s // 2, end_s)))
    for words, first, last in moves:
        url = build_range_url(run.name, chosen, first, max(last, first + SHORTEST_S))
        links.append(dcc.Link(words, href=url, className="button"))
    fields = build_time_fields(chosen, first_s, last_s)
    return html.Nav([*fields, *links], className="ranges", **build_aria_label("range of time"))
