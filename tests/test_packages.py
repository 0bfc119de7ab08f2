"""What a wheel holds."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_package_of_the_three_folders_is_in_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = [
        "stepsplit." + ".".join(path.parent.relative_to(ROOT).parts)
        for top in ("collectors", "analyzer", "dashboard")
        for path in (ROOT / top).rglob("__init__.py")
    ]

    assert sorted(listed) == sorted(found)
