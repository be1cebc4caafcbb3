"""deploy/kubernetes by reading it: each rule holds for each overlay. test_kubernetes_faults.py shows each fail."""

from __future__ import annotations

import deploy_network
import deploy_pods
import deploy_scaling
import deploy_schemas
import deploy_settings
import pytest
from deploy_objects import CHECKS, KUBERNETES, OVERLAYS, Check, overlay

MODULES = (deploy_network, deploy_pods, deploy_scaling, deploy_schemas, deploy_settings)


def test_every_overlay_is_checked() -> None:
    """No folder of overlays is left out."""
    assert {path.name for path in (KUBERNETES / "overlays").iterdir()} == set(OVERLAYS)
    assert all(any(name in vars(module) for module in MODULES) for name in CHECKS)


@pytest.mark.parametrize("name", OVERLAYS)
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_the_rule_holds(check: Check, name: str) -> None:
    """Nothing breaks it; its docstring says what it is."""
    assert check.meaning
    assert check(overlay(name)) == []
