"""`attention_driver.cpp` on tensors: the C++ of attention, rotation and the KV write, compiled without torch.

It is compiled as the extension is, for AVX2, and for processors without either.
"""

import ctypes
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from pagedd.kernels import cpu
from pagedd.kernels.cpu import build
from pagedd.kernels.kv_form import form_of
from pagedd.kernels.layout import KVLayer, QuantizedLayer, block_size_of, planes_of

FLAGS = {"native": [], "AVX2": ["-march=haswell", "-O2"], "portable": ["-march=x86-64-v2", "-O2"]}
TYPES = {  # KvType of keys and of values
    "float32": (0, 0),
    "bf16": (1, 1),
    "int8": (2, 2),
    "fp8": (3, 3),
    "k8v4": (2, 4),
    "int4": (5, 4),
}
QUANTIZED = ("int8", "fp8", "k8v4", "int4")
SOURCES = Path(cpu.__file__).parent
EVERY_FORM = pytest.mark.parametrize("form", list(TYPES))


@dataclass(frozen=True)
class Driver:
    """`attention_driver.cpp` on tensors."""

    library: ctypes.CDLL
    path: str

    def attend(
        self, batch, num_threads=1, soft_cap=0.0, sliding_window=0, plan_window=None
    ) -> tuple[torch.Tensor, int]:
        """Returns the attended rows and the number of items that the step was cut into."""
        query = batch.query.float().contiguous()
        output = torch.full_like(query, float("nan"))
        head_dim = query.shape[-1]
        num_items = self.library.attend(
            pointer(query),
            pointer(output),
            ctypes.c_int64(query.shape[1] * head_dim),
            *cache_arguments(batch.kv_layer, query.shape[1]),
            head_dim,
            pointer(batch.query_starts),
            pointer(batch.context_lens),
            pointer(batch.block_tables),
            ctypes.c_int64(batch.block_tables.shape[1]),
            pointer(batch.open_tables),
            ctypes.c_int64(batch.open_tables.shape[1]),
            len(batch.context_lens),
            num_threads,
            ctypes.c_float(head_dim**-0.5),
            ctypes.c_float(soft_cap),
            sliding_window,
            sliding_window if plan_window is None else plan_window,
        )
        return output, num_items

    def close_blocks(self, kv_layer, batch) -> None:
        self.library.close_full_blocks(
            pointer(batch.query_starts),
            pointer(batch.context_lens),
            pointer(batch.block_tables),
            ctypes.c_int64(batch.block_tables.shape[1]),
            pointer(batch.open_tables),
            ctypes.c_int64(batch.open_tables.shape[1]),
            len(batch.context_lens),
            *cache_arguments(kv_layer),
            kv_layer.head_dim,
        )

    def rope_and_write(self, qkv, num_heads, cos, sin, norms, slots, kv_layer) -> None:
        self.library.rope_and_write(
            pointer(qkv),
            ctypes.c_int64(qkv[0].numel()),
            ctypes.c_int64(len(qkv)),
            num_heads,
            pointer(cos),
            pointer(sin),
            *(norm if norm is None else pointer(norm) for norm in norms),
            ctypes.c_float(1e-6),
            pointer(slots),
            pointer(slots),  # a page for each block
            *cache_arguments(kv_layer),
            qkv.shape[-1],
        )


def compile_driver(path: str, folder: Path) -> Driver:
    """`path` is one of `FLAGS`; takes some seconds."""
    library = folder / f"{path}.so"
    sources = [Path(__file__).with_name("attention_driver.cpp"), SOURCES / "attention.cpp", SOURCES / "rope_kv.cpp"]
    command = ["g++", "-shared", "-fPIC", f"-I{SOURCES}", *build.FLAGS, *FLAGS[path]]
    subprocess.run([*command, *map(str, sources), "-o", str(library)], check=True)
    return Driver(ctypes.CDLL(str(library)), path)


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


def form_name(kv_layer: KVLayer) -> str:
    return kv_layer.form.name if isinstance(kv_layer, QuantizedLayer) else form_of(kv_layer.dtype).name


def cache_arguments(kv_layer: KVLayer, *num_heads: int) -> tuple:
    planes = planes_of(kv_layer)
    open_keys = kv_layer.open_keys if isinstance(kv_layer, QuantizedLayer) else planes[0][:0]
    return (
        *map(pointer, (*planes, open_keys)),
        *TYPES[form_name(kv_layer)],
        *num_heads,
        planes[0].shape[1],
        block_size_of(kv_layer),
    )


def bytes_of(kv_layer: KVLayer) -> list[torch.Tensor]:
    """Its planes and open keys, as what lies in memory."""
    parts = list(planes_of(kv_layer))
    if isinstance(kv_layer, QuantizedLayer):
        parts.append(kv_layer.open_keys)
    return [part.view(torch.uint8) for part in parts]
