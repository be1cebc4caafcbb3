"""Every check of deploy/kubernetes finds the faults that are planted for it."""

from __future__ import annotations

import copy
from typing import Any

import deploy_network
import deploy_pods
import deploy_scaling
import deploy_schemas
import deploy_settings
import pytest
from deploy_objects import CHECKS, Rendered, overlay
from kubernetes_faults import GONE, Fault, faults

FAULTS = list(faults())
MODULES = (deploy_network, deploy_pods, deploy_scaling, deploy_schemas, deploy_settings)


def plant(fault: Fault) -> Rendered:
    """Return the overlay with the fault."""
    rendered = Rendered(copy.deepcopy(overlay(fault.overlay).objects))
    place: Any = rendered.get(*fault.where.split("/"))
    *way, last = _steps(fault.path)
    for step in way:
        place = place[int(step)] if isinstance(place, list) else place.setdefault(step, {})
    key: Any = int(last) if isinstance(place, list) else last
    if fault.value is GONE:
        del place[key]
    else:
        place[key] = fault.value(place[key]) if callable(fault.value) else fault.value
    return rendered


def _steps(path: str) -> list[str]:
    """Return the parts of a path. The dots of a label's name are its own."""
    marked = path.replace("app.kubernetes.io/", "app\0kubernetes\0io/")
    return [step.replace("\0", ".") for step in marked.split(".")]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda each: f"{each.check}-{each.where}-{each.path.rpartition('.')[2]}")
def test_a_planted_fault_is_found(fault: Fault) -> None:
    """The check that is for it complains of it, in words that name it."""
    complaints = CHECKS[fault.check](plant(fault))
    assert any(fault.complaint in complaint for complaint in complaints), complaints


def test_every_check_can_fail() -> None:
    """There is a fault for each, as for the modules that hold them."""
    assert {fault.check for fault in FAULTS} == set(CHECKS)
    assert all(set(CHECKS) & set(vars(module)) for module in MODULES)
