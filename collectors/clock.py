"""How far this host's clock is from rank 0's: a few datagrams, beside the training."""

from __future__ import annotations

import os
import socket
import threading
import time

from stepsplit.collectors import presence
from stepsplit.collectors.rank_record import ClockProbe

_ROUNDS = 20
_MOST_LOST = 3
_TIMEOUT_S = 0.5
_PATIENCE_S = 30.0
_POLL_S = 0.5


class HostClock:
    """The probes of one rank: one rank a host asks rank 0, and a job of one host nobody."""

    def __init__(self, key: str, rank: int, host: str) -> None:
        self._key, self._probes = f"{key}/clock", list[ClockProbe]()
        local, world = (int(os.environ.get(n, "1")) for n in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
        if local >= world:
            return
        if rank == 0:
            presence.tell(self._key, f"{host}:{answer()}")
        elif os.environ.get("LOCAL_RANK") == "0":
            threading.Thread(target=self._ask, name="stepsplit-clock", daemon=True).start()

    def probes(self) -> tuple[ClockProbe, ...]:
        """What is known so far."""
        return tuple(self._probes)

    def _ask(self) -> None:
        address = presence.heard(self._key, _PATIENCE_S, _POLL_S)
        if address is None:
            return
        host, _, port = address.rpartition(":")
        found = probe(host, int(port))
        if found is not None:
            self._probes.append(found)


def answer() -> int:
    """Answers datagrams with this clock's time from now on, in a thread; the port."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("", 0))
    threading.Thread(target=_serve, args=(server,), name="stepsplit-clock", daemon=True).start()
    port: int = server.getsockname()[1]
    return port


def _serve(server: socket.socket) -> None:
    while True:
        asked, sender = server.recvfrom(64)
        server.sendto(asked[:16] + b" " + str(time.time_ns()).encode(), sender)


def probe(host: str, port: int) -> ClockProbe | None:
    """This clock less that at the address, by the quickest round trip; None without an answer."""
    best: ClockProbe | None = None
    lost = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(_TIMEOUT_S)
        for number in range(_ROUNDS):
            found = _round(client, (host, port), number)
            lost += found is None
            if lost >= _MOST_LOST:
                break
            if found and (best is None or found.round_trip_ns < best.round_trip_ns):
                best = found
    return best


def _round(client: socket.socket, address: tuple[str, int], number: int) -> ClockProbe | None:
    sent = time.time_ns()
    try:
        client.sendto(str(number).encode(), address)
        told, _, there = client.recvfrom(64)[0].partition(b" ")
    except OSError:
        return None
    back = time.time_ns()
    if told != str(number).encode() or not there.isdigit():
        return None
    return ClockProbe((sent + back) // 2 - int(there), back - sent, back)
