"""The settings of the three services and how they are read.

They stand together so that each program can tell another program's OCTAVO_* variable from a misspelt one.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from octavo.rpc.settings import (
    Settings,
    SettingsError,
    SettingsType,
    parse_address,
    parse_api_key,
    parse_bind,
    parse_bytes,
    read,
    setting,
    stop_with,
    variables_of,
)

LOG_LEVELS = ("debug", "info", "warning", "error")
GATEWAY_PORT = 50051
SCHEDULER_PORT = 50052
EXECUTOR_PORT = 50053
ADMIN_PORT = 50054
HTTP_PORT = 8000
GATEWAY_METRICS_PORT = 9101
SCHEDULER_METRICS_PORT = 9102
EXECUTOR_METRICS_PORT = 9103
# What the services have, told here so that whoever starts them can check a name at once; a test compares the two.
POLICIES = ("fcfs", "priority", "shortest-first")
PLACEMENTS = ("cache-aware", "least-loaded", "round-robin")
DEVICES = ("cpu", "cuda")
KERNEL_SETS = ("reference", "cpu", "triton")
PASSES = (
    "merge_qkv",
    "norm_query_key",
    "rotary_write_kv",
    "merge_gate_up",
    "silu_mul",
    "gelu_mul",
    "norm_gelu",
    "linear_activation",
    "add_rms_norm",
    "add_layer_norm",
    "in_place",
    "views",
    "dead_code",
    "liveness",
)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,A-Z]+")
_CLASS = re.compile(r"\w+(\.\w+)*:\w+")
_MODULE = re.compile(r"\w+(\.\w+)*")
_PASS = re.compile(r"-?[a-zA-Z_]\w*")


def _metrics_port(default: int) -> int:
    port: int = setting(
        default,
        per_program=True,
        least=0,
        most=65535,
        help="port of the metrics page, http://BIND:PORT/metrics; 0 picks a free one",
    )
    return port


def _stall_timeout() -> float:
    seconds: float = setting(
        10.0, least=0.1, most=3600, help="seconds with work and without progress after which health says NOT_SERVING"
    )
    return seconds


def _parse_list(text: str) -> tuple[str, ...]:
    """Return the parts of a list with commas."""
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise ValueError("a list with commas between its parts, none of them empty")
    return parts


def _parse_origins(text: str) -> tuple[str, ...]:
    """Return origins as browsers write them: a scheme and a host, in lower case, without a slash behind."""
    origins = _parse_list(text)
    if not all(origin == "*" or _ORIGIN.fullmatch(origin) for origin in origins):
        raise ValueError(
            "* or a list of origins as browsers send them, such as https://example.org,http://localhost:3000"
        )
    return origins


def _parse_resume_key(text: str) -> str:
    """Return a secret as it is."""
    if len(text) < 16 or not text.isprintable():
        raise ValueError("at least 16 printable characters")
    return text


def _parse_file(text: str) -> str:
    """Return the path of a file, which is there."""
    if Path(text).is_dir() or not os.access(text, os.R_OK):
        raise ValueError("a file that can be read")
    return text


def _parse_addresses(text: str) -> str:
    """Return addresses with commas between them as they are."""
    addresses = [part for part in map(str.strip, text.split(",")) if part]
    for address in addresses:
        try:
            parse_address(address)
        except ValueError as error:
            raise ValueError(f"host:port, or several with commas between; {address!r} is not {error}") from None
    if not addresses:
        raise ValueError("host:port, or several with commas between")
    return text


def _parse_gateways(text: str) -> str:
    """Return one or several addresses with commas between, as they are."""
    for address in text.split(","):
        parse_address(address.strip())
    return text


def _parse_policy(text: str) -> str:
    """Return the name of a policy."""
    if text not in POLICIES and not _CLASS.fullmatch(text):
        raise ValueError(f"one of {', '.join(POLICIES)}, or package.module:Class")
    return text


def _parse_passes(text: str) -> str:
    """Return a choice of passes as it is. Names that are none of Octavo's may be those of custom operators."""
    if not all(_PASS.fullmatch(word.strip()) for word in text.split(",")):
        raise ValueError(f"all, none, names with commas, or all,-NAME for all but it; there are {', '.join(PASSES)}")
    return text


def _parse_module(text: str) -> str:
    """Return the name of a module."""
    if not _MODULE.fullmatch(text):
        raise ValueError("package.module")
    return text


@dataclass(frozen=True)
class GatewaySettings(Settings):
    """The public API: text in, text out."""

    program: ClassVar[str] = "gateway"

    model: str = setting(help="the model served: a prepared folder, GGUF file or name, as `octavo prepare` left it")
    scheduler: str = setting(
        f"127.0.0.1:{SCHEDULER_PORT}",
        per_program=True,
        parse=parse_address,
        help="address of the scheduler, host:port",
    )
    bind: str = setting("127.0.0.1", per_program=True, parse=parse_bind, help="address to listen on")
    port: int = setting(
        GATEWAY_PORT, per_program=True, least=0, most=65535, help="port of the gRPC API; 0 picks a free one"
    )
    http_port: int = setting(
        HTTP_PORT, least=0, most=65535, help="port of the OpenAI-compatible HTTP API; 0 picks a free one"
    )
    admin_port: int = setting(
        ADMIN_PORT, least=0, most=65535, help="port of the operator's gRPC API; 0 picks a free one"
    )
    metrics_port: int = _metrics_port(GATEWAY_METRICS_PORT)
    max_requests: int = setting(
        4096, least=1, most=1_000_000, help="most choices served at once, n for a request; more are refused"
    )
    stream_interval: int = setting(
        1,
        least=1,
        most=256,
        help="tokens of a choice sent in one message behind its first token: fewer, larger messages cost less CPU",
    )
    served_model_name: tuple[str, ...] | None = setting(
        None, parse=_parse_list, help="further names that requests may call the model by: NAME,NAME,..."
    )
    cors_origins: tuple[str, ...] | None = setting(
        None, parse=_parse_origins, help="origins whose web pages may use the HTTP API: https://HOST,... or * for all"
    )
    api_keys: str | None = setting(
        None, parse=_parse_file, help="file of API keys, lines of tenant and key; default: nobody needs a key"
    )
    chat_template: str | None = setting(
        None, parse=_parse_file, help="file of a Jinja chat template, in place of the model's own"
    )
    drain_grace: float = setting(
        10.0, least=0, most=86400, help="seconds that requests get to end by themselves once the gateway is to stop"
    )
    resume_key: str | None = setting(
        None,
        parse=_parse_resume_key,
        help="secret that signs resume tokens, one for all gateways of a cell, at least 16 characters; default: random",
    )
    stall_timeout: float = _stall_timeout()
    check_invariants: bool = setting(False, help="check every invariant after every event; slow, for tests")
    cell: str = setting("default", help="the cell this process belongs to")
    log_level: str = setting("info", choices=LOG_LEVELS, help="least severe log written")


@dataclass(frozen=True)
class SchedulerSettings(Settings):
    """Batches, blocks and the queue of one cell."""

    program: ClassVar[str] = "scheduler"

    executors: str = setting(
        f"127.0.0.1:{EXECUTOR_PORT}",
        per_program=True,
        parse=_parse_addresses,
        help="executors: host:port,host:port,... or one DNS name:port whose every address is an executor",
    )
    bind: str = setting("127.0.0.1", per_program=True, parse=parse_bind, help="address to listen on")
    port: int = setting(SCHEDULER_PORT, per_program=True, least=0, most=65535, help="port; 0 picks a free one")
    metrics_port: int = _metrics_port(SCHEDULER_METRICS_PORT)
    depth: int = setting(2, least=1, most=8, help="steps in flight on each executor; 1 waits for each result")
    policy: str = setting(
        "fcfs",
        parse=_parse_policy,
        help="order of requests: fcfs, priority, shortest-first, or package.module:Class",
    )
    placement: str = setting(
        "cache-aware",
        choices=PLACEMENTS,
        help="executor of a request: where it should end first, the least loaded, or each in turn",
    )
    reserve: float = setting(
        0.0, least=0, most=0.9, help="share of KV blocks, rows and step budget kept for short newcomers; 0: none"
    )
    max_waiting: int = setting(1024, least=1, help="choices of one model that may wait; more are refused")
    max_waiting_tokens: int = setting(
        1_000_000, least=1, help="tokens of one model's choices that may wait; more are refused"
    )
    orphan_timeout: float = setting(60.0, least=0, help="seconds that accepted work waits for an executor to come back")
    gateway_grace: float = setting(5.0, least=0, help="seconds that a lost gateway's requests go on")
    resolve_interval: float = setting(3.0, least=0.05, help="seconds between look-ups of the executors' addresses")
    log_memory_usage: float | None = setting(
        None,
        least=0.01,
        most=86400,
        alone="10",
        aliases=("--log_memory_usage",),
        help="seconds between log lines that account for the KV blocks; the flag alone: 10; default: no such lines",
    )
    hang_timeout: float = setting(
        5.0, least=0.1, most=3600, help="seconds without a sign of progress after which an executor is given up"
    )
    stall_timeout: float = _stall_timeout()
    check_invariants: bool = setting(False, help="check every invariant after every event; slow, for tests")
    cell: str = setting("default", help="the cell this process serves")
    log_level: str = setting("info", choices=LOG_LEVELS, help="least severe log written")


@dataclass(frozen=True)
class ExecutorSettings(Settings):
    """One model's weights and KV memory."""

    program: ClassVar[str] = "executor"

    model: str = setting(help="the model run: a prepared folder, GGUF file or name, as `octavo prepare` left it")
    bind: str = setting("127.0.0.1", per_program=True, parse=parse_bind, help="address to listen on")
    port: int = setting(EXECUTOR_PORT, per_program=True, least=0, most=65535, help="port; 0 picks a free one")
    metrics_port: int = _metrics_port(EXECUTOR_METRICS_PORT)
    device: str = setting("cpu", choices=DEVICES, help="device to run on: cpu, or cuda for a GPU")
    dtype: str = setting(
        "auto",
        choices=("auto", "float32", "bfloat16"),
        help="type of weights and KV; auto: bfloat16 where the device computes it",
    )
    kernels: str | None = setting(
        None, choices=KERNEL_SETS, help="kernel set: reference, cpu or triton; default: triton on a GPU, else cpu"
    )
    deterministic: bool = setting(
        False, help="start only if every result is bit-equal whatever else is in a batch; set cpu always is"
    )
    max_num_seqs: int = setting(64, least=1, most=4096, help="most sequences in one step")
    max_num_batched_tokens: int = setting(512, least=1, most=1_000_000, help="most tokens in one step")
    max_model_len: int | None = setting(
        None, least=1, help="longest sequence in tokens; default: the model's own, or what fits"
    )
    block_size: int = setting(16, least=1, most=256, help="tokens per KV block")
    kv_memory: int | None = setting(
        None,
        parse=parse_bytes,
        least=1,
        help="memory for KV blocks of each process of the model, such as 4GiB; default: a share of what is free",
    )
    gpu_memory_utilization: float = setting(
        0.9,
        least=0.05,
        most=1,
        help="share of a GPU's memory that all together may take; KV blocks get what is left of it",
    )
    enforce_eager: bool = setting(False, help="launch decode steps on a GPU op by op, not as captured graphs")
    passes: str = setting(
        "all",
        parse=_parse_passes,
        help="passes over the model's graph: all, none, NAME,... or all,-NAME,... without these; see `octavo graph`",
    )
    ops: str | None = setting(
        None, parse=_parse_module, help="custom operators: package.module that has them; default: none"
    )
    tensor_parallel: int = setting(
        1, least=1, most=64, help="processes that divide the model: started here, or all of them by torchrun"
    )
    threads: int | None = setting(
        None, least=1, most=1024, help="CPU threads of each process of the model; default: all cores"
    )
    build_ahead: bool = setting(True, help="on a CPU, build a step's inputs while the step before it computes")
    profile_ops: bool = setting(False, help="time each kind of op, for `octavo bench --profile`")
    stall_timeout: float = _stall_timeout()
    check_invariants: bool = setting(False, help="check every invariant after every event; slow, for tests")
    cell: str = setting("default", help="the cell this process belongs to")
    log_level: str = setting("info", choices=LOG_LEVELS, help="least severe log written")


ALL_SETTINGS: tuple[type[Settings], ...] = (GatewaySettings, SchedulerSettings, ExecutorSettings)
CLIENT_VARIABLES: Mapping[str, Callable[[str], str]] = {
    "OCTAVO_ADDRESS": _parse_gateways,
    "OCTAVO_ADMIN_ADDRESS": _parse_gateways,
    "OCTAVO_API_KEY": parse_api_key,
}
"""Variables of clients, each with what takes its value or raises ValueError. Empty is as good as unset."""
OTHER_VARIABLES = frozenset({"OCTAVO_HOME", "OCTAVO_CPU_ISA", "OCTAVO_KERNELS_DIR", *CLIENT_VARIABLES})
"""Variables outside the services' settings. OCTAVO_HOME: where `octavo pull` keeps models (see octavo.models).
OCTAVO_ADDRESS and OCTAVO_ADMIN_ADDRESS: where clients find a gateway, host:port. OCTAVO_API_KEY: what they show it.
OCTAVO_CPU_ISA and OCTAVO_KERNELS_DIR: see executor_svc.kernels.native."""


def unknown_pass(settings: ExecutorSettings) -> str | None:
    """Return the first name in --passes that nothing has; None where custom operators may have it."""
    if settings.ops is not None:
        return None
    names = (word.strip().removeprefix("-") for word in settings.passes.split(","))
    return next((name for name in names if name not in ("all", "none", *PASSES)), None)


def known_variables() -> frozenset[str]:
    """Return every OCTAVO_* variable that means something to some program."""
    return OTHER_VARIABLES.union(*(variables_of(each) for each in ALL_SETTINGS))


def wrong_client_variables(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each client's variable that has no such value, and a sentence that names it."""
    for name, parse in CLIENT_VARIABLES.items():
        if not (value := environ.get(name, "")):
            continue
        try:
            parse(value)
        except ValueError as error:
            # A key is nobody's to see, not even a wrong one.
            shown = "" if parse is parse_api_key else f", is {value!r}"
            yield name, f"{name}: must be {error}{shown}"


def load(
    settings_class: type[SettingsType], argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> SettingsType:
    """Return the settings of flags and environment, or end the process with what is wrong (exit code 2)."""
    try:
        return read(
            settings_class,
            sys.argv[1:] if argv is None else argv,
            os.environ if environ is None else environ,
            known_variables(),
        )
    except SettingsError as error:
        stop_with(settings_class.program, error)
