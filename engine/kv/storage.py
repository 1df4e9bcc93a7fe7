"""The KV cache's memory: one allocation for all layers, and how many blocks it should have.

Owns the tensor. Which block belongs to whom is `block_pool.py`'s; how a kernel sees a layer, `kernels/layout.py`'s.
`size_pool` is arithmetic only; `free_bytes` is what asks the machine.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pagedd.engine.errors import EngineError
from pagedd.engine.model.config import ModelConfig
from pagedd.engine.staging import to_device
from pagedd.kernels.kv_form import KVForm
from pagedd.kernels.layout import KVLayer, QuantizedLayer

log = logging.getLogger(__name__)


class KVStorage:
    """`[num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]`, keys first, then values.

    In a quantized form uint8 `[num_layers, 2, num_blocks, num_kv_heads, record_bytes]`: a block is a block in either.
    The memory is not cleared, so that on a CPU a page costs nothing until a block in it is first written. Huge pages
    would make attention a tenth quicker, and the first use of a pool slower by more: each clears 2 MiB, in every plane.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, form: KVForm, device: torch.device
    ) -> None:
        shape: tuple[int, ...] = (config.num_layers, 2, num_blocks, config.num_kv_heads)
        if form.dtype is None:
            shape, dtype = (*shape, form.record_bytes(block_size, config.head_dim)), torch.uint8
        else:
            shape, dtype = (*shape, block_size, config.head_dim), form.dtype
        try:
            self._data = torch.empty(shape, dtype=dtype, device=device)
        except (torch.OutOfMemoryError, RuntimeError) as error:  # a CPU reports a failed allocation as RuntimeError
            wanted = num_blocks * self.bytes_per_block(config, form, block_size)
            raise EngineError(
                "no_kv_memory",
                f"{num_blocks} blocks need {_gib(wanted)} and {device} cannot give them; lower num_blocks",
            ) from error
        self._layers = self._data.unbind(0)
        self._head_dim = config.head_dim
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.form = form

    @staticmethod
    def bytes_per_block(config: ModelConfig, form: KVForm, block_size: int) -> int:
        """Of all layers, keys and values, with what scales and padding take."""
        return config.num_layers * 2 * config.num_kv_heads * form.record_bytes(block_size, config.head_dim)

    @property
    def num_bytes(self) -> int:
        return self._data.nbytes

    @property
    def data(self) -> torch.Tensor:
        """All layers at once, in the shape above."""
        return self._data

    def layer(self, index: int) -> KVLayer:
        """As the kernels see it, a view."""
        if self.form.dtype is not None:
            return self._layers[index]
        return QuantizedLayer(self._layers[index], self.form, self.block_size, self._head_dim)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole blocks, in all layers: (source, destination) each. No destination is another pair's source."""
        if not pairs:
            return
        sources, destinations = to_device(list(np.array(pairs, dtype=np.int64).T), self._data.device)
        for layer in self._layers:  # one layer at a time: the copy passes through a temporary
            layer[:, destinations] = layer[:, sources]


@dataclass(frozen=True, slots=True)
class PoolSize:
    """`num_full_requests`: how many requests of `max_model_len` tokens the pool holds at once."""

    num_blocks: int
    num_tokens: int
    num_bytes: int
    num_full_requests: float

    def describe(self) -> str:
        return (
            f"KV pool: {self.num_blocks} blocks, {self.num_tokens} tokens, {_gib(self.num_bytes)}; "
            f"{self.num_full_requests:.1f} full-length requests fit"
        )


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
    """As many blocks as `share` of the free memory holds beside the reserve, and no more than could ever be used.

    Args:
        free_bytes: free now, with the weights loaded.
        reserve_bytes: for the peak of activations in a step.

    Raises:
        EngineError: `no_kv_memory` when not even one block fits.
    """
    blocks_per_request = -(-max_model_len // block_size)
    budget = int(free_bytes * share) - reserve_bytes
    num_blocks = min(budget // bytes_per_block, max_num_seqs * blocks_per_request)
    if num_blocks < 1:
        raise EngineError(
            "no_kv_memory",
            f"{_mib(free_bytes)} free × {share:g} − {_mib(reserve_bytes)} reserved for activations leaves "
            f"{_mib(max(budget, 0))}, one block needs {_mib(bytes_per_block)}; "
            "free memory, raise gpu_memory_utilization or lower max_num_batched_tokens",
        )
    return pool_of(num_blocks, bytes_per_block, block_size, max_model_len)


def pool_of(num_blocks: int, bytes_per_block: int, block_size: int, max_model_len: int) -> PoolSize:
    """The figures of a pool of exactly so many blocks."""
    blocks_per_request = -(-max_model_len // block_size)
    return PoolSize(num_blocks, num_blocks * block_size, num_blocks * bytes_per_block, num_blocks / blocks_per_request)


def free_bytes(device: torch.device) -> int:
    """Memory that could be allocated on `device` now. On a CPU the least of the machine's and the control group's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min([_available_ram(), *_cgroup_headrooms()])


def _available_ram() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise EngineError("no_kv_memory", "/proc/meminfo has no MemAvailable; set num_blocks")


def _cgroup_headrooms() -> list[int]:
    """Limit minus use, of this process's control group (version 2) and of those above it that have a limit."""
    headrooms = []
    try:
        relative = Path("/proc/self/cgroup").read_text().strip().rpartition("::/")[2]
        root = Path("/sys/fs/cgroup")
        for group in (root / relative, *(root / relative).parents):
            if not group.is_relative_to(root):
                break
            limit = group / "memory.max"
            if limit.exists() and (text := limit.read_text().strip()) != "max":
                headrooms.append(max(0, int(text) - int((group / "memory.current").read_text())))
    except OSError as error:  # no /proc or /sys: not Linux, or hidden; the machine's own figure still holds
        log.debug("control group limits are not readable: %s", error)
    return headrooms


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
