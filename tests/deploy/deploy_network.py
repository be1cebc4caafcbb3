"""Checks of names, ports and ways: who finds whom, and who may talk to whom."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from deploy_objects import PROGRAMS, Check, Rendered, Workload, selects
from deploy_settings import Missing, read_settings

from octavo.rpc.settings import SettingsError

PART = "app.kubernetes.io/part-of"
COMPONENT = "app.kubernetes.io/component"
HERE = "octavo"


class Peer(NamedTuple):
    """Somebody at one end of a connection: a pod's labels, and its namespace; both None for what is no pod."""

    name: str
    labels: Mapping[str, str] | None
    namespace: str | None


OUTSIDERS = (
    Peer("client", {"octavo-client": "true"}, "elsewhere"),
    Peer("operator", {"octavo-operator": "true"}, HERE),
    Peer("operator-elsewhere", {"octavo-operator": "true"}, "elsewhere"),
    Peer("prometheus", {"app": "prometheus"}, "monitoring"),
    Peer("stranger", {}, "elsewhere"),
    Peer("neighbour", {}, HERE),
    Peer("world", None, None),
)
OUTSIDE_PORTS = (("TCP", 53), ("UDP", 53), ("TCP", 443), ("TCP", 80))
"""Ports of others that are tried."""


def peers(rendered: Rendered) -> list[Peer]:
    """Return whoever may be at an end of a connection."""
    return [*(Peer(each.name, each.labels, HERE) for each in rendered.workloads), *OUTSIDERS]


def allowed(rendered: Rendered) -> set[tuple[str, str, str]]:
    """Return the connections that the policies let through: from, to, protocol:port."""
    found = set()
    everybody = peers(rendered)
    for source in everybody:
        for target in everybody:
            for protocol, port in _ports_of(rendered, target):
                if _is_open(rendered, source, target, protocol, port):
                    found.add((source.name, target.name, f"{protocol}:{port}"))
    return {each for each in found if {each[0], each[1]} & {*PROGRAMS, "model"}}


def wanted(rendered: Rendered) -> set[tuple[str, str, str]]:
    """Return the connections that the services make, by their own settings and what the pages say."""
    gateway, scheduler, executor = (rendered.workload(name).ports for name in PROGRAMS)
    found = {
        ("client", "gateway", f"TCP:{gateway['grpc']}"),
        ("client", "gateway", f"TCP:{gateway['http']}"),
        ("operator", "gateway", f"TCP:{gateway['admin']}"),
        ("gateway", "scheduler", f"TCP:{scheduler['grpc']}"),
        ("scheduler", "executor", f"TCP:{executor['grpc']}"),
    }
    if rendered.find("ServiceMonitor", "octavo") is not None:
        found |= {("prometheus", name, f"TCP:{rendered.workload(name).ports['metrics']}") for name in PROGRAMS}
    names = {(name, protocol) for name in ("gateway", "scheduler", "model") for protocol in ("TCP", "UDP")}
    return found | {(name, "world", f"{protocol}:53") for name, protocol in names} | {("model", "world", "TCP:443")}


def _ports_of(rendered: Rendered, target: Peer) -> list[tuple[str, int]]:
    if target.name in PROGRAMS:
        return [("TCP", port) for port in rendered.workload(target.name).ports.values()]
    return list(OUTSIDE_PORTS) if target.name == "world" else []


def _is_open(rendered: Rendered, source: Peer, target: Peer, protocol: str, port: int) -> bool:
    ways = (("Ingress", target, source, "from"), ("Egress", source, target, "to"))
    return all(_lets(rendered, *way, protocol, port) for way in ways)


def _lets(rendered: Rendered, way: str, owner: Peer, other: Peer, word: str, protocol: str, port: int) -> bool:
    """Whether the policies of a pod let a connection in, or out. What no policy chooses is open."""
    if owner.labels is None or owner.namespace != HERE:
        return True
    policies = [
        each["spec"]
        for each in rendered.kind("NetworkPolicy")
        if selects(each["spec"]["podSelector"], owner.labels) and way in each["spec"]["policyTypes"]
    ]
    rules = [rule for policy in policies for rule in policy.get(way.lower(), ())]
    return not policies or any(
        _matches(rule.get(word), other) and _has_port(rule.get("ports"), protocol, port) for rule in rules
    )


def _matches(selectors: list[dict[str, Any]] | None, other: Peer) -> bool:
    if selectors is None:
        return True
    if other.labels is None:
        return False
    for each in selectors:
        is_there = other.namespace == HERE
        if "namespaceSelector" in each:
            is_there = selects(each["namespaceSelector"], {"kubernetes.io/metadata.name": str(other.namespace)})
        if is_there and selects(each.get("podSelector", {}), other.labels):
            return True
    return False


def _has_port(ports: list[dict[str, Any]] | None, protocol: str, port: int) -> bool:
    return ports is None or any(
        each.get("protocol", "TCP") == protocol and each.get("port", port) == port for each in ports
    )


@Check
def network(rendered: Rendered) -> Iterator[str]:
    """The policies let through exactly the connections that are made."""
    for way in sorted(allowed(rendered) - wanted(rendered)):
        yield f"open without need: {' '.join(way)}"
    for way in sorted(wanted(rendered) - allowed(rendered)):
        yield f"closed: {' '.join(way)}"


@Check
def selectors(rendered: Rendered) -> Iterator[str]:
    """Every workload owns its own pods alone, and every selector chooses the pods of the workload that it is for."""
    for workload in rendered.workloads:
        if workload.kind != "Job" and rendered.selected(workload.object["spec"]["selector"]) != [workload]:
            yield f"{workload.name}: its selector is not for its pods alone"
        if workload.labels.get(PART) != HERE or workload.labels.get(COMPONENT) != workload.name:
            yield f"{workload.name}: its pods are labelled {workload.labels}"
    for service in rendered.kind("Service"):
        name = service["metadata"]["name"]
        chosen = rendered.selected({"matchLabels": service["spec"]["selector"]})
        if [each.name for each in chosen] != [service["metadata"]["labels"].get(COMPONENT)]:
            yield f"Service {name}: it is for the pods of {[each.name for each in chosen]}"
        for port in service["spec"]["ports"]:
            for workload in chosen:
                if workload.ports.get(port["targetPort"]) != port["port"] or port["name"] != port["targetPort"]:
                    yield f"Service {name}: {workload.name} has no port {port['targetPort']} of number {port['port']}"
    for budget in rendered.kind("PodDisruptionBudget"):
        chosen = rendered.selected(budget["spec"]["selector"])
        if [each.name for each in chosen] != [budget["metadata"]["name"]]:
            yield f"PodDisruptionBudget {budget['metadata']['name']}: it is for {[each.name for each in chosen]}"


@Check
def finding(rendered: Rendered) -> Iterator[str]:
    """Each service finds the next by a Service that is there, which has the addresses of all its pods, ready or not."""
    for name, setting, target in (("gateway", "scheduler", "scheduler"), ("scheduler", "executors", "executor")):
        with contextlib.suppress(SettingsError, Missing):
            address = getattr(read_settings(rendered, rendered.workload(name)), setting)
            host, _, port = address.rpartition(":")
            service = rendered.find("Service", host)
            if service is None or int(port) not in {each["port"] for each in service["spec"]["ports"]}:
                yield f"{name}: no Service is {address}"
            elif [each.name for each in rendered.selected({"matchLabels": service["spec"]["selector"]})] != [target]:
                yield f"{name}: {address} is no {target}"
            elif service["spec"].get("clusterIP") != "None" or not service["spec"].get("publishNotReadyAddresses"):
                yield f"{name}: {host} has not the address of every {target}"
    for workload in (each for each in rendered.workloads if each.kind == "StatefulSet"):
        service = rendered.find("Service", workload.object["spec"]["serviceName"])
        if service is None or service["spec"].get("clusterIP") != "None":
            yield f"{workload.name}: its pods have no names, since {workload.object['spec']['serviceName']} is none"


@Check
def exposure(rendered: Rendered) -> Iterator[str]:
    """The Service for clients has nothing else than what is for clients."""
    ports = {each["name"] for each in rendered.get("Service", "gateway")["spec"]["ports"]}
    if ports != {"grpc", "http"}:
        yield f"clients reach {sorted(ports)}"
    for service in rendered.kind("Service"):
        if service["spec"].get("type", "ClusterIP") != "ClusterIP":
            yield f"Service {service['metadata']['name']} is reached from outside"


@Check
def namespace(rendered: Rendered) -> Iterator[str]:
    """Everything is in the namespace that is made for it."""
    there = {each["metadata"]["name"] for each in rendered.kind("Namespace")}
    for each in rendered.objects:
        if each["kind"] != "Namespace" and each["metadata"].get("namespace") not in there:
            yield f"{each['kind']} {each['metadata']['name']} is in {each['metadata'].get('namespace')}"


def service_ports(rendered: Rendered, selector: Mapping[str, Any], name: str) -> list[tuple[Workload, int]]:
    """Return what a ServiceMonitor finds: each workload behind a chosen Service that has a port of this name."""
    return [
        (workload, port["port"])
        for service in rendered.kind("Service")
        if selects(selector, service["metadata"].get("labels", {}))
        for port in service["spec"]["ports"]
        if port["name"] == name
        for workload in rendered.selected({"matchLabels": service["spec"]["selector"]})
    ]
