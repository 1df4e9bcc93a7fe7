"""The GPU backend: every kernel of `ops.py` in Triton, one operation a file. Knows tensors, and no sequence."""
