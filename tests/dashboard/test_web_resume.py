"""An interrupted upload resumes, and only bytes on disk are counted."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.server import create_server
from stepsplit.dashboard.web.uploads import Limits


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(f"sqlite:///{tmp_path}/runs.db", tmp_path / "artifacts")
    yield opened
    opened.close()


@pytest.fixture
def client(store: Store) -> FlaskClient:
    return create_server(store, limits=Limits(file_bytes=1000, spare_bytes=0)).test_client()


@pytest.fixture
def file(client: FlaskClient) -> str:
    """The address of a file of a new run."""
    answer = client.post("/api/v1/runs", json={"name": "run"})
    assert answer.json is not None
    return f"/api/v1/runs/{answer.json['id']}/files/exp1/rank0"


def test_parts_make_a_file(client: FlaskClient, store: Store, file: str) -> None:
    assert client.head(file).status_code == 404

    first, second = _patch(client, file, 0, b"hello "), _patch(client, file, 6, b"world")
    assert (_held(first), _held(second)) == ((200, "6", "?0"), (200, "11", "?0"))
    assert _held(client.head(file)) == (204, "11", "?0")
    last = _patch(client, file, 11, b"", ends=True)

    assert _held(last) == _held(client.head(file), 200) == (200, "11", "?1")
    assert _on_disk(store, file).read_bytes() == b"hello world"


def test_a_part_at_the_wrong_offset_gets_the_expected_offset(
    client: FlaskClient, file: str
) -> None:
    _patch(client, file, 0, b"hello")

    answers = [_patch(client, file, offset, b"x") for offset in (0, 4, 6)]

    assert [_held(answer) for answer in answers] == [(409, "5", "?0")] * 3


def test_a_complete_file_takes_no_part(client: FlaskClient, file: str) -> None:
    _patch(client, file, 0, b"hello", ends=True)

    assert _held(_patch(client, file, 5, b"x")) == (409, "5", "?1")


def test_a_part_with_a_wrong_digest_is_dropped(
    client: FlaskClient, store: Store, file: str
) -> None:
    _patch(client, file, 0, b"hello ", digest=b"hello ")

    false = _patch(client, file, 6, b"wurld", digest=b"world")

    assert false.status_code == 422
    assert _held(client.head(file)) == (204, "6", "?0")
    assert _on_disk(store, file).read_bytes() == b"hello "
    assert _held(_patch(client, file, 6, b"world", digest=b"world", ends=True))[0] == 200


def test_a_whole_file_with_a_wrong_digest_is_removed(
    client: FlaskClient, store: Store, file: str
) -> None:
    false = client.put(file, data=b"wurld", headers={"Content-Digest": _digest(b"world")})
    right = client.put(file, data=b"world", headers={"Content-Digest": _digest(b"world")})

    assert (false.status_code, right.status_code) == (422, 201)
    assert _held(client.head(file)) == (204, "5", "?1")


def test_received_bytes_of_a_cut_off_part_are_kept(
    client: FlaskClient, store: Store, file: str
) -> None:
    _patch(client, file, 0, b"hello ")

    plain = _patch(client, file, 6, b"wo", announced=5)
    assert _held(plain) == (400, "8", "?0")
    # Half of a part with a digest cannot be verified.
    checked = _patch(client, file, 8, b"r", announced=3, digest=b"rld")

    assert checked.status_code == 400
    assert _held(client.head(file)) == (204, "8", "?0")
    assert _on_disk(store, file).read_bytes() == b"hello wo"


def test_unrecorded_bytes_are_truncated(client: FlaskClient, store: Store, file: str) -> None:
    """A server that was killed has written more than it has recorded."""
    _patch(client, file, 0, b"hello ")
    with _on_disk(store, file).open("ab") as opened:
        opened.write(b"garbage")

    _patch(client, file, 6, b"world", ends=True)

    assert _on_disk(store, file).read_bytes() == b"hello world"


def test_bytes_lost_by_the_disk_are_sent_again(
    client: FlaskClient, store: Store, file: str
) -> None:
    _patch(client, file, 0, b"hello ")
    _on_disk(store, file).write_bytes(b"hel")

    assert _held(_patch(client, file, 6, b"world")) == (409, "3", "?0")
    assert _held(_patch(client, file, 3, b"lo world", ends=True)) == (200, "11", "?1")


def test_concurrent_uploads_of_a_file_are_serialized(
    client: FlaskClient, store: Store, file: str
) -> None:
    _patch(client, file, 0, b"hello ")

    with _on_disk(store, file).open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        refused = _patch(client, file, 6, b"world")

    assert refused.status_code == 409
    assert _patch(client, file, 6, b"world").status_code == 200


def test_an_upload_with_an_incomplete_file_cannot_finish(client: FlaskClient, file: str) -> None:
    finish = file.partition("/files/")[0] + "/finish"
    _patch(client, file, 0, b"hello")

    early = client.post(finish)
    message = "exp1/rank0 is incomplete: 5 bytes received; send the rest, or DELETE it"
    assert (early.status_code, early.json) == (409, {"error": message})
    _patch(client, file, 5, b"", ends=True)

    assert client.post(finish).status_code == 202


def test_an_incomplete_file_can_be_deleted(client: FlaskClient, store: Store, file: str) -> None:
    _patch(client, file, 0, b"hello")

    assert client.delete(file).status_code == 204

    assert (client.head(file).status_code, client.delete(file).status_code) == (404, 404)
    assert not _on_disk(store, file).exists()


def test_parts_beyond_the_limit_leave_the_stored_bytes(client: FlaskClient, file: str) -> None:
    _patch(client, file, 0, b"x" * 600)

    assert _patch(client, file, 600, b"x" * 401).status_code == 413
    assert _held(client.head(file)) == (204, "600", "?0")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Upload-Offset": "-1"},
        {"Upload-Offset": "zero"},
        {"Upload-Offset": "9" * 30},
        {"Upload-Offset": "0", "Upload-Complete": "yes"},
        {"Upload-Offset": "0", "Content-Digest": "sha-256=:AAAA:"},
        {"Upload-Offset": "0", "Content-Digest": "sha-256=:=A:"},
    ],
)
def test_invalid_headers_are_refused(
    headers: dict[str, str], client: FlaskClient, file: str
) -> None:
    assert client.patch(file, data=b"x", headers=headers).status_code == 400
    assert client.head(file).status_code == 404


def _patch(
    client: FlaskClient,
    file: str,
    offset: int,
    body: bytes,
    *,
    ends: bool = False,
    digest: bytes | None = None,
    announced: int | None = None,
) -> TestResponse:
    headers = {"Upload-Offset": str(offset), "Upload-Complete": "?1" if ends else "?0"}
    if digest is not None:
        headers["Content-Digest"] = _digest(digest)
    length = str(len(body) if announced is None else announced)
    environ = {"CONTENT_LENGTH": length}
    return client.patch(
        file, input_stream=io.BytesIO(body), headers=headers, environ_overrides=environ
    )


def _digest(content: bytes) -> str:
    return f"sha-256=:{base64.b64encode(hashlib.sha256(content).digest()).decode()}:"


def _held(answer: TestResponse, status: int | None = None) -> tuple[int, str | None, str | None]:
    headers = answer.headers
    code = status or answer.status_code
    return code, headers.get("Upload-Offset"), headers.get("Upload-Complete")


def _on_disk(store: Store, file: str) -> Path:
    run, _, path = file.removeprefix("/api/v1/runs/").partition("/files/")
    return store.find_folder(run) / "input" / path
