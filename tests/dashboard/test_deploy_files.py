"""examples/deploy: what the files start exists, and no container has more rights than it needs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from stepsplit.dashboard.commands import load_command

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
MANIFESTS = [
    manifest
    for path in sorted((DEPLOY / "kubernetes").rglob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text())
]
PODS = {
    each["metadata"]["name"]: each["spec"]["template"]["spec"]
    for each in MANIFESTS
    if each["kind"] in ("Deployment", "StatefulSet")
}


def find_commands() -> list[list[str]]:
    (words,) = re.findall(r"^CMD (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.M)
    ours = [one for one in COMPOSE.values() if one["image"] == "stepsplit"]
    pods = [one["containers"][0] for one in PODS.values()]
    return [
        json.loads(words),
        *(one["command"] for one in ours),
        *(one["args"] for one in pods if one["image"] == "stepsplit"),
    ]


@pytest.mark.parametrize("words", find_commands(), ids=" ".join)
def test_each_command_and_its_options_exist(words: list[str]) -> None:
    name, *arguments = words
    command = load_command(name)

    with command.make_context(name, arguments) as context:
        assert isinstance(context, click.Context)


def test_settings_are_those_that_a_command_reads() -> None:
    options = [*load_command("dashboard").params, *load_command("worker").params]
    known = {name for one in options if isinstance(name := one.envvar, str)}
    # Passwords are read from a file or a variable.
    known.add("STEPSPLIT_PASSWORD")
    texts = [path.read_text() for path in DEPLOY.rglob("*") if path.is_file()]

    assert set(re.findall(r"\bSTEPSPLIT_[A-Z_]+", "".join(texts))) <= known


@pytest.mark.parametrize("name", PODS)
def test_a_pod_has_no_rights_and_a_limit(name: str) -> None:
    pod = PODS[name]
    (container,) = pod["containers"]
    own: dict[str, Any] = container["securityContext"]

    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert (own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"]) == (False, True)
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert "memory" in container["resources"]["limits"]
    assert "livenessProbe" in container or name == "worker"
    policies = [each for each in MANIFESTS if each["kind"] == "NetworkPolicy"]
    assert [name] == [
        one["metadata"]["name"]
        for one in policies
        if one["spec"]["podSelector"]["matchLabels"] == {"component": name}
    ]


@pytest.mark.parametrize("name", [n for n, one in COMPOSE.items() if one["image"] == "stepsplit"])
def test_a_container_of_compose_writes_to_its_volumes_alone(name: str) -> None:
    service = COMPOSE[name]

    assert (service["read_only"], service["tmpfs"], service["cap_drop"]) == (
        True,
        ["/tmp"],
        ["ALL"],
    )
    assert [each.partition(":")[2] or each for each in service["volumes"]] == ["/data"]
