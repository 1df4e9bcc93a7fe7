"""Paged attention in C++ against the specification in float64, on both code paths."""

from dataclasses import replace

import pytest
import torch

from pagedd.kernels import reference
from pagedd.kernels.layout import KVLayer, QuantizedLayer

from .attention_driver import EVERY_FORM, QUANTIZED, TYPES, Driver, bytes_of, form_name


def check(driver: Driver, batch, **options) -> None:
    """The driver's rows against the specification's, which are taken in float64 of what the cache holds."""
    given = {name: options[name] for name in ("soft_cap", "sliding_window") if name in options}
    batch = replace(batch, query=narrow(batch))
    exact = replace(batch, query=batch.query.double(), kv_layer=as_read(driver, batch.kv_layer))
    scale = batch.query.shape[-1] ** -0.5
    expected = reference.paged_attention(exact.query, exact.kv_layer, exact, scale=scale, **given)
    actual, _ = driver.attend(batch, **options)
    tolerance = tolerance_of(driver, batch.kv_layer)
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def tolerance_of(driver: Driver, kv_layer: KVLayer) -> float:
    """bfloat16's dot products round weights; without them every form is widened, and only read."""
    if driver.path != "native" or form_name(kv_layer) == "float32":
        return 3e-5 if form_name(kv_layer) == "int4" else 1e-5  # there a key is a sum itself, and may be large
    return 6e-3


class LayerAsRead(QuantizedLayer):
    """What 4 bits stand for is rounded to bfloat16 where that is multiplied."""

    def dequantize(self, plane: int) -> torch.Tensor:
        x = super().dequantize(plane)
        return x.bfloat16().float() if self.form.rows[plane].name in ("int4", "channel4") else x


def as_read(driver: Driver, kv_layer: KVLayer) -> KVLayer:
    if driver.path != "native" or not isinstance(kv_layer, QuantizedLayer):
        return kv_layer
    return LayerAsRead(kv_layer.planes, kv_layer.form, kv_layer.block_size, kv_layer.head_dim, kv_layer.open_keys)


def narrow(batch) -> torch.Tensor:
    """The query as bfloat16 where the cache is narrower than float32: those dot products round it."""
    return batch.query if form_name(batch.kv_layer) == "float32" else batch.query.bfloat16().float()


@EVERY_FORM
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (9, 3), (4, 1), (8, 1), (16, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_grouped_heads_of_every_size_equal_the_reference(driver, paged, form, head_dim, num_heads, num_kv_heads):
    lens = [(1, 1), (1, 70), (3, 3), (7, 19)]
    batch = paged(lens, block_size=16, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, form=form)
    check(driver, batch, num_threads=1)
    check(driver, batch, num_threads=2)


# The engine refuses int4 in other blocks: their scales would take more than their keys.
FORMS_IN_BLOCKS = [(form, size) for form in TYPES for size in (1, 8, 16, 24, 32) if form != "int4" or size % 16 == 0]


@pytest.mark.parametrize(("form", "block_size"), FORMS_IN_BLOCKS)
@pytest.mark.parametrize("head_dim", [16, 96, 256])
def test_any_block_size_equals_the_reference(driver, paged, form, block_size, head_dim):
    lens = [(1, 33), (2, 50), (20, 20)]
    batch = paged(lens, block_size=block_size, num_heads=2, num_kv_heads=1, head_dim=head_dim, form=form)
    check(driver, batch, num_threads=1)
    check(driver, batch, num_threads=2)


@EVERY_FORM
@pytest.mark.parametrize("num_threads", [2, 3, 8])
@pytest.mark.parametrize(
    "lens",
    [
        [(1, 300)],
        [(1, 31)],  # too short to split
        [(5, 130)],  # several rows of one split context
        [(1, 200), (1, 9), (1, 64), (4, 40)],  # one of them is most of the work
    ],
    ids=str,
)
def test_contexts_split_over_threads_equal_the_reference(driver, paged, form, lens, num_threads):
    batch = paged(lens, block_size=16, num_heads=6, num_kv_heads=2, head_dim=64, form=form)
    check(driver, batch, num_threads=num_threads)


@EVERY_FORM
@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("options", [{"soft_cap": 2.0}, {"sliding_window": 1}, {"sliding_window": 37}], ids=str)
def test_windows_and_caps_equal_the_reference(driver, paged, form, options, num_threads):
    batch = paged([(1, 150), (80, 80), (1, 20)], block_size=16, num_heads=2, num_kv_heads=1, head_dim=64, form=form)
    check(driver, batch, num_threads=num_threads, **options)


def test_a_layer_may_have_a_narrower_window_than_the_plan(driver, paged):
    batch = paged([(1, 150), (9, 130)], block_size=16, num_heads=2, num_kv_heads=1, head_dim=64)
    check(driver, batch, num_threads=4, sliding_window=37, plan_window=0)


def test_blocks_that_the_window_has_left_are_not_looked_at(driver, paged):
    batch = paged([(1, 150)], block_size=16, num_heads=2, num_kv_heads=1, head_dim=64)
    expected, _ = driver.attend(batch, sliding_window=37)
    left = (150 - 37) // 16  # whole blocks
    batch.kv_layer[:, batch.block_tables[0, :left].long()] = float("nan")
    actual, _ = driver.attend(batch, sliding_window=37, num_threads=4)
    torch.testing.assert_close(actual, expected)


@EVERY_FORM
def test_a_long_prefill_equals_the_reference_where_its_tiles_end(driver, paged, form):
    batch = paged([(140, 170)], block_size=16, num_heads=3, num_kv_heads=1, head_dim=64, form=form)
    batch = replace(batch, query=narrow(batch))
    whole, _ = driver.attend(batch, num_threads=2)
    rows = [0, 1, 62, 63, 64, 65, 127, 128, 139]  # 64 rows are an item
    for row in rows:
        position = 30 + row
        alone = replace(
            batch,
            query=batch.query[row : row + 1],
            query_starts=torch.tensor([0, 1], dtype=torch.int32),
            context_lens=torch.tensor([position + 1], dtype=torch.int32),
            open_tables=batch.open_tables[:, position // 16 - 30 // 16 :],
        )
        exact = alone.query.double()
        expected = reference.paged_attention(exact, as_read(driver, alone.kv_layer), alone, scale=64**-0.5)
        tolerance = tolerance_of(driver, batch.kv_layer)
        torch.testing.assert_close(whole[row : row + 1].double(), expected, rtol=tolerance, atol=tolerance)


@EVERY_FORM
@pytest.mark.parametrize("options", [{}, {"sliding_window": 37}], ids=str)
def test_with_one_thread_a_row_alone_equals_itself_among_others_to_the_last_bit(driver, paged, form, options):
    batch = paged([(1, 90), (85, 150)], block_size=16, num_heads=3, num_kv_heads=1, head_dim=64, form=form)
    together, _ = driver.attend(batch, **options)
    for row in range(85):
        alone = replace(
            batch,
            query=batch.query[1 + row : 2 + row],
            query_starts=torch.tensor([0, 1], dtype=torch.int32),
            context_lens=torch.tensor([66 + row], dtype=torch.int32),
            block_tables=batch.block_tables[1:],
            open_tables=batch.open_tables[1:, (65 + row) // 16 - 65 // 16 :].contiguous(),
        )
        assert torch.equal(driver.attend(alone, **options)[0][0], together[1 + row])


@EVERY_FORM
def test_scores_that_differ_by_hundreds_do_not_overflow(driver, paged, form):
    batch = paged([(1, 100), (30, 90)], block_size=16, num_heads=2, num_kv_heads=2, head_dim=64, form=form)
    batch.query.mul_(64)
    check(driver, batch, num_threads=3)


@pytest.mark.parametrize("form", ["bf16", "int8", "k8v4", "int4"])
def test_offsets_may_exceed_32_bits(driver, paged, form):
    small = paged([(1, 70), (4, 40)], block_size=32, num_heads=8, num_kv_heads=8, head_dim=128, form=form)
    parts = bytes_of(small.kv_layer)[:2]
    num_small = len(parts[0])
    num_blocks = 2**32 // parts[1][0].nbytes + num_small
    shift = num_blocks - num_small
    # Address space only: but for the last blocks no page is ever touched.
    if form in QUANTIZED:
        pools = (torch.empty(num_blocks, *part.shape[1:], dtype=torch.uint8) for part in parts)
        pool = replace(small.kv_layer, planes=tuple(pools))
    else:
        pool = torch.empty(2, num_blocks, *small.kv_layer.shape[2:], dtype=small.kv_layer.dtype)
    for plane, part in zip(bytes_of(pool), parts, strict=False):
        plane[shift:] = part
    large = replace(small, kv_layer=pool, block_tables=small.block_tables + shift)
    assert torch.equal(driver.attend(large, num_threads=2)[0], driver.attend(small, num_threads=2)[0])


@pytest.mark.parametrize(
    ("lens", "num_threads", "num_items"),
    [
        ([(1, 300)], 1, 3),  # a KV head each
        ([(1, 300)], 2, 6),  # three heads do not share out over two threads, six halves do
        ([(1, 20)], 2, 3),
        ([(1, 40)] * 32, 2, 96),
        ([(200, 200)], 2, 12),  # 64 rows at a time
    ],
    ids=str,
)
def test_a_step_is_cut_into_items(driver, paged, lens, num_threads, num_items):
    batch = paged(lens, block_size=16, num_heads=9, num_kv_heads=3, head_dim=16)
    assert driver.attend(batch, num_threads=num_threads)[1] == num_items


@EVERY_FORM
@pytest.mark.parametrize("plane", [0, 1], ids=["key", "value"])
def test_nan_in_the_cache_comes_out_as_nan_and_only_where_it_is_seen(driver, paged, form, plane):
    batch = paged([(1, 40), (30, 30), (1, 20)], block_size=16, num_heads=2, num_kv_heads=2, head_dim=64, form=form)
    block = batch.block_tables[0, 1]
    if form in QUANTIZED:
        rows = batch.kv_layer.scales(plane)[block, 1]
        rows[0 if len(rows) == 1 else 3].view(torch.int16).fill_(0x7FC0)
    else:
        batch.kv_layer[plane, block, 1, 3] = float("nan")
    for num_threads in (1, 2):
        output, _ = driver.attend(batch, num_threads=num_threads)
        assert output[0, 1].isnan().all()
        assert output[0, 0].isfinite().all()
        assert output[1:].isfinite().all()
