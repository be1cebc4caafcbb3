"""Faults to plant in what is rendered, each with the check that is to find it and words of its complaint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

GONE = object()
"""In place of a value: the field is taken away."""
POD = "spec.template.spec"
MAIN = f"{POD}.containers.0"
GATEWAY, SCHEDULER, EXECUTOR = "Deployment/gateway", "StatefulSet/scheduler", "StatefulSet/executor"
COMPONENT = "app.kubernetes.io/component"


class Fault(NamedTuple):
    """`path` leads into the object `where` (kind/name); `value` is put there, or a function of what is there."""

    check: str
    where: str
    path: str
    value: Any
    complaint: str
    overlay: str = "production"


def appended(*values: Any) -> Callable[[list[Any]], list[Any]]:
    """Return a function that puts values behind a list's own."""
    return lambda there: [*there, *values]


def within(change: Any) -> Callable[[Any], Any]:
    """Return a function that replaces text: `change` is (from, to)."""
    return lambda there: there.replace(*change)


def faults() -> Iterator[Fault]:
    """Yield all of them."""
    yield from _settings_faults()
    yield from _pod_faults()
    yield from _network_faults()
    yield from _scaling_faults()
    yield from _schema_faults()


def _settings_faults() -> Iterator[Fault]:
    for where, path, value, complaint in (
        ("ConfigMap/scheduler", "data.OCTAVO_ORPHAN_TIMEOUT", "soon", "OCTAVO_ORPHAN_TIMEOUT='soon'"),
        ("ConfigMap/scheduler", "data.OCTAVO_ORFAN_TIMEOUT", "1", "no Octavo program knows this variable"),
        ("ConfigMap/executor", "data.OCTAVO_DEVICE", "gpu", "must be one of cpu, cuda"),
        (SCHEDULER, f"{MAIN}.args", ["--workers", "2"], "--workers"),
        (EXECUTOR, f"{MAIN}.envFrom", [], "--model (or OCTAVO_MODEL) is required"),
        (GATEWAY, f"{MAIN}.env.1.valueFrom.secretKeyRef.key", "key", "nobody is told to make"),
        (GATEWAY, f"{MAIN}.env.0.value", "/etc/octavo/keys", "has no /etc/octavo/keys"),
        (GATEWAY, f"{MAIN}.env.0.value", "/etc/keys", "OCTAVO_API_KEYS='/etc/keys'"),
        (EXECUTOR, f"{MAIN}.resources.requests.cpu", GONE, "OCTAVO_THREADS is requests.cpu"),
        (SCHEDULER, f"{MAIN}.envFrom.0.configMapRef.name", "schedule", "no ConfigMap schedule"),
    ):
        yield Fault("settings", where, path, value, complaint)
    yield Fault(
        "own_variables", "ConfigMap/scheduler", "data.OCTAVO_DRAIN_GRACE", "9", "OCTAVO_DRAIN_GRACE means nothing"
    )
    yield Fault("ports", EXECUTOR, f"{MAIN}.ports.0.containerPort", 50051, "it listens on")
    yield Fault("ports", GATEWAY, f"{MAIN}.ports.1.name", "web", "it listens on")
    yield Fault("ports", "ConfigMap/gateway", "data.OCTAVO_HTTP_PORT", "8001", "it listens on")
    yield Fault("ports", "ConfigMap/gateway", "data.OCTAVO_GATEWAY_BIND", "127.0.0.1", "nobody reaches it")
    wait = f"{POD}.initContainers.0.command"
    yield Fault("commands", GATEWAY, wait, ["octavo", "prepare", "--await", "m"], "--await")
    yield Fault("commands", GATEWAY, wait, ["sh", "-c", "true"], "sh is no command")
    yield Fault("commands", "Job/model", f"{MAIN}.command.3", "$(MODEL)", "no model '$(MODEL)'")
    yield Fault("commands", "Job/model", f"{MAIN}.env.0.valueFrom.configMapKeyRef.key", "NAME", "has no NAME")
    yield Fault("one_model", GATEWAY, f"{MAIN}.env", appended({"name": "OCTAVO_MODEL", "value": "o/m"}), "['Qwen")
    for where in (GATEWAY, SCHEDULER, EXECUTOR):
        fixed = appended({"name": "OCTAVO_CELL", "value": "mine"})
        yield Fault("one_cell", where, f"{MAIN}.env", fixed, "its cell is 'mine' in every namespace")
    yield Fault("one_cell", SCHEDULER, f"{MAIN}.env", [], "its cell is 'default'")
    yield Fault("devices", EXECUTOR, f"{MAIN}.resources.limits", {"memory": "8Gi"}, "the device is cuda")
    yield Fault("devices", "ConfigMap/executor", "data.OCTAVO_DEVICE", "cuda", "and the image", "cpu")
    yield Fault("devices", EXECUTOR, f"{MAIN}.env", [], "compiled kernels go to the home folder")
    yield Fault("devices", EXECUTOR, f"{MAIN}.env", [], "takes all of the node", "cpu")
    threads = f"{MAIN}.env.0"
    yield Fault("devices", EXECUTOR, f"{threads}.value", "4", "2 processes of 4 threads", "tensor-parallel")
    divided = f"{threads}.valueFrom.resourceFieldRef.divisor"
    yield Fault("settings", EXECUTOR, divided, "2", "no divisor but 1", "cpu")


def _pod_faults() -> Iterator[Fault]:
    for where in (GATEWAY, SCHEDULER, EXECUTOR, "Job/model"):
        yield Fault("confined", where, f"{POD}.enableServiceLinks", GONE, "may set an OCTAVO_")
    for path, value, complaint in (
        ("automountServiceAccountToken", True, "token"),
        ("securityContext.runAsUser", 0, "images' user"),
        ("securityContext.seccompProfile", GONE, "seccomp"),
        ("hostNetwork", True, "hostNetwork"),
        ("containers.0.securityContext.readOnlyRootFilesystem", False, "readOnlyRootFilesystem"),
        ("initContainers.0.securityContext", GONE, "wait-for-model: None"),
        ("containers.0.securityContext.capabilities.add", ["NET_ADMIN"], "NET_ADMIN"),
    ):
        yield Fault("confined", GATEWAY, f"{POD}.{path}", value, complaint)
    yield Fault("user_of_images", "Job/model", f"{POD}.securityContext.fsGroup", GONE, "need not belong")
    yield Fault("images", SCHEDULER, f"{MAIN}.image", "octavo-gateway:0.1.0", "image octavo-gateway")
    yield Fault("images", SCHEDULER, f"{MAIN}.image", "octavo-scheduler", "not of version")
    yield Fault("mounts", EXECUTOR, f"{MAIN}.volumeMounts.0.readOnly", False, "only the job")
    yield Fault("mounts", "Job/model", f"{MAIN}.volumeMounts.0.readOnly", True, "the job writes")
    yield Fault(
        "mounts", GATEWAY, f"{POD}.initContainers.0.volumeMounts.0.mountPath", "/models", "looked for elsewhere"
    )
    yield Fault("mounts", SCHEDULER, f"{MAIN}.volumeMounts", [], "no /tmp")
    yield Fault("mounts", SCHEDULER, f"{POD}.volumes", [], "no volume tmp")
    yield Fault("mounts", SCHEDULER, f"{POD}.volumes.0.emptyDir", {}, "fill the node's disk")
    yield Fault("mounts", "PersistentVolumeClaim/models", "metadata.name", "weights", "no claim models")
    yield Fault("resources", SCHEDULER, f"{MAIN}.resources.limits", GONE, "no limit of memory")
    yield Fault("resources", "Job/model", f"{MAIN}.resources.requests.cpu", GONE, "no request of cpu")
    yield Fault("probes", GATEWAY, f"{MAIN}.livenessProbe", {"grpc": {"port": 50051}}, "what is behind it")
    yield Fault("probes", EXECUTOR, f"{MAIN}.livenessProbe.grpc.port", 9103, "asks {'port': 9103}")
    yield Fault("probes", EXECUTOR, f"{MAIN}.startupProbe", GONE, "never served")
    yield Fault("probes", SCHEDULER, f"{MAIN}.readinessProbe", GONE, "no readinessProbe")
    yield Fault("probes", SCHEDULER, f"{MAIN}.readinessProbe.grpc.service", "Scheduler", "health is of the process")
    yield Fault("probes", SCHEDULER, f"{MAIN}.livenessProbe.httpGet.path", "/healthz", "nothing that a service answers")
    yield Fault("endings", "ConfigMap/gateway", "data.OCTAVO_DRAIN_GRACE", "600", "killed after 340")
    yield Fault("endings", EXECUTOR, f"{POD}.terminationGracePeriodSeconds", 10, "killed after 10")
    yield Fault("endings", GATEWAY, f"{MAIN}.lifecycle", GONE, "no preStop")
    zones = f"{POD}.topologySpreadConstraints"
    yield Fault("spread", EXECUTOR, zones, [], "spread over []")
    yield Fault("spread", EXECUTOR, f"{zones}.0.labelSelector.matchLabels.{COMPONENT}", "gateway", "gateway")
    yield Fault("spread", EXECUTOR, f"{zones}.0.whenUnsatisfiable", "DoNotSchedule", "DoNotSchedule")


def _network_faults() -> Iterator[Fault]:
    rule = "spec.ingress.0"
    for policy, path, value, complaint in (
        ("gateway", f"{rule}.ports", GONE, "open without need: client gateway TCP:50054"),
        ("gateway", f"{rule}.from", GONE, "open without need: stranger gateway TCP:50051"),
        ("gateway", "spec.ingress.1.from.0.namespaceSelector", {}, "operator-elsewhere gateway TCP:50054"),
        ("gateway", "spec.egress.0.ports.0.port", 50053, "closed: gateway scheduler TCP:50052"),
        ("executor", f"{rule}.ports.0.port", 50052, "closed: scheduler executor TCP:50053"),
        ("executor", f"{rule}.from.0.podSelector.matchLabels.{COMPONENT}", "gateway", "closed: scheduler executor"),
        ("scheduler", "spec.policyTypes", ["Egress"], "closed: gateway scheduler TCP:50052"),
        ("names", "spec.egress.0.ports.0.protocol", "TCP", "closed: gateway world UDP:53"),
        ("names", "spec.podSelector", {}, "open without need: executor world TCP:53"),
        ("model", "spec.egress.0.ports", GONE, "open without need: model world TCP:80"),
        ("nothing", "spec.podSelector.matchLabels", {"a": "b"}, "open without need: executor world TCP:443"),
        ("metrics", f"{rule}.ports.1", {"port": 9104}, "closed: prometheus scheduler TCP:9102"),
        ("metrics", f"{rule}.from.0.namespaceSelector", {}, "open without need: neighbour gateway TCP:9101"),
    ):
        yield Fault("network", f"NetworkPolicy/{policy}", path, value, complaint)
    for where, path, value, complaint in (
        (EXECUTOR, f"spec.selector.matchLabels.{COMPONENT}", GONE, "not for its pods alone"),
        (EXECUTOR, f"spec.template.metadata.labels.{COMPONENT}", "worker", "not for its pods alone"),
        ("Service/executor", f"spec.selector.{COMPONENT}", "worker", "for the pods of []"),
        ("Service/gateway", "spec.ports.0.port", 50050, "no port grpc of number 50050"),
        ("Service/gateway", "spec.ports.1.targetPort", "web", "no port web"),
        ("PodDisruptionBudget/executor", f"spec.selector.matchLabels.{COMPONENT}", "gateway", "for ['gateway']"),
    ):
        yield Fault("selectors", where, path, value, complaint)
    for where, path, value, complaint in (
        ("ConfigMap/gateway", "data.OCTAVO_GATEWAY_SCHEDULER", "sched:50052", "no Service is sched:50052"),
        ("ConfigMap/scheduler", "data.OCTAVO_SCHEDULER_EXECUTORS", "executor:50051", "no Service is executor:50051"),
        ("ConfigMap/scheduler", "data.OCTAVO_SCHEDULER_EXECUTORS", "gateway:50051", "is no executor"),
        ("Service/executor", "spec.clusterIP", GONE, "not the address of every executor"),
        ("Service/scheduler", "spec.publishNotReadyAddresses", GONE, "not the address of every scheduler"),
        (EXECUTOR, "spec.serviceName", "executors", "executors is none"),
    ):
        yield Fault("finding", where, path, value, complaint)
    admin = {"name": "admin", "port": 50054, "targetPort": "admin"}
    yield Fault("exposure", "Service/gateway", "spec.ports", appended(admin), "'admin'")
    yield Fault("exposure", "Service/gateway-internal", "spec.type", "LoadBalancer", "reached from outside")
    yield Fault("namespace", "ServiceMonitor/octavo", "metadata.namespace", GONE, "is in None")
    yield Fault("namespace", "Namespace/octavo", "metadata.name", "cell", "is in octavo")


def _scaling_faults() -> Iterator[Fault]:
    yield Fault("scaling", EXECUTOR, "spec.replicas", 2, "says its own count")
    yield Fault("scaling", EXECUTOR, "spec.replicas", GONE, "nobody says how many", "cpu")
    yield Fault("scaling", "ScaledObject/executor", "spec.scaleTargetRef.kind", "Deployment", "there is no")
    yield Fault("scaling", "ScaledObject/executor", "spec.scaleTargetRef", _gateway, "another scaler")
    yield Fault("scaling", GATEWAY, f"{MAIN}.resources.requests.cpu", GONE, "request no cpu")
    yield Fault("one_scheduler", SCHEDULER, "spec.replicas", 2, "2 of a StatefulSet")
    yield Fault(
        "one_scheduler", "HorizontalPodAutoscaler/gateway", "spec.scaleTargetRef.name", "scheduler", "scales it"
    )
    selector = f"spec.selector.matchLabels.{COMPONENT}"
    yield Fault("one_scheduler", "PodDisruptionBudget/executor", selector, "scheduler", "no node could be emptied")
    yield Fault("budgets", "PodDisruptionBudget/gateway", "spec.maxUnavailable", 2, "gateway: of 2")
    yield Fault("budgets", "ScaledObject/executor", "spec.minReplicaCount", 1, "executor: of 1")
    yield Fault("budgets", EXECUTOR, "spec.replicas", 1, "executor: of 1", "cpu")
    yield Fault("budgets", "PodDisruptionBudget/executor", "kind", "Lease", "executor: no budget")
    yield Fault("updates", GATEWAY, "spec.strategy.rollingUpdate.maxUnavailable", 1, "gateway: ")
    yield Fault("updates", GATEWAY, "spec.progressDeadlineSeconds", GONE, "counts as failed")
    yield Fault("updates", EXECUTOR, "spec.minReadySeconds", GONE, "before the one before is in use")
    yield Fault("updates", SCHEDULER, "spec.podManagementPolicy", GONE, "never gets ready")
    yield Fault("updates", EXECUTOR, "spec.updateStrategy.type", "OnDelete", "OnDelete")
    yield Fault("monitors", "ServiceMonitor/octavo", "spec.endpoints.0.port", "grpc", "by grpc")
    yield Fault("monitors", "ServiceMonitor/octavo", "spec.endpoints.0.path", "/prometheus", "/prometheus")
    labels = "metadata.labels.app.kubernetes.io/part-of"
    yield Fault("monitors", "Service/executor", labels, "other", "['gateway', 'scheduler']")
    query = "spec.triggers.0.metadata.query"
    for change, complaint in (
        (("octavo_queue_seconds_bucket", "octavo_queue_time_bucket"), "no such series: octavo_queue_time_bucket"),
        (('namespace="octavo"', 'namespace="other"'), "of another namespace"),
        (('{namespace="octavo"}', ""), "not of this cell alone"),
        (('{namespace="octavo"}', '{namespace="octavo",model="m"}'), 'model="m"'),
        (("> 0) or vector(0)", "))"), "no number"),
    ):
        yield Fault("queries", "ScaledObject/executor", query, within(change), complaint)
    yield Fault("queries", "ScaledObject/executor", "spec.triggers.0.metricType", "AverageValue", "AverageValue of")
    yield Fault("queries", "ScaledObject/executor", "spec.triggers.1.metadata.threshold", "0", "no threshold")
    yield Fault("queries", "ServiceMonitor/octavo", "kind", "PodMonitor", "nobody scrapes")
    yield Fault("memory", "ConfigMap/executor", "data.OCTAVO_KV_MEMORY", "3GiB", "3GiB of 4Gi", "cpu")


def _gateway(_: Any) -> dict[str, str]:
    return {"apiVersion": "apps/v1", "kind": "Deployment", "name": "gateway"}


def _schema_faults() -> Iterator[Fault]:
    for where, path, value, complaint in (
        (GATEWAY, f"{MAIN}.imagePullPolice", "Always", "imagePullPolice"),
        (EXECUTOR, f"{MAIN}.ports.0.containerPort", "grpc", "'grpc' is not"),
        (EXECUTOR, "apiVersion", "apps/v1beta1", "schema"),
        ("Job/model", "spec.template.spec.restartPolicies", "Never", "restartPolicies"),
        ("NetworkPolicy/names", "spec.ingresses", [], "ingresses"),
        ("ScaledObject/executor", "spec.triggers.0.metadata.threshold", 2, "2 is not of type 'string'"),
        ("ScaledObject/executor", "spec.triggers.0.metricTyp", "Value", "metricTyp"),
        ("ServiceMonitor/octavo", "spec.endpoints.0.interval", "often", "'often' does not match"),
    ):
        yield Fault("schemas", where, path, value, complaint)
