"""The configurations of nginx and Caddy in docs/dashboard.md, in front of a dashboard."""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.dashboard_processes import (
    Dashboard,
    find_free_port,
    open_store,
    running_dashboard,
    until,
)
from support.required import absent
from support.store_builders import state

pytestmark = [pytest.mark.slow, pytest.mark.in_turn("dashboard/web")]
ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "sample_traces" / "pp2_m2"
OPTIONS = ["--trusted-proxy-header", "X-Forwarded-User", "--trusted-proxy", "127.0.0.1"]
SECRET = "0123456789abcdef0123456789abcdef"
WAIT_S = 30.0


@dataclass(frozen=True)
class Proxy:
    """A proxy in front of the dashboard, with TLS, and its log."""

    dashboard: Dashboard
    port: int
    certificate: Path
    log: Path

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    def get(self, path: str, **headers: str) -> int:
        """The status of the answer."""
        trusted = ssl.create_default_context(cafile=str(self.certificate))
        request = urllib.request.Request(self.url + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S, context=trusted) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def connect(self) -> ssl.SSLSocket:
        """A client that has sent nothing yet."""
        trusted = ssl.create_default_context(cafile=str(self.certificate))
        link = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)
        return trusted.wrap_socket(link, server_hostname="localhost")


@pytest.fixture(params=["nginx", "caddy"])
def proxy(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Proxy]:
    """The proxy with the configuration of the docs, and a dashboard with the options there."""
    program = shutil.which(request.param, path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None or shutil.which("openssl") is None:
        absent(request.param, f"{request.param} and openssl are not installed")
    password = tmp_path / "password"
    password.write_text("secret")
    certificate, key = _make_certificate(tmp_path)
    # For the dashboard and Caddy; nginx has a file.
    monkeypatch.setenv("STEPSPLIT_PROXY_SECRET", SECRET)
    options = ("--workers", "0", "--password-file", str(password), *OPTIONS)
    with running_dashboard(tmp_path, *options) as dashboard:
        port = find_free_port()
        config = _read_docs(request.param).replace("127.0.0.1:8050", dashboard.url[7:])
        write = _write_nginx if request.param == "nginx" else _write_caddy
        command = write(tmp_path, config, port, certificate, key)
        with _running([str(program), *command], tmp_path, port):
            yield Proxy(dashboard, port, certificate, tmp_path / "proxy.log")


def test_uploads_pages_and_logins_pass_the_proxy(proxy: Proxy, tmp_path: Path) -> None:
    trace = tmp_path / "large" / "rank0_trace.json"
    trace.parent.mkdir()
    trace.write_bytes(bytes(20_000_000))

    sent = _upload(proxy, tmp_path, trace)

    login = b64encode(b"me:secret").decode()
    assert proxy.get("/", Authorization=f"Basic {login}") == 200
    assert proxy.get("/", Authorization="Basic bWU6d3Jvbmc=") == 401
    for name in ("X-Forwarded-User", "X_Forwarded_User"):
        assert proxy.get("/", **{name: "admin"}) == 401
    assert sent.startswith(f"{proxy.url}/run/")
    run_id = sent.strip().rpartition("/")[2]
    with open_store(tmp_path) as store:
        assert state(store, run_id) == ("queued", None)
        assert (store.find_folder(run_id) / "input" / trace.name).stat().st_size == 20_000_000
    # nginx logs this for each body that it writes to its own disk.
    assert "temporary file" not in proxy.log.read_text()


def test_slow_clients_of_the_proxy_hold_up_no_others(proxy: Proxy, tmp_path: Path) -> None:
    with ExitStack() as stack:
        for i in range(64):
            link = stack.enter_context(proxy.connect())
            body = b"POST /api/v1/runs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\nx"
            link.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " if i % 2 else body)

        assert [proxy.get("/healthz") for _ in range(5)] == [200] * 5
        assert _upload(proxy, tmp_path, SAMPLE).startswith(proxy.url)


def _upload(proxy: Proxy, folder: Path, place: Path) -> str:
    """What stepsplit upload prints, with a token."""
    with open_store(folder) as store:
        token = store.tokens.create("ci").secret
    command = [sys.executable, "-m", "stepsplit.dashboard", "upload", str(place)]
    command += ["--to", proxy.url, "--token", token]
    env = {**os.environ, "SSL_CERT_FILE": str(proxy.certificate)}
    return subprocess.run(command, env=env, check=True, text=True, stdout=subprocess.PIPE).stdout


def _read_docs(language: str) -> str:
    text = (ROOT / "docs" / "dashboard.md").read_text()
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return str(found)


def _write_nginx(folder: Path, site: str, port: int, certificate: Path, key: Path) -> list[str]:
    """Only addresses, files and the certificate differ from the docs."""
    site = site.replace("listen 443 ssl", f"listen 127.0.0.1:{port} ssl")
    site = site.replace("server_name traces.example", "server_name localhost")
    site = site.replace("/etc/ssl/traces.example.pem", str(certificate))
    secret = folder / "stepsplit-secret.conf"
    secret.write_text(f'proxy_set_header X-Stepsplit-Proxy-Secret "{SECRET}";')
    site = site.replace("/etc/nginx/stepsplit-secret.conf", str(secret))
    (folder / "site.conf").write_text(site.replace("/etc/ssl/traces.example.key", str(key)))
    temporary = folder / "proxy"
    temporary.mkdir()
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    lines = [f"{kind}_temp_path {temporary}/{kind};" for kind in kinds]
    user = "user root;" if os.geteuid() == 0 else ""
    http = " ".join([*lines, "access_log off;", f"include {folder}/site.conf;"])
    (folder / "nginx.conf").write_text(
        f"{user} daemon off; pid {folder}/nginx.pid; error_log {folder}/proxy.log warn;\n"
        f"events {{}}\nhttp {{ {http} }}\n"
    )
    return ["-p", str(folder), "-c", str(folder / "nginx.conf")]


def _write_caddy(folder: Path, text: str, port: int, certificate: Path, key: Path) -> list[str]:
    """Only the address and the certificate differ from the docs."""
    text = text.replace("{\n", "{\n    admin off\n    auto_https disable_redirects\n", 1)
    site = f"https://localhost:{port} {{\n    tls {certificate} {key}\n"
    (folder / "Caddyfile").write_text(text.replace("traces.example {\n", site))
    return ["run", "--adapter", "caddyfile", "--config", str(folder / "Caddyfile")]


@contextmanager
def _running(command: list[str], folder: Path, port: int) -> Iterator[None]:
    home = {"HOME": str(folder / "home"), "XDG_DATA_HOME": str(folder / "home")}
    env = {**os.environ, **home}
    with (folder / "proxy.log").open("ab") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        until(lambda: _answers(port) or process.poll() is not None)
        assert process.poll() is None, (folder / "proxy.log").read_text()
        yield
    finally:
        process.terminate()
        process.wait(WAIT_S)


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def _make_certificate(folder: Path) -> tuple[Path, Path]:
    certificate, key = folder / "site.pem", folder / "site.key"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *subject, *files], check=True, capture_output=True)
    return certificate, key
