"""docs/kubernetes.md tells what the manifests have."""

from __future__ import annotations

import itertools
import re

from deploy_objects import KUBERNETES, ROOT, overlay
from deploy_settings import SECRETS
from kustomize_render import identity

from octavo.settings import (
    ADMIN_PORT,
    EXECUTOR_METRICS_PORT,
    EXECUTOR_PORT,
    GATEWAY_METRICS_PORT,
    GATEWAY_PORT,
    HTTP_PORT,
    SCHEDULER_METRICS_PORT,
    SCHEDULER_PORT,
)

PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
KINDS = {"deployment": "Deployment", "statefulset": "StatefulSet", "service": "Service", "job": "Job"}


def section(title: str) -> str:
    """Return a section of the page."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_object_is_told_of() -> None:
    """The table has each object of the overlay that has all of them, and no other."""
    rows = re.findall(r"^\| ([A-Z]\w+) ([\w, -]+) \|", section("What is there"), re.MULTILINE)
    told = [(kind, name) for kind, names in rows for name in names.split(", ")]
    assert sorted(told) == sorted(identity(each) for each in overlay("production").objects)


def test_commands_name_what_is_there() -> None:
    """Objects, overlays and components of the commands exist, as do the Secrets that a reader is told to make."""
    objects = {identity(each) for each in overlay("production").objects}
    named = re.findall(rf"\b({'|'.join(KINDS)})/([\w-]+)", PAGE)
    assert {(KINDS[kind], name) for kind, name in named} <= objects
    assert len(named) > 5
    for folder in re.findall(r"\b((?:overlays|components)/[\w-]+)", PAGE):
        assert (KUBERNETES / folder / "kustomization.yaml").is_file(), folder
    made = re.findall(r"secret generic (\w+)((?:\s+--from-\w+=\S+)+)", PAGE)
    pairs = {(name, key) for name, flags in made for key in re.findall(r"--from-\w+=([\w-]+)=", flags)}
    assert pairs == {*SECRETS, ("gateway", "api-keys")}


def test_ports_are_the_services_own() -> None:
    """The table of ways, and the objects', have the ports that the programs have."""
    ports = re.findall(r"\b\d{4,5}\b", section("Who may talk to whom"))
    metrics = {GATEWAY_METRICS_PORT, EXECUTOR_METRICS_PORT}
    assert set(map(int, ports)) == {GATEWAY_PORT, HTTP_PORT, ADMIN_PORT, SCHEDULER_PORT, EXECUTOR_PORT} | metrics
    told = dict(re.findall(r"^\| Service ([\w-]+) \|(.*)$", section("What is there"), re.MULTILINE))
    listed = {name: list(map(int, re.findall(r"\b\d{4,5}\b", text))) for name, text in told.items()}
    assert listed == {
        "gateway": [GATEWAY_PORT, HTTP_PORT],
        "gateway-internal": [ADMIN_PORT, GATEWAY_METRICS_PORT],
        "scheduler": [SCHEDULER_PORT, SCHEDULER_METRICS_PORT],
        "executor": [EXECUTOR_PORT, EXECUTOR_METRICS_PORT],
    }


def test_numbers_are_those_of_the_manifests() -> None:
    """Seconds and counts that the page gives are what is applied."""
    rendered = overlay("production")
    gateway, executor = (rendered.workload(name) for name in ("gateway", "executor"))
    grace = rendered.get("ConfigMap", "gateway")["data"]["OCTAVO_DRAIN_GRACE"]
    sleep = gateway.main["lifecycle"]["preStop"]["exec"]["command"][1]
    killed = [rendered.workload(name).pod["terminationGracePeriodSeconds"] for name in ("scheduler", "executor")]
    words = " ".join(section("Stopping").split())
    assert f"sleeps for {sleep} s" in words
    assert f"`OCTAVO_DRAIN_GRACE` ({grace} s here)" in words
    assert f"killed after {gateway.pod['terminationGracePeriodSeconds']}:" in words
    assert f"killed after {killed[0]} and {killed[1]})" in words
    orphans = rendered.get("ConfigMap", "scheduler")["data"]["OCTAVO_ORPHAN_TIMEOUT"]
    assert f"`OCTAVO_ORPHAN_TIMEOUT` ({orphans} s here)" in section("Upgrade")
    assert f"for {executor.object['spec']['minReadySeconds']} s, time for its session" in section("Upgrade")
    scaled = rendered.get("ScaledObject", "executor")["spec"]
    thresholds = [trigger["metadata"]["threshold"] for trigger in scaled["triggers"]]
    assert f"keeps {scaled['minReplicaCount']} to {scaled['maxReplicaCount']} executors" in section("Scale")
    assert re.search(
        rf"octavo_queue_seconds`, {thresholds[0]} s\).*, {thresholds[1]} for each", section("Scale"), re.DOTALL
    )
    spec = rendered.get("HorizontalPodAutoscaler", "gateway")["spec"]
    assert f"{spec['minReplicas']} to {spec['maxReplicas']} gateways" in section("What is there")


def test_the_page_follows_from_each_other_one() -> None:
    """README and the page on running lead here; overlays of the table are those that there are."""
    for page in ("README.md", "docs/running.md"):
        assert "kubernetes.md" in (ROOT / page).read_text()
    overlays = re.findall(r"^\| `overlays/([\w-]+)` \|", PAGE, re.MULTILINE)
    assert sorted(overlays) == sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
    text = itertools.chain.from_iterable(path.read_text().splitlines() for path in KUBERNETES.rglob("*.yaml"))
    assert max(map(len, text)) <= 120
