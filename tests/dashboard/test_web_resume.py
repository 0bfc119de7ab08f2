"""An interrupted upload resumes, and only bytes on disk are counted."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.server import create_server
from stepsplit.dashboard.web.uploads import Limits


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


def test_concurrent_uploads_of_a_file_are_serialized(client: FlaskClient, file: str) -> None:
    _patch(client, file, 0, b"hello ")

    during = [
        (lambda: _patch(client, file, 6, b"world"), 409),
        (lambda: client.put(file, data=b"other"), 409),
        (lambda: client.delete(file), 409),
    ]
    body = _Body(b"world", [step for step, _ in during])
    last = _send(client, "PATCH", file, body, {"Upload-Offset": "6", "Upload-Complete": "?1"})

    assert [answer.status_code for answer in body.answers] == [status for _, status in during]
    assert _held(last) == (200, "11", "?1")


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


def test_a_put_of_the_rest_of_a_file_is_refused(client: FlaskClient, file: str) -> None:
    """As curl -T FILE -C 5 sends: taken for a whole file it would replace the beginning."""
    client.patch(file, data=b"hello", headers={"Upload-Offset": "0"})
    rest = client.put(file, data=b"world", headers={"Content-Range": "bytes 5-9/10"})
    assert (rest.status_code, "PATCH" in rest.text) == (400, True)
    assert _held(client.head(file)) == (204, "5", "?0")


def _kept(client: FlaskClient, store: Store, file: str) -> tuple[bytes, str | None, str | None]:
    """The bytes on disk, and what the server says of them."""
    head = _held(client.head(file))
    return _on_disk(store, file).read_bytes(), head[1], head[2]


@pytest.mark.parametrize(
    ("body", "headers", "announced", "status"),
    [
        (b"wor", {}, 5, 400),
        (b"wurld", {"Content-Digest": "world"}, 5, 422),
        (b"x" * 1001, {}, None, 413),
        (b"x" * 1001, {}, 1001, 413),
    ],
    ids=["broken off", "false digest", "too large", "announced too large"],
)
@pytest.mark.parametrize("ends", [True, False], ids=["a whole file", "parts of a file"])
def test_a_failed_put_keeps_what_was_stored(
    body: bytes, headers: dict[str, str], announced: int | None, status: int, ends: bool,
    client: FlaskClient, store: Store, file: str,
) -> None:  # fmt: skip
    _patch(client, file, 0, b"hello", ends=ends)
    before = _kept(client, store, file)
    sent = {name: _digest(text.encode()) for name, text in headers.items()}

    answer = _send(client, "PUT", file, io.BytesIO(body), sent, announced)

    assert answer.status_code == status
    assert _kept(client, store, file) == before == (b"hello", "5", "?1" if ends else "?0")
    assert _files(store, file) == ["input/exp1/rank0"]
    assert client.put(file, data=b"new").status_code == 201
    assert _kept(client, store, file) == (b"new", "3", "?1")


def test_a_put_on_a_full_disk_keeps_what_was_stored(
    client: FlaskClient, store: Store, file: str
) -> None:
    client.put(file, data=b"hello")
    full = create_server(store, limits=Limits(spare_bytes=1 << 60)).test_client()

    assert full.put(file, data=b"other").status_code == 507

    assert _kept(client, store, file) == (b"hello", "5", "?1")


def test_a_draft_counts_in_the_size_of_a_run_with_the_file_it_replaces(store: Store) -> None:
    limits = Limits(file_bytes=100_000, run_bytes=150_000, spare_bytes=0)
    client = create_server(store, limits=limits).test_client()
    made = client.post("/api/v1/runs", json={"name": "run"})
    assert made.json is not None
    files = f"/api/v1/runs/{made.json['id']}/files"
    client.put(f"{files}/a", data=b"a" * 60_000)

    assert client.put(f"{files}/a", data=b"x" * 90_001).status_code == 413
    body = _Body(b"b" * 50_000, [lambda: client.put(f"{files}/c", data=b"c" * 65_001)])
    assert _send(client, "PUT", f"{files}/b", body, {}).status_code == 201

    assert [answer.status_code for answer in body.answers] == [413]
    assert client.put(f"{files}/c", data=b"c" * 40_000).status_code == 201


def test_a_refused_part_makes_no_file_or_folder(
    client: FlaskClient, store: Store, file: str
) -> None:
    assert _held(_patch(client, file, 3, b"x")) == (409, "0", "?0")
    assert _patch(client, file, 0, b"x" * 1001).status_code == 413
    torn = _patch(client, file, 0, b"wurld", digest=b"world")

    assert (torn.status_code, client.head(file).status_code) == (422, 404)
    assert not _on_disk(store, file).parent.exists()


def test_a_put_that_ends_after_finish_is_refused(
    client: FlaskClient, store: Store, file: str
) -> None:
    """The analysis reads what was stored when the upload was finished."""
    finish = file.partition("/files/")[0] + "/finish"
    client.put(file, data=b"hello")
    body = _Body(b"other", [lambda: client.post(finish)])

    answer = _send(client, "PUT", file, body, {})

    assert ([step.status_code for step in body.answers], answer.status_code) == ([202], 409)
    assert _files(store, file) == ["input/exp1/rank0"]
    assert _kept(client, store, file) == (b"hello", "5", "?1")


def test_an_upload_cannot_finish_while_a_new_file_is_sent(client: FlaskClient, file: str) -> None:
    finish = file.partition("/files/")[0] + "/finish"
    client.put(f"{file}.gz", data=b"hello")
    body = _Body(b"other", [lambda: client.post(finish)])

    answer = _send(client, "PUT", file, body, {})

    assert ([step.status_code for step in body.answers], answer.status_code) == ([409], 201)
    assert client.post(finish).status_code == 202


def test_bytes_of_a_server_that_was_killed_during_a_put_are_not_read(
    client: FlaskClient, store: Store, file: str
) -> None:
    client.put(file, data=b"hello")
    left = []
    body = _Body(b"other file", [lambda: left.append(_files(store, file)) or client.head(file)])
    _send(client, "PUT", file, body, {})
    (draft,) = [path for path in left[0] if not path.startswith("input/")]
    (_on_disk(store, file).parents[2] / draft).write_bytes(b"half of a longer file")

    assert client.put(file, data=b"hello").status_code == 201

    assert _kept(client, store, file) == (b"hello", "5", "?1")
    assert _files(store, file) == ["input/exp1/rank0"]


class _Body(io.BytesIO):
    """A request body; the steps happen when its first half has been received."""

    def __init__(self, content: bytes, steps: Sequence[Callable[[], TestResponse]]) -> None:
        super().__init__(content)
        self._steps, self.answers = list(steps), list[TestResponse]()

    def read(self, size: int | None = -1, /) -> bytes:
        if self._steps and self.tell() == 0:
            return super().read(len(self.getvalue()) // 2)
        steps, self._steps = self._steps, []
        self.answers += [step() for step in steps]
        return super().read(size)

    def readinto(self, buffer: bytearray, /) -> int:  # type: ignore[override]
        block = self.read(len(buffer))
        buffer[: len(block)] = block
        return len(block)


def _send(
    client: FlaskClient,
    method: str,
    file: str,
    body: io.BytesIO,
    headers: dict[str, str],
    announced: int | None = None,
) -> TestResponse:
    length = str(len(body.getvalue()) if announced is None else announced)
    environ = {"CONTENT_LENGTH": length}
    return client.open(
        file, method=method, input_stream=body, headers=headers, environ_overrides=environ
    )


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


def _files(store: Store, file: str) -> list[str]:
    """All files in the folder of the run."""
    folder = store.find_folder(file.removeprefix("/api/v1/runs/").partition("/")[0])
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
