"""Pools and host tiers of a given size that the machine can never hold: refused before a weight is read.

Owns what such a pool would take, and so the choice of its form. On a CPU all lies in one memory and counts together.
What fits into the memory that is free now, where no size is given, is `storage.size_pool`'s.
"""

import torch

from pagedd.engine.config import EngineConfig
from pagedd.engine.errors import EngineError
from pagedd.engine.kv.storage import KVStorage, total_bytes
from pagedd.engine.model.config import DecoderConfig
from pagedd.engine.model.decoder import Checkpoint
from pagedd.engine.model.weight_blocks import BlockCheckpoint
from pagedd.kernels.kv_form import FORMS, KVForm, form_of


def refuse_impossible_pools(
    settings: EngineConfig,
    config: DecoderConfig,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    *,
    weight_bytes: int,
) -> None:
    """Whatever is free now, which may change. `weight_bytes` is what the weights take at least.

    Raises:
        EngineError: `invalid_setting` with what would fill the machine.
    """
    refuse_impossible_host_tier(settings.kv_host_gib, device, weight_bytes=weight_bytes)
    if settings.num_blocks is None or settings.kv_cache_dtype not in ("auto", *FORMS):
        return  # a form that there is not is refused with those that there are
    is_quantized = has_quantized_weights(settings, config, checkpoint)
    form = choose_kv_form(settings.kv_cache_dtype, dtype, config.head_dim, beside_quantized=is_quantized)
    bytes_per_block = KVStorage.bytes_per_block(config, form, settings.block_size)
    refuse_impossible_pool(settings.num_blocks, bytes_per_block, weight_bytes, device, settings.kv_host_gib)


def refuse_impossible_pool(
    num_blocks: int, bytes_per_block: int, weight_bytes: int, device: torch.device, kv_host_gib: float
) -> None:
    """The same for a pool whose form is known."""
    host_tier_bytes = int(kv_host_gib * 2**30) if device.type == "cpu" else 0
    machine_bytes, pool_bytes = total_bytes(device), num_blocks * bytes_per_block
    if pool_bytes + weight_bytes + host_tier_bytes > machine_bytes:
        most = max(0, machine_bytes - weight_bytes - host_tier_bytes) // bytes_per_block
        host_tier = f" and kv_host_gib {kv_host_gib:g}" if host_tier_bytes else ""
        raise EngineError(
            "invalid_setting",
            f"num_blocks {num_blocks} of {bytes_per_block} bytes take {_gib(pool_bytes)} beside {_gib(weight_bytes)} "
            f"of weights{host_tier}, {device} has {_gib(machine_bytes)}; {most} would fill it",
        )


def refuse_impossible_host_tier(kv_host_gib: float, device: torch.device, *, weight_bytes: int = 0) -> None:
    """The same for host memory behind the pool, of whatever model, beside weights that lie there too."""
    host_bytes = total_bytes(torch.device("cpu"))
    beside_bytes = weight_bytes if device.type == "cpu" else 0
    if kv_host_gib and kv_host_gib * 2**30 + beside_bytes > host_bytes:
        beside = f" beside {_gib(beside_bytes)} of weights" if beside_bytes else ""
        raise EngineError(
            "invalid_setting", f"kv_host_gib {kv_host_gib:g}{beside}, the host has {_gib(host_bytes)}; lower it"
        )


def choose_kv_form(name: str, dtype: torch.dtype, head_dim: int, *, beside_quantized: bool) -> KVForm:
    """`auto` is 8 bits beside quantized weights, which cost more accuracy than that, else the activations' `dtype`."""
    if name != "auto":
        return FORMS[name]
    return FORMS["int8"] if beside_quantized and FORMS["int8"].fits(head_dim) else form_of(dtype)


def has_quantized_weights(settings: EngineConfig, config: DecoderConfig, checkpoint: Checkpoint) -> bool:
    """Whether the weights will be, as far as the file's names tell."""
    if settings.weight_dtype != "auto":
        return settings.weight_dtype in ("int8", "int4")
    if settings.dtype == "float32" or not isinstance(checkpoint, BlockCheckpoint):
        return False
    names = (f"model.layers.{index}.mlp.down_proj.weight" for index in range(config.num_layers))
    return any(map(checkpoint.is_quantized, names))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
