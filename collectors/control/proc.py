"""What /proc tells of other processes of this user."""

from __future__ import annotations

from pathlib import Path


def environment(pid: int) -> dict[str, str]:
    """The environment that the process was started with; empty where it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    entries = text.decode(errors="replace").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def command_line(pid: int) -> str:
    """The words of its command; empty where it cannot be read."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def ancestors(pid: int) -> list[int]:
    """The processes that have started it, its parent first."""
    found: list[int] = []
    while (pid := _parent(pid)) > 1:
        found.append(pid)
    return found


def family(pid: int) -> list[int]:
    """The process and all that it has started, directly or through others, in order."""
    every = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return sorted(each for each in every if each == pid or pid in ancestors(each))


def _parent(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The name in parentheses may hold spaces and parentheses itself.
    return int(text.rpartition(")")[2].split()[1])
