"""Octavo serves large language models as three gRPC services: gateway, scheduler, executors."""
