"""The tools through the official client: over standard input and output, and over HTTP."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from flask.testing import FlaskClient
from mcp import Client, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from support.dashboard_processes import open_store, running_dashboard
from support.report_builders import analysis
from support.samples import SAMPLES
from support.tokens import count_tokens

from stepsplit.dashboard import cli
from stepsplit.dashboard.agents import server
from stepsplit.dashboard.agents.recordings import Recordings
from stepsplit.dashboard.agents.tools import TOOLS, ToolEntry
from stepsplit.dashboard.store.logins import Role
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.options import choose_access
from stepsplit.dashboard.web.server import create_server

MCP = "/api/v1/mcp"
HEADERS = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}

Talk = Callable[[Client], Awaitable[None]]


def talk_to(target: Any, talk: Talk) -> None:
    """A conversation of the official client with a server."""

    async def run() -> None:
        with anyio.fail_after(120):
            async with Client(target) as client:
                await talk(client)

    anyio.run(run)


def text_of(result: Any) -> str:
    (part,) = result.content
    return str(part.text)


async def call(client: Client, tool: str, **arguments: object) -> dict[str, Any]:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, text_of(result)
    found: dict[str, Any] = json.loads(text_of(result))
    return found


def test_the_tools_are_listed_as_read_only() -> None:
    async def talk(client: Client) -> None:
        listed = (await client.list_tools()).tools
        assert [one.name for one in listed] == [*TOOLS]
        assert all(one.annotations and one.annotations.read_only_hint for one in listed)
        assert all(one.input_schema["type"] == "object" for one in listed)
        everything = json.dumps([one.model_dump(mode="json") for one in listed])
        assert count_tokens(everything) < 6_000
        assert client.instructions == server.INSTRUCTIONS

    talk_to(server.build_server(Recordings((SAMPLES,))), talk)


def test_an_error_is_an_answer_in_words_and_the_server_goes_on() -> None:
    async def talk(client: Client) -> None:
        for arguments in ({"recording": "/etc/passwd"}, {"recordings": 1}, {}):
            result = await client.call_tool("summary", arguments)
            assert result.is_error and text_of(result).startswith("summary: ")
        assert (await client.call_tool("summry", {})).is_error
        assert (await call(client, "summary", recording="dp4"))["step_ns"] > 0

    talk_to(server.build_server(Recordings((SAMPLES,))), talk)


def test_a_failure_of_ours_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(recordings: Recordings, query: object) -> Any:
        raise ZeroDivisionError("a secret of the recording")

    broken = ToolEntry(TOOLS["summary"].query, fail, "broken")
    monkeypatch.setitem(TOOLS, "summary", broken)  # type: ignore[arg-type]

    async def talk(client: Client) -> None:
        result = await client.call_tool("summary", {"recording": "dp4"})
        assert result.is_error
        assert text_of(result) == (
            "summary: internal error (ZeroDivisionError); please report it as a bug"
        )

    talk_to(server.build_server(Recordings((SAMPLES,))), talk)
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.slow
def test_many_questions_at_once_are_answered() -> None:
    async def talk(client: Client) -> None:
        answers: list[dict[str, Any]] = []

        async def one(tool: str) -> None:
            answers.append(await call(client, tool, recording="tp2_pp2"))

        async with anyio.create_task_group() as group:
            for tool in ("summary", "findings", "waits", "timeline", "kernels", "idle") * 3:
                group.start_soon(one, tool)
        assert len(answers) == 18

    talk_to(server.build_server(Recordings((SAMPLES,))), talk)


@pytest.mark.slow
def test_the_command_speaks_to_the_official_client(tmp_path: Path) -> None:
    async def talk(client: Client) -> None:
        assert len((await client.list_tools()).tools) == len(TOOLS)
        for tool in ("recording", "summary", "findings", "waits", "what_if", "timeline"):
            answer = await call(client, tool, recording="pp2_m2")
            assert answer["about"]
        result = await client.call_tool("summary", {"recording": "../README.md"})
        assert result.is_error

    command = StdioServerParameters(
        command=sys.executable,
        args=["-m", "stepsplit.dashboard", "mcp", str(SAMPLES)],
        cwd=str(tmp_path),
    )
    talk_to(stdio_client(command), talk)
    assert [*tmp_path.iterdir()] == []


def test_without_the_package_the_command_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stepsplit.dashboard.commands.common.find_spec", lambda name: None)

    assert cli.run(["mcp"]) == 2
    said = capsys.readouterr().err
    assert said == "stepsplit: this needs mcp; install it with: pip install 'stepsplit[agents]'\n"


def test_a_missing_folder_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.run(["mcp", str(tmp_path / "absent")]) == 2
    assert capsys.readouterr().err.endswith("no such folder; name the folder of your recordings\n")
    assert cli.run(["mcp", str(tmp_path), "--store", f"sqlite:///{tmp_path}/absent.db"]) == 2
    assert "no such store" in capsys.readouterr().err


# Over HTTP: the tokens and roles of the dashboard.


def ask_http(client: FlaskClient, headers: dict[str, str], tool: str, **arguments: object) -> Any:
    message = {
        "jsonrpc": "2.0", "id": 1, "method": "tools/call",
        "params": {"name": tool, "arguments": arguments},
    }  # fmt: skip
    return client.post(MCP, json=message, headers=HEADERS | headers)


@pytest.fixture
def guarded(store: Store) -> FlaskClient:
    return create_server(store, choose_access("0.0.0.0", password="adm")).test_client()


def bearer(store: Store, role: Role) -> dict[str, str]:
    return {"Authorization": f"Bearer {store.tokens.create(role.label, role).secret}"}


@pytest.mark.parametrize("role", [Role.VIEWER, Role.UPLOADER, Role.ADMIN])
def test_every_role_may_ask(guarded: FlaskClient, store: Store, role: Role) -> None:
    run = analysis()
    run_id = store.import_report("nightly", run.report, run.tables)
    answer = ask_http(guarded, bearer(store, role), "summary", recording=f"run:{run_id}")

    assert answer.status_code == 200
    result = answer.json["result"]
    assert not result["isError"] and json.loads(result["content"][0]["text"])["step_ns"] > 0


def test_who_has_no_token_gets_nothing(guarded: FlaskClient, store: Store) -> None:
    assert ask_http(guarded, {}, "recordings").status_code == 401
    assert ask_http(guarded, {"Authorization": "Bearer x"}, "recordings").status_code == 401
    mine = bearer(store, Role.VIEWER)
    store.tokens.revoke(store.tokens.list_tokens()[0].id)
    assert ask_http(guarded, mine, "recordings").status_code == 401


def test_http_reads_runs_and_no_files(guarded: FlaskClient, store: Store) -> None:
    mine = bearer(store, Role.VIEWER)
    for tool, arguments in (
        ("summary", {"recording": "/etc/passwd"}),
        ("summary", {"recording": "."}),
        ("hang", {"recording": str(SAMPLES / "dp4")}),
        ("predict", {"job": "/etc/passwd"}),
        ("what_if", {"recording": "run:x"}),
        ("plan", {"job": "[model]", "gpus": 8}),
    ):
        result = ask_http(guarded, mine, tool, **arguments).json["result"]
        assert result["isError"], tool


def test_odd_requests_are_refused(guarded: FlaskClient, store: Store) -> None:
    mine = HEADERS | bearer(store, Role.VIEWER)

    assert guarded.get(MCP, headers=mine).status_code == 405
    assert guarded.delete(MCP, headers=mine).status_code == 405
    assert guarded.post(MCP, data=b"x" * (300 << 10), headers=mine).status_code == 413
    for body in (b"", b"{", b"[]", b'{"jsonrpc": "2.0"}', b"\xff", b"[" * 100_000):
        assert 400 <= guarded.post(MCP, data=body, headers=mine).status_code < 500, body[:9]
    other = mine | {"Origin": "https://elsewhere.example"}
    assert guarded.post(MCP, data=b"{}", headers=other).status_code == 403


def test_a_dashboard_without_the_package_says_so(
    guarded: FlaskClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepsplit.dashboard.web.agent_routes.find_spec", lambda name: None)
    answer = ask_http(guarded, bearer(store, Role.VIEWER), "recordings")

    assert answer.status_code == 501 and "stepsplit[agents]" in answer.json["error"]


@pytest.mark.slow
def test_a_dashboard_speaks_to_the_official_client(tmp_path: Path) -> None:
    run = analysis()
    with open_store(tmp_path) as store:
        run_id = store.import_report("nightly", run.report, run.tables)
        secret = store.tokens.create("agent", Role.VIEWER).secret
    (tmp_path / "password").write_text("admin password")

    async def talk(client: Client) -> None:
        names = [one.name for one in (await client.list_tools()).tools]
        assert "findings" in names and "plan" not in names
        rows = (await call(client, "recordings"))["rows"]
        assert rows == [[f"run:{run_id}", "run, done", "nightly"]]
        for tool in ("recording", "summary", "findings", "waits"):
            assert (await call(client, tool, recording=rows[0][0]))["about"]

    options = ("--password-file", str(tmp_path / "password"))
    with running_dashboard(tmp_path, *options) as dashboard:

        async def run_client() -> None:
            headers = {"Authorization": f"Bearer {secret}"}
            async with httpx2.AsyncClient(headers=headers) as http:
                url = f"{dashboard.url.rstrip('/')}{MCP}"
                async with Client(streamable_http_client(url, http_client=http)) as client:
                    await talk(client)

        anyio.run(run_client)
