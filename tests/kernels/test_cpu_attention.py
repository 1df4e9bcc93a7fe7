"""Paged attention, rotation and the KV write in C++ against the specification in float64, on both code paths.

`attention_driver.cpp` is compiled here, without torch: as the extension is, and without AVX-512 (the portable path).
"""

import ctypes
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from pagedd.kernels import cpu, reference
from pagedd.kernels.cpu import build
from pagedd.kernels.kv_form import FORMS, form_of
from pagedd.kernels.layout import KVLayer, QuantizedLayer, block_size_of, planes_of

FLAGS = {"native": [], "portable": ["-mno-avx512f", "-O2"]}
TYPES = {  # KvType of keys and of values
    "float32": (0, 0),
    "bf16": (1, 1),
    "int8": (2, 2),
    "fp8": (3, 3),
    "k8v4": (2, 4),
    "int4": (5, 4),
}
QUANTIZED = ("int8", "fp8", "k8v4", "int4")
SOURCES = Path(cpu.__file__).parent


@dataclass(frozen=True)
class Driver:
    """`attention_driver.cpp` on tensors."""

    library: ctypes.CDLL
    path: str

    def attend(
        self, batch, num_threads=1, soft_cap=0.0, sliding_window=0, plan_window=None
    ) -> tuple[torch.Tensor, int]:
        """Returns the attended rows and the number of items that the step was cut into."""
        query = batch.query.float().contiguous()
        output = torch.full_like(query, float("nan"))
        head_dim = query.shape[-1]
        num_items = self.library.attend(
            pointer(query),
            pointer(output),
            ctypes.c_int64(query.shape[1] * head_dim),
            *cache_arguments(batch.kv_layer, query.shape[1]),
            head_dim,
            pointer(batch.query_starts),
            pointer(batch.context_lens),
            pointer(batch.block_tables),
            ctypes.c_int64(batch.block_tables.shape[1]),
            pointer(batch.open_tables),
            ctypes.c_int64(batch.open_tables.shape[1]),
            len(batch.context_lens),
            num_threads,
            ctypes.c_float(head_dim**-0.5),
            ctypes.c_float(soft_cap),
            sliding_window,
            sliding_window if plan_window is None else plan_window,
        )
        return output, num_items

    def close_blocks(self, kv_layer, batch) -> None:
        self.library.close_full_blocks(
            pointer(batch.query_starts),
            pointer(batch.context_lens),
            pointer(batch.block_tables),
            ctypes.c_int64(batch.block_tables.shape[1]),
            pointer(batch.open_tables),
            ctypes.c_int64(batch.open_tables.shape[1]),
            len(batch.context_lens),
            *cache_arguments(kv_layer),
            kv_layer.head_dim,
        )

    def rope_and_write(self, qkv, num_heads, cos, sin, norms, slots, kv_layer) -> None:
        self.library.rope_and_write(
            pointer(qkv),
            ctypes.c_int64(qkv[0].numel()),
            ctypes.c_int64(len(qkv)),
            num_heads,
            pointer(cos),
            pointer(sin),
            *(norm if norm is None else pointer(norm) for norm in norms),
            ctypes.c_float(1e-6),
            pointer(slots),
            pointer(slots),  # a page for each block
            *cache_arguments(kv_layer),
            qkv.shape[-1],
        )


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


def form_name(kv_layer: KVLayer) -> str:
    return kv_layer.form.name if isinstance(kv_layer, QuantizedLayer) else form_of(kv_layer.dtype).name


def cache_arguments(kv_layer: KVLayer, *num_heads: int) -> tuple:
    planes = planes_of(kv_layer)
    open_keys = kv_layer.open_keys if isinstance(kv_layer, QuantizedLayer) else planes[0][:0]
    return (
        *map(pointer, (*planes, open_keys)),
        *TYPES[form_name(kv_layer)],
        *num_heads,
        planes[0].shape[1],
        block_size_of(kv_layer),
    )


@pytest.fixture(scope="module", params=list(FLAGS))
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("attention") / f"{request.param}.so"
    sources = [Path(__file__).with_name("attention_driver.cpp"), SOURCES / "attention.cpp", SOURCES / "rope_kv.cpp"]
    command = ["g++", "-shared", "-fPIC", f"-I{SOURCES}", *build.FLAGS, *FLAGS[request.param]]
    subprocess.run([*command, *map(str, sources), "-o", str(library)], check=True)
    return Driver(ctypes.CDLL(str(library)), request.param)


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
    if driver.path == "portable" or form_name(kv_layer) == "float32":
        return 3e-5 if form_name(kv_layer) == "int4" else 1e-5  # there a key is a sum itself, and may be large
    return 6e-3


class LayerAsRead(QuantizedLayer):
    """What 4 bits stand for is rounded to bfloat16 where that is multiplied."""

    def dequantize(self, plane: int) -> torch.Tensor:
        x = super().dequantize(plane)
        return x.bfloat16().float() if self.form.rows[plane].name in ("int4", "channel4") else x


def as_read(driver: Driver, kv_layer: KVLayer) -> KVLayer:
    if driver.path == "portable" or not isinstance(kv_layer, QuantizedLayer):
        return kv_layer
    return LayerAsRead(kv_layer.planes, kv_layer.form, kv_layer.block_size, kv_layer.head_dim, kv_layer.open_keys)


def narrow(batch) -> torch.Tensor:
    """The query as bfloat16 where the cache is narrower than float32: those dot products round it."""
    return batch.query if form_name(batch.kv_layer) == "float32" else batch.query.bfloat16().float()


EVERY_FORM = pytest.mark.parametrize("form", list(TYPES))


@EVERY_FORM
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (9, 3), (4, 1), (8, 1), (16, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_grouped_heads_of_every_size_equal_the_reference(driver, paged, form, head_dim, num_heads, num_kv_heads):
    lens = [(1, 1), (1, 70), (3, 3), (7, 19)]
    batch = paged(lens, block_size=16, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, form=form)
    check(driver, batch, num_threads=1)
    check(driver, batch, num_threads=2)


@EVERY_FORM
@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 32])
@pytest.mark.parametrize("head_dim", [16, 96, 256])
def test_any_block_size_equals_the_reference(driver, paged, form, block_size, head_dim):
    if form == "int4" and block_size % 16:
        return  # the engine refuses it: such blocks' scales would take more than their keys
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


@pytest.mark.parametrize("has_norms", [False, True])
@EVERY_FORM
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_rows_are_normalised_rotated_and_written(driver, form, head_dim, has_norms):
    generator = torch.Generator().manual_seed(head_dim)
    qkv = torch.randn(4, 9, head_dim, generator=generator)  # 5 query, 2 key and 2 value heads
    angles = torch.randn(4, head_dim // 2, generator=generator) * 100
    norms = [torch.randn(head_dim, generator=generator), torch.randn(head_dim, generator=generator)]
    slots = torch.tensor([11, 0, 5, 6])
    exact = qkv.clone()
    heads = exact[:, :5], exact[:, 5:7]
    for x, norm in zip(heads, norms, strict=True):
        if has_norms:
            x.copy_(reference.rms_norm(x, norm, 1e-6))
        reference.apply_rope(x, angles.cos(), angles.sin())

    kv_layer, expected = make_layer(form, head_dim), make_layer(form, head_dim)
    cos, sin = angles.cos(), angles.sin()
    driver.rope_and_write(qkv, 5, cos, sin, norms if has_norms else [None, None], slots, kv_layer)
    torch.testing.assert_close(qkv, exact, rtol=1e-5, atol=1e-5)
    reference.write_kv(qkv[:, 5:7], qkv[:, 7:], expected, slots, slots)
    assert have_same_bytes(kv_layer, expected)


def make_layer(form: str, head_dim: int) -> KVLayer:
    """Three blocks of four slots, two heads, full of sevens."""
    if form not in QUANTIZED:
        return torch.full((2, 3, 2, 4, head_dim), 7.0, dtype=FORMS[form].dtype)
    return QuantizedLayer.filled(FORMS[form], 3, 2, 4, head_dim, byte=7, num_pages=3)


def have_same_bytes(one: KVLayer, other: KVLayer) -> bool:
    return all(map(torch.equal, bytes_of(one), bytes_of(other)))


def bytes_of(kv_layer: KVLayer) -> list[torch.Tensor]:
    parts = list(planes_of(kv_layer))
    if isinstance(kv_layer, QuantizedLayer):
        parts.append(kv_layer.open_keys)
    return [part.view(torch.uint8) for part in parts]


@pytest.mark.parametrize("form", QUANTIZED)
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_any_row_is_quantized_as_specified_to_the_last_bit(driver, form, head_dim):
    generator = torch.Generator().manual_seed(head_dim)
    sizes = 10.0 ** torch.linspace(-40, 38, 200)[:, None, None]
    rows = torch.randn(200, 1, head_dim, generator=generator) * sizes
    few = torch.randint(-3, 4, (200, 1, head_dim), generator=generator) / 4 + 100  # ties, and a width below the offset
    special = torch.zeros(8, 1, head_dim)
    special[1] = -0.0
    special[2] = 3.0
    special[3] = -3.0
    special[4, :, 5] = float("nan")
    special[5, :, 15] = float("inf")
    special[6, :, 0] = float("-inf")
    special[7, :, ::2] = 3e38
    special[7, :, 1::2] = -3e38
    values = torch.cat([rows, few, -few, special])
    num_rows = len(values)
    qkv = torch.cat([values, values, values.flip(0)], dim=1)
    written = QuantizedLayer.filled(FORMS[form], num_rows, 1, 1, head_dim, byte=7, num_pages=num_rows)
    ones = torch.ones(num_rows, head_dim // 2)
    slots = torch.arange(num_rows)
    driver.rope_and_write(qkv, 1, ones, ones * 0, [None, None], slots, written)
    for plane, x in enumerate((qkv[:, 1], qkv[:, 2])):
        if FORMS[form].rows[plane].needs_whole_block:
            continue
        expected_values, expected_scales = FORMS[form].rows[plane].quantize(x)
        assert torch.equal(written.values(plane)[:, 0, 0], expected_values)
        assert torch.equal(written.scales(plane)[:, 0, 0], expected_scales)


@pytest.mark.parametrize("head_dim", [16, 64, 80])
@pytest.mark.parametrize("block_size", [16, 32])
def test_keys_of_full_blocks_are_quantized_as_specified_to_the_last_bit(driver, paged, block_size, head_dim):
    """Steps that fill no block, one, and several; numbers of every size, and some that are none."""
    lens = [(1, 40), (1, 64), (70, 70), (33, 96), (3, 33)]
    batch = paged(lens, block_size=block_size, head_dim=head_dim, form="int4")
    open_keys = batch.kv_layer.open_keys
    open_keys.mul_(10.0 ** torch.linspace(-38, 38, open_keys.shape[-1]))
    special = batch.open_tables[2, 0]
    open_keys[special, 0, 3, :6] = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 3e38])
    open_keys[special, 1, :, :2] = torch.tensor([0.0, -0.0])
    expected = replace(batch.kv_layer, planes=tuple(plane.clone() for plane in batch.kv_layer.planes))
    driver.close_blocks(batch.kv_layer, batch)
    reference.close_blocks(expected, batch)
    assert all(map(torch.equal, batch.kv_layer.planes, expected.planes))


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


def test_bfloat16_is_rounded_to_nearest_even(driver):
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 3.4e38, float("inf")])
    qkv = torch.zeros(1, 3, 16)
    qkv[0, 2, : len(values)] = values
    qkv[0, 2, 15] = float("nan")
    kv_layer = torch.zeros(2, 1, 1, 1, 16, dtype=torch.bfloat16)
    zeros = torch.zeros(1, 8)
    driver.rope_and_write(qkv, 1, zeros + 1, zeros, [None, None], torch.tensor([0]), kv_layer)
    assert torch.equal(kv_layer[1, 0, 0, 0, :15], qkv[0, 2, :15].to(torch.bfloat16))
    assert kv_layer[1, 0, 0, 0, 15].isnan()
