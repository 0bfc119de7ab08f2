"""Where raw files are written: next to the packed ones, but not on a shared file system."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from stepsplit.collectors.job.launcher import read_identity
from stepsplit.collectors.safe_io.private_folder import make_scratch_folder

SCRATCH_VARIABLES = ("STEPSPLIT_SCRATCH", "SLURM_TMPDIR", "TMPDIR")
"""Environment variables that name a folder on a disk of this host, the first one first."""

MIN_FREE_BYTES = 4 << 30
"""Free space that a scratch disk needs for each rank of this host."""

MOUNTS = Path("/proc/self/mountinfo")

_SHARED = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4"}
    | {"ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "vastnfs", "virtiofs", "wekafs"}
)
_LOCAL_FUSE = ("fuse.fuse-overlayfs", "fuse.squashfuse", "fuseblk")
DISKS = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "xfs", "zfs"})
"""File systems on a disk of the host."""


def choose_raw_folder(out: Path) -> Path:
    """The folder for the raw files of a recording in `out`; a new private one if it is another.

    A raw trace is about ten times as large as the packed one, and all ranks write theirs at once,
    within a step: too much for a shared file system. It is `out` all the same if no scratch folder
    will do. /tmp will only on a disk: in memory or in a container's own file system it may take
    what the training needs.
    """
    if not is_shared(read_file_system(out)):
        return out
    named = [Path(os.environ[name]) for name in SCRATCH_VARIABLES if os.environ.get(name)]
    candidates = [folder for folder in named if not is_shared(read_file_system(folder))]
    if read_file_system(Path("/tmp")) in DISKS:
        candidates.append(Path("/tmp"))
    for folder in filter(_has_space, candidates):
        # The profiler opens its file by the path: only the folder keeps links of others out of it.
        is_ours = str(folder) == os.environ.get("STEPSPLIT_SCRATCH", "").rstrip("/")
        with contextlib.suppress(OSError):
            return make_scratch_folder(folder, f"stepsplit-{out.name}-", named=is_ours)
    return out


def read_file_system(path: Path) -> str:
    """The type of the file system that holds the path, such as "ext4"; "" if it is not known."""
    place, longest, kind = os.path.realpath(path), "", ""
    try:
        lines = MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        head, _, tail = line.partition(" - ")
        mount = head.split()[4].replace("\\040", " ")
        # The longest mount above the path holds it; of two at one place the later one is on top.
        if len(mount) >= len(longest) and f"{place}/".startswith(f"{mount.rstrip('/')}/"):
            longest, kind = mount, tail.split()[0]
    return kind


def is_shared(file_system: str) -> bool:
    """Whether other hosts write to a file system of this type too."""
    is_fuse = file_system.startswith("fuse") and file_system not in _LOCAL_FUSE
    return file_system in _SHARED or is_fuse


def _has_space(folder: Path) -> bool:
    try:
        free_bytes = shutil.disk_usage(folder).free
    except OSError:
        return False
    return free_bytes >= MIN_FREE_BYTES * read_identity().local_world_size
