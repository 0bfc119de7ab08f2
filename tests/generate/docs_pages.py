"""Writes docs/pages/*.png: python -m generate.docs_pages

Every page of the dashboard on the recorded samples, as a browser shows it; that of a watched run
shows an invented one, and that of roles a job that is recorded first.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.browser_builders import running_chromium
from support.dashboard_processes import open_store, running_dashboard
from support.store_builders import claimed, queued
from support.watch_builders import STORY, build_story_change, list_story

from stepsplit.analyzer import UsageError, examine
from stepsplit.analyzer.regression.checks import parse_budgets
from stepsplit.analyzer.regression.judge import check_candidate as check
from stepsplit.analyzer.regression.metrics import extract_metrics
from stepsplit.dashboard.reporters.verdict import format_headline
from stepsplit.dashboard.store.ingest import analyze_upload, process_job
from stepsplit.dashboard.store.run_row import Tag
from stepsplit.dashboard.store.store import Store

ROOT = Path(__file__).parents[2]
SAMPLES = ("dp4", "fsdp4", "pp2_m2", "pp2_m8", "tp2_pp2", "tp2_pp2_dp2")
MAIN = "tp2_pp2_dp2"
ROLES = "roles"
WIDE, HIGH = 1280, 860
PAGES = (
    "overview",
    "timeline",
    "pipeline",
    "collectives",
    "compute",
    "structure",
    "memory",
    "model",
)


WATCH = f"/watch/{STORY}"


def imported(store: Store) -> dict[str, str]:
    """The samples in the store: their ids by name."""
    ids = {}
    for name in SAMPLES:
        try:
            made = examine([ROOT / "sample_traces" / name], job="auto")
        except UsageError:
            made = examine([ROOT / "sample_traces" / name])
        tags = (Tag("branch", "main"), Tag("commit", f"{len(ids):07x}"))
        ids[name] = store.import_report(name, made.report, made.tables, tags)
    return ids


def import_roles(store: Store, folder: Path) -> str:
    """A job of three roles, recorded now, with one sequence that takes longest to generate: its
    id."""
    script, job = ROOT / "tests" / "support" / "role_job.py", folder / "rl"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    subprocess.run([*launch, str(script), str(job), "tail", "1"], check=True, timeout=600)
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in job.rglob("*")
        # What the job itself measured lies beside the folders of the roles.
        if path.is_file() and path.parent != job
    }
    run_id = queued(store, "rl", **files)
    process_job(store, claimed(store), analyze_upload)
    return run_id


def judge(store: Store, ids: dict[str, str]) -> None:
    """Holds two of the runs against others, which the list of runs then tells."""
    for own, before in (("pp2_m8", "pp2_m2"), ("dp4", "fsdp4")):
        sides = [extract_metrics(store.load_report(ids[name]), name) for name in (own, before)]
        verdict = check(sides[:1], sides[1:], parse_budgets(("calls:exact",)), across_setups=True)
        store.verdicts.record(ids[own], verdict.answer, format_headline(verdict))


def addresses(ids: dict[str, str]) -> dict[str, str]:
    """The pages to show, by the names of their pictures."""
    run = f"/run/{ids[MAIN]}"
    own = {name: run if name == "overview" else f"{run}/{name}" for name in PAGES}
    own["model"] += "?tp=1&dp_replicate=4"
    compared = f"/compare?baseline={ids['pp2_m2']}&candidate={ids['pp2_m8']}"
    stores = {"compare": compared, "history": "/history", "watch": WATCH}
    return {"runs": "/", **own, **stores, "roles": f"/run/{ids[ROLES]}"}


def photograph(url: str, ids: dict[str, str], folder: Path) -> None:
    """A picture of each page, and the overview in the dark."""
    with running_chromium() as browser:
        for scheme, names in (("light", list(addresses(ids))), ("dark", ["overview"])):
            page = browser.new_page(viewport={"width": WIDE, "height": HIGH}, color_scheme=scheme)
            for name in names:
                page.goto(url + addresses(ids)[name])
                page.wait_for_selector("h1")

                page.wait_for_timeout(6_000)
                file = f"{name}.png" if scheme == "light" else f"{name}_dark.png"
                page.screenshot(path=str(folder / file), full_page=name != "overview")


def main() -> None:
    """Rewrites the pictures."""
    folder = ROOT / "docs" / "pages"
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        with open_store(Path(name)) as store:
            ids = imported(store)
            for one in list_story(time.time_ns()):
                store.watches.add_batch(one)
            store.watches.add_batch(build_story_change("change"))
            ids[ROLES] = import_roles(store, Path(name))
            judge(store, ids)
        with running_dashboard(Path(name), "--workers", "0") as dashboard:
            photograph(dashboard.url, ids, folder)
    sys.stdout.write(f"{len(list(folder.iterdir()))} pictures in {folder}\n")


if __name__ == "__main__":
    main()
