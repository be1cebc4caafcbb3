"""Looking a model over without serving it: what it is, what it takes, what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from executor_svc.cpu_features import cpu_features, resolve_dtype
from executor_svc.inspection.capacity_report import capacity
from executor_svc.kv_cache import block_bytes
from executor_svc.models import ModelConfig, describe
from executor_svc.models.spec import DecoderSpec
from executor_svc.weights import Checkpoint, ModelLoadError, check_tensors, open_checkpoint
from octavo.models.errors import ModelError
from octavo.models.location import MANIFEST_NAME, ModelKind, ModelLocation, locate
from octavo.models.prepare import read_source
from octavo.models.prepared import open_prepared
from octavo.models.tokenizer_fit import fit_tokenizer

_CHECKS = ("files", "config", "tensors", "tokenizer")


@dataclass(frozen=True)
class Question:
    """What is asked. `context` in tokens and `batch` in sequences; `kv_memory` in bytes; None: as the executor would."""

    model: str
    dtype: str = "auto"
    context: int | None = None
    batch: int | None = None
    kv_memory: int | None = None
    allow_pickle: bool = False


@dataclass
class _Findings:
    """One line for each check; after one that failed those that build on it are not made."""

    checks: list[dict[str, Any]] = field(default_factory=list)

    def make(self, name: str, check: Callable[[], str]) -> bool:
        try:
            self.checks.append({"check": name, "ok": True, "text": check()})
        except (ModelLoadError, ModelError) as error:
            self.checks.append({"check": name, "ok": False, "text": str(error)})
            return False
        return True


def report_on(question: Question) -> dict[str, Any]:
    """Return the report. `ok` is false where a check failed; the figures are there as far as they could be found."""
    findings = _Findings()
    report: dict[str, Any] = {"model": question.model, "checks": findings.checks}
    opened: list[Checkpoint] = []
    described: list[tuple[ModelConfig, DecoderSpec]] = []
    location: list[ModelLocation] = []

    def files() -> str:
        place, weights, is_pickled = _find(question)
        location.append(place)
        opened.append(open_checkpoint(weights, allow_pickle=is_pickled or question.allow_pickle))
        report["weights"] = str(weights)
        report["file_bytes"] = sum(path.stat().st_size for path in _files(weights))
        return f"{weights}: {len(opened[0].shapes)} tensors, whole"

    def config() -> str:
        described.append(describe(opened[0]))
        return f"{described[0][0].architecture} is supported"

    def tensors() -> str:
        spec = described[0][1]
        check_tensors(opened[0], spec.tensors(), ignored=spec.ignored)
        return "names, shapes and element types fit the config"

    if findings.make("files", files) and findings.make("config", config):
        report |= _figures(described[0][0], described[0][1], question)
        findings.make("tensors", tensors)
        findings.make("tokenizer", lambda: _check_tokenizer(location[0], described[0][0], question))
    for name in _CHECKS[len(findings.checks) :]:
        findings.checks.append({"check": name, "ok": None, "text": "not looked at"})
    report["ok"] = all(check["ok"] for check in findings.checks) and report.get("fits", True)
    return report


def _find(question: Question) -> tuple[ModelLocation, Path, bool]:
    """Return where the model lies, its weights, and whether these were prepared as PyTorch's."""
    location = locate(question.model)
    if (location.prepared / MANIFEST_NAME).is_file():
        prepared = open_prepared(question.model)
        prepared.check_weights()
        return location, prepared.weights, prepared.is_pickled
    assert location.weights is not None  # locate: only a prepared folder has none
    if not location.weights.exists():
        command = "pull" if location.kind in (ModelKind.CATALOG, ModelKind.HUB) else "prepare"
        raise ModelError(f"{location.name} is not on this machine: run `octavo {command} {location.given}`")
    return location, location.weights, False


def _files(weights: Path) -> list[Path]:
    if weights.is_file():
        return [weights]
    return [path for path in weights.iterdir() if path.suffix in (".safetensors", ".bin")]


def _check_tokenizer(location: ModelLocation, config: ModelConfig, question: Question) -> str:
    if (location.prepared / MANIFEST_NAME).is_file():
        prepared = open_prepared(question.model)
        size, ends, notes = prepared.vocab_size, prepared.eos_token_ids, [f"prepared in {prepared.path}"]
        has_template = prepared.chat_template is not None
    else:
        assert location.weights is not None  # _find
        notes = []
        source = fit_tokenizer(read_source(location.weights, allow_pickle=question.allow_pickle), notes.append)
        size, has_template = source.vocab_size, source.chat_template is not None
        ends = tuple(sorted({each for each in source.eos_token_ids if each is not None}))
    if size > config.vocab_size:
        raise ModelError(f"the tokenizer's vocabulary of {size} does not fit the embedding of {config.vocab_size} rows")
    notes.append("a chat template" if has_template else "no chat template: completions only")
    notes.append(f"outputs end at {', '.join(map(str, ends))}" if ends else "no token ends an output")
    return f"fits the vocabulary of {config.vocab_size}; {'; '.join(notes)}"


def _figures(config: ModelConfig, spec: DecoderSpec, question: Question) -> dict[str, Any]:
    dtype = resolve_dtype(question.dtype, torch.device("cpu"), cpu_features())
    parameters = sum(map(prod, spec.tensors().values()))
    kv_bytes = block_bytes(config, 1, dtype)
    figures = {
        "architecture": config.architecture,
        "parameters": parameters,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "dtype": str(dtype).removeprefix("torch."),
        "weight_bytes": parameters * dtype.itemsize,
        "kv_bytes_per_token": kv_bytes,
    }
    return figures | capacity(
        weight_bytes=parameters * dtype.itemsize,
        kv_bytes_per_token=kv_bytes,
        longest=config.max_position_embeddings,
        context=question.context,
        batch=question.batch,
        kv_memory=question.kv_memory,
    )
