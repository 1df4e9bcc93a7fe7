"""The functions of `kernels/ops.py` in Triton, in one place. Each is explained in its own file."""

import triton

from pagedd.kernels.triton.close_blocks import close_blocks
from pagedd.kernels.triton.linear import packed_linear
from pagedd.kernels.triton.paged_attention import paged_attention
from pagedd.kernels.triton.rms_norm import add_rms_norm, rms_norm
from pagedd.kernels.triton.rope_kv import rope_and_write_kv, write_kv
from pagedd.kernels.triton.silu_and_mul import silu_and_mul
from pagedd.kernels.triton.top_k_top_p import keep_best

IS_INTERPRETED: bool = triton.knobs.runtime.interpret  # on a CPU, number by number

__all__ = [
    "IS_INTERPRETED",
    "add_rms_norm",
    "close_blocks",
    "keep_best",
    "packed_linear",
    "paged_attention",
    "rms_norm",
    "rope_and_write_kv",
    "silu_and_mul",
    "write_kv",
]
