"""The offset of a host's clock from that of rank 0's host, measured with a few datagrams."""

from __future__ import annotations

import fcntl
import hmac
import ipaddress
import json
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field

from stepsplit.collectors.formats.rank_record import ClockProbe
from stepsplit.collectors.guard import warn_on_failure
from stepsplit.collectors.job.job_store import SharedValues, wait_for_value
from stepsplit.collectors.job.launcher import read_identity

# The fastest round trip counts, since a slow one was delayed on one of its ways.
_MAX_ROUNDS = 20

# A firewall between the hosts drops all of them.
_MAX_LOST = 3

_TIMEOUT_S = 0.5

_ADDRESS_TIMEOUT_S = 30.0

_CLOCK_POLL_S = 0.5


class HostClock:
    """Clock probes: one rank per host probes rank 0; a job on one host needs no probes."""

    def __init__(self, key: str, rank: int, host: str) -> None:
        self._key, self._probes, self._rank = f"{key}/clock", list[ClockProbe](), rank
        self._host, place = host, read_identity()
        if place.local_world_size >= place.world_size or (rank and place.local_rank):
            return
        target = self._probe_rank0 if rank else self._serve
        threading.Thread(target=target, name="stepsplit-clock", daemon=True).start()

    def list_probes(self) -> tuple[ClockProbe, ...]:
        """The probes measured so far."""
        return tuple(self._probes)

    def _serve(self) -> None:
        with warn_on_failure(self._rank, "the clocks of the other hosts, relative to its own"):
            try:
                values = SharedValues()
            except RuntimeError:
                # The other hosts cannot read the address either.
                return
            with ClockServer(self._host, os.environ.get("MASTER_ADDR", "")) as server:
                values.write(self._key, json.dumps(asdict(server.address)))
                server.serve()

    def _probe_rank0(self) -> None:
        with warn_on_failure(self._rank, "its clock's offset from rank 0"):
            text = wait_for_value(self._key, _ADDRESS_TIMEOUT_S, _CLOCK_POLL_S)
            if text is None:
                return
            address = ClockAddress(**json.loads(text))
            # In other pods the name often does not resolve; rank 0's store is at MASTER_ADDR.
            name = address.name
            hosts = dict.fromkeys([name, os.environ.get("MASTER_ADDR", name), *address.numeric])
            probes = (probe_clock(host, address.port, address.key) for host in hosts)
            measured = next(filter(None, probes), None)
            if measured is None:
                tried = " nor ".join(f"{host}:{address.port}" for host in hosts)
                raise OSError(f"no answer to datagrams from {tried}; is UDP blocked?")
            self._probes.append(measured)


# Datagrams. Anyone who can reach the port may send one, in the name of any address. So a request
# has the job's key, which the ranks get from the job's store; an answer is not a request, or two
# servers would answer each other for ever; and it is not longer than its request.

_DATAGRAM = struct.Struct("!8s16sQ16s")
"""Kind, nonce, time (0 in a request) and the first bytes of its HMAC."""

_REQUEST, _ANSWER = b"sspl-ask", b"sspl-tim"

_NONCE_BYTES, _MAC_BYTES, _KEY_BYTES = 16, 16, 16


def _pack(key: str, kind: bytes, nonce: bytes, time_ns: int) -> bytes:
    unsigned = _DATAGRAM.pack(kind, nonce, time_ns, b"")[:-_MAC_BYTES]
    return unsigned + hmac.digest(bytes.fromhex(key), unsigned, "sha256")[:_MAC_BYTES]


def _unpack(key: str, kind: bytes, datagram: bytes) -> tuple[bytes, int] | None:
    """The nonce and the time of a datagram of this kind; None if it is not one of this job."""
    if len(datagram) != _DATAGRAM.size:
        return None
    sent_kind, nonce, time_ns, _ = _DATAGRAM.unpack(datagram)
    if sent_kind != kind or not hmac.compare_digest(datagram, _pack(key, kind, nonce, time_ns)):
        return None
    return nonce, time_ns


@dataclass(frozen=True, slots=True)
class ClockAddress:
    """Where rank 0 answers: its host's name, the addresses that it listens at, port and key."""

    name: str
    numeric: Sequence[str]
    port: int
    key: str = field(repr=False)


_SERVE_S = 600.0
"""All hosts ask within a minute: their recordings begin with the same step."""

_BURST, _PER_S, _PAUSE_S = 8192, 1000, 0.1
"""Datagrams that are read, at first and later: 20 of each of 400 hosts at once, and 1 % of a core
however many arrive."""


class ClockServer:
    """Answers this job's requests with this host's time, at the addresses of the names only.

    names: the host's own and the one by which the ranks reach rank 0; "" for none.
    """

    def __init__(self, *names: str) -> None:
        self._sockets, self._opened = list[socket.socket](), ExitStack()
        port = 0
        for addresses in _list_own_addresses(names):
            for address in addresses:
                with suppress(OSError):
                    kind = socket.AF_INET6 if ":" in address else socket.AF_INET
                    server = self._opened.enter_context(socket.socket(kind, socket.SOCK_DGRAM))
                    # Fails for an address of another host, or if the port is in use at this one.
                    server.bind((address, port))
                    server.setblocking(False)
                    port = server.getsockname()[1]
                    self._sockets.append(server)
            if self._sockets:
                break
        numeric = tuple(server.getsockname()[0] for server in self._sockets)
        self.address = ClockAddress(names[0], numeric, port, secrets.token_hex(_KEY_BYTES))

    def __enter__(self) -> ClockServer:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def serve(self, timeout_s: float = _SERVE_S) -> None:
        """Answers until the time is over."""
        deadline, tokens, last_s = time.monotonic() + timeout_s, float(_BURST), time.monotonic()
        with selectors.DefaultSelector() as selector:
            for server in self._sockets:
                # It may be closed before a thread begins to serve.
                with suppress(ValueError):
                    selector.register(server, selectors.EVENT_READ, server)
            while (now_s := time.monotonic()) < deadline:
                tokens, last_s = min(_BURST, tokens + (now_s - last_s) * _PER_S), now_s
                if tokens < 1:
                    time.sleep(_PAUSE_S)
                    continue
                for key, _ in selector.select(deadline - now_s):
                    tokens -= 1
                    with suppress(OSError):
                        server = key.data
                        datagram, sender = server.recvfrom(_DATAGRAM.size + 1)
                        request = _unpack(self.address.key, _REQUEST, datagram)
                        # One in the name of this socket would be answered to itself.
                        if request is not None and sender[:2] != server.getsockname()[:2]:
                            answer = _pack(self.address.key, _ANSWER, request[0], time.time_ns())
                            server.sendto(answer, sender)


def _list_own_addresses(names: Sequence[str]) -> Iterator[list[str]]:
    """Addresses at which other hosts may reach this one: all of the first list that has any.

    A name may be this host's in its own eyes only (127.0.1.1 in Debian's /etc/hosts), or lead to
    another host; then the address towards other networks will do, or else those of all interfaces.
    """
    found = dict.fromkeys(address for name in names for address in _resolve(name))
    yield [address for address in found if not ipaddress.ip_address(address).is_loopback]
    # The address from which one would reach another network. These two are reserved for
    # documentation, and nothing is sent.
    routes: list[str] = []
    for kind, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))
            routes.append(probe.getsockname()[0])
    yield routes
    interfaces: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                reply = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                address = socket.inet_ntoa(reply[20:24])
                if not ipaddress.ip_address(address).is_loopback:
                    interfaces.append(address)
    yield interfaces
    yield ["127.0.0.1"]


def _resolve(name: str) -> Iterator[str]:
    if name:
        with suppress(OSError, UnicodeError):
            for *_, address in socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM):
                # One of a link only (fe80::1%eth0) means nothing on another host.
                if not ipaddress.ip_address(address[0]).is_link_local:
                    yield str(address[0])


_SIOCGIFADDR = 0x8915


def probe_clock(host: str, port: int, key: str) -> ClockProbe | None:
    """The clock offset from the given host by the fastest round trip; None without an answer."""
    with suppress(OSError, UnicodeError):
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as client:
                # From now on the kernel drops what comes from another address.
                client.connect(address)
                best: ClockProbe | None = None
                lost = 0
                for _ in range(_MAX_ROUNDS):
                    measured = _measure_round_trip(client, key)
                    lost += measured is None
                    if lost >= _MAX_LOST:
                        break
                    # The fastest round trip has waited least on its way, so its middle is nearest
                    # to the moment of the answer.
                    if measured and (best is None or measured.round_trip_ns < best.round_trip_ns):
                        best = measured
                if best is not None:
                    return best
    return None


def _measure_round_trip(client: socket.socket, key: str) -> ClockProbe | None:
    nonce, deadline = secrets.token_bytes(_NONCE_BYTES), time.monotonic() + _TIMEOUT_S
    request = _pack(key, _REQUEST, nonce, 0)
    sent_ns = time.time_ns()
    try:
        client.send(request)
        while (left_s := deadline - time.monotonic()) > 0:
            client.settimeout(left_s)
            datagram, received_ns = client.recv(_DATAGRAM.size + 1), time.time_ns()
            answer = _unpack(key, _ANSWER, datagram)
            # Others are late answers to earlier requests, or not rank 0's.
            if answer is not None and answer[0] == nonce:
                remote_ns, round_trip_ns = answer[1], received_ns - sent_ns
                return ClockProbe(
                    (sent_ns + received_ns) // 2 - remote_ns, round_trip_ns, received_ns
                )
    except OSError:
        return None
    return None
