"""Every rpc that a descriptor promises is implemented, and every service that is promised has a servicer."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor

ROOT = Path(__file__).parents[2]
# A new service is added here together with the class that serves it.
SERVICERS = {
    "octavo.v1.InferenceService": "gateway.servicer:InferenceServicer",
    "octavo.v1.ModelService": "gateway.model_servicer:ModelServicer",
    "octavo.v1.AdminService": "gateway.admin_servicer:AdminServicer",
    "octavo.internal.scheduler.v1.SchedulerService": "scheduler_svc.servicer:SchedulerServicer",
    "octavo.internal.executor.v1.ExecutorService": "executor_svc.servicer:ExecutorService",
}


def files() -> Iterator[tuple[str, FileDescriptor]]:
    """Yield the module and descriptor of every .proto file."""
    for path in sorted((ROOT / "protos").rglob("*.proto")):
        module = ".".join(path.relative_to(ROOT / "protos").with_suffix("").parts)
        yield module, importlib.import_module(f"{module}_pb2").DESCRIPTOR


def services() -> dict[str, tuple[str, ServiceDescriptor]]:
    """Return every service by full name, with the module its stubs are in."""
    return {
        service.full_name: (module, service) for module, file in files() for service in file.services_by_name.values()
    }


def load(path: str) -> type:
    """Import `module:Class`."""
    module, _, name = path.partition(":")
    loaded: type = getattr(importlib.import_module(module), name)
    return loaded


def test_every_service_has_a_servicer() -> None:
    """The table names the services of the descriptors, all of them and no others."""
    assert set(SERVICERS) == set(services())


@pytest.mark.parametrize(
    ("service", "rpc"),
    [(name, rpc) for name, (_, service) in services().items() for rpc in service.methods_by_name],
)
def test_every_rpc_is_implemented(service: str, rpc: str) -> None:
    """The servicer of a service defines each of its rpcs itself; the generated base answers UNIMPLEMENTED."""
    module, _ = services()[service]
    base = getattr(importlib.import_module(f"{module}_pb2_grpc"), f"{service.rpartition('.')[2]}Servicer")
    servicer = load(SERVICERS[service])
    assert issubclass(servicer, base)
    assert getattr(servicer, rpc) is not getattr(base, rpc)


@pytest.mark.parametrize("service", SERVICERS)
def test_no_handler_without_an_rpc(service: str) -> None:
    """A servicer has no public method that no client can call: a renamed rpc leaves none behind."""
    _, descriptor = services()[service]
    public = {name for name in vars(load(SERVICERS[service])) if name[:1].isupper()}
    assert public <= set(descriptor.methods_by_name)
