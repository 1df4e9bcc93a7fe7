"""The product of two tiles, as all kernels take it."""

import triton
import triton.language as tl

# The interpreter multiplies bfloat16's bits as if they were integers, so there it has to widen first.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, accumulator):
    """accumulator + a · b, summed in float32; no float32 is cut down to tf32."""
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision="ieee")
