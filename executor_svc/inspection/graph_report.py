"""A model's graph before and after the passes: what `octavo graph` shows. No weight is read."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from executor_svc.cpu_features import cpu_features, resolve_dtype
from executor_svc.graph.buffers import own_buffers, peak_bytes, planned_buffers
from executor_svc.graph.custom import bind_ops, load_ops
from executor_svc.graph.drawing import draw
from executor_svc.graph.model_graph import ModelGraph, census
from executor_svc.graph.optimize import PASSES, choose_passes, optimize
from executor_svc.graph.passes.base import Pass
from executor_svc.kernels import build_kernels
from executor_svc.models import describe, is_family
from executor_svc.models.plain import capture_decoder
from executor_svc.weights import open_checkpoint
from octavo.models.errors import ModelError
from octavo.models.location import MANIFEST_NAME, locate
from octavo.models.prepared import open_prepared


def graph_report(model: str, passes: str, ops: str | None, dtype: str, svg: Path | None) -> dict[str, Any]:
    """Return what the passes do to a model's graph; write a drawing where one is asked for.

    Raises ModelError and ModelLoadError; ValueError for passes and ops.
    """
    kind = resolve_dtype(dtype, torch.device("cpu"), cpu_features())
    known: tuple[Pass, ...] = PASSES
    if ops is not None:
        known = (*bind_ops(load_ops(ops), build_kernels("cpu"), kind, torch.device("cpu")), *PASSES)
    chosen = choose_passes(passes, known)
    name, graph = _capture(model)
    size = kind.itemsize
    before = _state(graph, size)
    runs = {run.name: run for run in optimize(graph, chosen)}
    if svg is not None:
        svg.write_text(draw(graph, f"{name}, passes {passes}"), encoding="utf-8")
    return {
        "model": model,
        "architecture": name,
        "dtype": str(kind).removeprefix("torch."),
        "passes": [
            {
                "name": each.name,
                "description": each.description,
                "on": each.name in runs,
                "matches": runs[each.name].matches if each.name in runs else 0,
                "nodes": runs[each.name].nodes if each.name in runs else None,
            }
            for each in known
        ],
        "before": before,
        "after": _state(graph, size),
    }


def _capture(model: str) -> tuple[str, ModelGraph]:
    weights, is_pickled = _weights(model)
    if not is_family(weights, allow_pickle=is_pickled):
        from executor_svc.models.transformers_graph import capture_described

        return capture_described(weights)
    config, spec = describe(open_checkpoint(weights, allow_pickle=is_pickled))
    return config.architecture, capture_decoder(config, spec)


def _weights(model: str) -> tuple[Path, bool]:
    location = locate(model)
    if (location.prepared / MANIFEST_NAME).is_file():
        prepared = open_prepared(model)
        return prepared.weights, prepared.is_pickled
    if location.weights is None or not location.weights.exists():
        raise ModelError(f"{location.name} is not on this machine: run `octavo pull {location.given}`")
    return location.weights, False


def _state(graph: ModelGraph, size: int) -> dict[str, Any]:
    return {
        "nodes": sum(1 for _ in graph.calls()),
        "ops": dict(census(graph)),
        "buffers": asdict(planned_buffers(graph, size)),
        "own_buffers": asdict(own_buffers(graph, size)),
        "peak_bytes": peak_bytes(graph, size),
    }
