"""The list of runs as a table: columns, tags, pages and order by the address."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from dash import dcc, html
from support.page_text import find, read_tables, read_text
from support.report_builders import analysis

from stepsplit.dashboard.pages.address import AddressQuery
from stepsplit.dashboard.pages.run_actions import RunRights
from stepsplit.dashboard.pages.run_columns import COLUMNS, choose_columns, has_tags, split_tags
from stepsplit.dashboard.pages.runs import MAX_LISTED, build_runs_page
from stepsplit.dashboard.pages.tables import DataTable
from stepsplit.dashboard.store.metrics import build_headline
from stepsplit.dashboard.store.run_row import RunRow, State, Tag

DONE = build_headline(analysis().report)


def build_run(n: int, state: State = "done", **more: Any) -> RunRow:
    numbers = DONE if state == "done" else None
    return RunRow(f"{n:012x}", f"run-{n:03}", n, state, None, numbers, **more)


def show(runs: list[RunRow], rights: RunRights | None = None, **chosen: str) -> html.Div:
    return build_runs_page(runs, AddressQuery(chosen), rights or RunRights())


def list_names(page: html.Div) -> list[str]:
    links = find(page, dcc.Link)
    return [one.children for one in links if getattr(one, "className", "") == "run-link"]


def list_heads(page: html.Div) -> list[str]:
    (table,) = find(page, DataTable)
    return [read_text(getattr(one, "content", one)) for one in table.heads][1:]


def find_link(page: html.Div, text: str) -> str:
    links = [*find(page, dcc.Link), *find(page, html.A)]
    (link,) = [one.href for one in links if read_text(one) == text]
    return str(link)


def test_columns_are_those_of_the_address_with_the_common_ones_first() -> None:
    runs = [build_run(1, tags=(Tag("branch", "main"),)), build_run(2, "failed")]
    page = show(runs, columns="finding,idle,tag.branch,nonsense,tag.,added")
    assert list_heads(page) == ["run", "added ▼", "branch", "idle", "first finding"]
    (table,) = read_tables(page)
    assert [row["branch"] for row in table] == ["main"], "a run without metrics has a state instead"
    assert table[0]["first finding"].startswith("18.2 ms") or DONE.first_finding is not None
    assert table[0]["first finding"].endswith(str(DONE.first_finding and DONE.first_finding.words))


def test_a_column_is_shown_and_hidden_by_a_button_beside_those_that_are_shown() -> None:
    runs = [build_run(1, tags=(Tag("branch", "main"),))]
    page = show(runs, q="run", sort="name", columns="step,bubble")
    boxes = {read_text(one): (getattr(one, "data-toggle"), getattr(one, "aria-checked"))
             for one in find(page, html.Button) if hasattr(one, "data-toggle")}  # fmt: skip
    assert boxes["step"] == ("step", "true") and boxes["bubble"] == ("bubble", "true")
    assert boxes["MFU"] == ("mfu", "false")
    assert boxes["tag branch"] == ("tag.branch", "false")
    (listed,) = [one for one in find(page, html.Ul) if hasattr(one, "data-usual")]
    assert getattr(listed, "data-usual") == "name,step,bubble"


def test_every_column_can_be_shown_and_sorted_by() -> None:
    runs = [build_run(1), build_run(2, tags=(Tag("a", "b"),)), build_run(3, "queued")]
    names = [*COLUMNS, "tag.a"]
    page = show(runs, columns=",".join(names))
    assert len(list_heads(page)) == len(names)
    for name in names:
        for sort in (name, f"-{name}"):
            page = show(runs, columns=",".join(names), sort=sort)
            assert sorted(list_names(page)) == ["run-001", "run-002", "run-003"]


def test_the_usual_columns_leave_out_what_no_run_has() -> None:
    bare = replace(DONE, mesh=None, mfu=None)
    names = choose_columns([replace(build_run(1), headline=bare)])
    assert not {"mesh", "mfu", "verdict", "job"} & set(names)
    assert {"step", "split", "bubble"} <= set(names)


def test_a_long_list_has_pages() -> None:
    runs = [build_run(n) for n in range(2 * MAX_LISTED + 5)]
    first = show(runs, q="run")
    assert list_names(first)[0] == f"run-{2 * MAX_LISTED + 4:03}"
    assert find_link(first, "next page") == "/?q=run&page=2"
    assert "1 to 100 of 205 runs" in read_text(first) and "page 1 of 3" in read_text(first)
    second = show(runs, q="run", page="2")
    assert find_link(second, "previous page") == "/?q=run"
    last = show(runs, q="run", page="3")
    assert list_names(last)[-1] == "run-000" and len(list_names(last)) == 5
    # A page behind the last one is the last one; sorting begins with the first.
    assert list_names(show(runs, q="run", page="99")) == list_names(last)
    assert find_link(last, "step") == "/?q=run&sort=-step"


def test_tags_filter_the_list_and_lead_to_it() -> None:
    a, b = Tag("branch", "main"), Tag("gpus", "8")
    runs = [build_run(1, tags=(a, b)), build_run(2, tags=(a,)), build_run(3)]
    page = show(runs)
    assert find_link(page, "gpus=8") == "/?tag=gpus%3D8"
    assert list_names(show(runs, tag="branch=main")) == ["run-002", "run-001"]
    both = show(runs, tag="branch=main,gpus=8")
    assert list_names(both) == ["run-001"]
    assert find_link(both, "gpus=8 : remove this filter") == "/?tag=branch%3Dmain"
    assert list_names(show(runs, tag="branch=main", q="run-001")) == ["run-001"]
    assert "No run matches" in read_text(show(runs, tag="branch=other"))
    (menu,) = [one for one in find(show(runs, tag="branch=main"), html.Select)
               if getattr(one, "data-choice") == "tag"]  # fmt: skip
    assert [option.value for option in menu.children] == ["", "gpus=8"]


def test_tags_of_several_runs_are_offered_before_those_that_each_run_has_of_its_own() -> None:
    """Of 70 commits in a menu of 60 tags, none may hide the teams."""
    runs = [
        build_run(n, tags=(Tag("commit", f"{n:07x}"), Tag("team", "ab"[n % 2]))) for n in range(70)
    ]
    (menu,) = [one for one in find(show(runs), html.Select)
               if getattr(one, "data-choice") == "tag"]  # fmt: skip
    assert [option.value for option in menu.children][:4] == [
        "",
        "team=a",
        "team=b",
        "commit=0000000",
    ]


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        (None, []),
        ("", []),
        ("nonsense", []),
        ("a=1,b=2", ["a=1", "b=2"]),
        ("a=1,2,3,b=2", ["a=1,2,3", "b=2"]),
        ("a=1,a=1", ["a=1"]),
    ],
)
def test_tags_of_an_address(text: str | None, tags: list[str]) -> None:
    assert split_tags(text) == tags
    assert has_tags(build_run(1, tags=(Tag("a", "1,2,3"), Tag("b", "2"))), ["a=1,2,3", "b=2"])


def test_what_is_done_with_selected_runs_is_offered_to_who_may_do_it() -> None:
    def list_buttons(rights: RunRights) -> set[str]:
        page = show([build_run(1), build_run(2, "failed")], rights)
        return {one.id for one in find(page, html.Button) if getattr(one, "id", None)}

    viewer = {"clear-picks", "pick-all"}
    assert list_buttons(RunRights(edit=False, delete=False)) == viewer
    uploader = viewer | {"tag-picks", "tag-save", "tag-cancel"}
    assert list_buttons(RunRights(delete=False)) == uploader
    assert list_buttons(RunRights()) == uploader | {"delete-picks"}

    def list_boxes(rights: RunRights) -> list[str]:
        page = show([build_run(1), build_run(2, "failed")], rights)
        buttons = find(page, html.Button)
        return [getattr(one, "aria-label") for one in buttons if hasattr(one, "data-pick")]

    # A viewer compares, and what has no step cannot be compared.
    assert list_boxes(RunRights(edit=False, delete=False)) == ["select run-001"]
    assert list_boxes(RunRights()) == ["select run-002", "select run-001"]
