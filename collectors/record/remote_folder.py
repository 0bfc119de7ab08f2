"""The folder of a recording at a URL, such as s3://bucket/runs/exp1.

What was recorded on the disk is copied there by fsspec. Nothing at a URL is ever deleted or
replaced: the hosts of a job copy to one folder, and none of them knows the files of all.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import stat
import threading
from collections.abc import Callable, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from stepsplit.collectors.formats.file_names import is_recorded_name
from stepsplit.collectors.formats.rank_record import RankRecord, read_record
from stepsplit.collectors.formats.run_spec import RUN_FILE, from_json
from stepsplit.collectors.guard import CollectError, warn
from stepsplit.collectors.job.launcher import Identity
from stepsplit.collectors.record.gather import list_files
from stepsplit.collectors.safe_io.atomic_file import PRIVATE, make_owner_folder
from stepsplit.collectors.safe_io.regular_file import read_regular

CHECK_LIMIT_S = 5.0
"""What the training waits for a server before it starts."""
FILE_LIMIT_S = 600.0
"""What each file, and the choice of the folder, may take at the end: the job keeps its nodes."""
# One record a host; each is a request of the object storage.
_MOST_LOOKED_AT = 64
_MOST_FOLDERS = 100
_RECORD = re.compile(r"rank(\d{1,7})_record\.json")

_Result = TypeVar("_Result")
_Processes = dict[int, tuple[str, int]]
"""Rank -> host and process number, in which the parts of one recording agree."""


def is_url(place: str) -> bool:
    """Whether an --out is a URL for fsspec."""
    return "://" in place


def show_url(url: str) -> str:
    """The URL without what may be secret in it: name and password, and the query."""
    protocol, _, rest = url.partition("://")
    before_query = rest.partition("?")[0]
    if "@" in rest[len(before_query) :]:
        # Either the password has a question mark, or the query an @.
        return f"{protocol}://..."
    # A password may have a slash, and a folder an @: both end at the last one.
    _, at, place = before_query.rpartition("@")
    return f"{protocol}://{'...@' * bool(at)}{place}"


@dataclass(slots=True)
class RemoteFolder:
    """A folder at a URL. shown: the URL without secrets; name: that of the run.

    The copy goes to the folder, or to the first of FOLDER-2, FOLDER-3, ... that has no other
    recording.
    """

    shown: str
    name: str
    _url: str
    _opened: tuple[Any, str] | None = None
    _free: int | None = None
    """The first folder without a recording before the training; None: the server was away. The
    hosts of a job look before the first of them copies, and so choose the same."""

    def check(self, speaks: bool) -> None:
        """Chooses the folder before the training, within CHECK_LIMIT_S; a server that does not
        answer is a warning, if this process speaks for all ranks. Raises CollectError for a URL
        that no installed package serves."""

        def find_free() -> int:
            self._open()
            return _find_first(1, lambda n: not any(map(is_recorded_name, self._list(n))))

        try:
            self._free = _run_within(CHECK_LIMIT_S, find_free)
        except Exception as error:  # noqa: BLE001  each backend has errors of its own
            problem = f"{self.shown}: {self._describe(error)}"
            if self._opened is None and isinstance(error, ImportError | ValueError):
                raise CollectError(problem) from None
            if speaks:
                warn(f"{problem}; it is tried again at the end")
            return
        if self._free > 1 and speaks:
            warn(f"{self.shown} has a recording: this one is copied to {self._show(self._free)}")

    def copy(self, folder: Path, identity: Identity | None) -> str:
        """Copies the recording, and returns to which URL, "" if to none; a failure is a warning.

        identity: what a launcher started this process as: the rank whose own files are copied
        alone, where each rank runs `record`, or one process for all ranks of its host.
        """
        try:
            ranks = _find_ranks(folder, identity) if identity else frozenset[int]()
            paths = [path for path in list_files(folder) if _is_of(path, identity, ranks)]
            files = {path.relative_to(folder).as_posix(): path for path in paths}
            if not files:
                return ""
            # Ranks that each record on a shared disk may copy a log twice; it belongs to all.
            own = {name for name in files if identity is None or is_recorded_name(name)}
            number = _run_within(FILE_LIMIT_S, lambda: self._choose(own, folder))
            # run.json last: where it is, all that this process copies is there.
            for name in sorted(files, key=lambda name: name == RUN_FILE):
                _run_within(FILE_LIMIT_S, partial(self._put, files[name], number, name))
        except Exception as error:  # noqa: BLE001
            problem = self._describe(error)
            warn(f"{self.shown}: not copied ({problem}); the recording is in {folder}")
            return ""
        return self._show(number)

    def _choose(self, own: Set[str], folder: Path) -> int:
        """The number of the first folder that may take these files."""
        self._open()
        here: _Processes = {}
        for name in (RUN_FILE, *own):
            if _RECORD.fullmatch(name) or name == RUN_FILE:
                with suppress(OSError, ValueError):
                    here |= _read_processes(name, read_regular(folder / name))
        return _find_first(self._free or 1, lambda n: self._fits(n, own, here))

    def _fits(self, number: int, own: Set[str], here: _Processes) -> bool:
        """Whether the folder has none of these files, and no file of another recording."""
        listed = self._list(number)
        there = set(listed)
        for parent in {name.rpartition("/")[0] for name in own} - {""}:
            there |= {f"{parent}/{name}" for name in self._list(number, parent)}
        if there & own:
            return False
        if not any(map(is_recorded_name, listed)):
            return True
        # The processes that run.json names there; else, of each host that it names here, one.
        looked_at = [RUN_FILE] if RUN_FILE in there else []
        if not looked_at:
            records = [name for name in listed if _RECORD.fullmatch(name)]
            by_host = {here.get(_find_rank(name), (name, 0))[0]: name for name in records}
            looked_at = list(by_host.values())[:_MOST_LOOKED_AT]
        processes: _Processes = {}
        for name in looked_at:
            with suppress(ValueError):
                processes |= _read_processes(name, self._files.cat_file(self._place(number, name)))
        common = processes.keys() & here.keys()
        if any(processes[rank] != here[rank] for rank in common):
            return False
        # What other hosts have copied may say nothing of this one, where no run.json does: then
        # only the folder that all of them have chosen before the training is taken.
        return bool(common) or number == self._free

    def _put(self, path: Path, number: int, name: str) -> None:
        from fsspec.implementations.local import LocalFileSystem

        target = self._place(number, name)
        # fsspec makes the files of a disk as the umask says, and follows links of others.
        if isinstance(self._files, LocalFileSystem):
            folder = Path(self._place(number, ""))
            _copy_for_owner(path, folder, name, self._show(number), is_named=number == 1)
            return
        if target.startswith("/"):
            # Of object storage, s3fs would make the bucket of a misspelt URL.
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(path), target)

    def _list(self, number: int, below: str = "") -> list[str]:
        """The names in the folder, or in one below it."""
        try:
            # What was listed before may be kept, by s3fs for one.
            self._files.invalidate_cache()
            paths = self._files.ls(self._place(number, below), detail=False)
        except FileNotFoundError:
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def _open(self) -> None:
        import fsspec.core  # the extra [cloud]

        if self._opened is None:
            # Some backends connect here.
            files, path = fsspec.core.url_to_fs(self._url)
            if not path.rstrip("/"):
                raise ValueError("name a folder")
            self._opened = files, path.rstrip("/")

    @property
    def _files(self) -> Any:
        assert self._opened is not None
        return self._opened[0]

    def _place(self, number: int, name: str) -> str:
        assert self._opened is not None
        return f"{self._opened[1]}{_number(number)}{'/' * bool(name)}{name}"

    def _show(self, number: int) -> str:
        return f"{self.shown.rstrip('/')}{_number(number)}"

    def _describe(self, error: Exception) -> str:
        """The error on one line. Where the URL has a secret, a backend may quote it in parts."""
        if self.shown != self._url and not isinstance(error, CollectError):
            return f"{type(error).__name__}, not shown in full because of what is secret in the URL"
        problem = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return " ".join(str(problem).split())


def open_remote_folder(url: str) -> RemoteFolder:
    """The folder at the URL, before it is known whether the server answers.

    Raises CollectError if no installed package writes there, and for a chain of file systems with
    local files in it.
    """
    shown = show_url(url)
    if importlib.util.find_spec("fsspec") is None:
        raise CollectError(f"a URL needs fsspec; pip install 'stepsplit[cloud]': {shown}")
    parts = url.split("::")
    if len(parts) > 1 and any(map(_is_local, parts)):
        # Only fsspec could write through the chain, and it neither keeps files private nor sees
        # links.
        raise CollectError(f"{shown}: a chain to local files; name their folder by file:// alone")
    name = shown.partition("://")[2].rstrip("/").rpartition("/")[2]
    return RemoteFolder(shown, name.removeprefix("...@"), url)


def _is_local(part: str) -> bool:
    """Whether a part of a chain of URLs, such as dir:: or file:///runs, is one of local files."""
    import fsspec.core
    from fsspec.implementations.local import LocalFileSystem

    protocol = fsspec.core.split_protocol(part)[0]
    if protocol is None:
        # As fsspec takes it: the name of a protocol, else a path.
        is_name = part in fsspec.available_protocols() or re.fullmatch("[a-z]*", part)
        protocol = part if is_name else "file"
    try:
        return issubclass(fsspec.get_filesystem_class(protocol), LocalFileSystem)
    except Exception:  # noqa: BLE001  what is wrong with it is said when the URL is opened
        return False


def _copy_for_owner(path: Path, folder: Path, name: str, shown: str, *, is_named: bool) -> None:
    """Copies a file of a recording to this name in the folder of the copy, readable by this user
    only. fsspec makes files and folders as the umask says, and follows links, which may be others'.

    No folder is followed if it is a link, or used if it belongs to another user, except for the
    one that the user has named: that may be anyone's, and a link of his own.
    shown: the folder for people. Raises CollectError for such a folder, and OSError.
    """
    make_owner_folder(folder)
    *inner, last = name.split("/")
    draft = f".{last}.{os.urandom(4).hex()}"
    above: int | None = None
    with ExitStack() as opened:
        for part in (str(folder), *inner):
            trusts = is_named and above is None
            if above is not None:
                shown = f"{shown}/{part}"
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=above)
            found = os.stat(part, dir_fd=above, follow_symlinks=False)
            is_link = stat.S_ISLNK(found.st_mode)
            if is_link and not (trusts and found.st_uid in (0, os.geteuid())):
                raise CollectError(f"{shown} is a link{' of another user' * trusts}")
            # By descriptors: what is a folder now may be a link a moment later.
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW * (not is_link)
            above = os.open(part, flags, dir_fd=above)
            opened.callback(os.close, above)
            if not trusts and not _is_own(above, draft):
                raise CollectError(f"{shown} belongs to another user")
        try:
            with path.open("rb") as source, _create(draft, above) as copy:
                shutil.copyfileobj(source, copy)
            os.replace(draft, last, src_dir_fd=above, dst_dir_fd=above)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(draft, dir_fd=above)


def _is_own(folder: int, draft: str) -> bool:
    """Whether the open folder is this user's: NFS may give what root makes another owner, and then
    does so with a file as well."""
    owner = os.fstat(folder).st_uid
    if owner == os.geteuid():
        return True
    with _create(draft, folder) as file:
        os.unlink(draft, dir_fd=folder)
        return os.fstat(file.fileno()).st_uid == owner


def _create(name: str, folder: int | None) -> BinaryIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    return os.fdopen(os.open(name, flags, PRIVATE, dir_fd=folder), "wb")


def _find_first(start: int, is_right: Callable[[int], bool]) -> int:
    for number in range(start, _MOST_FOLDERS + 1):
        if is_right(number):
            return number
    raise CollectError(f"it and all up to -{_MOST_FOLDERS} have recordings; choose another --out")


def _run_within(limit_s: float, call: Callable[[], _Result]) -> _Result:
    """The result of the call, or CollectError: a server that hangs cannot be stopped, and is left
    to a thread that ends with this process. A signal ends the wait."""
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001  raised below
            errors.append(error)

    thread = threading.Thread(target=run, name="stepsplit-url", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        raise CollectError(f"no answer within {limit_s:g} s")
    return results[0]


def _find_ranks(folder: Path, identity: Identity) -> Set[int]:
    """The ranks whose files the process that a launcher started as `identity` is to copy: itself,
    or those of its host, where it is no rank but starts them, as torchrun does in a task of srun
    for each host. Ranks that were killed have files without a record."""
    known: dict[int, RankRecord] = {}
    there: set[int] = set()
    for path in folder.iterdir():
        if is_recorded_name(path.name) and path.name != RUN_FILE:
            there.add(_parse_rank(path.name))
        if _RECORD.fullmatch(path.name):
            with suppress(OSError, ValueError):
                record = read_record(read_regular(path))
                known[record.rank.rank] = record
    host, tasks = socket.gethostname(), identity.world_size
    world_size = max((record.world_size for record in known.values()), default=0)
    of_itself = known.get(identity.rank)
    # With one rank on each host the sizes are equal, and torchrun may number the hosts otherwise
    # than srun.
    is_for_host = (
        any(record.world_size != tasks for record in known.values())
        or max(there, default=0) >= tasks
        or identity.local_world_size == 1 < tasks
        or (of_itself is not None and of_itself.rank.host != host)
    )
    if not is_for_host:
        return {identity.rank}
    if not known:
        # On a disk that the hosts share, each with one rank, the files of all ranks are there.
        is_shared = there == set(range(tasks))
        return {identity.rank} if is_shared else there
    of_host = [record.rank for record in known.values() if record.rank.host == host]
    # A host has ranks with successive numbers. Others may be of hosts that have not ended yet.
    count = -(-world_size // tasks)
    first = min((one.rank - one.local_rank for one in of_host), default=identity.rank * count)
    killed = (there - known.keys()) & set(range(first, first + count))
    ranks = killed | {one.rank for one in of_host}
    if there and not ranks:
        warn(f"no rank of this host is in {folder}: none is copied from here")
    return ranks


def _is_of(path: Path, identity: Identity | None, ranks: Set[int]) -> bool:
    """Whether the file is for this process to copy: those of its ranks; run.json for rank 0; the
    logs of a host for its first rank."""
    if identity is None:
        return True
    if path.name == RUN_FILE:
        return 0 in ranks
    if is_recorded_name(path.name):
        return _parse_rank(path.name) in ranks
    return identity.local_rank == 0


def _parse_rank(name: str) -> int:
    """The rank in the name of its file."""
    return int(name.removeprefix("rank").partition("_")[0])


def _read_processes(name: str, content: bytes) -> _Processes:
    """The processes that run.json or a rank's record names. Raises ValueError."""
    ranks = from_json(content).ranks if name == RUN_FILE else (read_record(content).rank,)
    return {one.rank: (one.host, one.pid) for one in ranks}


def _find_rank(name: str) -> int:
    found = _RECORD.fullmatch(name)
    return int(found[1]) if found else -1


def _number(number: int) -> str:
    return f"-{number}" if number > 1 else ""
