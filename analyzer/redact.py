"""Redaction: a copy of a recording without hosts, users, paths, stacks and, by choice, names.

Times, counts, sizes, correlations and groups are copied as they are. A text is copied only if its
field is known to be public; any other text gets a pseudonym, the same one wherever it occurs.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import msgspec
from msgspec import Raw

from stepsplit.analyzer.errors import (
    RECORD_AGAIN,
    DataError,
    UsageError,
    make_write_error,
    parse_toml,
    write,
)
from stepsplit.analyzer.model.config import (
    Experts,
    HardwareConfig,
    LatentAttention,
    ModelConfig,
    ParallelConfig,
    TrainingConfig,
)
from stepsplit.analyzer.readers.compression import list_files, natural_sort_key, open_unpacked
from stepsplit.analyzer.readers.flight_recorder import decode_dump
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules, format_stated_class
from stepsplit.analyzer.readers.kinds import FLIGHT, RECORD, TRACE, find_kinds
from stepsplit.analyzer.readers.kineto.columns import CATEGORIES
from stepsplit.analyzer.readers.kineto.json_stream import ArrayBlocks, Entries, parse_loose_object
from stepsplit.analyzer.readers.kineto.schema import UNDECODABLE, Complete, TrackMetadata
from stepsplit.analyzer.readers.kineto.trace_file import TraceOpening, parse_opening
from stepsplit.analyzer.readers.nccl.records import LogMessage, MessageSplitter
from stepsplit.analyzer.readers.pickle import read_whole
from stepsplit.analyzer.readers.recording import check_outside, parse_rank
from stepsplit.analyzer.readers.registry import KINDS
from stepsplit.analyzer.readers.sources import DiskFile, Source, is_special
from stepsplit.analyzer.trace import MAX_NAME_LENGTH, PYTHON_FUNCTION, Category
from stepsplit.collectors.regular_file import leads_outside
from stepsplit.collectors.run_spec import RUN_FILE, whole_file

KEY_SCHEMA = "stepsplit.key/1"

_LOG = "NCCL log"

_MAX_JSON_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Replacement:
    """How many distinct texts of a field were replaced, and in how many places."""

    field: str
    distinct: int
    places: int


@dataclass(frozen=True, slots=True)
class Redaction:
    """The result of `redact_recording`.

    files are the written paths below the output folder. left_out are the files that were not
    copied, with the reason. replaced counts what was replaced, by field.
    """

    files: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]
    replaced: tuple[Replacement, ...]


def redact_recording(
    places: Sequence[str | Path],
    out: Path,
    *,
    names: bool = False,
    words: Sequence[str] = (),
    key: Path | None = None,
    rules: Rules = BUILT_IN,
) -> Redaction:
    """Writes a redacted copy of the recording in the files, folders, archives and URLs.

    Kept: times, structure, counts, sizes, correlations and groups, so that the copy has the same
    split. Files of other kinds than traces, run.json, rank records, Flight Recorder dumps, NCCL
    logs and job.toml are left out.

    Args:
        places: As for `analyze`.
        out: Folder of the copy; must be empty or missing.
        names: Also replace the names of kernels, modules, ops and ranges that are not those of
            PyTorch or NCCL. Default: False. The name of a kernel then states its class.
        words: Texts that are replaced wherever they occur, such as a project's name. Default: ().
        key: File for the replaced texts, readable by its owner only. Default: None, not written.
        rules: Rules that classify the replaced kernels. Default: the built-in rules.

    Returns:
        What was written, left out and replaced.

    Raises:
        DataError: A place is missing, a file is damaged, or there is nothing to redact.
        UsageError: `out` has files, the key exists or is in `out`, or either cannot be written.
    """
    _check_outputs(out, key)
    check_outside(out, places)
    texts = _Redactor(names, words, rules)
    written: list[str] = []
    with list_files([str(place) for place in places]) as sources, whole_folder(out) as draft:
        copies, left_out = _plan_copies(sources, [Path(place) for place in places])
        for copy in copies:
            texts.collect_hosts(copy)
        for copy in copies:
            _COPIERS[copy.kind](copy, draft / copy.name, texts)
            written.append(copy.name)
        if not written:
            hint = "name a folder with traces of torch.profiler"
            raise DataError(str(places[0]), "no file of a recording", hint)
    if key is not None:
        _write_key(key, texts.pseudonyms)
    return Redaction(tuple(written), tuple(left_out), texts.pseudonyms.summarize())


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A draft of the folder, which takes its place at the end and is removed if an error or Ctrl-C
    comes before; in a folder that exists already its files do. Raises UsageError if it cannot be
    made."""
    place = Path(os.path.realpath(out))
    if place.is_symlink():  # it leads to itself
        raise make_write_error(out, OSError(errno.ELOOP, os.strerror(errno.ELOOP)))
    exists = place.is_dir()
    draft = (place if exists else place.parent) / f".{place.name}.{os.getpid()}"
    try:
        draft.mkdir(parents=True)
    except OSError as error:
        raise make_write_error(out, error) from None
    try:
        yield draft
        if exists:
            for path in sorted(draft.iterdir(), key=lambda path: path.name == RUN_FILE):
                path.replace(place / path.name)
        else:
            draft.replace(place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _check_outputs(out: Path, key: Path | None) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out}: not an empty folder; choose another one")
    if key is None:
        return
    if Path(os.path.realpath(out)) in Path(os.path.realpath(key)).parents:
        raise UsageError(f"{key}: the key would be in the redacted copy; choose another folder")
    if key.exists():
        raise UsageError(f"{key}: exists already; choose another file")


def _write_key(key: Path, pseudonyms: _Pseudonyms) -> None:
    """Writes pseudonym -> text, by field, to a new file that only its owner can read."""
    body = {"schema": KEY_SCHEMA, "texts": pseudonyms.invert()}
    try:
        descriptor = os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(body, file, indent=1, ensure_ascii=False)
            file.write("\n")
    except OSError as error:
        raise make_write_error(key, error) from None


# Which files are copied, and their names: those of stepsplit's recorder stay, others are numbered.

_OWN_NAME = re.compile(r"rank\d{1,7}_(?:(?:trace|flight)\.json(?:\.gz)?|record\.json)")

_ENDING = {TRACE.name: ".json.gz", FLIGHT.name: ".json.gz", RECORD.name: ".json", _LOG: ".log"}

_STEM = {TRACE.name: "trace", FLIGHT.name: "flight", RECORD.name: "record", _LOG: "nccl"}

_JOB = "job.toml"


@dataclass(frozen=True, slots=True)
class _Copy:
    """A file to copy: its kind, and its path in the output folder."""

    source: Source
    kind: str
    name: str


def _plan_copies(
    sources: Sequence[Source], places: Sequence[Path]
) -> tuple[list[_Copy], list[tuple[str, str]]]:
    """The files to copy in natural order, and the others with the reason."""
    copies: list[_Copy] = []
    left_out: list[tuple[str, str]] = []
    present = {source.where for source in sources}
    folders: dict[PurePosixPath, str] = {}
    for source in sorted(sources, key=lambda each: natural_sort_key(each.where)):
        if isinstance(source, DiskFile) and all(leads_outside(source.path, one) for one in places):
            # It may be any file of this user.
            left_out.append((source.where, "a link out of the folder"))
            continue
        try:
            kind = _find_kind(source)
        except DataError as error:
            left_out.append((source.where, error.problem))
            continue
        if f"{source.where}.gz" in present:
            left_out.append((source.where, "its packed file is copied"))
        elif kind not in _COPIERS:
            left_out.append((source.where, kind or "not a file of a recording"))
        else:
            folder = _name_folder(source.inner.parent, folders)
            copies.append(_Copy(source, kind, folder + _name_file(source, kind, len(copies))))
    return copies, left_out


def _find_kind(source: Source) -> str:
    """The kind as which the file is copied, "" if unknown. Raises DataError if it is damaged."""
    if not is_special(source):
        if source.inner.name == RUN_FILE:
            return RUN_FILE
        if source.inner.suffix == ".toml":
            return _JOB
    kinds = [kind.name for kind in find_kinds(source, KINDS)]
    return next((kind for kind in kinds if kind in _COPIERS), "".join(kinds[:1]))


def _name_folder(folder: PurePosixPath, folders: dict[PurePosixPath, str]) -> str:
    """The first folder is the output itself; others are numbered and keep the rank they name."""
    if folder not in folders:
        rank = parse_rank(PurePosixPath("_") / folder.name / "_")
        of_rank = "" if rank is None else f"_rank{rank}"
        folders[folder] = f"folder{len(folders)}{of_rank}/" if folders else ""
    return folders[folder]


def _name_file(source: Source, kind: str, number: int) -> str:
    if kind in (RUN_FILE, _JOB):
        return kind
    if _OWN_NAME.fullmatch(source.inner.name):
        packed = kind in (TRACE.name, FLIGHT.name) and not source.inner.name.endswith(".gz")
        return source.inner.name + (".gz" if packed else "")
    rank = parse_rank(source.inner)
    of_rank = "" if rank is None else f"_rank{rank}"
    return f"{_STEM[kind]}{number}{of_rank}{_ENDING[kind]}"


# Pseudonyms.


@dataclass(slots=True)
class _Pseudonyms:
    """The pseudonym of each replaced text by field, and how often each field was replaced."""

    _names: defaultdict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    _places: Counter[str] = field(default_factory=Counter)

    def replace(self, kind: str, text: str, ending: str = "") -> str:
        """The pseudonym of the text, such as host1; the ending follows the number."""
        if not text:
            return text
        self._places[kind] += 1
        names = self._names[kind]
        if text not in names:
            names[text] = f"{kind}{len(names) + 1}{ending}"
        return names[text]

    def knows(self, kind: str, text: str) -> bool:
        """Whether the field's text has a pseudonym."""
        return text in self._names[kind]

    def list_texts(self, kind: str) -> tuple[str, ...]:
        return tuple(self._names[kind])

    def invert(self) -> dict[str, dict[str, str]]:
        return {
            kind: {name: text for text, name in names.items()}
            for kind, names in self._names.items()
            if names
        }

    def summarize(self) -> tuple[Replacement, ...]:
        return tuple(
            Replacement(kind, len(names), self._places[kind])
            for kind, names in sorted(self._names.items())
            if names
        )


# Texts by field: public ones are copied without paths, addresses and the given words.

_PUBLIC = frozenset({
    "schema", "schemaVersion", "displayTimeUnit", "trace_id", "backend", "backend_config", "axis",
    "dtype", "optimizer", "schedule", "framework", "recompute", "offload", "norm", "description",
    "device", "cpu", "gpu", "detail", "pg_name", "pg_desc", "desc", "ranks", "version",
    "nccl_version", "comm_lib_version", "input_dtypes", "output_dtypes", "state", "profiling_name",
    "process_group", "thread_id", "Collective name", "Process Group Name",
    "Process Group Description", "Process Group Ranks", "Input type", "Input Dims",
    "Input Strides", "versions", "last_enqueued_collective", "last_started_collective",
    "last_completed_collective", "bound", "context", "stream", "memory bandwidth (GB/s)",
})  # fmt: skip
"""Fields of traces, dumps, run.json and rank records whose texts name no person or place."""

_NAMED = frozenset({"groups", "pg_config", "deviceProperties"})
"""Lists of objects whose `name` is that of a process group or a device."""

_VALUES = re.compile(r"(?:[\d\s\[\](),.+:-]|\de[+-]?\d|True|False|None|nan|inf)*")
"""Numbers, lists of them, and constants among the concrete inputs of an op."""

_HOST_FIELDS = frozenset({"host", "host_name", "hostname"})

_PATH = re.compile(r"(?<![\w/.])~?/(?:[\w.+@%=-]+/)+[\w.+@%=-]*|\b[A-Za-z]:\\[^\s\"']+")

_ADDRESS = re.compile(
    r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])|(?<![\w.+-])[\w.+-]{1,64}@[\w-]+\.[\w.-]+"
    r"|(?<![\w:])(?:[0-9a-f]{1,4}:){2,7}:?(?:[0-9a-f]{1,4})?(?:%\w+)?(?=<)"
)

_USER = re.compile(r"/(?:home|Users|users)/([\w.+@-]+)")

_TRACK = re.compile(
    r"python[\d.]*|[CGNX]PU(?: \d+)?|thread -?\d+ \((?:python[\d.]*|pt_\w+)\)|stream \d+\s*|Spans"
    r"|Traces|(?:Trace )?PyTorch Profiler(?: \(\d+\))?|Ascend Hardware|CANN|HCCL|Communication"
    r"|Overlap Analysis|Computing|Free|AI Core Freq|(?:Group|Plane) \w+(?: Communication)?|-?\d*"
)
"""Names of processes and threads that profilers give; programs may give others."""


_MAX_CLEAN = 1 << 16
"""Texts that are remembered as without anything to replace."""


_MAX_DEPTH = 64


class _Redactor:
    """Replaces the texts of a recording, with the same pseudonyms in all of its files."""

    def __init__(self, names: bool, words: Sequence[str], rules: Rules) -> None:
        self.pseudonyms, self._replaces_names, self._rules = _Pseudonyms(), names, rules
        self._words = re.compile("|".join(map(re.escape, filter(None, words))) or r"(?!)", re.I)
        self._known: re.Pattern[str] | None = None
        self._events: dict[tuple[str, str], str] = {}
        self._clean: set[str] = set()

    # Hosts and users are known before anything is written, as any text may contain them.

    def collect_hosts(self, copy: _Copy) -> None:
        """Adds the hosts that the file names in fields of its own, and the users of its paths."""
        if copy.kind == TRACE.name:
            with open_unpacked(copy.source) as content:
                opening = parse_opening(content)
            self._collect(_decode_header(opening) if opening else {})
        elif copy.kind in (RUN_FILE, RECORD.name):
            self._collect(_read_json(copy.source))
        elif copy.kind == _LOG:
            for message in _read_messages(copy.source):
                self._add_host(message.speaker.host)

    def _collect(self, value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                if name in _HOST_FIELDS and isinstance(inner, str):
                    self._add_host(inner)
                self._collect(inner)
        elif isinstance(value, list):
            for inner in value:
                self._collect(inner)
        elif isinstance(value, str):
            self._add_users(value)

    def _add_host(self, host: str) -> None:
        if host and not self.pseudonyms.knows("host", host):
            self._add_known("host", host)

    def _add_users(self, text: str) -> None:
        for user in _USER.findall(text):
            if not self.pseudonyms.knows("user", user):
                self._add_known("user", user)

    def _add_known(self, kind: str, text: str) -> None:
        self.pseudonyms.replace(kind, text)
        self._known = None
        self._clean.clear()

    def _compile_known(self) -> re.Pattern[str]:
        known = [*self.pseudonyms.list_texts("host"), *self.pseudonyms.list_texts("user")]
        known = sorted((re.escape(word) for word in known if word != "root"), key=len, reverse=True)
        pattern = rf"(?<![A-Za-z0-9])({'|'.join(known)})(?:\.[\w-]+)*(?![A-Za-z0-9])"
        return re.compile(pattern if known else r"(?!)")

    # Texts and values.

    def scrub(self, text: str) -> str:
        """The text without paths, addresses, known hosts and users, and the given words."""
        if text in self._clean:
            return text
        replace, original = self.pseudonyms.replace, text
        self._add_users(text)
        text = _PATH.sub(lambda match: replace("path", match[0]), text)
        text = _ADDRESS.sub(lambda match: replace("address", match[0]), text)
        self._known = self._known or self._compile_known()
        text = self._known.sub(self._replace_known, text)
        text = self._words.sub(lambda match: replace("word", match[0].lower()), text)
        if text == original and len(self._clean) < _MAX_CLEAN:
            self._clean.add(text)
        return text

    def _replace_known(self, match: re.Match[str]) -> str:
        is_host = self.pseudonyms.knows("host", match[1])
        return self.pseudonyms.replace("host" if is_host else "user", match[1])

    def redact(self, value: Any, name: str = "", parent: str = "", depth: int = 0) -> Any:
        """The JSON value of the field `name` in an object of the field `parent`.

        Values that are nested deeper than any profiler writes become None.
        """
        if isinstance(value, str):
            return self._redact_text(value, name, parent)
        if not isinstance(value, list | tuple | dict):
            return value
        if depth > _MAX_DEPTH:
            return None
        if not isinstance(value, dict):
            return [self.redact(each, name, parent, depth + 1) for each in value]
        if {"name", "filename"} <= value.keys() or {"function", "file"} <= value.keys():
            return self._redact_frame(value)
        within = parent if parent in _NAMED else name or parent
        return {
            self.scrub(str(key)): self.redact(
                each, name if name == "versions" else key, within, depth + 1
            )
            if isinstance(each, str | list | tuple | dict)
            else each
            for key, each in value.items()
        }

    def _redact_text(self, text: str, name: str, parent: str) -> str:
        if name in _HOST_FIELDS:
            return self.pseudonyms.replace("host", text)
        is_named = name == "name" and parent in _NAMED
        if name in _PUBLIC or is_named or (name == "Concrete Inputs" and _VALUES.fullmatch(text)):
            return self.scrub(text)
        if name in ("name", "run"):
            return self.pseudonyms.replace("run", text)
        if name == "thread_name":
            return self.redact_track(text)
        return self.pseudonyms.replace("text", text)

    def redact_track(self, text: str) -> str:
        """The name of a process or a thread."""
        return text if _TRACK.fullmatch(text) else self.pseudonyms.replace("thread", text)

    def _redact_frame(self, frame: Mapping[str, Any]) -> dict[str, Any]:
        function, file = ("name", "filename") if "filename" in frame else ("function", "file")
        redacted = self._redact_code(str(frame[file]), str(frame[function]))
        return {**{file: redacted[0], function: redacted[1]}, "line": frame.get("line", -1)}

    def _redact_code(self, file: str, function: str) -> tuple[str, str]:
        """File and function of a frame; those of torch and the standard library stay."""
        library = _find_library_file(file)
        if library is not None:
            return library, function
        folder = "lib/site-packages/" if _PACKAGES.search(file) else ""
        hidden = self.pseudonyms.replace("file", file, ".py")
        return folder + hidden, self.pseudonyms.replace("function", function)

    # Names of events.

    def redact_event(self, name: str, category: str) -> str:
        """The name of an event of this category of a trace."""
        key = name, category
        if key not in self._events:
            self._events[key] = self._redact_new_event(name[:MAX_NAME_LENGTH], category.lower())
        return self._events[key]

    def _redact_new_event(self, name: str, category: str) -> str:
        kind = CATEGORIES.get(category)
        if kind == Category.PYTHON:
            return self._redact_function(name)
        if kind == Category.KERNEL:
            is_private = self._replaces_names and not _PUBLIC_KERNEL.fullmatch(name)
            return self._rename("kernel", name) if is_private or self.scrub(name) != name else name
        is_private = self._replaces_names and not _API_CATEGORY.fullmatch(category)
        return self._redact_op(name) if is_private or self.scrub(name) != name else name

    def _rename(self, kind: str, name: str, ending: str = "") -> str:
        stated = format_stated_class(self._rules, name)
        return f"{self.pseudonyms.replace(kind, name)}{ending} {stated}"

    def _redact_op(self, name: str) -> str:
        """The name of an op or a range: what PyTorch and stepsplit write stays."""
        if (inner := _EVALUATES.match(name)) is not None:
            return inner[0] + self._redact_op(name[inner.end() :])
        if (shard := _SHARD.fullmatch(name)) is not None:
            return f"{shard[1]}{self.pseudonyms.replace('module', shard[2])}{shard[3]}"
        if (optimizer := _OPTIMIZER.fullmatch(name)) is not None:
            hidden = self.pseudonyms.replace("optimizer", optimizer[2])
            return f"{optimizer[1]}{hidden}{optimizer[3]}"
        if _PUBLIC_OP.fullmatch(name) and self.scrub(name) == name:
            return name
        if "::" in name:
            return self._rename("op", name, "::")
        if (step := _STEP_TAIL.search(name)) is not None:
            front = name[: step.start()]
            return f"{self.pseudonyms.replace('range', front)} {step[0]}" if front else name
        hints = " ".join(hint for hint in _HINTS if hint in name.lower())
        if _BACKWARD.search(name):
            return f"{self._rename('function', name)} Backward"
        return f"{self.pseudonyms.replace('range', name)} {hints}".rstrip()

    def _redact_function(self, name: str) -> str:
        """The name of a Python function or module in a trace."""
        if (module := _MODULE.fullmatch(name)) is not None:
            if not self._replaces_names:
                return self.scrub(name)
            return f"nn.Module: {self.pseudonyms.replace('module', module[1])}{module[2]}"
        if (frame := PYTHON_FUNCTION.fullmatch(name)) is not None:
            file, function = self._redact_code(frame["file"], frame["function"])
            return f"{file}({frame['line']}): {function}"
        return f"<built-in {self.pseudonyms.replace('function', name)}>"


_API_CATEGORY = re.compile(
    r"\A(?:(?:\w+_)?(?:runtime|driver|memcpy|memset)|cuda_sync|fwdbwd|ac2g|async_cpu_to_gpu|trace"
    r"|cpu_instant_event|overhead)"
)
"""Categories of events that are named by the profiler or a vendor's library."""

_MODULE = re.compile(r"\Ann\.Module: (.*?)(_\d+)?")

_PACKAGES = re.compile(r"/(?:site|dist)-packages/")

_LIBRARY = re.compile(r"\A.*/(?:(?:site|dist)-packages|lib/python\d[\d.]*)/", re.S)

_PUBLIC_KERNEL = re.compile(r"\Anccl(?:Dev|Symk\w*)?Kernel\w*(?:\(nccl\w+(?:<\d+\w*>)?\))?")

_EVALUATES = re.compile(r"\Aautograd::engine::evaluate_function: ")

_SHARD = re.compile(r"\A((?:FSDP::\w+|FullyShardedDataParallel\._?\w+) (?:\(|for ))(.*?)(\)?)")

_OPTIMIZERS = (
    "Adam|AdamW|SGD|Adagrad|Adadelta|Adafactor|Adamax|ASGD|LBFGS|Muon|NAdam|RAdam|RMSprop|Rprop"
    "|SparseAdam|ZeroRedundancyOptimizer"
)

_OPTIMIZER = re.compile(rf"(Optimizer\.\w+#)(?!(?:{_OPTIMIZERS})\.)(\w+)(\.\w+)")

_PUBLIC_OP = re.compile(
    r"(?:aten|c10d|_c10d_functional|_c10d_functional_autograd|c10d_functional|prim|prims|profiler"
    r"|quantized|symm_mem|fsdp|torch::\w+|autograd::\w+)::[\w.:]+|\w+Backward\d+|CompiledFunction\w*"
    r"|(?:_FromTorchTensor|_ToTorchTensor|(?:Nested)?Redistribute)(?:Backward)?|PythonSubclass"
    r"|RegisterPostBackwardFunction(?:Backward)?"
    r"|torch::autograd::(?:AccumulateGrad|GraphRoot|CopySlices|CopyBackwards)|detach_?"
    r"|record_param_comms|\[memory\]|(?:nccl|gloo|mpi|ucc|xccl|hccl):\w+(?: \d+(?:->|<-)\d+)?"
    rf"|stepsplit::.*|ProfilerStep#\d+|Optimizer\.\w+#(?:{_OPTIMIZERS})\.\w+"
    r"|enumerate\(DataLoader\)#_(?:Single|Multi)Process\w+\.__next__|DataParallel\.forward"
    r"|DistributedDataParallel\.forward|FSDP::\w+|FullyShardedDataParallel\._?\w+"
    r"|PP:[\w:();]+|(?:Forward|Backward) \d+|Torch-Compiled Region: [\d/]+|TorchDynamo [\w ]+"
    r"|PyTorch Profiler(?: \(\d+\))?|Iteration Start: PyTorch Profiler|Record Window End|"
    r"|hcom_\w+|[A-Z][A-Z_]{2,}|Computing|Communication|Free"
)
"""Names that PyTorch and stepsplit give to ops and ranges."""

_STEP_TAIL = re.compile(
    r"(?:train(?:ing)?|global)?[\s_-]?(?:step|iter|iteration|batch)s?[\s_#:=.-]*\d{1,9}"
    r"(?:\s*(?:/|of)\s*\d{1,9})?[\])}]?$|(?:train(?:ing)?[\s_-]?)?(?:step|iter|iteration)$",
    re.I,
)
"""The part of a range's name by which it may be a step."""

_BACKWARD = re.compile(r"Backward\d*$")

_HINTS = ("backward", "forward", "optimizer", "attention", "dataload", "load_batch", "get_batch",
          "fetch_batch", "next_batch")  # fmt: skip
"""Words that say what kind of work a range is."""


def _find_library_file(file: str) -> str | None:
    """The path of a file of torch or the standard library without its folder; None for others."""
    inner = _LIBRARY.sub("", file)
    first = inner.removesuffix(".py").partition("/")[0]
    if first == "torch" or (first in sys.stdlib_module_names and not inner.startswith("/")):
        return inner
    return None


# Copies of each kind of file.


def _copy_trace(copy: _Copy, out: Path, texts: _Redactor) -> None:
    """Copies a trace, block by block."""
    with open_unpacked(copy.source) as content:
        opening = parse_opening(content)
        if opening is None:
            raise DataError(copy.source.where, "not a trace", RECORD_AGAIN)
        blocks = ArrayBlocks(content, opening.begin)
        with whole_file(out) as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
            for part in _redact_trace(opening, blocks, texts, out.name.removesuffix(".gz")):
                packed.write(part)


def _redact_trace(
    opening: TraceOpening, blocks: ArrayBlocks, texts: _Redactor, name: str
) -> Iterator[bytes]:
    header = _decode_header(opening)
    yield _format_fields(_redact_header(header, texts, name), b"{") if opening.fields else b""
    yield b'"traceEvents": [' if opening.fields else b"["
    separator = b"\n"
    for block in blocks:
        entries = [_redact_entry(entry, texts) for entry in _list_entries(block)]
        if entries:
            yield separator + b",\n".join(map(msgspec.json.encode, entries))
            separator = b",\n"
    tail = _decode_fields(b'{"":0' + blocks.tail) if opening.fields and blocks.whole else {}
    yield b"\n]"
    if opening.fields:
        rest = _format_fields(_redact_header(tail, texts, name), b",")
        yield rest.removesuffix(b",") + b"}\n"


def _format_fields(values: Mapping[str, Any], begin: bytes) -> bytes:
    """The fields of an object as JSON, each followed by a comma."""
    text = b"".join(
        msgspec.json.encode(key) + b": " + msgspec.json.encode(value) + b","
        for key, value in values.items()
    )
    return begin + text


def _redact_header(header: Mapping[str, Any], texts: _Redactor, name: str) -> dict[str, Any]:
    private = {key: value for key, value in header.items() if key not in ("", "traceName")}
    redacted: dict[str, Any] = texts.redact(private)
    return redacted | ({"traceName": name} if "traceName" in header else {})


_TEXTS = msgspec.json.Decoder(list[dict[str, Raw]])

_NUMBERS = msgspec.json.Encoder(decimal_format="number")


def _list_entries(block: Entries) -> Iterator[dict[str, Any]]:
    """The entries of a block with the text of each field; repaired ones by their known fields."""
    if block.text is not None:
        yield from _TEXTS.decode(block.text)
        return
    for entry in block.entries:
        if isinstance(entry, Complete | TrackMetadata):
            body: dict[str, Any] = _FIELDS.decode(_NUMBERS.encode(entry))
            yield body


_FIELDS = msgspec.json.Decoder(dict[str, Raw])


def _redact_entry(entry: dict[str, Raw], texts: _Redactor) -> dict[str, Any]:
    """The entry: times keep their digits, and texts are replaced by their field."""
    redacted: dict[str, Any] = {key: entry[key] for key in ("ts", "dur") if key in entry}
    known = {key: _decode_value(text) for key, text in entry.items() if key not in redacted}
    name, category = known.pop("name", None), str(known.get("cat", ""))
    is_track = known.get("ph") == "M"
    for key, value in known.items():
        if key == "args" and is_track and isinstance(value, dict):
            redacted[key] = _redact_track_args(value, texts)
        elif key in ("pid", "tid") and isinstance(value, str):
            redacted[key] = texts.redact_track(value)
        elif key in ("ph", "cat"):
            redacted[key] = texts.scrub(str(value))
        else:
            is_code = isinstance(value, str) and len(value) <= _MAX_CODE
            redacted[key] = value if is_code else texts.redact(value, key)
    if isinstance(name, str):
        redacted["name"] = name if is_track else texts.redact_event(name, category)
    return redacted


_MAX_CODE = 2
"""Fields such as s and bp hold a letter."""


def _redact_track_args(args: Mapping[str, Any], texts: _Redactor) -> dict[str, Any]:
    return {
        key: texts.redact_track(value)
        if key in ("name", "labels") and isinstance(value, str)
        else texts.redact(value, key)
        for key, value in args.items()
    }


_VALUE = msgspec.json.Decoder()


def _decode_value(text: Raw) -> Any:
    """The value; None if it has a text that is not Unicode."""
    try:
        return _VALUE.decode(text)
    except UNDECODABLE:
        return None


def _decode_header(opening: TraceOpening) -> dict[str, Any]:
    """The fields before a trace's events; {} if there are none."""
    return _decode_fields(opening.fields + b'"":0}') if opening.fields else {}


def _decode_fields(text: bytes) -> dict[str, Any]:
    """The fields of an object, also of slightly invalid JSON; {} if there are none."""
    try:
        fields: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
    except UNDECODABLE:
        return parse_loose_object(text) or {}
    return fields


def _copy_json(copy: _Copy, out: Path, texts: _Redactor) -> None:
    body = texts.redact(_read_json(copy.source))
    write(out, json.dumps(body, indent=1).encode() + b"\n")


def _read_json(source: Source) -> dict[str, Any]:
    with open_unpacked(source) as content:
        text = content.read(_MAX_JSON_BYTES)
    try:
        return dict(msgspec.json.decode(text, type=dict[str, Any]))
    except UNDECODABLE as error:
        raise DataError(source.where, f"not valid JSON ({error})", RECORD_AGAIN) from None


def _copy_dump(copy: _Copy, out: Path, texts: _Redactor) -> None:
    """Copies a Flight Recorder dump, as JSON also if it was a pickle."""
    with open_unpacked(copy.source) as content:
        dump, _ = decode_dump(read_whole(content, copy.source.where), copy.source.where)
    body = msgspec.to_builtins(dump)
    body = {key: texts.redact(body[key], key) for key in ("version", "pg_config", "pg_status")} | {
        "entries": texts.redact(body["entries"])
    }
    packed = gzip.compress(msgspec.json.encode(body), 6, mtime=0)
    write(out, packed)


def _copy_log(copy: _Copy, out: Path, texts: _Redactor) -> None:
    """Copies NCCL's messages; what else the job printed is left out."""
    try:
        with whole_file(out) as file:
            _write_messages(file, _read_messages(copy.source), texts)
    except OSError as error:
        raise make_write_error(out, error) from None


def _write_messages(file: BinaryIO, messages: Iterator[LogMessage], texts: _Redactor) -> None:
    for speaker, stamp_ns, level, text in messages:
        host = texts.pseudonyms.replace("host", speaker.host)
        who = f"{host}:{speaker.pid}:{speaker.tid} " if host else ""
        stamp = f"{stamp_ns // 1000:016d} " if stamp_ns >= 0 else ""
        line = texts.scrub(text.decode(errors="replace"))
        dev = f"[{speaker.dev}] " if speaker.dev >= 0 else ""
        file.write(f"{who}{dev}{stamp}NCCL {level.decode()} {line}\n".encode())


def _read_messages(source: Source) -> Iterator[LogMessage]:
    splitter = MessageSplitter()
    with open_unpacked(source) as content:
        for line in content.read_lines():
            if b"CCL" in line:
                yield from splitter.split_line(line)


_JOB_TABLES = (
    ModelConfig, Experts, LatentAttention, ParallelConfig, TrainingConfig, HardwareConfig
)  # fmt: skip

_JOB_KEYS = {"preset"} | {each.name for kind in _JOB_TABLES for each in fields(kind)} - {"name"}


def _copy_job(copy: _Copy, out: Path, texts: _Redactor) -> None:
    """Copies the keys of a job.toml that the model knows, without comments."""
    with open_unpacked(copy.source) as content:
        text = content.read(_MAX_JSON_BYTES)
    write(out, "".join(_format_tables(parse_toml(copy.source.where, text), texts)).encode())


def _format_tables(
    table: Mapping[str, Any], texts: _Redactor, path: tuple[str, ...] = ()
) -> Iterator[str]:
    for key, value in table.items():
        if not isinstance(value, dict):
            yield f"{json.dumps(key)} = {_format_toml_value(key, value, texts)}\n"
    for key, value in table.items():
        if isinstance(value, dict):
            yield f"\n[{'.'.join(map(json.dumps, (*path, key)))}]\n"
            yield from _format_tables(value, texts, (*path, key))


def _format_toml_value(key: str, value: Any, texts: _Redactor) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_format_toml_value(key, each, texts) for each in value)}]"
    if isinstance(value, dict):
        pairs = (
            f"{json.dumps(k)} = {_format_toml_value(k, each, texts)}" for k, each in value.items()
        )
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        known = texts.scrub(value) if key in _JOB_KEYS else texts.pseudonyms.replace("text", value)
        return json.dumps(known)
    return json.dumps(value, default=str)


_COPIERS: Mapping[str, Callable[[_Copy, Path, _Redactor], None]] = {
    TRACE.name: _copy_trace,
    RUN_FILE: _copy_json,
    RECORD.name: _copy_json,
    FLIGHT.name: _copy_dump,
    _LOG: _copy_log,
    _JOB: _copy_job,
}
