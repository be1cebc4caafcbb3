"""The committed stubs and the contracts they come from."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf.descriptor import ServiceDescriptor

from octavo.internal.executor.v1 import executor_pb2, executor_pb2_grpc
from octavo.internal.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from octavo.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, model_pb2, model_pb2_grpc

ROOT = Path(__file__).parents[2]
CONTRACTS = (
    (inference_pb2, inference_pb2_grpc),
    (model_pb2, model_pb2_grpc),
    (admin_pb2, admin_pb2_grpc),
    (scheduler_pb2, scheduler_pb2_grpc),
    (executor_pb2, executor_pb2_grpc),
)
SERVICERS = (
    "gateway.servicer",
    "gateway.model_servicer",
    "gateway.admin_servicer",
    "scheduler_svc.servicer",
    "executor_svc.servicer",
)
STUB_PATTERNS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")
SERVICES: list[tuple[ServiceDescriptor, ModuleType]] = [
    (service, grpc_module)
    for module, grpc_module in CONTRACTS
    for service in module.DESCRIPTOR.services_by_name.values()
]


def stubs_in(folder: Path) -> dict[str, bytes]:
    """Return the stubs under `folder` by relative path."""
    paths = [path for pattern in STUB_PATTERNS for path in folder.rglob(pattern)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_committed_stubs_are_what_the_contracts_give_today(tmp_path: Path) -> None:
    """No stub is stale, missing or left over: `make protos` would change nothing."""
    subprocess.run([sys.executable, str(ROOT / "scripts" / "make_stubs.py"), str(tmp_path)], check=True)
    committed = {f"octavo/{name}": content for name, content in stubs_in(ROOT / "octavo").items()}
    made = stubs_in(tmp_path)
    assert committed.keys() == made.keys()
    stale = [name for name in made if made[name] != committed[name]]
    assert not stale, "run `make protos`"


def test_every_proto_file_is_looked_at_here() -> None:
    """A new contract joins CONTRACTS, so that the tests below see its rpcs."""
    in_protos = {str(path.relative_to(ROOT / "protos")) for path in (ROOT / "protos").rglob("*.proto")}
    without_services = {"octavo/internal/executor/v1/sequence.proto"}
    assert {module.DESCRIPTOR.name for module, _ in CONTRACTS} | without_services == in_protos


@pytest.mark.parametrize(("service", "grpc_module"), SERVICES, ids=[service.name for service, _ in SERVICES])
def test_every_rpc_has_an_implementation(service: ServiceDescriptor, grpc_module: ModuleType) -> None:
    """Exactly one servicer class stands for a service, and it defines every method that the contract names."""
    base = getattr(grpc_module, f"{service.name}Servicer")
    classes = {
        found
        for module in map(importlib.import_module, SERVICERS)
        for found in vars(module).values()
        if isinstance(found, type) and issubclass(found, base) and found is not base
    }
    assert len(classes) == 1
    (servicer,) = classes
    missing = [
        method.name for method in service.methods if getattr(servicer, method.name) is getattr(base, method.name)
    ]
    assert not missing
