"""The parts of `gpu_check.py`: what runs on the card, and what it is held to. Knows no command line."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pagedd.bench import gpu_model
from pagedd.bench.gpu_inputs import PagedInputs, make_inputs, on_cpu, poisoned, random_weight
from pagedd.bench.report import Cell
from pagedd.kernels import reference
from pagedd.kernels.kv_form import FORMS
from pagedd.kernels.triton import backend as kernels

Rows = list[dict[str, Cell]]

TOLERANCE = 2e-2  # relative and absolute, of numbers around 1 in bfloat16
NUM_FLUSHED_BYTES = 256 << 20  # more than any card's second-level cache holds


@dataclass(slots=True)
class Check:
    """One run. Ceilings are bytes and operations a second, once `ceilings` has measured them."""

    device: torch.device
    sizes: Any
    seed: int
    copy_rate: float | None = None
    product_rate: float | None = None

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def time(self, call: Callable[[], object]) -> float:
        """Seconds of one call, the median of many, each with cold caches."""
        call()
        if self.device.type != "cuda":
            started = time.perf_counter()
            call()
            return time.perf_counter() - started
        flushed = torch.empty(NUM_FLUSHED_BYTES, dtype=torch.uint8, device=self.device)
        taken: list[float] = []
        end_s = time.perf_counter() + self.sizes.seconds
        while len(taken) < 5 or time.perf_counter() < end_s:
            flushed.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            call()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(taken)


def row(what: str, value: float, unit: str, share: float | None = None) -> dict[str, Cell]:
    return {
        "what": what,
        "value": float(f"{value:.4g}"),
        "unit": unit,
        "share": None if share is None else round(share, 3),
    }


def share_of(rate: float, ceiling: float | None) -> float | None:
    return None if ceiling is None else rate / ceiling


# --- right ------------------------------------------------------------------------------------------------------------


def correct(check: Check) -> Rows:
    """The largest difference of each kernel from the reference, over its size. Raises for one beyond the tolerance."""
    generator, dtype = torch.Generator().manual_seed(check.seed), check.dtype
    found: Rows = []

    def hold(what: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        got = got.detach().cpu().double()
        for whose, numbers in (("its", got), ("the reference's", wanted)):
            if numbers.isnan().any():
                raise AssertionError(f"{what}: {int(numbers.isnan().sum())} of {whose} numbers are NaN")
        difference = float(((got - wanted.double()).abs() / (1 + wanted.double().abs())).max())
        if difference > TOLERANCE:
            raise AssertionError(f"{what}: differs by {difference:.3g} from the reference, {TOLERANCE} are allowed")
        found.append(row(what, difference, "largest error"))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, residual, weight = draw(37, 512), draw(37, 512), draw(512)
    there = [tensor.to(check.device) for tensor in (x, residual, weight)]
    with poisoned():
        hold("rms_norm", kernels.rms_norm(there[0], there[2], 1e-5), reference.rms_norm(x, weight, 1e-5))
        for name, got, wanted in zip(
            ("add_rms_norm", "add_rms_norm, sum"),
            kernels.add_rms_norm(there[0], there[1], there[2], 1e-5),
            reference.add_rms_norm(x, residual, weight, 1e-5),
            strict=True,
        ):
            hold(name, got, wanted)
        hold("silu_and_mul", kernels.silu_and_mul(there[0]), reference.silu_and_mul(x))
        for bits in (4, 8):
            packed = random_weight(96, 512, bits, torch.device("cpu"), generator)
            for num_rows in (1, 5, 37):
                hold(
                    f"packed_linear, {bits} bits, {num_rows} rows",
                    kernels.packed_linear(there[0][:num_rows], random_like(packed, check.device), None),
                    reference.packed_linear(x[:num_rows], packed, None),
                )
        for form in FORMS:
            # The first is so long that it is cut over programs and merged.
            inputs = make_inputs([(1, 700), (1, 3), (20, 33), (9, 9)], form, dtype, generator)
            moved = inputs.to(check.device)
            for backend, given in ((kernels, moved), (reference, inputs)):
                slots = given.slot_mapping, given.open_slots
                backend.rope_and_write_kv(
                    given.query, given.key, given.value, given.cos, given.sin, given.kv_layer, *slots
                )
                if FORMS[form].has_open_keys:
                    backend.close_blocks(given.kv_layer, given)
            hold(f"rope_and_write_kv, {form}, query", moved.query, inputs.query)
            wanted = reference.paged_attention(inputs.query, inputs.kv_layer, inputs, scale=0.1)
            got = kernels.paged_attention(moved.query, moved.kv_layer, moved, scale=0.1)
            hold(f"paged_attention, {form}", got, wanted)
            hold(f"the same over the card's own cache, {form}", got, _attend_on_cpu(moved))
    return found


def _attend_on_cpu(moved: PagedInputs) -> torch.Tensor:
    back = on_cpu(moved)
    return reference.paged_attention(back.query, back.kv_layer, back, scale=0.1)


def random_like(packed: Any, device: torch.device) -> Any:
    """The same packed weight on another device."""
    return type(packed)(
        packed.bits, packed.out_features, packed.in_features, packed.words.to(device), packed.scales.to(device)
    )


# --- fast -------------------------------------------------------------------------------------------------------------


def ceilings(check: Check) -> Rows:
    """What the card copies (read and written, both counted) and multiplies in bfloat16, through torch."""
    source = torch.empty(check.sizes.copy_bytes, dtype=torch.uint8, device=check.device)
    target = torch.empty_like(source)
    check.copy_rate = 2 * source.nbytes / check.time(lambda: target.copy_(source))
    n = check.sizes.matmul
    a, b = (torch.randn(n, n, device=check.device).to(check.dtype) for _ in range(2))
    check.product_rate = 2 * n**3 / check.time(lambda: a @ b)
    return [row("copy", check.copy_rate / 1e9, "GB/s"), row("product", check.product_rate / 1e12, "TFLOP/s")]


def attention(check: Check) -> Rows:
    """Decode of a full batch at the long context, and the first chunk of a prompt."""
    sizes, found = check.sizes, []
    if check.copy_rate is None:
        ceilings(check)
    generator = torch.Generator().manual_seed(check.seed)
    shape = {"num_heads": sizes.heads, "num_kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim, "block_size": 16}
    for form in FORMS:
        if form == "float32":
            continue
        lens = [(1, sizes.context)] * sizes.batch
        inputs = make_inputs(lens, form, check.dtype, generator, device=check.device, fill=False, **shape)
        seconds = check.time(lambda inputs=inputs: _attend(inputs))  # type: ignore[misc]
        row_bytes = FORMS[form].block_bytes(16, sizes.head_dim) / 16  # keys and values
        rate = sizes.batch * sizes.context * sizes.kv_heads * row_bytes / seconds
        found.append(row(f"decode.{form}", rate / 1e9, "GB/s", share_of(rate, check.copy_rate)))
        lens = [(sizes.chunk, sizes.chunk)]
        inputs = make_inputs(lens, form, check.dtype, generator, device=check.device, fill=False, **shape)
        seconds = check.time(lambda inputs=inputs: _attend(inputs))  # type: ignore[misc]
        rate = 4 * sizes.heads * sizes.head_dim * sizes.chunk * (sizes.chunk + 1) / 2 / seconds
        found.append(row(f"prefill.{form}", rate / 1e12, "TFLOP/s", share_of(rate, check.product_rate)))
    return found


def _attend(inputs: PagedInputs) -> torch.Tensor:
    return kernels.paged_attention(inputs.query, inputs.kv_layer, inputs, scale=0.1)


def linear(check: Check) -> Rows:
    """The widest product of a layer, gate and up, by rows."""
    sizes, found = check.sizes, []
    if check.copy_rate is None:
        ceilings(check)
    generator = torch.Generator().manual_seed(check.seed)
    for bits in (4, 8):
        weight = random_weight(2 * sizes.inner, sizes.hidden, bits, check.device, generator)
        for num_rows in (1, 8, 64, 2048):
            x = torch.randn(num_rows, sizes.hidden, device=check.device).to(check.dtype)
            seconds = check.time(lambda x=x, weight=weight: kernels.packed_linear(x, weight, None))  # type: ignore[misc]
            if num_rows <= 64:
                rate = (weight.num_bytes + x.nbytes + num_rows * 2 * sizes.inner * x.itemsize) / seconds
                figure = row("", rate / 1e9, "GB/s", share_of(rate, check.copy_rate))
            else:
                rate = 2 * num_rows * sizes.hidden * 2 * sizes.inner / seconds
                figure = row("", rate / 1e12, "TFLOP/s", share_of(rate, check.product_rate))
            found.append(figure | {"what": f"{bits} bits, {num_rows} rows"})
    return found


def graphs(check: Check) -> Rows:
    """A decode step replayed and launched kernel by kernel."""
    return [row(*figure) for figure in gpu_model.replayed_steps(check.device, check.sizes, check.dtype)]


def model(check: Check) -> Rows:
    """The engine on a random Llama, beside transformers on the same weights."""
    return [row(*figure) for figure in gpu_model.engine_rates(check.device, check.sizes, check.dtype, check.copy_rate)]


PARTS: dict[str, Callable[[Check], Rows]] = {
    "correct": correct,
    "ceilings": ceilings,
    "attention": attention,
    "linear": linear,
    "graphs": graphs,
    "model": model,
}
