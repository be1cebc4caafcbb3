"""What `kubectl apply -k` would send, for the part of kustomize that deploy/kubernetes uses. Other parts are errors.

Kustomize is a program of its own that no package index has, and what is in the manifests has to be checked everywhere.
Where a kubectl is at hand, a test compares the two.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
"""A Kubernetes object as its manifest has it."""

MERGE_KEYS: Mapping[str, str] = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
}
"""Lists that a patch merges entry by entry, and what tells the entries apart. Every other list it replaces."""
FIELDS = {"apiVersion", "kind", "namespace", "resources", "components", "patches", "images"}
CLUSTER_WIDE = {"Namespace"}


class RenderError(Exception):
    """A kustomization that cannot be rendered here; the message says why."""


def render(folder: Path) -> list[Object]:
    """Return the objects of a kustomization. Raises RenderError."""
    return _apply(folder, [])


def _apply(folder: Path, before: list[Object]) -> list[Object]:
    """Return `before` with what a kustomization adds and changes; a component sees what stands before it."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if unknown := set(kustomization) - FIELDS:
        raise RenderError(f"{folder}: {', '.join(sorted(unknown))} cannot be rendered here")
    objects = list(before)
    for name in kustomization.get("resources", ()):
        path = folder / name
        objects += render(path) if path.is_dir() else _documents(path)
    for name in kustomization.get("components", ()):
        objects = _apply(folder / name, objects)
    _check_unique(folder, objects)
    for patch in kustomization.get("patches", ()):
        if set(patch) != {"path"}:
            raise RenderError(f"{folder}: only patches by path can be rendered here")
        for document in _documents(folder / patch["path"]):
            _patch(objects, document, folder)
    if "namespace" in kustomization:
        for each in objects:
            if each["kind"] not in CLUSTER_WIDE:
                each["metadata"]["namespace"] = kustomization["namespace"]
            elif each["kind"] == "Namespace":
                each["metadata"]["name"] = kustomization["namespace"]
    for image in kustomization.get("images", ()):
        _set_image(objects, image)
    return objects


def identity(each: Object) -> tuple[str, str]:
    """Return what tells an object from the others of a namespace: kind and name."""
    return each["kind"], each["metadata"]["name"]


def containers(pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all containers of a pod's spec, those that run first too."""
    return [*pod.get("initContainers", ()), *pod.get("containers", ())]


def pod_template(each: Object) -> dict[str, Any] | None:
    """Return the pod template of a workload; None for any other object."""
    template: dict[str, Any] | None = each.get("spec", {}).get("template")
    return template


def _documents(path: Path) -> list[Object]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def _check_unique(folder: Path, objects: Iterable[Object]) -> None:
    seen: set[tuple[str, str]] = set()
    for each in objects:
        if identity(each) in seen:
            raise RenderError(f"{folder}: {identity(each)} is there twice")
        seen.add(identity(each))


def _patch(objects: list[Object], patch: Object, folder: Path) -> None:
    for index, each in enumerate(objects):
        if identity(each) == identity(patch) and each["apiVersion"] == patch["apiVersion"]:
            objects[index] = _merge(each, patch, "")
            return
    raise RenderError(f"{folder}: nothing to patch for {identity(patch)}")


def _merge(value: Any, patch: Any, name: str) -> Any:
    """Return a value with a strategic merge patch; `name` is that of the field."""
    if isinstance(value, dict) and isinstance(patch, dict):
        merged = dict(value)
        for key, part in patch.items():
            if part is None:
                merged.pop(key, None)
            else:
                merged[key] = _merge(merged[key], part, key) if key in merged else copy.deepcopy(part)
        return merged
    if isinstance(value, list) and isinstance(patch, list) and (key := MERGE_KEYS.get(name)):
        # In kustomize's order: the patch's entries, then those that it does not name.
        by_key = {entry[key]: entry for entry in value}
        named = {entry[key] for entry in patch}
        patched = [_merge(by_key[entry[key]], entry, "") if entry[key] in by_key else entry for entry in patch]
        return copy.deepcopy(patched) + [entry for entry in value if entry[key] not in named]
    return copy.deepcopy(patch)


def _set_image(objects: Iterable[Object], image: Mapping[str, str]) -> None:
    for each in objects:
        for container in containers((pod_template(each) or {}).get("spec", {})):
            name, _, tag = container["image"].partition(":")
            if name == image["name"]:
                tag = str(image.get("newTag", tag))
                container["image"] = image.get("newName", name) + (f":{tag}" if tag else "")
