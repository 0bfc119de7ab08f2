"""NCCL's RAS: a thread in each process of a job, from NCCL 2.24 on.

Any of them answers for the whole job, on a port of its host, even while it hangs: lines of text,
and a document at the end.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress

RAS_ADDRESS = "localhost:28028"
"""Where NCCL listens unless NCCL_RAS_ADDR says otherwise."""

_CONNECT_S = 1.0

_RAS_TIMEOUT_S = 5
"""How long NCCL may wait for the other processes of the job."""

# The answer has a line for each rank that differs; whoever listens at the port need not be NCCL.
_MAX_RAS_BYTES = 64 << 20


def ask_ras(environment: Mapping[str, str]) -> str:
    """What NCCL's RAS says of the job of a process with this environment; "" if none answers.

    It is JSON where NCCL has that format, else the text of "verbose status".
    """
    if environment.get("NCCL_RAS_ENABLE", "1") == "0":
        return ""
    host, _, port = environment.get("NCCL_RAS_ADDR", RAS_ADDRESS).rpartition(":")
    with suppress(OSError, ValueError):
        address = (host.strip("[]") or "localhost", int(port))
        with socket.create_connection(address, _CONNECT_S) as connection:
            return _talk_to_ras(connection)
    return ""


def _talk_to_ras(connection: socket.socket) -> str:
    """Raises OSError if the other side is not NCCL's RAS."""
    connection.settimeout(_CONNECT_S)
    with connection.makefile("rwb") as stream:

        def ask(line: str) -> str:
            stream.write(f"{line}\n".encode())
            stream.flush()
            return stream.readline(_MAX_LINE).decode(errors="replace").strip()

        if not ask("CLIENT PROTOCOL 2").upper().startswith("SERVER PROTOCOL"):
            raise OSError("another server")
        ask(f"TIMEOUT {_RAS_TIMEOUT_S}")
        # An older NCCL refuses this, and stays with its text.
        ask("SET FORMAT json")
        connection.settimeout(3 * _RAS_TIMEOUT_S)
        stream.write(b"VERBOSE STATUS\n")
        stream.flush()
        return stream.read(_MAX_RAS_BYTES).decode(errors="replace")


_MAX_LINE = 1024
