"""What tiers are made of, and what is refused before a byte is taken."""

import pytest
import torch

from pagedd.engine.errors import EngineError
from pagedd.engine.kv import create_tiers as module
from pagedd.engine.kv.create_tiers import create_tiers
from pagedd.engine.kv.storage import KVStorage
from pagedd.engine.model.config import ModelConfig
from pagedd.kernels.kv_form import FORMS

CONFIG = ModelConfig(architecture="", vocab_size=9, num_layers=1, num_kv_heads=1, head_dim=16, max_position=64)


def test_more_host_memory_than_is_free_is_refused_with_value_limit_and_next_step(monkeypatch) -> None:
    cpu = torch.device("cpu")
    storage = KVStorage(CONFIG, num_blocks=2, block_size=16, form=FORMS["float32"], device=cpu)
    monkeypatch.setattr(module, "free_bytes", lambda device: storage.num_bytes + (1 << 30))
    asked = {"disk_bytes": 0, "disk_directory": None, "identity": {}, "lookahead": 1}
    with pytest.raises(EngineError) as refusal:
        create_tiers(storage, None, cpu, host_bytes=2 << 30, **asked)
    assert refusal.value.code == "no_host_memory"
    for said in ("kv_host_gib 2.00", "1.00 GiB free beside the pool", "lower kv_host_gib"):
        assert said in refusal.value.message
