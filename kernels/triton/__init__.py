"""The GPU backend: every kernel of `ops.py` in Triton, one operation a file. Knows tensors, and no sequence."""

import os

# Multiplications and additions are fused: what Triton did by itself up to 3.9, and does only if told from 3.10 on. No
# byte of the cache depends on it (`rope_kv.py`, `kv_quantize.py`), only the last bits of sums.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
