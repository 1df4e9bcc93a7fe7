"""The parts of `gpu_check.py`: what runs on the card, and what it is held to. Knows no command line."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from pagedd.bench import gpu_correct, gpu_model
from pagedd.bench.gpu_inputs import PagedInputs, forms_beside, make_inputs, random_nested_weight, random_weight
from pagedd.bench.gpu_rows import Row, attempt, row
from pagedd.bench.kernels.card import copy_rate, product_rate, seconds_of, warm_up
from pagedd.bench.report import Cell
from pagedd.engine.model.device import check_current_device
from pagedd.kernels.kv_form import FORMS
from pagedd.kernels.packed_weight import PackedWeight
from pagedd.kernels.triton import backend as kernels
from pagedd.kernels.triton.attention_shape import native_dtype
from pagedd.kernels.triton.card import card_of

Rows = Iterator[Row]
Figure = tuple[float, str, float]  # value, unit, share of its ceiling


@dataclass(slots=True)
class Check:
    """One run.

    Attributes:
        decode_rates: (layers, batch) → the engine's tokens a second, once `model` has measured them.
        share: which of how many processes this is, each of which takes its cases of the parts that ask `takes_next`.
        only_compiles: nothing is timed; what is launched, Triton keeps for the process that times it.
    """

    device: torch.device
    sizes: Any
    seed: int
    decode_rates: dict[tuple[int, int], float] = field(default_factory=dict)
    share: tuple[int, int] = (0, 1)
    only_compiles: bool = False
    _num_cases: int = 0
    _ceilings: tuple[float, float] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return native_dtype(card_of(self.device).arch) if self.device.type == "cuda" else torch.float32

    @property
    def forms(self) -> list[str]:
        """Of the cache, that such a card is served with."""
        return forms_beside(self.dtype)

    @property
    def ceilings(self) -> tuple[float, float]:
        """Bytes a second that it copies, read and written both counted, and operations of a product; measured once."""
        if self.only_compiles:
            return 1.0, 1.0
        if self._ceilings is None:
            warm_up(self.device, self.dtype)
            copied = copy_rate(self.device, self.sizes.copy_bytes)
            self._ceilings = copied, product_rate(self.device, self.sizes.matmul, self.dtype)
        return self._ceilings

    def takes_next(self) -> bool:
        """Whether the next case is this process's.

        Raises:
            DeviceLostError: the card answers nothing any more.
        """
        check_current_device()
        self._num_cases += 1
        index, count = self.share
        return self._num_cases % count == index

    def can_go_on(self) -> bool:
        """Whether the card still answers this process. What nobody holds there any more is given back."""
        try:
            check_current_device()
            if self.device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
        except RuntimeError:  # lost, or it says so only now
            return False
        return True

    def time(self, call: Callable[[], object]) -> float:
        if self.only_compiles:
            call()
            return 1.0
        return seconds_of(call, self.device, self.sizes.seconds)


def facts_of(device: torch.device) -> dict[str, Cell] | None:
    """Which card it is, as torch sees it."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
    }


def measured(what: str, measure: Callable[[], Figure]) -> Rows:
    """Its row; where it fails, one that says why: the next one may be measured all the same."""
    return attempt(what, lambda: [row(what, *measure())])


def correct(check: Check) -> Rows:
    """Each kernel against the reference."""
    is_thorough = not check.sizes.is_tiny
    yield from gpu_correct.compare_all(
        check.device, check.dtype, check.seed, is_thorough=is_thorough, takes_next=check.takes_next
    )


def ceilings(check: Check) -> Rows:
    """What the card copies, and multiplies in 16 bits, through torch; and what timing adds to every kernel."""
    copied, multiplied = check.ceilings
    yield row("copy", copied / 1e9, "GB/s")
    yield row("product", multiplied / 1e12, "TFLOP/s")
    nothing = torch.zeros(1, device=check.device)
    yield row("a kernel that does nothing", 1e6 * check.time(nothing.zero_), "µs")


def attention(check: Check) -> Rows:
    """Decode of a full batch at the long context, and the first chunk of a prompt."""
    generator = torch.Generator().manual_seed(check.seed)
    for form in check.forms:
        for kind, measure in (("decode", _decode_attention), ("prefill", _prefill_attention)):
            if check.takes_next():
                yield from measured(f"{kind}.{form}", partial(measure, check, form, generator))


def _decode_attention(check: Check, form: str, generator: torch.Generator) -> Figure:
    sizes = check.sizes
    inputs = _attention_inputs([(1, sizes.context)] * sizes.batch, check, form, generator)
    seconds = check.time(lambda: _attend(inputs))
    row_bytes = FORMS[form].block_bytes(16, sizes.head_dim) / 16  # keys and values
    rate = sizes.batch * sizes.context * sizes.kv_heads * row_bytes / seconds
    return rate / 1e9, "GB/s", rate / check.ceilings[0]


def _prefill_attention(check: Check, form: str, generator: torch.Generator) -> Figure:
    sizes = check.sizes
    inputs = _attention_inputs([(sizes.chunk, sizes.chunk)], check, form, generator)
    seconds = check.time(lambda: _attend(inputs))
    rate = 4 * sizes.heads * sizes.head_dim * sizes.chunk * (sizes.chunk + 1) / 2 / seconds
    return rate / 1e12, "TFLOP/s", rate / check.ceilings[1]


def _attention_inputs(lens: list[tuple[int, int]], check: Check, form: str, generator: torch.Generator) -> PagedInputs:
    sizes = check.sizes
    shape = {"num_heads": sizes.heads, "num_kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim, "block_size": 16}
    return make_inputs(lens, form, check.dtype, generator, device=check.device, fill=False, **shape)


def _attend(inputs: PagedInputs) -> torch.Tensor:
    return kernels.paged_attention(inputs.query, inputs.kv_layer, inputs, scale=0.1)


def linear(check: Check) -> Rows:
    """The widest product of a layer, gate and up, by rows."""
    sizes = check.sizes
    generator = torch.Generator().manual_seed(check.seed)
    shape = (2 * sizes.inner, sizes.hidden)
    weights = {f"int{bits}": random_weight(*shape, bits, check.device, generator) for bits in (4, 8)}
    weights["q4_k"] = random_nested_weight(*shape, 4, 32, check.device, generator)
    for name, weight in weights.items():
        for num_rows in sizes.rows:
            if check.takes_next():
                yield from measured(f"{name}, {num_rows} rows", partial(_product, check, weight, num_rows))


def _product(check: Check, weight: PackedWeight, num_rows: int) -> Figure:
    x = torch.randn(num_rows, weight.in_features, device=check.device).to(check.dtype)
    seconds = check.time(lambda: kernels.packed_linear(x, weight, None))
    if num_rows < check.sizes.rows[-1]:
        rate = (weight.num_bytes + x.nbytes + num_rows * weight.out_features * x.itemsize) / seconds
        return rate / 1e9, "GB/s", rate / check.ceilings[0]
    rate = 2 * num_rows * weight.in_features * weight.out_features / seconds
    return rate / 1e12, "TFLOP/s", rate / check.ceilings[1]


def graphs(check: Check) -> Rows:
    """A decode step replayed and launched kernel by kernel, over a small model."""
    sizes = check.sizes
    theirs = gpu_model.random_llama(check.device, sizes, check.dtype, num_layers=min(2, sizes.layers))
    loaded = gpu_model.load_from(theirs, check.device, check.dtype)
    for form in gpu_model.replayed_forms(check.dtype, is_tiny=sizes.is_tiny):
        yield from attempt(form.name, partial(gpu_model.replayed_steps, loaded, form, sizes))


def model(check: Check) -> Rows:
    """The engine on a random Llama, beside transformers on the same weights."""
    copied, _ = check.ceilings
    yield from gpu_model.engine_rates(check.device, check.sizes, check.dtype, copied, check.decode_rates)


def compiled(check: Check) -> Rows:
    """transformers compiled by torch, beside what `model` found."""
    yield from gpu_model.compiled_rates(check.device, check.sizes, check.dtype, check.decode_rates)


# In this order: what has targets first.
PARTS: dict[str, Callable[[Check], Rows]] = {
    "ceilings": ceilings,
    "attention": attention,
    "model": model,
    "compiled": compiled,
    "linear": linear,
    "graphs": graphs,
    "correct": correct,
}
