"""Checks of shape: every object by the schema of its kind.

Kubernetes' own kinds by its published schemas, in the oldest and the newest version that is meant; unknown fields are
errors. The schemas of the two custom kinds stand here, for the fields that are used: ServiceMonitor of
monitoring.coreos.com/v1 (Prometheus operator), ScaledObject of keda.sh/v1alpha1 (KEDA).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema
import kubernetes_validate
from deploy_objects import Check, Rendered
from kustomize_render import Object, identity

VERSIONS = ("1.27", "1.37")
"""Of Kubernetes. 1.27 is the first whose probes ask grpc.health.v1 for good."""


def _record(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


TEXT = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 0}
DURATION = {"type": "string", "pattern": r"^([0-9]+(ms|s|m|h))+$"}
LABELS = {"type": "object", "additionalProperties": TEXT}
METADATA = _record(["name"], name=TEXT, namespace=TEXT, labels=LABELS)
SCALING_RULES = _record(
    ["policies"],
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    policies=_list(
        _record(
            ["type", "value", "periodSeconds"],
            type={"enum": ["Pods", "Percent"]},
            value={"type": "integer", "minimum": 1},
            periodSeconds={"type": "integer", "minimum": 1, "maximum": 1800},
        )
    ),
)
CUSTOM: dict[tuple[str, str], dict[str, Any]] = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _record(
        ["selector", "endpoints"],
        selector=_record([], matchLabels=LABELS),
        targetLabels=_list(TEXT),
        endpoints=_list(
            _record(
                ["port"],
                port=TEXT,
                path={"type": "string", "pattern": "^/"},
                scheme={"enum": ["http", "https"]},
                interval=DURATION,
                scrapeTimeout=DURATION,
            )
        ),
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): _record(
        ["scaleTargetRef", "triggers"],
        scaleTargetRef=_record(["name"], apiVersion=TEXT, kind=TEXT, name=TEXT),
        minReplicaCount=COUNT,
        maxReplicaCount=COUNT,
        advanced=_record(
            [],
            horizontalPodAutoscalerConfig=_record(
                [], behavior=_record([], scaleUp=SCALING_RULES, scaleDown=SCALING_RULES)
            ),
        ),
        triggers=_list(
            _record(
                ["type", "metadata"],
                type={"const": "prometheus"},
                metricType={"enum": ["Value", "AverageValue"]},
                # Every value of a trigger is text, numbers too.
                metadata=_record(
                    ["serverAddress", "query", "threshold"],
                    serverAddress={"type": "string", "pattern": "^https?://"},
                    query=TEXT,
                    threshold={"type": "string", "pattern": r"^[0-9.]+$"},
                ),
            )
        ),
    ),
}


@Check
def schemas(rendered: Rendered) -> Iterator[str]:
    """Every object has the shape of its kind, and no field that Kubernetes does not know."""
    for each in rendered.objects:
        for complaint in dict.fromkeys(_complaints(each)):
            yield f"{' '.join(identity(each))}: {complaint}"


def _complaints(each: Object) -> Iterator[str]:
    custom = CUSTOM.get((each["apiVersion"], each["kind"]))
    if custom is not None:
        whole = _record(
            ["apiVersion", "kind", "metadata", "spec"], apiVersion={}, kind={}, metadata=METADATA, spec=custom
        )
        for error in jsonschema.Draft202012Validator(whole).iter_errors(each):
            yield f"{'.'.join(map(str, error.path))}: {error.message}"
        return
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(each, version, strict=True)
        except kubernetes_validate.SchemaNotFoundError as error:
            yield str(error.message)
        except kubernetes_validate.ValidationError as error:
            yield f"{'.'.join(map(str, error.path))}: {error.message}"
