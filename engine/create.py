"""From settings to a running engine: model, pool, graphs, scheduler, put together once.

The only place that knows all of them. Imports torch; `engine.py` and the scheduler do not.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from pagedd.engine.config import BLOCK_SIZES, DEFAULT_MEMORY_SHARE, EngineConfig, SchedulerConfig
from pagedd.engine.config_check import refuse_unfit
from pagedd.engine.cuda_graphs import DecodeGraphs, capture_on_gpu, graph_bytes
from pagedd.engine.engine import Engine
from pagedd.engine.errors import EngineError
from pagedd.engine.faults import load_refusal
from pagedd.engine.freed_memory import return_freed_memory
from pagedd.engine.info import EngineInfo
from pagedd.engine.kv.block_manager import BlockManager
from pagedd.engine.kv.create_tiers import create_tiers
from pagedd.engine.kv.open_pages import num_pages_for
from pagedd.engine.kv.pool_check import choose_kv_form, refuse_impossible_pool
from pagedd.engine.kv.storage import KVStorage, free_bytes, pool_of, size_pool
from pagedd.engine.kv.tiers import Tiers
from pagedd.engine.kv_quality_check import MAX_TOKENS, check_kv_quality, judge, reference_form
from pagedd.engine.model.device import check_current_device, device_name, num_physical_cores
from pagedd.engine.model.fingerprint import fingerprint
from pagedd.engine.model.load import LoadedModel, load_model
from pagedd.engine.runner import ModelRunner, drawn_together
from pagedd.engine.sampler import MAX_VOCAB_SIZE, Sampler, working_bytes_per_logit
from pagedd.engine.scheduler import Scheduler
from pagedd.engine.warm_up import launch_everything, warm_up

log = logging.getLogger(__name__)

Progress = Callable[[float, str], None]

DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 2048}


def create_engine(
    config: EngineConfig, progress: Progress, load: Callable[[EngineConfig, Progress], LoadedModel] = load_model
) -> tuple[Engine, EngineInfo]:
    """Loads the model and makes the engine, idle.

    Args:
        progress: called with the share done, 0 … 1, and what is being done.
        load: makes the model, where it does not come from a path.

    Raises:
        EngineError: `invalid_setting`, or what loading the model and sizing the pool raise; `out_of_memory` or
            `device_unavailable` when the device gives out meanwhile.
    """
    try:
        return _create_engine(config, progress, load)
    except EngineError:
        raise
    except Exception as error:
        refusal = load_refusal(error, check_current_device)
        if refusal is None:
            raise
        log.exception("the device gave out while the model loaded")
        raise refusal from error


def _create_engine(
    config: EngineConfig, progress: Progress, load: Callable[[EngineConfig, Progress], LoadedModel]
) -> tuple[Engine, EngineInfo]:
    if config.block_size not in BLOCK_SIZES:
        raise EngineError("invalid_setting", f"block_size {config.block_size}; use one of {BLOCK_SIZES}")
    runner, info = create_runner(config, progress, load)
    blocks = BlockManager(
        info.num_blocks,
        config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        namespace=(("model", Path(config.model).name), ("kv_cache_dtype", info.kv_cache_dtype)),
        tiers=_create_tiers(config, runner, info),
        open_pages=runner.open_pages,
    )
    scheduler = Scheduler(
        SchedulerConfig(
            block_size=config.block_size,
            num_blocks=info.num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_model_len=info.max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
            scheduling_policy=config.scheduling_policy,
            ageing_s_per_point=config.ageing_s_per_point,
            num_speculative_tokens=0 if runner.runs_ahead else config.num_speculative_tokens,
        ),
        blocks,
    )
    return Engine(runner, scheduler), info


def create_runner(
    config: EngineConfig, progress: Progress, load: Callable[[EngineConfig, Progress], LoadedModel] = load_model
) -> tuple[ModelRunner, EngineInfo]:
    """Loads the model, sizes and allocates the KV pool, and runs once so that the first request isn't slow.

    Args:
        progress: called with the share done, 0 … 1, and what is being done.
        load: makes the model, where it does not come from a path.

    Raises:
        EngineError: what `load_model` and `size_pool` raise, `invalid_setting` or `poor_kv_quality`.
    """
    started = time.perf_counter()
    torch.set_num_threads(config.num_threads or num_physical_cores())
    loaded = load(config, lambda share, what: progress(0.9 * share, what))
    device, model, backend = loaded.device, loaded.model, loaded.backend
    if model.own_kernels is None:
        log.info("the kernels are those of %s, because %s", backend.name, backend.reason)
    refuse_unfit(config, loaded.config.max_position, model.kv_forms)
    if loaded.config.vocab_size > MAX_VOCAB_SIZE:
        raise EngineError(
            "unsupported_model",
            f"vocabulary of {loaded.config.vocab_size} tokens, at most {MAX_VOCAB_SIZE} can be drawn from; "
            "choose another model",
        )
    max_model_len = config.max_model_len or loaded.config.max_position
    budget = config.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS[device.type]
    kv_form = choose_kv_form(
        config.kv_cache_dtype, loaded.dtype, loaded.config.head_dim, beside_quantized=loaded.model.has_quantized_weights
    )
    bytes_per_block = KVStorage.bytes_per_block(loaded.config, kv_form, config.block_size)
    runs_ahead = is_run_ahead(config.async_scheduling, device)
    # A guess needs the tokens before it, which a step that runs ahead does not know yet.
    num_guesses = 0 if runs_ahead else config.num_speculative_tokens
    max_logits_rows = min(budget, config.max_num_seqs * (1 + num_guesses))
    reserve_bytes = model.activation_bytes(budget, max_logits_rows, max_model_len, kv_form)
    num_logits = drawn_together(max_logits_rows, config.max_num_seqs) * loaded.config.vocab_size
    reserve_bytes += num_logits * working_bytes_per_logit(sorts_logits=backend.sorts_logits)
    uses_graphs = backend.can_be_captured and model.can_be_captured and not config.enforce_eager
    if uses_graphs:
        reserve_bytes += graph_bytes(
            model, config.max_num_seqs, max_model_len, loaded.config.vocab_size, kv_form, config.block_size
        )

    num_pages = 0
    if kv_form.has_open_keys:
        num_pages = uses_graphs + num_pages_for(
            budget, config.block_size, config.max_num_seqs, num_guesses=num_guesses, runs_ahead=runs_ahead
        )
    open_bytes = num_pages * KVStorage.bytes_per_page(loaded.config, kv_form, config.block_size)
    reserve_bytes += open_bytes
    quality = config.kv_quality if config.kv_quality and config.kv_quality.form == kv_form.name else None
    is_checked = kv_form.dtype is None and config.kv_quality_check != "off" and quality is None
    text = config.kv_quality_token_ids[: min(MAX_TOKENS, max_model_len)] if is_checked else ()
    if text:
        per_block = KVStorage.bytes_per_block(loaded.config, reference_form(model.kv_forms), config.block_size)
        reserve_bytes += -(-len(text) // config.block_size) * per_block

    if device.type == "cuda":
        torch.cuda.empty_cache()  # what packing the weights took would count as used
    if config.num_blocks is None:
        pool = size_pool(
            free_bytes=free_bytes(device),
            share=config.gpu_memory_utilization or DEFAULT_MEMORY_SHARE[device.type],
            reserve_bytes=reserve_bytes,
            bytes_per_block=bytes_per_block,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
        )
    else:
        refuse_impossible_pool(config.num_blocks, bytes_per_block, model.weight_bytes, device, config.kv_host_gib)
        pool = pool_of(config.num_blocks, bytes_per_block, config.block_size, max_model_len)
    log.info("%s; a token takes %d bytes as %s", pool.describe(), bytes_per_block // config.block_size, kv_form.name)
    if num_pages:
        size_mib = open_bytes / 2**20
        log.info("keys of blocks that are not full lie in %d pages of 16 bits, %.1f MiB", num_pages, size_mib)
    num_blocks = pool.num_blocks + uses_graphs  # one that belongs to nobody
    storage = KVStorage(loaded.config, num_blocks, config.block_size, kv_form, device, num_pages=num_pages)

    runner = ModelRunner(model, storage, Sampler(), device, runs_ahead=runs_ahead, max_num_seqs=config.max_num_seqs)
    if backend.compiles_at_first_launch:
        progress(0.9, "compiling kernels")
        launch_everything(runner, budget, max_logits_rows, max_model_len, config.block_size)
    progress(0.9, "warming up")
    warm_up(runner, min(budget, max_model_len, pool.num_tokens), max_logits_rows, config.block_size)
    if text:
        progress(0.9, "checking the KV cache's quality")
        text = text[: pool.num_tokens]
        quality = check_kv_quality(model, storage, loaded.config, text, max_rows=min(budget, max_logits_rows))
        judge(quality, config.kv_quality_check)
    if uses_graphs:
        progress(0.95, "capturing graphs")
        runner.graphs = DecodeGraphs(
            model,
            storage,
            scratch_block=pool.num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            vocab_size=loaded.config.vocab_size,
            device=device,
            capture=capture_on_gpu(),
        )
    return_freed_memory()
    progress(1.0, "ready")
    info = EngineInfo(
        device=str(device),
        device_name=device_name(device),
        dtype=_name(loaded.dtype),
        kv_cache_dtype=kv_form.name,
        kernel_backend=model.own_kernels or backend.name,
        vocab_size=loaded.config.vocab_size,
        max_model_len=max_model_len,
        # The last token of a request is never computed, so its KV needs no slot.
        max_request_tokens=min(max_model_len, pool.num_tokens + 1),
        block_size=config.block_size,
        num_blocks=pool.num_blocks,
        kv_bytes_per_token=bytes_per_block // config.block_size,
        kv_open_bytes=open_bytes,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
        model_bytes=model.weight_bytes,
        load_seconds=time.perf_counter() - started,
        kv_quality=quality,
    )
    return runner, info


def _create_tiers(config: EngineConfig, runner: ModelRunner, info: EngineInfo) -> Tiers | None:
    if not (config.kv_host_gib or config.kv_disk_gib):
        return None
    if not config.enable_prefix_caching:
        log.warning("kv_host_gib and kv_disk_gib keep cached prefixes; without enable_prefix_caching there are none")
        return None
    directory = None if config.kv_disk_directory is None else Path(config.kv_disk_directory)
    identity = {"dtype": info.dtype, "weight_dtype": config.weight_dtype, "kernels": info.kernel_backend}
    if config.kv_disk_gib and directory is not None:
        try:
            identity["model"] = fingerprint(Path(config.model))
        except OSError as error:
            log.warning("the disk keeps no KV blocks, because the weights cannot be told from others: %s", error)
            directory = None
    return create_tiers(
        runner.storage,
        runner.copy_costs,
        torch.device(info.device),
        host_bytes=int(config.kv_host_gib * (1 << 30)),
        disk_bytes=int(config.kv_disk_gib * (1 << 30)),
        disk_directory=directory,
        identity=identity,
        # A chunk's blocks, and one that each decode begins.
        lookahead=info.max_num_batched_tokens // config.block_size + config.max_num_seqs,
    )


def is_run_ahead(async_scheduling: str, device: torch.device) -> bool:
    """Whether the next step is formed while the device computes one."""
    return async_scheduling == "on" or (async_scheduling == "auto" and device.type == "cuda")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
