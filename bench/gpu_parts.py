"""The parts of `gpu_check.py`: what runs on the card, and what it is held to. Knows no command line."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from pagedd.bench import gpu_correct, gpu_model
from pagedd.bench.gpu_inputs import PagedInputs, make_inputs, random_nested_weight, random_weight
from pagedd.bench.kernels.card import copy_rate, product_rate, seconds_of
from pagedd.bench.report import Cell
from pagedd.kernels.kv_form import FORMS
from pagedd.kernels.triton import backend as kernels

Rows = list[dict[str, Cell]]


@dataclass(slots=True)
class Check:
    """One run.

    Attributes:
        decode_rates: batch → the engine's tokens a second, once `model` has measured them.
    """

    device: torch.device
    sizes: Any
    seed: int
    decode_rates: dict[int, float] = field(default_factory=dict)
    _ceilings: tuple[float, float] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def ceilings(self) -> tuple[float, float]:
        """Bytes a second that it copies, read and written both counted, and operations of a product; measured once."""
        if self._ceilings is None:
            copied = copy_rate(self.device, self.sizes.copy_bytes)
            self._ceilings = copied, product_rate(self.device, self.sizes.matmul, self.dtype)
        return self._ceilings

    def time(self, call: Callable[[], object]) -> float:
        return seconds_of(call, self.device, self.sizes.seconds)


def row(what: str, value: float, unit: str, share: float | None = None) -> dict[str, Cell]:
    return {
        "what": what,
        "value": float(f"{value:.4g}"),
        "unit": unit,
        "share": None if share is None else round(share, 3),
    }


def correct(check: Check) -> Rows:
    """Each kernel against the reference."""
    return gpu_correct.compare_all(check.device, check.dtype, check.seed, is_thorough=not check.sizes.is_tiny)


def ceilings(check: Check) -> Rows:
    """What the card copies, and multiplies in bfloat16, through torch."""
    copied, multiplied = check.ceilings
    return [row("copy", copied / 1e9, "GB/s"), row("product", multiplied / 1e12, "TFLOP/s")]


def attention(check: Check) -> Rows:
    """Decode of a full batch at the long context, and the first chunk of a prompt."""
    sizes, found = check.sizes, []
    copied, multiplied = check.ceilings
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
        found.append(row(f"decode.{form}", rate / 1e9, "GB/s", rate / copied))
        lens = [(sizes.chunk, sizes.chunk)]
        inputs = make_inputs(lens, form, check.dtype, generator, device=check.device, fill=False, **shape)
        seconds = check.time(lambda inputs=inputs: _attend(inputs))  # type: ignore[misc]
        rate = 4 * sizes.heads * sizes.head_dim * sizes.chunk * (sizes.chunk + 1) / 2 / seconds
        found.append(row(f"prefill.{form}", rate / 1e12, "TFLOP/s", rate / multiplied))
    return found


def _attend(inputs: PagedInputs) -> torch.Tensor:
    return kernels.paged_attention(inputs.query, inputs.kv_layer, inputs, scale=0.1)


def linear(check: Check) -> Rows:
    """The widest product of a layer, gate and up, by rows."""
    sizes, found = check.sizes, []
    copied, multiplied = check.ceilings
    generator = torch.Generator().manual_seed(check.seed)
    shape = (2 * sizes.inner, sizes.hidden)
    weights = {f"int{bits}": random_weight(*shape, bits, check.device, generator) for bits in (4, 8)}
    weights["q4_k"] = random_nested_weight(*shape, 4, 32, check.device, generator)
    for name, weight in weights.items():
        for num_rows in sizes.rows:
            x = torch.randn(num_rows, sizes.hidden, device=check.device).to(check.dtype)
            seconds = check.time(lambda x=x, weight=weight: kernels.packed_linear(x, weight, None))  # type: ignore[misc]
            if num_rows < sizes.rows[-1]:
                rate = (weight.num_bytes + x.nbytes + num_rows * 2 * sizes.inner * x.itemsize) / seconds
                figure = row("", rate / 1e9, "GB/s", rate / copied)
            else:
                rate = 2 * num_rows * sizes.hidden * 2 * sizes.inner / seconds
                figure = row("", rate / 1e12, "TFLOP/s", rate / multiplied)
            found.append(figure | {"what": f"{name}, {num_rows} rows"})
    return found


def graphs(check: Check) -> Rows:
    """A decode step replayed and launched kernel by kernel."""
    return [row(*figure) for figure in gpu_model.replayed_steps(check.device, check.sizes, check.dtype)]


def model(check: Check) -> Rows:
    """The engine on a random Llama, beside transformers on the same weights."""
    copied, _ = check.ceilings
    figures = gpu_model.engine_rates(check.device, check.sizes, check.dtype, copied, check.decode_rates)
    return [row(*figure) for figure in figures]


def compiled(check: Check) -> Rows:
    """transformers compiled by torch, beside what `model` found."""
    figures = gpu_model.compiled_rates(check.device, check.sizes, check.dtype, check.decode_rates)
    return [row(*figure) for figure in figures]


PARTS: dict[str, Callable[[Check], Rows]] = {
    "correct": correct,
    "ceilings": ceilings,
    "attention": attention,
    "linear": linear,
    "graphs": graphs,
    "model": model,
    "compiled": compiled,
}
