"""Every kernel on a card against the reference, on fresh random inputs: what `make test-kernels` proves interpreted.

Outputs are poisoned before, and so is what of a cache nobody wrote. Numbers that are computed may differ by roundings;
what is written to the cache without being computed, and what top-k and top-p leave over, has to be the same.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from pagedd.bench.gpu_inputs import (
    PagedInputs,
    forms_beside,
    make_inputs,
    on_cpu,
    poisoned,
    random_nested_weight,
    random_weight,
)
from pagedd.bench.gpu_rows import Row, attempt, row
from pagedd.kernels import reference, torch_ops
from pagedd.kernels.kv_form import FORMS
from pagedd.kernels.layout import KVLayer, QuantizedLayer, has_open_keys, planes_of
from pagedd.kernels.triton import backend as kernels

# Bits, and numbers with one nested scale.
WEIGHT_FORMS = {"int4": (4, 0), "int8": (8, 0), "q4_k": (4, 32), "q6_k": (8, 16)}

TOLERANCE = 2e-2  # relative and absolute, of numbers around 1 in bfloat16
# One step of e4m3, the coarser of the forms with 8 bits: a sum that was rounded the other way may be quantized so.
TOLERANCE_OF_QUANTIZED = 0.13

# New tokens and context: the first is so long that it is cut over programs and merged, the last two are chunks.
LENS = [(1, 700), (1, 3), (20, 33), (9, 9)]
# No context is so long that a card would cut it: decodes alone, and beside chunks in one launch.
FEW = [(1, 200), (1, 3), (1, 64)]
FEW_AND_CHUNKS = [(1, 200), (1, 3), (20, 33), (9, 9)]
SHORTER_LENS = [(1, 260), (1, 3), (5, 18), (3, 3)]


@dataclass(frozen=True, slots=True)
class Heads:
    """One shape of attention."""

    head_dim: int
    block_size: int
    num_kv_heads: int
    group: int
    window: int | None = None
    soft_cap: float | None = None

    def __str__(self) -> str:
        options = f"{f', window {self.window}' if self.window else ''}{', soft cap' if self.soft_cap else ''}"
        heads = f"{self.num_kv_heads * self.group} / {self.num_kv_heads} heads of {self.head_dim}"
        return f"{heads}, blocks of {self.block_size}{options}"


SHAPES = (
    Heads(64, 16, 2, 4),
    Heads(80, 8, 2, 3),
    Heads(96, 32, 1, 1),
    Heads(128, 16, 2, 4, window=24),
    Heads(128, 16, 1, 8),
    Heads(256, 16, 1, 2, soft_cap=3.0),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Holds a card to the reference."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator
    is_thorough: bool

    def near(
        self,
        what: str,
        got: torch.Tensor,
        wanted: torch.Tensor,
        *,
        may_be_unwritten: bool = False,
        tolerance: float = TOLERANCE,
    ) -> Row:
        """The largest error.

        Raises:
            AssertionError: a number is NaN (or NaN in one of the two only), or too far off.
        """
        got, wanted = got.detach().cpu().double(), wanted.detach().cpu().double()
        if may_be_unwritten:
            self._hold(what, torch.equal(got.isnan(), wanted.isnan()), "what was not written is not the same")
            got, wanted = got.nan_to_num(), wanted.nan_to_num()
        for whose, numbers in (("its", got), ("the reference's", wanted)):
            self._hold(what, not numbers.isnan().any(), f"{int(numbers.isnan().sum())} of {whose} numbers are NaN")
        difference = float(((got - wanted).abs() / (1 + wanted.abs())).max())
        self._hold(what, difference <= tolerance, f"differs by {difference:.3g}, {tolerance} are allowed")
        return row(what, difference, "largest error")

    def same(self, what: str, got: torch.Tensor, wanted: torch.Tensor) -> Row:
        """That nothing differs.

        Raises:
            AssertionError: a bit differs.
        """
        num_wrong = int((got.detach().cpu() != wanted).sum())
        self._hold(what, num_wrong == 0, f"{num_wrong} of {wanted.numel()} are not the same")
        return row(what, 0.0, "differences")

    def draw(self, *shape: int) -> torch.Tensor:
        """On the CPU."""
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def _hold(self, what: str, is_so: bool, otherwise: str) -> None:
        if not is_so:
            raise AssertionError(f"{what}: {otherwise}")


def compare_all(
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    *,
    is_thorough: bool,
    takes_next: Callable[[], bool] = lambda: True,
) -> Iterator[Row]:
    """Rows of the table: the largest error of each kernel, or what is beyond what is allowed, and the next case.

    Args:
        takes_next: asked before each case, whether it is compared here.
    """
    comparison = Comparison(device, dtype, torch.Generator().manual_seed(seed), is_thorough)
    with poisoned():
        # On a card that has bfloat16, over all; in float32, a form of tests, too.
        forms = forms_beside(dtype) if dtype == torch.float16 else list(FORMS)
        for what, compare in _cases(forms, is_thorough=is_thorough):
            if takes_next():
                yield from attempt(what, partial(compare, comparison))


def _cases(forms: list[str], *, is_thorough: bool) -> Iterator[tuple[str, Callable[[Comparison], Iterator[Row]]]]:
    yield "rows", _compare_rows
    for in_features in (512, 4096, 14336) if is_thorough else (512,):
        for form in WEIGHT_FORMS:
            yield (
                f"packed_linear, {form}, {in_features}",
                partial(_compare_products, form=form, in_features=in_features),
            )
    yield "keep_best", _compare_cut_offs
    for number, form in enumerate(forms):
        for index, heads in enumerate(SHAPES if is_thorough else [SHAPES[number % len(SHAPES)]]):
            several = (LENS, FEW_AND_CHUNKS if (number + index) % 2 else FEW) if is_thorough else (SHORTER_LENS,)
            for lens in several:
                yield f"{form}, {heads}, {lens}", partial(_compare_attention, form=form, heads=heads, lens=lens)


def _compare_rows(comparison: Comparison) -> Iterator[Row]:
    x, residual, weight = comparison.draw(37, 512), comparison.draw(37, 512), comparison.draw(512)
    there = [tensor.to(comparison.device) for tensor in (x, residual, weight)]
    yield comparison.near("rms_norm", kernels.rms_norm(there[0], there[2], 1e-5), reference.rms_norm(x, weight, 1e-5))
    got = kernels.add_rms_norm(there[0], there[1], there[2], 1e-5)
    wanted = reference.add_rms_norm(x, residual, weight, 1e-5)
    yield comparison.near("add_rms_norm", got[0], wanted[0])
    yield comparison.near("add_rms_norm, sum", got[1], wanted[1])
    yield comparison.near("silu_and_mul", kernels.silu_and_mul(there[0]), reference.silu_and_mul(x))


def _compare_products(comparison: Comparison, form: str, in_features: int) -> Iterator[Row]:
    """Long rows are cut over programs. Inputs are such that results are as large as those of short ones."""
    bits, group = WEIGHT_FORMS[form]
    host, generator = torch.device("cpu"), comparison.generator
    out_features = 520 if in_features == 14336 else 96  # so many that a large card's programs take several steps each
    x, bias = comparison.draw(200, in_features) * (512 / in_features) ** 0.5, comparison.draw(out_features)
    if group:
        weight = random_nested_weight(out_features, in_features, bits, group, host, generator)
    else:
        weight = random_weight(out_features, in_features, bits, host, generator)
    there, bias_there = x.to(comparison.device), bias.to(comparison.device)
    weight_there = weight.to(comparison.device)
    row_counts = (1, 2, 5, 37, 200) if comparison.is_thorough else (2, 37)
    for num_rows in row_counts if in_features == 512 else (1, 37):
        for has_bias in (False, True) if comparison.is_thorough and in_features == 512 else (True,):
            yield comparison.near(
                f"packed_linear, {form}, {num_rows} x {in_features}{', bias' if has_bias else ''}",
                kernels.packed_linear(there[:num_rows], weight_there, bias_there if has_bias else None),
                reference.packed_linear(x[:num_rows], weight, bias if has_bias else None),
            )


def _compare_cut_offs(comparison: Comparison) -> Iterator[Row]:
    """Half of the logits are tied with others."""
    vocab_size, bounds = 5000, [(5000, 1.0), (1, 1.0), (7, 1.0), (50, 0.9), (5000, 0.95), (40, 0.01), (5000, 1e-9)]
    logits = torch.randn(len(bounds), vocab_size, generator=comparison.generator) * 3
    logits[:, ::2] = logits[:, ::2].round()
    weights = ((logits - logits.amax(dim=1, keepdim=True)).exp() * 2.0**40).long()
    limits, shares = torch.tensor([limit for limit, _ in bounds]), torch.tensor([share for _, share in bounds])
    left = weights.to(comparison.device)
    kernels.keep_best(
        logits.to(comparison.device), left, limits.to(comparison.device), shares.double().to(comparison.device)
    )
    torch_ops.keep_best(logits, weights, limits, shares.double())
    yield comparison.same("keep_best, weights left over", left, weights)


def _compare_attention(comparison: Comparison, form: str, heads: Heads, lens: list[tuple[int, int]]) -> Iterator[Row]:
    """The cache is written with and without rope, and then attended to."""
    inputs = make_inputs(
        lens,
        form,
        comparison.dtype,
        comparison.generator,
        num_heads=heads.num_kv_heads * heads.group,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        block_size=heads.block_size,
    )
    moved, where = (
        inputs.to(comparison.device),
        f"{form}, {heads}, {len(lens)} sequences to {max(context for _, context in lens)}",
    )
    for backend, given in ((kernels, moved), (reference, inputs)):
        backend.write_kv(given.key, given.value, given.kv_layer, given.slot_mapping, given.open_slots)
        if has_open_keys(given.kv_layer):
            backend.close_blocks(given.kv_layer, given)
    for plane, name in enumerate(("keys", "values")):
        got, wanted = (_bytes(given.kv_layer, plane) for given in (moved, inputs))
        yield comparison.same(f"write_kv, bytes of the {name}, {where}", got, wanted)
    _rope(kernels.rope_and_write_kv, moved)
    _rope(reference.rope_and_write_kv, inputs)
    yield comparison.near(f"rope_and_write_kv, query, {where}", moved.query, inputs.query)
    there, here = on_cpu(moved).kv_layer, inputs.kv_layer
    yield comparison.same(f"rope_and_write_kv, bytes of the values, {where}", _bytes(there, 1), _bytes(here, 1))
    yield comparison.near(
        f"rope_and_write_kv, keys, {where}",
        _new_keys(there),
        _new_keys(here),
        may_be_unwritten=True,
        tolerance=TOLERANCE_OF_QUANTIZED if FORMS[form].dtype is None else TOLERANCE,
    )
    if has_open_keys(moved.kv_layer):
        kernels.close_blocks(moved.kv_layer, moved)
    options = {"scale": heads.head_dim**-0.5, "sliding_window": heads.window, "soft_cap": heads.soft_cap}
    got = kernels.paged_attention(moved.query, moved.kv_layer, moved, **options)
    back = on_cpu(moved)  # over the card's own cache: keys that were rounded otherwise do not count
    wanted = reference.paged_attention(back.query, back.kv_layer, back, **options)
    yield comparison.near(f"paged_attention, {where}", got, wanted)


def _rope(write: Callable[..., None], inputs: PagedInputs) -> None:
    slots = inputs.slot_mapping, inputs.open_slots
    write(inputs.query, inputs.key, inputs.value, inputs.cos, inputs.sin, inputs.kv_layer, *slots)


def _bytes(layer: KVLayer, plane: int) -> torch.Tensor:
    return planes_of(layer)[plane].view(torch.uint8).cpu()


def _new_keys(layer: KVLayer) -> torch.Tensor:
    """As rows are written: open ones are quantized later."""
    if has_open_keys(layer):
        return layer.open_keys.float()
    return layer.dequantize(0) if isinstance(layer, QuantizedLayer) else layer[0]
