"""The content of the page at an address; pages of finished runs are cached."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import orjson
from plotly.io.json import to_json_plotly

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.model.prediction_process import NoPrediction
from stepsplit.dashboard.pages.address import Address
from stepsplit.dashboard.pages.hang import build_hang_page
from stepsplit.dashboard.pages.page import (
    ODD_DATA,
    PageContent,
    PageRequest,
    build_problem,
    compute_fingerprint,
)
from stepsplit.dashboard.pages.roles import build_roles_page
from stepsplit.dashboard.pages.run_actions import RunRights
from stepsplit.dashboard.pages.run_pages import build_run_page, build_waiting_page, find_run_page
from stepsplit.dashboard.pages.store_pages import build_missing_page, find_store_page
from stepsplit.dashboard.store.logins import Role
from stepsplit.dashboard.store.run_row import RunRow
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.report_cache import LruCache, ReportCache

_CACHED_PAGES = 64

_LOG = logging.getLogger(__name__)


class PageBuilder:
    """The pages of a store. Pages of finished runs are cached in serialized form."""

    def __init__(self, store: Store, loaded: ReportCache) -> None:
        self.store, self._loaded = store, loaded
        self._kept: LruCache[dict[str, Any]] = LruCache(_CACHED_PAGES)

    def build_content(
        self, address: Address | None, role: Role = Role.VIEWER, *, has_login: bool = True
    ) -> PageContent:
        """The content of the page at this address, with the buttons that the role may use."""
        content = None
        if address is not None and address.run_id:
            content = self._build_run(address, _find_rights(role))
        elif address is not None:
            page = find_store_page(address)
            if page.needs_admin and role < Role.ADMIN:
                why = "Log in as an admin, or ask one."
                return PageContent(build_problem(page.title, "Only admins see this page", why))
            request = replace(self._make_request(address, role), has_login=has_login)
            content = page.build(request)
        return content or PageContent(build_missing_page())

    def build_live(
        self, address: Address | None, role: Role, mark: str | None
    ) -> PageContent | None:
        """What a page that updates by itself shows now; None if it is no such page, or if the mark
        shows that it is still the same."""
        if address is None or not self.is_live(address):
            return None
        build = find_store_page(address).build_live
        return build and build(self._make_request(address, role, mark))

    def is_live(self, address: Address | None) -> bool:
        """Whether build_live draws all of the page that the choices of the address change."""
        if address is None or address.run_id:
            return False
        return find_store_page(address).build_live is not None

    def _make_request(self, address: Address, role: Role, mark: str | None = None) -> PageRequest:
        load = self._loaded.load_report_view
        return PageRequest(self.store, load, address, _find_rights(role), mark=mark)

    def _build_run(self, address: Address, rights: RunRights) -> PageContent | None:
        run = self.store.find_run_or_role(address.run_id)
        if run is None:
            return None
        if run.is_role:
            rights = RunRights(edit=False, delete=False)
        if run.state != "done":
            waiting = build_waiting_page(run, rights)
            return PageContent(waiting, run.state != "failed", compute_fingerprint(run))
        if run.is_hang or run.has_roles:
            try:
                if run.is_hang:
                    return PageContent(build_hang_page(self.store.load_hang(run.id), run, rights))
                job = self.store.load_roles(run.id)
                return PageContent(build_roles_page(job, run, rights, address.chosen))
            except DataError as error:
                return PageContent(build_problem(run.name, "This run cannot be read", str(error)))
            except Exception:  # noqa: BLE001 - as below
                _LOG.exception("the page of run %s failed", run.id)
                return PageContent(build_problem(run.name, "This page cannot be shown", ODD_DATA))
        # The whole row: a new name, tag or analysis makes another page.
        key = (address.page, run, tuple(sorted(address.chosen.values.items())), rights)
        try:
            rendered = self._kept.find(key)
            if rendered is None and find_run_page(address.page).predicts:
                # Rendered outside of the cache, where requests for the same page would wait for
                # each other with a thread each: too many predictions at once are refused.
                rendered = self._render_run(run, address, rights)
            return PageContent(
                self._kept.get(key, lambda: rendered or self._render_run(run, address, rights))
            )
        except NoPrediction as error:
            # Not cached; a busy server is asked again by the page's next tick.
            problem = build_problem(run.name, "No prediction", str(error))
            return PageContent(problem, error.is_busy, compute_fingerprint(str(error)))
        except DataError as error:
            return PageContent(build_problem(run.name, "This run cannot be read", str(error)))
        except Exception:  # noqa: BLE001 - a bug met by odd data; other pages may still work
            _LOG.exception("page %s of run %s failed", address.page, run.id)
            return PageContent(build_problem(run.name, "This page cannot be shown", ODD_DATA))

    def _render_run(self, run: RunRow, address: Address, rights: RunRights) -> dict[str, Any]:
        """The page as plain JSON values, cheap to send again."""
        with_tables = find_run_page(address.page).needs_tables
        load = self._loaded.load_view if with_tables else self._loaded.load_report_view
        page = build_run_page(load(run), address, run, rights)
        rendered: dict[str, Any] = orjson.loads(to_json_plotly(page, engine="orjson"))
        return rendered


def _find_rights(role: Role) -> RunRights:
    return RunRights(edit=role >= Role.UPLOADER, delete=role >= Role.ADMIN)
