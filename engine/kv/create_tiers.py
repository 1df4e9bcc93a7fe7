"""From settings to the tiers behind the pool. What cannot be had is said in the log, and pagedd serves without it."""

import json
import logging
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import torch

from pagedd.engine.errors import EngineError
from pagedd.engine.kv.copy_costs import CopyCosts
from pagedd.engine.kv.disk_segment import IDENTITY_BYTES, SegmentForm
from pagedd.engine.kv.disk_tier import DirectoryInUse, DiskTier
from pagedd.engine.kv.host_tier import HostTier
from pagedd.engine.kv.storage import LAYOUT_VERSION, KVStorage, free_bytes, host_memory
from pagedd.engine.kv.tiers import Tiers

log = logging.getLogger(__name__)


def create_tiers(
    storage: KVStorage,
    costs: CopyCosts,
    device: torch.device,
    *,
    host_bytes: int,
    disk_bytes: int,
    disk_directory: Path | None,
    identity: Mapping[str, str],
    lookahead: int,
) -> Tiers | None:
    """None when neither is asked for, or to be had.

    Args:
        costs: those of the runner that copies.
        identity: what the bytes of a block depend on beside its tokens, `storage` and who asked: model, dtype, kernels.
        lookahead: see `Tiers`.

    Raises:
        EngineError: `no_host_memory`.
    """
    host = None
    if host_bytes >= storage.block_bytes:
        num_bytes = host_bytes // storage.block_bytes * storage.block_bytes
        _check_room(num_bytes, storage, device)
        host = HostTier(host_memory(num_bytes, device), storage.block_bytes)
        log.info("host memory has room for %d KV blocks of %d bytes", host.num_slots, storage.block_bytes)
    disk = None
    if disk_bytes and disk_directory is not None:
        try:
            disk = DiskTier(disk_directory, disk_bytes, _segment_form(storage, identity))
        except (DirectoryInUse, OSError) as error:
            log.warning("the disk keeps no KV blocks: %s", error)
    return Tiers(host, disk, costs, lookahead=lookahead) if host is not None or disk is not None else None


def _check_room(num_bytes: int, storage: KVStorage, device: torch.device) -> None:
    """Memory is taken when it is first written to, that of a CPU's pool as well: too little shows too late."""
    num_free = free_bytes(torch.device("cpu")) - (storage.num_bytes if device.type == "cpu" else 0)
    if num_bytes > num_free:
        gib = 1 << 30
        raise EngineError(
            "no_host_memory",
            f"kv_host_gib {num_bytes / gib:.2f}, the host has {max(0, num_free) / gib:.2f} GiB free beside the pool; "
            "lower kv_host_gib or gpu_memory_utilization",
        )


def _segment_form(storage: KVStorage, identity: Mapping[str, str]) -> SegmentForm:
    facts = {
        **identity,
        "kv_cache_dtype": storage.form.name,
        "planes": [[plane.shape[0], *plane.shape[2:]] for plane in storage.planes],  # of how many blocks, is no matter
        "layout": LAYOUT_VERSION,
    }
    digest = blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=IDENTITY_BYTES).digest()
    return SegmentForm(digest, storage.block_size, storage.block_bytes)
