"""What Triton knows of a shape when it looks for a kernel that was compiled before."""

from types import SimpleNamespace

import pytest
import torch
from triton.compiler import ASTSource

from pagedd.kernels.kv_form import FORMS, KVForm
from pagedd.kernels.triton.attention_shape import AttentionShape


def key_on_disk(shape: AttentionShape) -> str:
    kernel = SimpleNamespace(__name__="kernel", arg_names=["SHAPE"], cache_key="source")
    return str(ASTSource(kernel, {"SHAPE": "constexpr"}, {"SHAPE": shape}).hash())


def test_a_kernel_of_another_layout_of_the_cache_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionShape(torch.bfloat16, FORMS["int8"], num_kv_heads=2, group=4, block_size=16, head_dim=64)
    before = key_on_disk(shape)
    assert key_on_disk(shape) == before
    record_bytes = KVForm.record_bytes
    monkeypatch.setattr(KVForm, "record_bytes", lambda *arguments: record_bytes(*arguments) + 64)
    assert key_on_disk(shape) != before


@pytest.mark.parametrize(
    "change", [{"group": 2}, {"block_size": 8}, {"sliding_window": 3}, {"dtype": torch.float16}, {"form": FORMS["fp8"]}]
)
def test_a_kernel_of_another_shape_is_not_found(change: dict[str, object]) -> None:
    sizes: dict[str, object] = {"num_kv_heads": 2, "group": 4, "block_size": 16, "head_dim": 64}
    sizes |= {"dtype": torch.bfloat16, "form": FORMS["int8"]}
    assert key_on_disk(AttentionShape(**sizes)) != key_on_disk(AttentionShape(**sizes | change))
