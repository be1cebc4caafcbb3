"""Checks of pods: what they may do, what they may use, how they start and how they end."""

from __future__ import annotations

import contextlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from deploy_objects import ROOT, Check, Rendered, Workload
from deploy_settings import Missing, image_environment, image_program, read_settings
from kustomize_render import containers

from executor_svc.server import STOP_GRACE as EXECUTOR_STOP
from gateway.server import _CUT, _SCHEDULER_COMES, _SCHEDULER_HEARS, _STREAMS_END
from octavo.rpc.settings import SettingsError
from scheduler_svc.server import STOP_GRACE as SCHEDULER_STOP

MARGIN = 5.0
"""Seconds beyond what a service's own constants add up to, before it is killed."""
LONGEST_STEP = 30.0
"""Seconds that the step which an executor waits for may take."""
LONGEST_LOAD = 1800
"""Seconds that a model may take to load from a slow volume."""
USER = 10001
LIMITED = ("memory",)
REQUESTED = ("cpu", "memory")


def _everywhere(rendered: Rendered) -> Iterator[tuple[str, Workload, dict[str, Any]]]:
    for workload in rendered.workloads:
        for container in containers(workload.pod):
            yield f"{workload.name}/{container['name']}", workload, container


@Check
def confined(rendered: Rendered) -> Iterator[str]:
    """No pod may do more than Kubernetes' own level `restricted` allows, nor write to its root, nor call Kubernetes."""
    for workload in rendered.workloads:
        pod = workload.pod.get("securityContext", {})
        if not pod.get("runAsNonRoot") or pod.get("runAsUser") != USER or pod.get("runAsGroup") != USER:
            yield f"{workload.name}: it has to run as the images' user, {USER}"
        if pod.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{workload.name}: no seccomp profile"
        if workload.pod.get("automountServiceAccountToken") is not False:
            yield f"{workload.name}: it gets a token for Kubernetes' API, which it does not call"
        if workload.pod.get("enableServiceLinks") is not False:
            yield f"{workload.name}: a Service may set an OCTAVO_... variable"
        for name in {"hostNetwork", "hostPID", "hostIPC"} & set(workload.pod):
            yield f"{workload.name}: {name}"
    for place, _, container in _everywhere(rendered):
        allowed = {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        if container.get("securityContext") != allowed:
            yield f"{place}: {container.get('securityContext')}"


@Check
def user_of_images(rendered: Rendered) -> Iterator[str]:
    """The user is the one that every image makes, so that all can read what the job writes."""
    for program in ("gateway", "scheduler", "executor"):
        if f"--uid {USER} " not in (ROOT / "deploy" / f"{program}.Dockerfile").read_text():
            yield f"the image of {program} has another user than {USER}"
    for workload in rendered.workloads:
        has_claim = any("persistentVolumeClaim" in each for each in workload.pod.get("volumes", ()))
        if has_claim and workload.pod.get("securityContext", {}).get("fsGroup") != USER:
            yield f"{workload.name}: its volume need not belong to {USER}"


@Check
def images(rendered: Rendered) -> Iterator[str]:
    """Every image is one that a Dockerfile makes, of this version, and is the one that the container needs."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    needed = {"gateway": "gateway", "scheduler": "scheduler", "executor": "executor", "model": "executor"}
    for place, workload, container in _everywhere(rendered):
        if image_program(container) != needed.get(workload.name):
            yield f"{place}: image {container['image']}"
        tag = container["image"].rpartition(":")[2]
        if tag not in (version, f"{version}-gpu"):
            yield f"{place}: {container['image']} is not of version {version}"


@Check
def mounts(rendered: Rendered) -> Iterator[str]:
    """Models lie where the image looks for them, only the job may write them, and temporary files have a place."""
    for place, workload, container in _everywhere(rendered):
        volumes = {each["name"]: each for each in workload.pod.get("volumes", ())}
        for mount in container.get("volumeMounts", ()):
            if mount["name"] not in volumes:
                yield f"{place}: there is no volume {mount['name']}"
                continue
            volume = volumes[mount["name"]]
            if (claim := volume.get("persistentVolumeClaim")) is not None:
                if rendered.find("PersistentVolumeClaim", claim["claimName"]) is None:
                    yield f"{place}: there is no claim {claim['claimName']}"
                if mount["mountPath"] != image_environment(image_program(container))["OCTAVO_HOME"]:
                    yield f"{place}: models are looked for elsewhere than in {mount['mountPath']}"
                if bool(mount.get("readOnly")) == (workload.kind == "Job"):
                    yield f"{place}: the job writes the models, and only the job"
            elif "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"] and workload.kind != "Job":
                yield f"{place}: {mount['mountPath']} may fill the node's disk"
        if container is workload.main and "/tmp" not in {each["mountPath"] for each in container["volumeMounts"]}:
            yield f"{place}: no /tmp"
        used = {each["mountPath"] for each in container.get("volumeMounts", ())}
        if image_program(container) != "scheduler" and "/var/lib/octavo" not in used:
            yield f"{place}: no models"


@Check
def resources(rendered: Rendered) -> Iterator[str]:
    """Each container says what it needs, and has a bound on its memory."""
    for place, _, container in _everywhere(rendered):
        given = container.get("resources", {})
        for name in (each for each in REQUESTED if each not in given.get("requests", {})):
            yield f"{place}: no request of {name}"
        for name in (each for each in LIMITED if each not in given.get("limits", {})):
            yield f"{place}: no limit of {name}"


@Check
def probes(rendered: Rendered) -> Iterator[str]:
    """A service gets calls while health says SERVING, and is restarted only for what a restart mends.

    Health of gateway and scheduler tells of what is behind them, so their liveness is their event loop's; an executor's
    tells of its own device.
    """
    for workload in rendered.services:
        main = workload.main
        grpc_ports = {number for name, number in workload.ports.items() if name == "grpc"}
        for kind in ("readinessProbe", "livenessProbe", "startupProbe"):
            probe = main.get(kind)
            if probe is None:
                if kind != "startupProbe":
                    yield f"{workload.name}: no {kind}"
                continue
            if "grpc" in probe:
                if probe["grpc"]["port"] not in grpc_ports or probe["grpc"].get("service"):
                    yield f"{workload.name}: {kind} asks {probe['grpc']}; health is of the process, at {grpc_ports}"
            elif probe.get("httpGet") != {"path": "/metrics", "port": "metrics"}:
                yield f"{workload.name}: {kind} asks nothing that a service answers"
        if "grpc" not in main.get("readinessProbe", {}):
            yield f"{workload.name}: readiness is what health says"
        if ("grpc" in main.get("livenessProbe", {})) != (workload.name == "executor"):
            yield f"{workload.name}: liveness by what is behind it, or not by its device"
        if workload.name == "executor" and _seconds(main.get("startupProbe", {})) < LONGEST_LOAD:
            yield f"executor: a model that loads for {LONGEST_LOAD} s is never served"


def _seconds(probe: Mapping[str, Any]) -> float:
    return float(probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3))


@Check
def endings(rendered: Rendered) -> Iterator[str]:
    """No service is killed before it has ended by itself; a gateway gets no calls any more when it begins to."""
    for workload in rendered.services:
        with contextlib.suppress(SettingsError, Missing):
            needs = _stop_seconds(workload, read_settings(rendered, workload)) + MARGIN
            if (given := workload.pod.get("terminationGracePeriodSeconds", 30)) < needs:
                yield f"{workload.name}: it needs {needs:g} s to end, and is killed after {given}"
    if _pre_stop(rendered.workload("gateway")) < 5:
        yield "gateway: no preStop, and calls are sent to it until every proxy knows that it ends"


def _stop_seconds(workload: Workload, settings: Any) -> float:
    """Return the longest that a service takes to stop, its preStop included."""
    own = {
        "gateway": lambda: settings.drain_grace + _SCHEDULER_COMES + _STREAMS_END + 2 * _CUT + _SCHEDULER_HEARS,
        "scheduler": lambda: SCHEDULER_STOP,
        "executor": lambda: EXECUTOR_STOP + LONGEST_STEP,
    }
    return _pre_stop(workload) + float(own[workload.name]())


def _pre_stop(workload: Workload) -> float:
    command = workload.main.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    assert re.fullmatch(r"sleep \d+", " ".join(command)), command
    return float(command[1])


@Check
def spread(rendered: Rendered) -> Iterator[str]:
    """Pods that there are several of are spread over nodes and zones; where that cannot be they run all the same."""
    for name in ("gateway", "executor"):
        workload = rendered.workload(name)
        rules = workload.pod.get("topologySpreadConstraints", ())
        if {rule["topologyKey"] for rule in rules} != {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}:
            yield f"{name}: spread over {[rule['topologyKey'] for rule in rules]}"
        for rule in rules:
            if rendered.selected(rule["labelSelector"]) != [workload] or rule["whenUnsatisfiable"] != "ScheduleAnyway":
                yield f"{name}: {rule}"
