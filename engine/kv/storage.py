"""The KV cache's memory: one allocation for all layers, and how many blocks it should have.

Owns the tensor. Which block belongs to whom is `block_pool.py`'s; how a kernel sees a layer, `kernels/layout.py`'s.
`size_pool` is arithmetic only; `free_bytes` is what asks the machine.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from pagedd.engine.errors import EngineError
from pagedd.engine.faults import is_out_of_memory
from pagedd.engine.kv.open_pages import OpenPages
from pagedd.engine.kv.stored_block import BlockBytes, BlockCopy
from pagedd.engine.model.config import ModelConfig
from pagedd.engine.staging import to_device
from pagedd.kernels.kv_form import KVForm
from pagedd.kernels.layout import KVLayer, QuantizedLayer

log = logging.getLogger(__name__)

# Raised whenever the bytes of a block come to mean something else, or are computed in another way: blocks on the disk
# outlive the program that wrote them.
LAYOUT_VERSION = 2


class KVStorage:
    """Keys, then values of each layer: `[num_blocks, num_kv_heads, block_size, head_dim]`, or quantized records.

    A block is a block in either form. The memory is not cleared, so that on a CPU a page costs nothing until a block in
    it is first written. Huge pages would make attention a tenth quicker, and the first use of a pool slower by more:
    each clears 2 MiB, in every plane.

    Attributes:
        data: [num_layers, bytes] uint8, the one allocation.
        planes: keys and values, views: [num_layers, num_blocks, num_kv_heads, block_size, head_dim] of a float form,
            uint8 [num_layers, num_blocks, num_kv_heads, record_bytes] of a quantized one.
        open_pages: who has which of `num_pages` pages of open keys; none unless the form has such.
        open_keys: [num_layers, num_pages, num_kv_heads, block_size, head_dim] bfloat16.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        form: KVForm,
        device: torch.device,
        *,
        num_pages: int = 0,
    ) -> None:
        wanted = num_blocks * self.bytes_per_block(config, form, block_size)
        try:
            self.data = torch.empty(config.num_layers, wanted // config.num_layers, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise EngineError(
                "no_kv_memory",
                f"{num_blocks} blocks need {_gib(wanted)} and {device} cannot give them; lower num_blocks",
            ) from error
        key_bytes = num_blocks * config.num_kv_heads * form.record_bytes(0, block_size, config.head_dim)
        outer = (config.num_layers, num_blocks, config.num_kv_heads)
        parts = self.data[:, :key_bytes], self.data[:, key_bytes:]
        keys, values = (part.view(*outer, -1) for part in parts)
        # Each [num_layers, num_blocks, bytes of one block of one layer].
        self._blocks = [part.view(config.num_layers, num_blocks, -1) for part in parts]
        if form.dtype is not None:
            row = (block_size, config.head_dim)
            keys, values = (part.view(form.dtype).view(*outer, *row) for part in (keys, values))
        self.planes = (keys, values)
        self.open_pages = OpenPages(num_pages)
        page = (config.num_kv_heads, block_size, config.head_dim)
        self.open_keys = torch.empty(config.num_layers, num_pages, *page, dtype=torch.bfloat16, device=device)
        self._head_dim = config.head_dim
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.form = form

    @staticmethod
    def bytes_per_block(config: ModelConfig, form: KVForm, block_size: int) -> int:
        """Of all layers, keys and values, with what scales and padding take."""
        return config.num_layers * config.num_kv_heads * form.block_bytes(block_size, config.head_dim)

    @staticmethod
    def bytes_per_page(config: ModelConfig, form: KVForm, block_size: int) -> int:
        """Of all layers: keys of an open block."""
        return config.num_layers * config.num_kv_heads * form.page_bytes(block_size, config.head_dim)

    @property
    def num_bytes(self) -> int:
        """Of the pool; pages of open keys are beside it."""
        return self.data.nbytes

    def layer(self, index: int) -> KVLayer:
        """As the kernels see it, a view."""
        keys, values = (plane[index] for plane in self.planes)
        if self.form.dtype is not None:
            return self.data[index].view(self.form.dtype).view(2, *keys.shape)
        return QuantizedLayer(
            (keys, values), self.form, self.block_size, self._head_dim, open_keys=self.open_keys[index]
        )

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole blocks, in all layers: (source, destination) each. No destination is another pair's source.

        The open keys of a block are copied with it.
        """
        for plane in self.planes:
            _copy(plane, pairs)
        pages = ((self.open_pages.find(source), destination) for source, destination in pairs)
        _copy(self.open_keys, [(page, self.open_pages.open(block)) for page, block in pages if page is not None])

    @property
    def block_bytes(self) -> int:
        """Of one block as it is read and written: keys of all layers, then values of all layers."""
        return sum(plane.shape[0] * plane.shape[2] for plane in self._blocks)

    def read_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copies whole blocks to host memory of `block_bytes` each. Their open keys, if they have any, stay.

        On a GPU in the current stream, and without waiting if the memory is pinned. On a CPU by numpy: torch would
        share each of these small copies among its threads, and wait for them.
        """
        for block_id, memory in copies:
            for plane, part in zip(self._blocks, self._parts_of(memory), strict=True):
                _copy_bytes(plane[:, block_id], part)

    def write_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """The reverse of `read_blocks`."""
        for block_id, memory in copies:
            for plane, part in zip(self._blocks, self._parts_of(memory), strict=True):
                _copy_bytes(part, plane[:, block_id])

    def _parts_of(self, memory: BlockBytes) -> list[torch.Tensor]:
        """As the planes have a block: [num_layers, bytes] each."""
        sizes = [plane.shape[0] * plane.shape[2] for plane in self._blocks]
        parts = torch.split(torch.frombuffer(memory, dtype=torch.uint8), sizes)
        return [part.view(plane.shape[0], -1) for part, plane in zip(parts, self._blocks, strict=True)]


def _copy(layers: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    if not pairs:
        return
    sources, destinations = to_device(list(np.array(pairs, dtype=np.int64).T), layers.device)
    for layer in layers:  # one layer at a time: the copy passes through a temporary
        layer[destinations] = layer[sources]


def _copy_bytes(source: torch.Tensor, to: torch.Tensor) -> None:
    if source.is_cpu and to.is_cpu:
        to.numpy()[:] = source.numpy()
    else:
        to.copy_(source, non_blocking=True)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """`num_full_requests`: how many requests of `max_model_len` tokens the pool holds at once.

    `is_memory_left`: more blocks would have fitted than all seats can use.
    """

    num_blocks: int
    num_tokens: int
    num_bytes: int
    num_full_requests: float
    is_memory_left: bool = False

    def describe(self) -> str:
        return (
            f"the KV pool has {self.num_blocks} blocks for {self.num_tokens} tokens in {_gib(self.num_bytes)}; "
            f"{self.num_full_requests:.1f} full-length requests fit"
        ) + (", one for each seat, and num_blocks makes room for more prefixes" if self.is_memory_left else "")


def size_pool(
    *,
    free_bytes: int,
    share: float,
    reserve_bytes: int,
    bytes_per_block: int,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
) -> PoolSize:
    """As many blocks as `share` of the free memory holds beside the reserve, and no more than all seats can use.

    Beyond that a larger pool would hold prefixes that nobody uses now, and who wants them sets `num_blocks`: the memory
    may be of use to other programs. So where it is plenty, a smaller form of the cache leaves more of it free.

    Args:
        free_bytes: free now, with the weights loaded.
        reserve_bytes: for the peak of activations in a step.

    Raises:
        EngineError: `no_kv_memory` when not even one block fits.
    """
    blocks_per_request = -(-max_model_len // block_size)
    budget = int(free_bytes * share) - reserve_bytes
    usable = max_num_seqs * blocks_per_request
    num_blocks = min(budget // bytes_per_block, usable)
    if num_blocks < 1:
        raise EngineError(
            "no_kv_memory",
            f"{_mib(free_bytes)} free × {share:g} − {_mib(reserve_bytes)} reserved for activations leaves "
            f"{_mib(max(budget, 0))}, one block needs {_mib(bytes_per_block)}; "
            "free memory, raise gpu_memory_utilization or lower max_num_batched_tokens",
        )
    pool = pool_of(num_blocks, bytes_per_block, block_size, max_model_len)
    return replace(pool, is_memory_left=budget // bytes_per_block > usable)


def pool_of(num_blocks: int, bytes_per_block: int, block_size: int, max_model_len: int) -> PoolSize:
    """The figures of a pool of exactly so many blocks."""
    blocks_per_request = -(-max_model_len // block_size)
    return PoolSize(num_blocks, num_blocks * block_size, num_blocks * bytes_per_block, num_blocks / blocks_per_request)


def host_memory(num_bytes: int, device: torch.device) -> memoryview:
    """Memory of the host, pinned where `device` is a GPU. Not cleared: a page costs nothing until it is first written.

    Raises:
        EngineError: `no_host_memory` when it cannot give so much.
    """
    try:
        memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise EngineError(
            "no_host_memory",
            f"kv_host_gib needs {_gib(num_bytes)} in one piece, the host has {_gib(free_bytes(torch.device('cpu')))} "
            "free and does not give them; lower kv_host_gib",
        ) from error
    return memory.numpy().data


def free_bytes(device: torch.device) -> int:
    """Memory that could be allocated on `device` now. On a CPU the least of the machine's and the control group's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min([_available_ram(), *(max(0, limit - used) for limit, used in _cgroup_memory())])


def total_bytes(device: torch.device) -> int:
    """Memory that `device` has, whoever uses it. On a CPU the least of the machine's and the control groups' limits."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *(limit for limit, _ in _cgroup_memory())])


def _available_ram() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise EngineError("no_kv_memory", "/proc/meminfo has no MemAvailable; set num_blocks")


def _cgroup_memory() -> list[tuple[int, int]]:
    """Limit and use, of this process's control group (version 2) and of those above it that have a limit."""
    groups = []
    try:
        relative = Path("/proc/self/cgroup").read_text().strip().rpartition("::/")[2]
        root = Path("/sys/fs/cgroup")
        for group in (root / relative, *(root / relative).parents):
            if not group.is_relative_to(root):
                break
            limit = group / "memory.max"
            if limit.exists() and (text := limit.read_text().strip()) != "max":
                groups.append((int(text), int((group / "memory.current").read_text())))
    except OSError as error:  # no /proc or /sys: not Linux, or hidden; the machine's own figure still holds
        log.debug("control group limits are not readable: %s", error)
    return groups


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
