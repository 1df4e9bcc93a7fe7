"""The exit statuses that `pagectl` and `pagedd` share; those of a model that cannot be had are of sysexits.h."""

import os

# What a shell says of a program that an interrupt ended.
EXIT_INTERRUPTED = 130
MODEL_STATUSES = {
    "checksum_mismatch": os.EX_DATAERR,
    "model_in_use": os.EX_TEMPFAIL,
    "model_unavailable": os.EX_UNAVAILABLE,
    "unsupported_model": os.EX_CONFIG,
    "unsupported_device": os.EX_CONFIG,
}
