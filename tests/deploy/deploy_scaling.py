"""Checks of how many there are of each, and by which figures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from deploy_network import service_ports
from deploy_objects import PROGRAMS, ROOT, Check, Rendered, Workload
from deploy_pods import LONGEST_LOAD

from octavo.rpc.settings import parse_bytes

_ROW = re.compile(r"^\| `(octavo_\w+)` \| (\w+) \| ([\w, ]*) \| .+ \|$", re.MULTILINE)
_SERIES = re.compile(r"\b(octavo_\w+)\{([^}]*)\}")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def known_series() -> dict[str, set[str]]:
    """Return the labels of each series that a query may name, by the tables of docs/running.md, which a test holds."""
    known: dict[str, set[str]] = {}
    for name, kind, labels in _ROW.findall((ROOT / "docs" / "running.md").read_text()):
        own = set(filter(None, map(str.strip, labels.split(","))))
        if kind == "histogram":
            known |= {f"{name}_bucket": own | {"le"}, f"{name}_sum": own, f"{name}_count": own}
        else:
            known[name] = own
    return known


def _scalers(rendered: Rendered) -> list[tuple[str, dict[str, Any], int]]:
    """Return what scales: its name, its target, and the least that it leaves."""
    found = [
        (f"HorizontalPodAutoscaler {each['metadata']['name']}", each["spec"], each["spec"].get("minReplicas", 1))
        for each in rendered.kind("HorizontalPodAutoscaler")
    ]
    found += [
        (f"ScaledObject {each['metadata']['name']}", each["spec"], each["spec"].get("minReplicaCount", 0))
        for each in rendered.kind("ScaledObject")
    ]
    return [(name, spec["scaleTargetRef"], least) for name, spec, least in found]


def least_replicas(rendered: Rendered, workload: Workload) -> int:
    """Return how many pods of a workload there are at least."""
    scaled = [least for _, target, least in _scalers(rendered) if target["name"] == workload.name]
    return int(min(scaled)) if scaled else int(workload.object["spec"].get("replicas", 1))


@Check
def scaling(rendered: Rendered) -> Iterator[str]:
    """A scaler's target is there, has no other scaler, and no count of its own, which each apply would go back to."""
    targets: set[tuple[str, str]] = set()
    for name, target, _ in _scalers(rendered):
        key = target["kind"], target["name"]
        found = rendered.find(*key)
        if found is None or found["apiVersion"] != target["apiVersion"]:
            yield f"{name}: there is no {target}"
            continue
        if key in targets:
            yield f"{name}: {key} has another scaler"
        targets.add(key)
        if "replicas" in found["spec"]:
            yield f"{name}: {key} says its own count"
    for workload in rendered.services:
        key = workload.kind, workload.name
        if workload.name != "gateway" and key not in targets and "replicas" not in workload.object["spec"]:
            yield f"{workload.name}: nobody says how many"
    for each in rendered.kind("HorizontalPodAutoscaler"):
        workload = rendered.workload(each["spec"]["scaleTargetRef"]["name"])
        for metric in each["spec"]["metrics"]:
            if metric["resource"]["name"] not in workload.main["resources"]["requests"]:
                yield f"{each['metadata']['name']}: its pods request no {metric['resource']['name']}"


@Check
def one_scheduler(rendered: Rendered) -> Iterator[str]:
    """A cell has one scheduler: never two of them, and nothing that keeps the one from being moved."""
    scheduler = rendered.workload("scheduler")
    if (scheduler.kind, scheduler.object["spec"].get("replicas")) != ("StatefulSet", 1):
        yield f"{scheduler.object['spec'].get('replicas')} of a {scheduler.kind}"
    if any(target["name"] == "scheduler" for _, target, _ in _scalers(rendered)):
        yield "something scales it"
    if any(workload is scheduler for each in _budgets(rendered) for workload in rendered.selected(each["selector"])):
        yield "with a budget for the only one, no node could be emptied"


def _budgets(rendered: Rendered) -> list[dict[str, Any]]:
    return [each["spec"] for each in rendered.kind("PodDisruptionBudget")]


@Check
def budgets(rendered: Rendered) -> Iterator[str]:
    """Emptying nodes leaves at least one gateway and one executor, and is never blocked."""
    covered = set()
    for budget in _budgets(rendered):
        for workload in rendered.selected(budget["selector"]):
            covered.add(workload.name)
            if budget.get("maxUnavailable") != 1 or least_replicas(rendered, workload) < 2:
                yield f"{workload.name}: of {least_replicas(rendered, workload)} all but one may go, and one must"
    for name in {"gateway", "executor"} - covered:
        yield f"{name}: no budget"


@Check
def updates(rendered: Rendered) -> Iterator[str]:
    """A new version comes one pod after the other, each once the one before does its work; a broken one is replaced."""
    gateway = rendered.workload("gateway").object["spec"]
    if gateway["strategy"].get("rollingUpdate") != {"maxUnavailable": 0, "maxSurge": 1}:
        yield f"gateway: {gateway['strategy']}"
    if gateway.get("progressDeadlineSeconds", 600) < LONGEST_LOAD:
        yield "gateway: a first rollout counts as failed while the model is loaded"
    for workload in rendered.services:
        spec = workload.object["spec"]
        if workload.name != "scheduler" and spec.get("minReadySeconds", 0) < 10:
            yield f"{workload.name}: the next goes before the one before is in use"
        if workload.kind == "StatefulSet" and spec.get("podManagementPolicy") != "Parallel":
            yield f"{workload.name}: pods wait for one that never gets ready"
        if spec.get("updateStrategy", {}).get("type", "RollingUpdate") != "RollingUpdate":
            yield f"{workload.name}: {spec['updateStrategy']}"


@Check
def monitors(rendered: Rendered) -> Iterator[str]:
    """Prometheus finds the metrics page of every service, once."""
    for monitor in rendered.kind("ServiceMonitor"):
        for endpoint in monitor["spec"]["endpoints"]:
            found = [each.name for each, _ in service_ports(rendered, monitor["spec"]["selector"], endpoint["port"])]
            if sorted(found) != sorted(PROGRAMS) or endpoint["port"] != "metrics":
                yield f"it finds {found} by {endpoint['port']}"
            if endpoint.get("path") != "/metrics":
                yield f"no service has {endpoint.get('path')}"


@Check
def queries(rendered: Rendered) -> Iterator[str]:
    """A query names series that there are, with labels that they have, of this cell alone; somebody scrapes them."""
    known = known_series()
    for scaled in rendered.kind("ScaledObject"):
        if not rendered.kind("ServiceMonitor"):
            yield "nobody scrapes what is asked for"
        for trigger in scaled["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            named = _SERIES.findall(query)
            if not named or len(named) != len(re.findall(r"octavo_\w+", query)):
                yield f"not of this cell alone: {query}"
            for name, matchers in named:
                labels = dict(_LABEL.findall(matchers))
                if labels.pop("namespace", None) != scaled["metadata"]["namespace"]:
                    yield f"of another namespace: {query}"
                if name not in known or not set(labels) <= known[name]:
                    yield f"no such series: {name}{{{matchers}}}"
            if "histogram_quantile" in query and "> 0) or vector(0)" not in query:
                yield f"without requests this is no number: {query}"
            if not float(trigger["metadata"]["threshold"]) > 0:
                yield f"no threshold: {trigger}"
            is_ratio = "sum(octavo_scheduler_sequences" not in query
            if trigger["metricType"] != ("Value" if is_ratio else "AverageValue"):
                yield f"{trigger['metricType']} of: {query}"


@Check
def memory(rendered: Rendered) -> Iterator[str]:
    """KV memory that is asked for leaves room for weights within the limit."""
    executor = rendered.workload("executor")
    asked = rendered.get("ConfigMap", "executor")["data"].get("OCTAVO_KV_MEMORY")
    limit = executor.main.get("resources", {}).get("limits", {}).get("memory", "0")
    if asked is not None and parse_bytes(asked) > 0.7 * parse_bytes(limit):
        yield f"KV blocks get {asked} of {limit}"
