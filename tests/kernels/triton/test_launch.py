"""The launch table: what has a row, and what it says of the rest."""

from itertools import product

import pytest
import torch

from pagedd.kernels.errors import UnfitError
from pagedd.kernels.kv_form import FORMS
from pagedd.kernels.triton.attention_shape import AttentionShape, chunk_launch, short_launch
from pagedd.kernels.triton.launch import TABLE, launch_for
from pagedd.kernels.triton.limits import obstacle
from pagedd.kernels.triton.paged_attention import MAX_SHORT_ROWS

ARCHS = (75, 80, 86, 89, 90, 100, 103, 120, 121)
GROUPS = (1, 7, 16, 17, 33, 48, 64, 71, 128)


@pytest.mark.parametrize("arch", ARCHS)
def test_up_to_128_query_heads_a_kv_head_have_a_launch_for_every_length_of_chunk(arch: int) -> None:
    head_dim = 64 if arch == 75 else 128
    for group, form in product(GROUPS, FORMS.values()):
        dtype = form.dtype or torch.float16
        if arch == 75 and dtype == torch.float32:
            continue
        shape = AttentionShape(dtype, form, 1, group, 16, head_dim)
        for rows in range(group, max(MAX_SHORT_ROWS, group) + 1, group):
            assert short_launch(arch, shape, rows).tiles["rows"] >= rows
        assert chunk_launch(arch, shape).tiles["rows"] >= group


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (
            {"num_heads": 129, "num_kv_heads": 1},
            "129 query heads a KV head, of 128 numbers of 2 bytes, over a bf16",
        ),
        ({"head_dim": 1024}, "4 query heads a KV head, of 1024 numbers"),
        ({"head_dim": 512, "num_heads": 64, "num_kv_heads": 1}, "64 query heads a KV head, of 512 numbers"),
        ({"hidden_size": 32769}, "hidden_size 32769, rows of at most 32768 fit"),
        (
            {"form": "int8", "head_dim": 90},
            "head_dim 90 over a int8 cache needs a multiple of 4; use kv_cache",
        ),
        ({"arch": 75, "form": "int8", "head_dim": 90}, "use kv_cache_dtype fp16"),
        ({"form": "k8v4", "head_dim": 90}, "head_dim 90 over a k8v4 cache needs a multiple of 4"),
        ({"arch": 75, "head_dim": 512}, "on sm_75 for .*, as 64 KiB of shared memory hold no tile"),
        ({"arch": 75, "num_heads": 128, "num_kv_heads": 1}, "128 query heads a KV head"),
    ],
    ids=str,
)
def test_what_cannot_be_launched_is_told_from_the_sizes_with_value_and_next_step(sizes: dict, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        assert obstacle_of(**sizes) is None


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"form": "int4"},
        {"num_heads": 71, "num_kv_heads": 1, "head_dim": 64, "hidden_size": 4544},
        {"head_dim": 512, "num_heads": 8, "num_kv_heads": 1},
        {"head_dim": 90},
        {"head_dim": 8},
        {"arch": 75, "head_dim": 256},
    ],
    ids=str,
)
def test_what_can_be_launched_has_no_obstacle(sizes: dict) -> None:
    assert obstacle_of(**sizes) is None


def obstacle_of(*, arch: int = 90, form: str = "bf16", **sizes: int) -> str | None:
    sizes = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "hidden_size": 4096} | sizes
    return obstacle(arch, torch.bfloat16, FORMS[form], **sizes)


def test_a_kernel_without_a_launch_says_why() -> None:
    sizes = {"group": 200, "row_bytes": 256, "is_quantized": 0, "has_open_keys": 0}
    with pytest.raises(UnfitError, match=r"attention\.chunk has no launch on sm_90 for .*, as a tile would not fit"):
        launch_for("attention.chunk", 90, **sizes)


def test_every_row_has_a_reason() -> None:
    assert all(row.reason for row in TABLE)
