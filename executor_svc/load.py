"""From settings to what runs the steps: device, kernels, weights, KV memory."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from executor_svc.batch import Limits
from executor_svc.capacity import Wanted, plan_limits
from executor_svc.cpu_features import cpu_features, resolve_dtype
from executor_svc.device import Device
from executor_svc.device.cuda import open_accelerator
from executor_svc.graph.custom import bind_ops, load_ops
from executor_svc.graph.custom_check import CustomOpError
from executor_svc.graph.optimize import PASSES, choose_passes
from executor_svc.graph.passes.base import Pass
from executor_svc.inputs_ahead import InputsAhead
from executor_svc.kernels import KernelSet, build_kernels
from executor_svc.kernels.native.build import KernelBuildError
from executor_svc.kernels.profiled import OpTimes, profiled
from executor_svc.kernels.sets.triton import GpuUnusableError, find_gpu
from executor_svc.kv_cache import KVCache, block_bytes
from executor_svc.kv_pages import KvPages
from executor_svc.memory import available_memory, default_kv_memory
from executor_svc.metrics import Holdings
from executor_svc.model_runner import ModelRunner
from executor_svc.models import CausalLM, LoadedModel, ServedConfig, load_model, read_config
from executor_svc.parallel.lead import ConnectedRanks, Follower, LeadingModel
from executor_svc.pipeline.following import load_follower
from executor_svc.pipeline.leading import Leading
from executor_svc.pipeline.load import DevicePlan, load_runner, out_of_memory
from executor_svc.pipeline.runner import PipelinedRunner
from executor_svc.ranks_plan import RanksPlan
from executor_svc.sampler import Sampler
from octavo.models import PreparedModel, open_prepared
from octavo.rpc.settings import SettingsError
from octavo.rpc.stages import Stages
from octavo.settings import ExecutorSettings

logger = logging.getLogger(__name__)

KERNELS_OF_DEVICE = {"cpu": "cpu", "cuda": "triton"}
"""The kernel set that a device is served with where none is named."""


def torch_device(name: str, ranks: RanksPlan | None = None) -> torch.device:
    """Return the device; of several ranks on a machine, each its own. Raises SettingsError where it is not there, or
    will not do.
    """
    device = torch.device(name)
    if device.type == "cuda":
        if ranks is not None:
            device = torch.device("cuda", ranks.place.local.rank)
        try:
            find_gpu(device)
        except GpuUnusableError as error:
            local = "" if ranks is None else f", rank {ranks.place.local.rank} of {ranks.place.local.size} on a machine"
            raise SettingsError(f"--device {name}{local}: {error}") from None
    return device


def _kernels(settings: ExecutorSettings, device: torch.device) -> KernelSet:
    name = settings.kernels or KERNELS_OF_DEVICE[device.type]
    if device.type == "cuda" and name == "cpu":
        raise SettingsError("--kernels cpu: these kernels run on CPUs; take triton with --device cuda, or reference")
    try:
        kernels = build_kernels(name, num_threads(settings), device)
    except (ValueError, KernelBuildError) as error:
        raise SettingsError(f"--kernels {name}: {error}") from None
    if settings.deterministic and not kernels.batch_invariant:
        raise SettingsError(
            f"--deterministic: the results of --kernels {kernels.name} depend on the batch; cpu's do not"
        )
    return kernels


def _passes(
    settings: ExecutorSettings, kernels: KernelSet, dtype: torch.dtype, device: torch.device
) -> tuple[Pass, ...]:
    """Return the passes, those of custom operators first: they are written for the plain graph."""
    own: tuple[Pass, ...] = ()
    if settings.ops is not None:
        try:
            own = bind_ops(load_ops(settings.ops), kernels, dtype, device)
        except CustomOpError as error:
            raise SettingsError(f"--ops {settings.ops}: {error}") from None
    try:
        return choose_passes(settings.passes, (*own, *PASSES))
    except ValueError as error:
        raise SettingsError(f"--passes {settings.passes}: {error}") from None


def plan_load(
    settings: ExecutorSettings,
    stages: Stages,
    op_times: OpTimes | None = None,
    ranks: RanksPlan | None = None,
) -> Load:
    """Return what loads the model on the device thread. `op_times`: where the ops' time is counted. `ranks`: where the
    model is divided.

    Raises SettingsError and ModelError.
    """
    assert (ranks is None) == (settings.tensor_parallel == 1), "who starts a rank knows its place"
    device = torch_device(settings.device, ranks)
    if settings.profile_ops and device.type != "cpu":
        raise SettingsError("--profile-ops: ops are timed on the host, which a GPU does not wait for; set --device cpu")
    dtype = resolve_dtype(settings.dtype, device, cpu_features())
    kernels = _kernels(settings, device)
    if op_times is not None:
        kernels = profiled(kernels, op_times)
    passes = _passes(settings, kernels, dtype, device)
    stages.done("kernels")
    prepared = open_prepared(settings.model)
    prepared.check_weights()
    return Load(settings, prepared, dtype, device, kernels, passes, stages, ranks)


class Load:
    """Loads weights, takes KV memory, warms up: called once, on the device thread, whose thread pool is made here."""

    def __init__(
        self,
        settings: ExecutorSettings,
        prepared: PreparedModel,
        dtype: torch.dtype,
        device: torch.device,
        kernels: KernelSet,
        passes: Sequence[Pass],
        stages: Stages,
        ranks_plan: RanksPlan | None = None,
    ) -> None:
        self._settings = settings
        self._ranks_plan = ranks_plan
        self._ranks: ConnectedRanks | None = None
        self._widest: ServedConfig | None = None
        self.prepared = prepared
        self.dtype = dtype
        self._device = device
        self.kernels = kernels
        self.passes = passes
        """What the model's graph is fused by."""
        self._stages = stages
        self._weights_bytes = 0
        self.architecture = self.code = ""
        """What is loaded, and whose code runs it; empty before that."""
        self.holdings: Holdings | None = None
        """What has been loaded; None before that."""
        self._pages: KvPages | None = None
        self._ahead: InputsAhead | None = None

    def stop(self, failure: str | None = None) -> None:
        """End what goes on beside the device thread. Idempotent. `failure`: why other ranks must not wait for it."""
        if self._pages is not None:
            self._pages.stop()
        if self._ranks is not None:
            if failure is None:
                self._ranks.watch.finish()
            else:
                self._ranks.watch.leave(failure)
            if self._ranks_plan is not None and self._ranks_plan.started is not None:
                self._ranks_plan.started.wait()
            self._ranks.watch.close()
        if self._ahead is not None:
            self._ahead.stop()

    def __call__(self) -> ModelRunner | PipelinedRunner:
        """Load; returns what runs the steps. Raises ModelLoadError, and SettingsError where a setting does not fit."""
        with self._all_or_none():
            try:
                return self._load()
            except CustomOpError as error:  # in the warm-up
                raise SettingsError(f"--ops {self._settings.ops}: {error}") from error

    def follow(self) -> None:
        """Load the part of a rank that is not the first, and do what rank 0 tells until it ends. Raises what a load
        does.
        """
        with contextlib.ExitStack() as stack:
            with self._all_or_none():
                device = open_accelerator(self._device) if self._device.type != "cpu" else None
                model = self._load_model() if device is None else self._load_on(device)
                assert self._ranks is not None  # its plan
                assert isinstance(model, CausalLM)  # the loader: only these are divided
                self._stages.done("weights")
                if device is None:
                    follower = self._follower(model, self._ranks)
                else:
                    follower = self._device_follower(model, self._ranks, device)
                    stack.enter_context(device.on(device.compute))
                self._stages.done("KV memory")
            stack.callback(self._ranks.watch.close)
            if self._pages is not None:
                self._pages.start()
                stack.callback(self._pages.stop)
            follower.follow()

    def _follower(self, model: CausalLM, ranks: ConnectedRanks) -> Follower:
        """Take KV memory on the host."""
        limits = self._limits(model.config, self._free_memory())
        kv_cache = self._take_kv_memory(model, limits)
        self._pages = KvPages(kv_cache)
        return Follower(model, kv_cache, ranks, pages=self._pages)

    def _device_follower(self, model: CausalLM, ranks: ConnectedRanks, device: Device) -> Follower:
        """Take KV memory on an accelerator."""
        plan, limits_of = self._device_plan(model)
        block_size = self._settings.block_size
        return load_follower(model, self.kernels, self.dtype, block_size, plan, limits_of, device, ranks)

    @contextlib.contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Have the other ranks end where this one cannot load."""
        try:
            yield
        except BaseException as error:
            if self._ranks is not None:
                rank = self._ranks.share.rank
                self._ranks.watch.leave(f"rank {rank} could not start: {error}")
                self._ranks = None
            raise

    def _load(self) -> ModelRunner | PipelinedRunner:
        started = time.monotonic()
        settings, dtype, device = self._settings, self.dtype, self._device
        accelerator = open_accelerator(device) if device.type != "cpu" else None
        model = self._load_model() if accelerator is None else self._load_on(accelerator)
        self.architecture, self.code = model.config.architecture, model.code
        if settings.deterministic and self.code != CausalLM.code:
            raise SettingsError(
                f"--deterministic: {self.architecture} is run by {self.code}, whose results depend on the batch"
            )
        self._stages.done("weights")
        runner = self._runner(model) if accelerator is None else self._pipelined(model, accelerator)
        limits = runner.limits
        if settings.max_model_len is None and model.config.unstretched_length < model.config.max_position_embeddings:
            fields = {"max_model_len": limits.max_model_len, "longest": model.config.max_position_embeddings}
            logger.warning(
                "the model takes longer sequences if --max-model-len asks for them", extra={"fields": fields}
            )
        self._stages.done("warm-up")
        # The null block is nobody's.
        load_seconds = time.monotonic() - started
        kv_bytes = limits.num_blocks * block_bytes(model.config, settings.block_size, dtype)
        self.holdings = Holdings(self._weights_bytes, load_seconds, limits.num_blocks - 1, kv_bytes)
        return runner

    def _load_on(self, accelerator: Device) -> LoadedModel:
        with out_of_memory(accelerator, "the weights", "--dtype, or take a smaller model"):
            return self._load_model()

    def _load_model(self) -> LoadedModel:
        """Read the weights, on a device of whatever kind, once the ranks have come together where there are several."""
        settings = self._settings
        torch.set_num_threads(num_threads(settings))
        plan = self._ranks_plan
        config = read_config(self.prepared) if settings.kv_memory is not None or plan is not None else None
        if plan is not None:
            assert config is not None  # just above
            whole, config = config, plan.check(self.prepared, config)
            self._widest = plan.widest(whole)
        if settings.kv_memory is not None:
            assert config is not None  # just above
            # Said before the weights are read, which may take minutes. What is free is known only after that.
            self._limits(config, settings.kv_memory)
        if plan is not None:
            self._ranks = plan.connect(settings, self.prepared, self.dtype, self._device, self.kernels, self.passes)
            self._stages.done("ranks")
        longest, kernels = settings.max_model_len, self.kernels
        progress, ranks = self._progress, self._ranks
        model = load_model(self.prepared, self.dtype, self._device, kernels, progress, longest, self.passes, ranks)
        if kernels.name == "cpu" and model.code == CausalLM.code:
            # From here on torch has small things to do. Its threads would look for more of them for some milliseconds
            # each time, on the processors of those that compute.
            torch.set_num_threads(1)
        return model

    def _free_memory(self) -> int:
        """Return what is free for KV, in bytes: of several ranks, for the one that has least, once all have weights."""
        if self._ranks is None or self._ranks_plan is None:
            return default_kv_memory()
        # Two ranks of one machine see the same memory free.
        self._ranks.group.least(0)
        return self._ranks.group.least(default_kv_memory() // self._ranks_plan.place.local.size)

    def _take_kv_memory(self, model: LoadedModel, limits: Limits) -> KVCache:
        num_ranks = 1 if self._ranks_plan is None else self._ranks_plan.place.local.size
        _warn_of_memory(num_ranks * limits.num_blocks * block_bytes(model.config, limits.block_size, self.dtype))
        return KVCache.allocate(model.config, limits.num_blocks, limits.block_size, self.dtype, self._device)

    def _runner(self, model: LoadedModel) -> ModelRunner:
        """Take KV memory on the host, and warm up."""
        limits = self._limits(model.config, self._free_memory())
        kv_cache = self._take_kv_memory(model, limits)
        pages = KvPages(kv_cache)
        leading: LeadingModel | LoadedModel = model
        if self._ranks is not None:
            assert isinstance(model, CausalLM)  # the loader: only these are divided
            leading = LeadingModel(model, self._ranks)
        sampler, builds_ahead = Sampler(self.kernels), self._settings.build_ahead
        runner = ModelRunner(leading, kv_cache, sampler, limits, pages, builds_ahead=builds_ahead)
        runner.warm_up()
        if runner.ahead is not None:
            runner.ahead.start()
        self._ahead = runner.ahead
        self._pages = pages
        pages.start()
        return runner

    def _pipelined(self, model: LoadedModel, accelerator: Device) -> PipelinedRunner:
        """Take KV memory on an accelerator, capture graphs, and warm up."""
        plan, limits_of = self._device_plan(model)
        leading = None
        if self._ranks is not None:
            assert isinstance(model, CausalLM)  # the loader: only these are divided
            leading = Leading(model, self._ranks, accelerator)
        block_size = self._settings.block_size
        return load_runner(model, self.kernels, self.dtype, block_size, plan, limits_of, accelerator, leading)

    def _device_plan(self, model: LoadedModel) -> tuple[DevicePlan, Callable[[int], Limits]]:
        """Return what the settings say of a device, and what it holds with so many bytes for KV."""
        settings = self._settings
        plan = DevicePlan(settings.gpu_memory_utilization, settings.kv_memory, settings.enforce_eager)
        return plan, lambda kv_memory: self._limits(model.config, kv_memory)

    def _limits(self, config: ServedConfig, kv_memory: int) -> Limits:
        """Return what is held; `kv_memory`: bytes for KV, where the settings name none. Raises SettingsError."""
        settings = self._settings
        # Of several ranks all have as many blocks as the one with the largest.
        config = self._widest or config
        return plan_limits(
            Wanted(
                settings.block_size,
                settings.max_num_seqs,
                settings.max_num_batched_tokens,
                settings.max_model_len,
                settings.kv_memory,
            ),
            vocab_size=config.vocab_size,
            max_position_embeddings=min(config.max_position_embeddings, self.prepared.max_position_embeddings),
            block_bytes=block_bytes(config, settings.block_size, self.dtype),
            default_kv_memory=kv_memory,
            unstretched_length=config.unstretched_length,
            window=config.window,
        )

    def _progress(self, done: int, total: int) -> None:
        size = self.dtype.itemsize
        self._weights_bytes = total * size
        self._stages.progress("weights", done * size, total * size)


def _warn_of_memory(kv_bytes: int) -> None:
    """Warn where what all ranks of this machine take is more than there is. Pages of the KV memory are taken as they
    are first written: what does not fit shows only under load.
    """
    available = available_memory()
    if kv_bytes > available:
        fields = {"kv_bytes": kv_bytes, "available_bytes": available}
        logger.warning("there is less memory available than --kv-memory takes", extra={"fields": fields})


def num_threads(settings: ExecutorSettings) -> int:
    """Return the CPU threads of the model."""
    return settings.threads or len(os.sched_getaffinity(0))
