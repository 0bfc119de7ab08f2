"""What a wheel holds, and the versions of other packages that it is tested with."""

import re
import tomllib
from pathlib import Path

from generate.constraints import LOCKED, LOWEST, format_lowest, read_bounds

ROOT = Path(__file__).parent.parent


def test_every_package_of_the_three_folders_is_in_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = [
        "stepsplit." + ".".join(path.parent.relative_to(ROOT).parts)
        for top in ("collectors", "analyzer", "dashboard")
        for path in (ROOT / top).rglob("__init__.py")
    ]

    assert sorted(listed) == sorted(found)


def read_pins(path: Path) -> dict[str, tuple[int, ...]]:
    """The packages of a constraints file; each line is an exact version or a comment."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    return {name_of(line): numbers_of(line.partition("==")[2]) for line in lines}


def name_of(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", requirement.partition("==")[0]).lower()


def numbers_of(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def test_the_lowest_versions_are_the_bounds_that_are_promised() -> None:
    assert LOWEST.read_text() == format_lowest(), "python -m generate.constraints rewrites it"


def test_every_package_is_locked_at_or_above_its_bound() -> None:
    locked = read_pins(LOCKED)
    bounds = {name_of(name): numbers_of(version) for name, version in read_bounds()}

    assert bounds.keys() - locked.keys() == set()
    assert {name: locked[name] for name, least in bounds.items() if locked[name] < least} == {}


def test_the_citation_names_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version} " in (ROOT / "CHANGELOG.md").read_text()
