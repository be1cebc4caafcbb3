"""The renderer of the tests is held to kustomize itself, where there is one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kustomize_render import RenderError, identity, render

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
OVERLAYS = sorted(path.parent for path in KUBERNETES.glob("overlays/*/kustomization.yaml"))
BASE = """
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: one}
spec:
  replicas: 2
  template:
    spec:
      containers:
        - {name: a, image: "x:1", env: [{name: V, value: "1"}], args: [p, q]}
        - {name: b, image: y}
---
apiVersion: v1
kind: Namespace
metadata: {name: there}
"""
PATCH = """
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: one}
spec:
  replicas: null
  template:
    spec:
      containers:
        - {name: a, env: [{name: W, value: "2"}], args: [r]}
        - {name: c, image: z}
"""


def write(folder: Path, **files: str) -> Path:
    """Write files of YAML, by stem, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


def by_identity(objects: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return objects by kind and name."""
    return {identity(each): each for each in objects}


def overlay_of_all(tmp_path: Path) -> Path:
    """Return a kustomization that uses everything that can be rendered."""
    base = "resources: [objects.yaml]\nimages: [{name: x, newTag: '2'}]\n"
    write(tmp_path / "base", objects=BASE, kustomization=base)
    write(
        tmp_path / "part",
        kustomization="apiVersion: kustomize.config.k8s.io/v1alpha1\nkind: Component\npatches: [{path: patch.yaml}]\n",
        patch=PATCH,
    )
    return write(
        tmp_path / "over",
        kustomization="namespace: here\nresources: [../base]\ncomponents: [../part]\n"
        "images: [{name: x, newName: registry/x}, {name: z, newTag: '3'}]\n",
    )


def test_patches_images_and_namespaces_are_applied(tmp_path: Path) -> None:
    """A patch merges containers and variables by name, replaces other lists, and takes away what it says is null."""
    objects = by_identity(render(overlay_of_all(tmp_path)))
    assert set(objects) == {("StatefulSet", "one"), ("Namespace", "here")}
    one = objects["StatefulSet", "one"]
    assert one["metadata"]["namespace"] == "here"
    assert "replicas" not in one["spec"]
    containers = {each["name"]: each for each in one["spec"]["template"]["spec"]["containers"]}
    assert {name: each["image"] for name, each in containers.items()} == {"a": "registry/x:2", "b": "y", "c": "z:3"}
    assert containers["a"]["args"] == ["r"]
    assert {each["name"]: each["value"] for each in containers["a"]["env"]} == {"V": "1", "W": "2"}


@pytest.mark.parametrize(
    ("kustomization", "complaint"),
    [
        ("resources: [objects.yaml]\nnamePrefix: x-\n", "namePrefix cannot be rendered"),
        ("resources: [objects.yaml, objects.yaml]\n", "there twice"),
        ("resources: [objects.yaml]\npatches: [{path: patch.yaml}]\n", "nothing to patch"),
        ("resources: [objects.yaml]\npatches: [{patch: '', target: {kind: X}}]\n", "only patches by path"),
    ],
)
def test_what_cannot_be_rendered_is_said(tmp_path: Path, kustomization: str, complaint: str) -> None:
    """Nothing of kustomize's is left out in silence."""
    write(tmp_path, objects=BASE, patch=PATCH.replace("one", "two"), kustomization=kustomization)
    with pytest.raises(RenderError, match=complaint):
        render(tmp_path)


@pytest.mark.parametrize("folder", [*OVERLAYS, None], ids=lambda path: path.name if path else "everything")
def test_it_renders_as_kustomize_does(folder: Path | None, tmp_path: Path) -> None:
    """The same objects, field by field, as kubectl's own kustomize makes."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here to compare with")
    folder = overlay_of_all(tmp_path) if folder is None else folder
    made = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=True)
    assert by_identity(render(folder)) == by_identity(list(yaml.safe_load_all(made.stdout)))
