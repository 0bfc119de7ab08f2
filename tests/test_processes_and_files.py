"""Each place that starts or ends a process, deletes or moves files, or makes a temporary or private
file has a reason.

A process of ours imports nothing from the current folder; a deletion hits what we made; a file in a
place that others may write is no one else's. Whoever adds a place says why that holds.

The names below are found however they are imported. Path.replace differs from that of a text by its
one argument, so it is found only where it is called.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("analyzer", "collectors", "dashboard")

WATCHED = {
    "asyncio": ("create_subprocess_exec", "create_subprocess_shell"),
    "concurrent.futures": ("ProcessPoolExecutor",),
    "ctypes": ("CDLL",),
    "multiprocessing": ("Manager", "Pipe", "Pool", "Process", "get_context", "set_start_method"),
    "os": ("fork", "forkpty", "kill", "killpg", "link", "makedirs", "mkdir", "mkfifo", "mknod",
           "open", "popen", "remove", "removedirs", "rename", "replace", "rmdir", "symlink",
           "system", "unlink"),
    "pty": ("fork", "spawn"),
    "shutil": ("move", "rmtree"),
    "subprocess": ("Popen", "call", "check_call", "check_output", "getoutput", "run"),
    "sys": ("executable",),
    "tempfile": ("NamedTemporaryFile", "SpooledTemporaryFile", "TemporaryDirectory",
                 "TemporaryFile", "gettempdir", "mkdtemp", "mkstemp", "mktemp", "tempdir"),
}  # fmt: skip
FAMILIES = ("os.exec", "os.posix_spawn", "os.spawn")
METHODS = ("hardlink_to", "kill", "killpg", "mv", "rename", "rm", "rmdir", "rmtree", "send_signal",
           "symlink_to", "terminate", "unlink")  # fmt: skip
"""Of a path, a process, a file system of fsspec, or anything else."""
SHARED = ("/tmp", "/var/tmp", "/dev/shm", "/run/user")
"""Folders that others may write to, in texts."""

REASONS: dict[str, dict[str, str]] = {
    "analyzer/allocator.py": {
        "return_freed_memory ctypes.CDLL": "this process itself",
        "reuse_freed_memory ctypes.CDLL": "this process itself",
    },
    "analyzer/model/prediction_process.py": {
        "_run subprocess.Popen": "by helper_process",
        "_run .kill": "the process that it has started",
    },
    "analyzer/readers/compression.py": {
        "list_files tempfile.TemporaryDirectory": "random and 0700; removed with the recording",
    },
    "analyzer/readers/event_store.py": {
        "EventStore.__init__ tempfile.gettempdir": "holds stores of dead processes",
        "EventStore.__init__ tempfile.mkdtemp": "random and 0700",
        "_remove_abandoned shutil.rmtree": "a store whose lock its dead process left",
        "_remove_store shutil.rmtree": "this process's own store",
        "_Folder.__init__ .rename": "a file that it has made, in its own folder",
    },
    "analyzer/readers/kineto/cache.py": {
        "_prune .unlink": "entries of this user's cache, the oldest",
    },
    "analyzer/readers/nsys.py": {
        "_unpack_to_disk tempfile.TemporaryDirectory": "random and 0700",
    },
    "analyzer/readers/sources.py": {
        "RemoteFile.open_local tempfile.TemporaryDirectory": "random and 0700",
        "ZipMember.open_local tempfile.NamedTemporaryFile": "random and 0600",
    },
    "analyzer/readers/worker_process.py": {
        "main tempfile.tempdir": "the folder of the process that started it",
    },
    "analyzer/readers/workers.py": {
        "_Worker.__init__ multiprocessing.Pipe": "a pair of sockets without a name",
        "_Worker.__init__ subprocess.Popen": "by helper_process",
        "_start_workers tempfile.TemporaryDirectory": "random and 0700",
        "_Worker.stop .kill": "the process that it has started",
    },
    "analyzer/redact/recording.py": {
        "_write_key os.open": "a new file (O_EXCL), 0600",
        "whole_folder shutil.rmtree": "the draft that it has made",
        "whole_folder .replace": "the draft that it has made, to --out",
    },
    "analyzer/watch/reducer.py": {
        "Reducer._keep_within_budget shutil.rmtree": "samples below the watch's own folder",
        "_compress_traces .unlink": "the raw trace that it has packed",
        "_compress_traces .replace": "a draft of ours, to the name of the trace that it packs",
    },
    "collectors/__main__.py": {
        "_report_recording .unlink": "records of a recording without a trace",
    },
    "collectors/attach/agent.py": {
        "Agent._close_at_exit .unlink": "its own socket",
    },
    "collectors/attach/inject.py": {
        "inject .unlink": "the script that it wrote",
        "inject tempfile.NamedTemporaryFile": "random and 0600, for a process of this user",
    },
    "collectors/attach/kineto_daemon.py": {
        "_open_daemon_socket .unlink": "its own socket",
    },
    "collectors/attach/left_states.py": {
        "leave_state .unlink": "the state of an earlier rank, in a private folder",
        "remove_old_states .unlink": "states of dead processes, in a private folder",
    },
    "collectors/attach/sockets.py": {
        "_shorten os.open": "the folder of sockets, for its path alone",
        "listen .unlink": "a socket of this user that nothing listens to, in a private folder",
    },
    "collectors/attach/stacks.py": {
        "StackWatchdog.stop .unlink": "its own file",
    },
    "collectors/demo/launch.py": {
        "_start subprocess.Popen": "by helper_process",
        "launch_workload tempfile.TemporaryDirectory": "random and 0700",
        "_end_ranks .kill": "ranks that it has started",
    },
    "collectors/formats/step_memory.py": {
        "HeldStepMemory.__init__ os.open": "memory of a process of this user, by the label of ours",
    },
    "collectors/formats/watch_notes.py": {
        "take_capture_request .unlink": "a file of ours below the watch's folder",
        "NoteFile.write .replace": "its own file, to a name of ours",
    },
    "collectors/guard.py": {
        "delay_sigterm os.kill": "this process itself, which was to end",
    },
    "collectors/probes/versions.py": {
        "read_cupti_version ctypes.CDLL": "a library that is loaded already",
    },
    "collectors/record/command.py": {
        "run_finish_hook.signal_all os.killpg": "the hook, which leads a group of its own",
        "run_finish_hook subprocess.Popen": "the user's own command, in its words",
        "check_out .unlink": "an earlier recording, with --overwrite",
        "check_out shutil.rmtree": "an earlier recording, with --overwrite",
        "remove_if_empty .rmdir": "empty",
        "run_command subprocess.Popen": "the user's command, which keeps its environment and path",
        "run_command.terminate .send_signal": "the user's command, which it has started",
    },
    "collectors/record/gather.py": {
        "_remove_copies .rmdir": "empty, and within --out",
        "_remove_copies .unlink": "what gather has copied",
    },
    "collectors/record/log_to.py": {
        "RecordingLogger._log_to_own_run .unlink": "the file that it made",
        "RecordingLogger._start tempfile.mkstemp": "random and 0600",
        "_start_analysis subprocess.Popen": "by helper_process",
        "main os.execv": "by helper_process",
    },
    "collectors/record/pack.py": {
        "drop .unlink": "the raw trace that was packed",
        "remove_scratch .rmdir": "empty, and a scratch folder of ours",
        "keep .replace": "a raw trace of ours, to a name of ours",
    },
    "collectors/record/packer.py": {
        "Packer.pack subprocess.Popen": "by helper_process, and -I -S",
        "Packer.finish .terminate": "processes that it has started",
    },
    "collectors/record/rank_files.py": {
        "RankFiles.clear .unlink": "an earlier recording of the rank, by names of ours",
        "RankFiles.make_folder .unlink": "drafts of the rank, by names of ours",
        "RankFiles.read_activations .unlink": "a file of ours, once it is read",
        "_name_whole .replace": "a raw trace of ours, to a name of ours",
    },
    "collectors/record/remote_folder.py": {
        "_copy_for_owner os.mkdir": "0700, by the descriptor of the folder above",
        "_copy_for_owner os.open": "a folder, by no link but the user's own",
        "_copy_for_owner os.replace": "its own draft, within the folder that it holds open",
        "_copy_for_owner os.unlink": "its own draft, of a random name",
        "_create os.open": "a new file (O_EXCL), 0600",
        "_is_own os.unlink": "the file that it has made, of a random name",
    },
    "collectors/record/scratch_disk.py": {
        "choose_raw_folder '/tmp'": "raw traces",
    },
    "collectors/record/shared_window.py": {
        "_SharedTrace.export_chrome_trace os.open": "the trace that it has written",
    },
    "collectors/safe_io/atomic_file.py": {
        "_sync os.open": "the draft that it made",
        "create_private os.open": "a new file is 0600",
        "open_special os.open": "a pipe or a device that the user names for an output",
        "replace_whole .unlink": "the draft that it made",
        "replace_whole os.open": "new (O_EXCL), by a random name",
        "replace_whole .replace": "the draft that it made, to the output that the user names",
    },
    "collectors/safe_io/helper_process.py": {
        "module sys.executable": "with -P; no other file starts Python",
    },
    "collectors/safe_io/private_folder.py": {
        "module '/run/user'": "checked before it is used",
        "module '/tmp'": "checked before it is used",
        "open_private os.open": "no link, a regular file of this user",
    },
    "collectors/safe_io/regular_file.py": {
        "open_regular os.open": "for reading, and never a pipe or a device",
    },
    "collectors/watch/background.py": {
        "WatchThread._drop_oldest_traces .unlink": "traces that it has written",
    },
    "collectors/watch/sampler.py": {
        "Sampler._export .replace": "the trace that it has written, to a name of ours",
    },
    "dashboard/cli.py": {
        "_report_internal_error tempfile.NamedTemporaryFile": "random and 0600",
    },
    "dashboard/commands/analyze.py": {
        "examine_job tempfile.TemporaryDirectory": "random and 0700",
    },
    "dashboard/commands/doctor.py": {
        "_check_shared_memory '/dev/shm'": "a text",
    },
    "dashboard/commands/model.py": {
        "calibrate_command tempfile.TemporaryDirectory": "random and 0700",
    },
    "dashboard/commands/record.py": {
        "demo_command tempfile.TemporaryDirectory": "random and 0700",
    },
    "dashboard/commands/upload.py": {
        "_send_run tempfile.TemporaryDirectory": "random and 0700",
    },
    "dashboard/environment.py": {
        "_examine_folder tempfile.TemporaryFile": "without a name",
        "_list_nvidia_smi subprocess.run": "a program on the user's PATH",
        "_run_probe subprocess.run": "by helper_process",
        "read_environment '/dev/shm'": "its size is read",
        "read_environment tempfile.gettempdir": "its free space is read",
    },
    "dashboard/store/artifacts.py": {
        "RemoteArtifacts.remove .rm": "the folder of a valid id below the URL",
        "RemoteArtifacts._drop_outdated_results .unlink": "a copy of what is elsewhere",
        "RemoteArtifacts._drop_outdated_results shutil.rmtree": "a copy of what is elsewhere",
        "RemoteArtifacts.drop_uploads shutil.rmtree": "a copy of what is elsewhere",
        "remove_folder shutil.rmtree": "a child of the root named by a valid id, no link",
        "sync os.open": "a file that it has written",
        "move_file .replace": "a file that was received, to below the folder of its run",
    },
    "dashboard/store/default_store.py": {
        "_make_database .unlink": "its own draft",
        "_make_database .rename": "its own draft, to the store that is missing",
    },
    "dashboard/store/worker.py": {
        "Workers._clear os.killpg": "a worker that it has started, which leads a group of its own",
        "Workers._start subprocess.Popen": "by helper_process",
        "_run_in_process tempfile.tempdir": "the folder of its worker",
        "_run_next_job tempfile.TemporaryDirectory": "random and 0700",
        "_start_analysis multiprocessing.get_context": "fork: nothing is imported anew",
        "end_with_parent ctypes.CDLL": "this process itself",
        "Workers.stop .terminate": "workers that it has started",
        "_kill .kill": "the process of a job that its worker has started",
    },
    "dashboard/watch_process.py": {
        "ReducerProcess._start subprocess.Popen": "by helper_process",
    },
    "dashboard/web/gateway.py": {
        "Gateway._open_spool tempfile.SpooledTemporaryFile": "without a name, among artifacts",
        "module tempfile.SpooledTemporaryFile": "a type",
    },
    "dashboard/web/http_server.py": {
        "_listen_on_path .unlink": "a socket that nothing listens to, in a folder of this user",
        "open_listener .unlink": "its own socket",
    },
    "dashboard/web/serve.py": {
        "_fork multiprocessing.get_context": "fork: nothing is imported anew",
        "serve tempfile.TemporaryDirectory": "random and 0700",
        "_terminate .kill": "processes that it has started",
        "_terminate .terminate": "processes that it has started",
    },
    "dashboard/web/uploads.py": {
        "_lock_file .unlink": "the draft of an upload",
        "_open_file os.open": "no link (O_NOFOLLOW)",
        "_remove_file .rmdir": "empty, and within the run's folder",
        "_remove_file .unlink": "a file of the upload",
        "discard_drafts shutil.rmtree": "drafts in the run's folder",
    },
}
"""File, function and what it uses: why it does no harm."""


def test_each_place_has_a_reason() -> None:
    files = (file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py")))
    found = {(file.relative_to(ROOT).as_posix(), one) for file in files for one in find_uses(file)}
    known = {(file, one) for file, reasons in REASONS.items() for one in reasons}

    new = "".join(f'\n    "{file}": {{"{one}": "..."}},' for file, one in sorted(found - known))
    assert not new, f"say in REASONS of {Path(__file__).name} why it does no harm:{new}"
    gone = "".join(f"\n    {file}: {one}" for file, one in sorted(known - found))
    assert not gone, f"remove from REASONS what is no more:{gone}"


def test_a_place_is_found_however_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "import os, shutil as files, subprocess\n"
        "from tempfile import mkdtemp\n"
        "FOLDER = '/tmp/ours'\n"
        "class Job:\n"
        "    '''Not /tmp/ours, which is a docstring.'''\n"
        "    process: subprocess.Popen[bytes]\n"
        "    def end(self, path):\n"
        "        stack.callback(files.rmtree, mkdtemp())\n"
        "        os.execv('x', ['x'])\n"
        "        path.unlink()\n"
        "        self.process.kill()\n"
        "        Timer(1, process.terminate)\n"
        "        path.with_name('a').rename('b')\n"
        "        path.replace(path)\n"
        "        def inner():\n"
        "            from subprocess import run\n"
        "            run(['x'])\n"
        "            'a'.replace('a', 'b')\n"
        "            moment.replace(tzinfo=UTC)\n"
        "            structs.replace(one, name='a')\n"
        "            process.send_signal(2)\n"
        "            path.parent.replace(target='b')\n"
    )

    assert find_uses(file) == {
        "module '/tmp/ours'",
        "Job.end shutil.rmtree",
        "Job.end tempfile.mkdtemp",
        "Job.end os.execv",
        "Job.end .unlink",
        "Job.end .kill",
        "Job.end .terminate",
        "Job.end .rename",
        "Job.end .replace",
        "Job.end.inner subprocess.run",
        "Job.end.inner .send_signal",
        "Job.end.inner .replace",
    }


_REPLACES = r"""(?<!structs)\.replace\((?!"[^"]*",)"""
"""But for a text that is followed by another."""
_WORDS = re.compile(rf"\b(?:{'|'.join((*WATCHED, *METHODS))})\b|{'|'.join(SHARED)}|{_REPLACES}")


def find_uses(file: Path) -> set[str]:
    """What the module uses of the above, each with the function that it is in."""
    text = file.read_text()
    if _WORDS.search(text) is None:
        return set()
    finder = _Finder()
    finder.visit(ast.parse(text))
    return finder.uses


class _Finder(ast.NodeVisitor):
    """Collects uses; annotations and docstrings are none."""

    def __init__(self) -> None:
        self.uses: set[str] = set()
        self._function: list[str] = []
        self._names: dict[str, str] = {}
        """The dotted name of each name that is imported."""

    def visit_Import(self, node: ast.Import) -> None:
        self._names |= {one.asname or one.name: one.name for one in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self._names |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self._function.append(node.name)
        for child in ast.iter_child_nodes(node):
            if child is not getattr(node, "returns", None):
                self.visit(child)
        self._function.pop()

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_arg(self, node: ast.arg) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.target)
        if node.value is not None:
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and f"{node.value}/".startswith(_SHARED_STARTS):
            self._add(repr(node.value))

    def visit_Name(self, node: ast.Name) -> None:
        self._add_if_watched(self._names.get(node.id, node.id))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = node.value
        if isinstance(owner, ast.Name):
            self._add_if_watched(f"{self._names.get(owner.id, owner.id)}.{node.attr}")
        elif node.attr in METHODS:
            self._add(f".{node.attr}")
        self.visit(owner)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "replace":
            # A path takes one, a text two, a date and a struct fields by their names.
            named = [one.arg for one in node.keywords]
            if (len(node.args), named) in ((1, []), (0, ["target"])):
                self._add(".replace")
        self.generic_visit(node)

    def _add_if_watched(self, name: str) -> None:
        module, _, last = name.rpartition(".")
        if last in WATCHED.get(module, ()) or name.startswith(FAMILIES):
            self._add(name)
        elif module and last in METHODS:
            self._add(f".{last}")

    def _add(self, what: str) -> None:
        self.uses.add(f"{'.'.join(self._function) or 'module'} {what}")


_SHARED_STARTS = tuple(f"{place}/" for place in SHARED) + tuple(f"{place}-" for place in SHARED)
