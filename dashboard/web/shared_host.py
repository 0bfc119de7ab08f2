"""Whether others can log in to this host: every account of it reaches a port of 127.0.0.1."""

from __future__ import annotations

import os
from pathlib import Path

_INITS = ("systemd", "init")
"""The first process of a host or of a container that people log in to, as those of LXC."""

_LOGIN, _KERNEL = "sshd", "kthreadd"
"""A process that lets people in, and one that a container does not see: a machine that was made of
an image, as sandboxes and CI runners are, looks like a container but has its own accounts."""

_CONTAINER_FILES = (".dockerenv", "run/.containerenv")
_CONTAINER_VARIABLES = ("KUBERNETES_SERVICE_HOST", "container")
"""What Docker, Podman and Kubernetes leave in a container."""

_DIRECTORIES = {"sss", "ldap", "winbind", "nis"}
"""Sources of accounts in nsswitch.conf that list none of them."""

_NO_SHELLS = ("nologin", "false", "sync", "")


def has_other_users(root: Path = Path("/")) -> bool:
    """Whether an account that people use, other than this one, runs a process or may log in.

    In a container there are no logins, although its image may name accounts: there only processes
    count. If it shares the network of its host, whose accounts are not known inside, the answer is
    yes. root: the folder of /proc, /sys and /etc.
    """
    programs: set[str] = set()
    for process in (root / "proc").glob("[0-9]*"):
        try:
            if _is_of_another(process.stat().st_uid):
                return True
        except OSError:
            continue
        programs.add(_read(process / "comm").strip())
    is_container = any((root / name).exists() for name in _CONTAINER_FILES) or any(
        name in os.environ for name in _CONTAINER_VARIABLES
    )
    if is_container and _KERNEL not in programs:
        # A network of its own has no device behind its interfaces.
        if any((root / "sys/class/net").glob("*/device")):
            return True
        if _read(root / "proc/1/comm").strip() not in _INITS and _LOGIN not in programs:
            return False
    switch = _read(root / "etc/nsswitch.conf").splitlines()
    sources = next((line.split()[1:] for line in switch if line.startswith("passwd:")), [])
    if _DIRECTORIES.intersection(sources):
        return True
    accounts = (line.split(":") for line in _read(root / "etc/passwd").splitlines())
    return any(
        len(one) == 7 and one[2].isdecimal() and _is_of_another(int(one[2]))
        and Path(one[6]).name not in _NO_SHELLS
        for one in accounts
    )  # fmt: skip


def _is_of_another(uid: int) -> bool:
    # 65534 owns what belongs to no account; below 1000 are root and the system's own.
    return uid >= 1000 and uid not in (os.getuid(), 65534)


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
