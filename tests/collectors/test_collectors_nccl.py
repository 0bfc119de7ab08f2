"""The environment variables of NCCL by version; variables set by the user do not change."""

import socketserver
import threading
from importlib import metadata
from pathlib import Path

import pytest

from stepsplit.collectors.guard import CollectError
from stepsplit.collectors.probes.nccl_log import build_inspector_environment, build_log_environment
from stepsplit.collectors.probes.nccl_ras import ask_ras
from stepsplit.collectors.record import environment
from stepsplit.collectors.record.environment import SITE, NcclLogs, build_environment
from stepsplit.collectors.record.plan import PLAN_VARIABLE, RecordPlan

OUT = Path("/runs/a")
ASKED = RecordPlan(out=str(OUT), name="a", first=10)


def test_timestamps_are_requested_only_from_versions_with_support() -> None:
    old, new = build_log_environment(OUT, (2, 21, 5)), build_log_environment(OUT, (2, 26, 2))

    assert old == {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET,GRAPH",
        "NCCL_DEBUG_FILE": "/runs/a/nccl/%h.%p.log",
    }
    assert set(new) - set(old) == {"NCCL_DEBUG_TIMESTAMP_LEVELS", "NCCL_DEBUG_TIMESTAMP_FORMAT"}
    assert build_log_environment(OUT, None) == new


def test_call_logging_is_off_by_default() -> None:
    assert build_log_environment(OUT, None, calls=True)["NCCL_DEBUG_SUBSYS"].endswith("COLL,TUNING")


def test_the_inspector_dumps_periodically_and_includes_small_calls() -> None:
    old = build_inspector_environment(OUT, (2, 28, 9), Path("/lib/x.so"))
    new = build_inspector_environment(OUT, (2, 30, 3), Path("/lib/x.so"))

    assert old["NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS"] == "10000000"
    assert "NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES" not in old
    assert new["NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES"] == "0"


def test_an_nccl_without_inspector_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"NCCL 2\.27\.7 has no Inspector"):
        build_inspector_environment(OUT, (2, 27, 7), Path("/lib/x.so"))


def test_a_missing_inspector_plugin_is_an_error() -> None:
    with pytest.raises(CollectError, match="add its folder to LD_LIBRARY_PATH"):
        build_environment({}, ASKED, NcclLogs(inspector=True))


def test_the_job_gets_the_plan_and_the_agent_before_the_users_own_path() -> None:
    added = build_environment({"PYTHONPATH": "/mine"}, ASKED, NcclLogs())

    assert added["PYTHONPATH"] == f"{SITE}:/mine"
    assert added[PLAN_VARIABLE] == ASKED.format_json()
    assert added["TORCH_FR_BUFFER_SIZE"] == "20000"
    conf = Path(added["KINETO_CONFIG"]).read_text()
    assert conf.splitlines()[-1] == "ACTIVITIES_MAX_GPU_BUFFER_SIZE_MB = 1024"


def test_variables_set_by_the_user_are_not_changed() -> None:
    given = {"NCCL_DEBUG": "WARN", "TORCH_FR_BUFFER_SIZE": "100", "KINETO_CONFIG": "/etc/mine"}

    assert set(build_environment(given, ASKED, NcclLogs())) == {PLAN_VARIABLE, "PYTHONPATH"}


@pytest.mark.parametrize(
    ("torch", "given", "size"),
    [
        ("2.13.0+cpu", {}, {"TORCH_FR_BUFFER_SIZE": "20000"}),
        (None, {}, {"TORCH_FR_BUFFER_SIZE": "20000"}),
        ("2.7.1", {}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "20000"}),
        # The new name would override it.
        ("2.13.0", {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, {}),
        ("2.7.1", {"TORCH_FR_BUFFER_SIZE": "500"}, {}),
    ],
)
def test_the_size_of_the_flight_recorder_has_the_name_that_torch_reads_unless_the_user_set_it(
    torch: str | None, given: dict[str, str], size: dict[str, str]
) -> None:
    def find_version(package: str) -> str:
        if package != "torch" or torch is None:
            raise metadata.PackageNotFoundError
        return torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "version", find_version)
        added = build_environment(given, ASKED, NcclLogs())

    assert {name: added[name] for name in added if "BUFFER_SIZE" in name} == size


def test_kineto_keeps_the_configuration_of_its_daemon_or_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_SYSTEM_KINETO_CONFIG", tmp_path / "none")
    assert environment.build_kineto_environment({}) != {}
    assert environment.build_kineto_environment({"KINETO_USE_DAEMON": "1"}) == {}

    monkeypatch.setattr(environment, "_SYSTEM_KINETO_CONFIG", tmp_path)
    assert environment.build_kineto_environment({}) == {}


@pytest.mark.parametrize(
    ("cuda", "given", "torn_down"),
    [
        ("12.6", {}, True),
        ("13.0", {}, True),
        ("12.4", {}, False),  # with CUDA graphs it crashes
        (None, {}, False),
        ("13.0", {"TEARDOWN_CUPTI": "0"}, False),
        ("13.0", {"CUDA_INJECTION64_PATH": "/opt/nsys/libToolsInjection64.so"}, False),
    ],
)
def test_cupti_is_detached_after_the_recording_where_that_is_safe(
    cuda: str | None, given: dict[str, str], torn_down: bool
) -> None:
    added = environment.build_kineto_environment(given, cuda)

    assert added.get("TEARDOWN_CUPTI") == ("1" if torn_down else None)


class _Ras(socketserver.StreamRequestHandler):
    """NCCL's side of the protocol, as in its src/ras/client_support.cc."""

    has_json = True

    def handle(self) -> None:
        form = "text"
        for line in self.rfile:
            match line.decode().split():
                case ["CLIENT", "PROTOCOL", _]:
                    answer = "SERVER PROTOCOL 2"
                case ["TIMEOUT", number] if number.isdigit():
                    answer = "OK"
                case ["SET", "FORMAT", form] if self.has_json:
                    answer = "OK"
                case ["VERBOSE", "STATUS"]:
                    self.wfile.write(f"the status\nin {form}\n".encode())
                    return
                case _:
                    form, answer = "text", f"ERROR: Unknown command {line.decode().strip()}"
            self.wfile.write(f"{answer}\n".encode())


class _OldRas(_Ras):
    has_json = False


class _Http(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.wfile.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.parametrize(
    ("server", "answer"),
    [(_Ras, "the status\nin json\n"), (_OldRas, "the status\nin text\n"), (_Http, "")],
)
def test_nccls_ras_is_asked_by_its_protocol(
    server: type[socketserver.StreamRequestHandler], answer: str
) -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), server) as listening:
        thread = threading.Thread(target=listening.handle_request)
        thread.start()
        address = f"127.0.0.1:{listening.server_address[1]}"
        assert ask_ras({"NCCL_RAS_ADDR": address}) == answer
        thread.join()


def test_without_nccls_ras_there_is_no_answer() -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), _Ras) as closed:
        address = f"127.0.0.1:{closed.server_address[1]}"
    assert ask_ras({"NCCL_RAS_ADDR": address}) == ""
    assert ask_ras({"NCCL_RAS_ADDR": "nowhere"}) == ""
    assert ask_ras({"NCCL_RAS_ENABLE": "0"}) == ""
