"""What is rendered, and the questions that checks ask of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from kustomize_render import Object, identity, pod_template, render

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu", "gpu", "production", "tensor-parallel")
PROGRAMS = ("gateway", "scheduler", "executor")
"""The services, which are also the names of their workloads, containers and component labels."""


class Check:
    """A rule over what is rendered: yields a complaint for each place that breaks it. Registered in CHECKS."""

    def __init__(self, rule: Callable[[Rendered], Iterator[str]]) -> None:
        self._rule = rule
        self.name = rule.__name__
        self.meaning = rule.__doc__
        CHECKS[self.name] = self

    def __call__(self, rendered: Rendered) -> list[str]:
        """Return the complaints."""
        return list(self._rule(rendered))


CHECKS: dict[str, Check] = {}


@dataclass(frozen=True)
class Workload:
    """A Deployment, StatefulSet or Job, and the pods that it makes."""

    object: Object

    @property
    def kind(self) -> str:
        """Its kind."""
        return str(self.object["kind"])

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.object["metadata"]["name"])

    @property
    def pod(self) -> dict[str, Any]:
        """The spec of its pods."""
        pod: dict[str, Any] = self.object["spec"]["template"]["spec"]
        return pod

    @property
    def labels(self) -> dict[str, str]:
        """The labels of its pods."""
        labels: dict[str, str] = self.object["spec"]["template"]["metadata"]["labels"]
        return labels

    @property
    def main(self) -> dict[str, Any]:
        """Its only container that lasts."""
        (main,) = self.pod["containers"]
        assert isinstance(main, dict)
        return main

    @property
    def is_service(self) -> bool:
        """Whether it is one of Octavo's three."""
        return self.name in PROGRAMS

    @property
    def ports(self) -> dict[str, int]:
        """Its ports by name."""
        return {port["name"]: port["containerPort"] for port in self.main.get("ports", ())}


@dataclass(frozen=True)
class Rendered:
    """The objects of one overlay."""

    objects: list[Object]

    def kind(self, kind: str) -> list[Object]:
        """Return the objects of a kind."""
        return [each for each in self.objects if each["kind"] == kind]

    def find(self, kind: str, name: str) -> Object | None:
        """Return an object; None where there is none."""
        return next((each for each in self.objects if identity(each) == (kind, name)), None)

    def get(self, kind: str, name: str) -> Object:
        """Return an object that is there."""
        found = self.find(kind, name)
        assert found is not None, (kind, name)
        return found

    @cached_property
    def workloads(self) -> list[Workload]:
        """Everything that makes pods."""
        return [Workload(each) for each in self.objects if pod_template(each) is not None]

    @property
    def services(self) -> list[Workload]:
        """The workloads of gateway, scheduler and executor."""
        return [each for each in self.workloads if each.is_service]

    def workload(self, name: str) -> Workload:
        """Return the workload of this name."""
        (found,) = [each for each in self.workloads if each.name == name]
        return found

    def selected(self, selector: Mapping[str, Any]) -> list[Workload]:
        """Return the workloads whose pods a label selector chooses."""
        return [each for each in self.workloads if selects(selector, each.labels)]


@cache
def overlay(name: str) -> Rendered:
    """Return an overlay as it is. Not to be changed."""
    return Rendered(render(KUBERNETES / "overlays" / name))


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector chooses these labels. An empty one chooses all."""
    if unknown := set(selector) - {"matchLabels", "matchExpressions"}:
        raise ValueError(f"no label selector: {unknown}")
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    for each in selector.get("matchExpressions", ()):
        assert each["operator"] == "In", each
        if labels.get(each["key"]) not in each["values"]:
            return False
    return True
