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
from executor_svc.models import ServedConfig, describe, is_family
from executor_svc.models.loader import read_served_config
from executor_svc.models.spec import DecoderSpec
from executor_svc.weights import Checkpoint, ModelLoadError, check_tensors, open_checkpoint
from octavo.models.errors import ModelError
from octavo.models.gguf_file import read_header
from octavo.models.gguf_parts import find_parts
from octavo.models.location import MANIFEST_NAME, ModelKind, ModelLocation, locate
from octavo.models.prepare import read_source
from octavo.models.prepared import open_prepared
from octavo.models.tokenizer_fit import fit_tokenizer

_CHECKS = ("files", "config", "tensors", "tokenizer")


@dataclass(frozen=True)
class Question:
    """What is asked. `context` in tokens, `batch` in sequences, `kv_memory` in bytes; None: as the executor would."""

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


class _Inspection:
    """What has been found out of one model, check by check."""

    def __init__(self, question: Question) -> None:
        self.figures: dict[str, Any] = {}
        self._question = question
        self._location: ModelLocation
        self._checkpoint: Checkpoint
        self._config: ServedConfig
        self._spec: DecoderSpec | None = None

    def files(self) -> str:
        """Find and open them."""
        self._location, weights, is_pickled = _find(self._question)
        self._allow_pickle = is_pickled or self._question.allow_pickle
        self._checkpoint = open_checkpoint(weights, allow_pickle=self._allow_pickle)
        self.figures |= {
            "weights": str(weights),
            "file_bytes": sum(path.stat().st_size for path in _files(weights)),
        }
        return f"{weights}: {len(self._checkpoint.shapes)} tensors, whole"

    def config(self) -> str:
        """See what the config asks for, and what that takes."""
        path = self._checkpoint.path
        if is_family(path, allow_pickle=self._allow_pickle):
            self._config, self._spec = describe(self._checkpoint)
            runs = "runs on Octavo's own decoder"
        else:
            self._config = read_served_config(path, allow_pickle=self._allow_pickle)
            runs = "runs by transformers' code, which is slower"
        shapes = self._checkpoint.shapes if self._spec is None else self._spec.tensors()
        self.figures |= _figures(self._config, sum(map(prod, shapes.values())), self._question)
        return f"{self._config.architecture} {runs}"

    def tensors(self) -> str:
        """Compare them with the config."""
        if self._spec is None:
            return "which are needed is seen when transformers loads them"
        check_tensors(self._checkpoint, self._spec.tensors(), ignored=self._spec.ignored)
        return "names, shapes and element types fit the config"

    def tokenizer(self) -> str:
        """Compare it with the vocabulary."""
        return _check_tokenizer(self._location, self._config, self._question)


def report_on(question: Question) -> dict[str, Any]:
    """Return the report. `ok` is false where a check failed; the figures are there as far as they could be found."""
    inspection, findings = _Inspection(question), _Findings()
    if findings.make("files", inspection.files) and findings.make("config", inspection.config):
        findings.make("tensors", inspection.tensors)
        findings.make("tokenizer", inspection.tokenizer)
    for name in _CHECKS[len(findings.checks) :]:
        findings.checks.append({"check": name, "ok": None, "text": "not looked at"})
    ok = all(check["ok"] for check in findings.checks) and inspection.figures.get("fits", True)
    return {"model": question.model, "ok": ok, "checks": findings.checks, **inspection.figures}


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
        return [*find_parts(weights, read_header(weights)[0])]
    return [path for path in weights.iterdir() if path.suffix in (".safetensors", ".bin")]


def _check_tokenizer(location: ModelLocation, config: ServedConfig, question: Question) -> str:
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
    notes.append(f"outputs end at token {', '.join(map(str, ends))}" if ends else "no token ends an output")
    return f"fits the vocabulary of {config.vocab_size}; {'; '.join(notes)}"


def _figures(config: ServedConfig, parameters: int, question: Question) -> dict[str, Any]:
    dtype = resolve_dtype(question.dtype, torch.device("cpu"), cpu_features())
    kv_bytes = block_bytes(config, 1, dtype)
    figures = {
        "architecture": config.architecture,
        "parameters": parameters,
        "layers": config.num_layers,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "window": config.window,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "default_context": config.unstretched_length,
        "dtype": str(dtype).removeprefix("torch."),
        "weight_bytes": parameters * dtype.itemsize,
        "kv_bytes_per_token": kv_bytes,
    }
    return figures | capacity(
        weight_bytes=parameters * dtype.itemsize,
        kv_bytes_per_token=kv_bytes,
        longest=config.max_position_embeddings,
        window=config.window,
        context=question.context,
        batch=question.batch,
        kv_memory=question.kv_memory,
    )
