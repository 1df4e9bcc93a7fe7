"""The exit statuses that `pagectl` and `pagedd` share, numbers of sysexits.h: a model that cannot be had or served."""

import os

MODEL_STATUSES = {
    "checksum_mismatch": os.EX_DATAERR,
    "model_unavailable": os.EX_UNAVAILABLE,
    "unsupported_model": os.EX_CONFIG,
    "unsupported_device": os.EX_CONFIG,
}
