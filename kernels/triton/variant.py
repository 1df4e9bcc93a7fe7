"""A kernel with everything that compiling it needs, so that it can be built where there is no GPU.

Every operation's module has `variants(arch) -> list[Variant]`, as the launch table has them for that architecture.
"""

from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.jit import JITFunction


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel for one choice of constants.

    Attributes:
        name: operation and what sets it apart, such as `paged_attention.decode.int8.128`.
        kernel: the function under `triton.jit`.
        signature: argument → Triton's type, such as `*bf16`, `i32` or `constexpr`.
        constants: argument → value, of those that are `constexpr`.
        aligned: pointers and strides that are multiples of 16, which 16-byte loads need to know.
        num_warps, num_stages: as launched.
        must_fit: a model that many serve uses it, so it may spill no register.
        has_products: it multiplies matrices, so it has to contain matrix instructions.
    """

    name: str
    kernel: JITFunction[Any]
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: frozenset[str] = frozenset()
    num_warps: int = 4
    num_stages: int = 2
    must_fit: bool = False
    has_products: bool = False


# Triton's names of the dtypes that activations and caches have.
TRITON_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "u8"}
