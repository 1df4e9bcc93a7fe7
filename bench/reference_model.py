"""transformers' own model on the weights that pagedd serves: what tests compare with and benchmarks run against."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def load_reference(weights: Path, dtype: torch.dtype) -> Any:
    """A causal language model on the CPU, from a GGUF file or a folder; for GGUF the dequantized weights in `dtype`."""
    if weights.is_dir():
        return transformers.AutoModelForCausalLM.from_pretrained(weights, dtype=dtype)
    # `from_pretrained(gguf_file=...)` does the same, but only with accelerate installed.
    config = transformers.AutoConfig.from_pretrained(weights.parent, gguf_file=weights.name)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    checkpoint = load_gguf_checkpoint(  # type: ignore[no-untyped-call]
        str(weights), return_tensors=True, model_to_load=model, torch_dtype=dtype
    )
    absent = model.load_state_dict(checkpoint["tensors"], strict=False).missing_keys
    model.tie_weights()
    if set(absent) - set(model.all_tied_weights_keys):
        raise RuntimeError(f"{weights} lacks {', '.join(absent)}")
    return model.eval()
