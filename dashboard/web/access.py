"""Who may come in: this machine, those who know a secret, those whom a proxy has let in, anyone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from stepsplit.analyzer.errors import UsageError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class TrustedProxy:
    """A proxy that has checked its users, and names them in the header; heard from these networks
    alone."""

    header: str
    networks: tuple[IPv4Network | IPv6Network, ...]

    def is_at(self, address: str) -> bool:
        """Whether the address is the proxy's."""
        try:
            found = ip_address(address)
        except ValueError:
            return False
        if isinstance(found, IPv6Address) and found.ipv4_mapped:
            found = found.ipv4_mapped
        return any(found in network for network in self.networks)


@dataclass(frozen=True, slots=True)
class Access:
    """Who is let in. local: only requests to this machine's own names. guarded: only with the
    password, a token of the store, or the proxy's word."""

    local: bool = True
    guarded: bool = False
    password: str | None = field(default=None, repr=False)
    proxy: TrustedProxy | None = None


def access_to(
    host: str,
    *,
    password: str | None = None,
    proxy: TrustedProxy | None = None,
    has_tokens: bool = False,
    open_to_anyone: bool = False,
) -> Access:
    """Who is let in where the server listens on host. Raises UsageError where others could reach it
    and nothing says who of them may."""
    local = host in LOOPBACK
    if open_to_anyone:
        return Access(local=False)
    if password is not None or proxy is not None:
        return Access(local=False, guarded=True, password=password, proxy=proxy)
    if local:
        return Access()
    if has_tokens:
        return Access(local=False, guarded=True)
    ways = "--password-file, a token (stepsplit token create), --trusted-proxy-header"
    raise UsageError(f"others can reach {host}: say who may come in by {ways}, or --open-to-anyone")


def trusted_proxy(header: str | None, addresses: Sequence[str]) -> TrustedProxy | None:
    """The proxy of the options, None without any. Raises UsageError."""
    if header is None and not addresses:
        return None
    if header is None or not addresses:
        raise UsageError("--trusted-proxy-header and --trusted-proxy go together")
    try:
        networks = tuple(ip_network(address, strict=False) for address in addresses)
    except ValueError as error:
        raise UsageError(f"--trusted-proxy: {error}; write 10.0.0.5 or 10.0.0.0/24") from None
    return TrustedProxy(header, networks)
