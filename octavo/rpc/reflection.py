"""Server reflection under both of its names, v1 and v1alpha.

grpcio ships v1alpha only. The two protocols differ in nothing but the package name (grpc/reflection/v1 in the gRPC
protocol repository), so v1 is served by the same handler, under a descriptor renamed from v1alpha's.
"""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2

_ALPHA_PACKAGE = "grpc.reflection.v1alpha"
_V1_PACKAGE = "grpc.reflection.v1"
V1_SERVICE_NAME = f"{_V1_PACKAGE}.ServerReflection"


def add_reflection(server: grpc.aio.Server, service_names: tuple[str, ...]) -> None:
    """Serve the descriptors of `service_names` and of what they import. Call once for a server, before its start."""
    _register_v1_descriptor()
    names = (*service_names, V1_SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    servicer: Any = reflection.aio.ReflectionServicer(names)
    handler: Any = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(V1_SERVICE_NAME, {"ServerReflectionInfo": handler}),)
    )


def _register_v1_descriptor() -> None:
    pool = descriptor_pool.Default()
    try:
        pool.FindServiceByName(V1_SERVICE_NAME)
    except KeyError:
        pool.AddSerializedFile(_v1_file().SerializeToString())


def _v1_file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name = "grpc/reflection/v1/reflection.proto"
    file.package = _V1_PACKAGE
    for message in file.message_type:
        for field in message.field:
            if field.type_name:  # writing "" to a field of plain type would mark it as a message's
                field.type_name = field.type_name.replace(_ALPHA_PACKAGE, _V1_PACKAGE)
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(_ALPHA_PACKAGE, _V1_PACKAGE)
            method.output_type = method.output_type.replace(_ALPHA_PACKAGE, _V1_PACKAGE)
    return file
