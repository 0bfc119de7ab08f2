"""Options of the production server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from stepsplit.dashboard.store.ingest import LogFormat
from stepsplit.dashboard.web.alerting import AlertTarget
from stepsplit.dashboard.web.auth import Access
from stepsplit.dashboard.web.uploads import Limits

Ready = Callable[[str], None]
"""Called with the URL of the server, without a slash at its end."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Access control, upload limits, analysis workers, webhook and log format of the server.

    limit_s, memory_bytes: what one analysis may take; memory None for the default. public_url: the
    address of the pages in messages; by default the one that the server listens on.
    """

    access: Access
    limits: Limits = field(default_factory=Limits)
    workers: int = 1
    limit_s: float = 3_600.0
    memory_bytes: int | None = None
    log_format: LogFormat = "text"
    alert_target: AlertTarget | None = None
    public_url: str | None = None
