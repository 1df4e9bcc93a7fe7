"""What a decode step of an 8B model must cost on a card, on paper: bytes, operations, launches, and the floor of each.

    python -P -m pagedd.bench.roofline --markdown        the tables of docs/gpu.md

Nothing here is measured on a GPU. Bytes and operations are those that the kernels' docstrings say they must move and
do; the floor is the larger of bytes / bandwidth and operations / rate, from the makers' data sheets. Launches are
counted: a small model of the same kind runs through the same decoder and kernels, interpreted on the CPU.

    weights      groups of 32 in 4 bits with two float16 each, 5 bits a number; the embedding in bfloat16
    KV           bfloat16, or int8 with a bfloat16 scale a row, in whole cache lines as blocks are
    prompt       a chunk of 2 048 tokens, its causal attention included
"""

import argparse
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from pagedd.bench.gpu_model import GivenAway, random_llama
from pagedd.bench.recorded_launches import record
from pagedd.bench.report import Cell, markdown, print_report
from pagedd.engine.cuda_graphs import graph_bytes
from pagedd.engine.errors import EngineError
from pagedd.engine.kv.storage import size_pool
from pagedd.engine.model.config import parse_decoder_config
from pagedd.engine.model.decoder import Decoder
from pagedd.engine.runner import drawn_together
from pagedd.engine.sampler import working_bytes_per_logit
from pagedd.kernels.kv_form import FORMS, KVForm

CONTEXT_LEN = 4096
USABLE_SHARE = 0.9  # of a card's memory; the rest is the driver's, the context's and the activations'
BATCHES = (1, 8, 64)
SMALL_CARD_SEATS, SMALL_CARD_CONTEXT = 4, 8192  # what docs/gpu.md sets on 8 GB
CHUNK = 2048


@dataclass(frozen=True, slots=True)
class Card:
    """From the maker's data sheet: GB/s, dense bfloat16 TFLOP/s with float32 sums, GiB."""

    name: str
    gb_per_s: float
    tflop_per_s: float
    memory_gib: int


CARDS = (
    Card("RTX 4070 Laptop", 256, 39, 8),
    Card("RTX 4090", 1008, 165, 24),
    Card("H100", 3350, 989, 80),
    Card("H200", 4800, 989, 141),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama. Sizes in numbers."""

    layers: int = 32
    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128256

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def layer_weights(self) -> int:
        return self.hidden * (self.qkv + self.heads * self.head_dim + 3 * self.inner)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocab


LLAMA_8B = Shape()
BYTES_PER_WEIGHT = 20 / 32  # 16 bytes of numbers, 4 of scale and offset
KV_FORMS = ("bf16", "int8")
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Work:
    """What one kernel moves and does, in all layers of one step."""

    kernel: str
    num_bytes: float
    operations: float

    def floor_ms(self, card: Card) -> float:
        return 1e3 * max(self.num_bytes / (card.gb_per_s * 1e9), self.operations / (card.tflop_per_s * 1e12))


def decode_step(
    batch: int, *, kv_form: str = "int8", context_len: int = CONTEXT_LEN, shape: Shape = LLAMA_8B
) -> list[Work]:
    """One token for each of `batch` sequences with `context_len` tokens of context."""
    return _step(rows=batch, keys_read=batch * context_len, pairs=batch * context_len, kv_form=kv_form, shape=shape)


def prefill_step(num_tokens: int = CHUNK, *, kv_form: str = "int8", shape: Shape = LLAMA_8B) -> list[Work]:
    """The first `num_tokens` of one prompt, of which one is sampled. A tile of 128 rows reads the keys before it."""
    pairs = num_tokens * (num_tokens + 1) // 2
    group = shape.heads // shape.kv_heads
    return _step(num_tokens, keys_read=pairs * group // 128, pairs=pairs, kv_form=kv_form, shape=shape, num_sampled=1)


def _step(
    rows: int, *, keys_read: int, pairs: int, kv_form: str, shape: Shape, num_sampled: int | None = None
) -> list[Work]:
    layers, activation = shape.layers, 2  # bytes of a bfloat16
    sampled = rows if num_sampled is None else num_sampled
    kv_token = kv_bytes(shape, kv_form)
    query = shape.heads * shape.head_dim
    return [
        Work("rms_norm", layers * 2 * rows * shape.hidden * activation * 4, layers * 2 * rows * shape.hidden * 6),
        Work(
            "linear",
            layers
            * (
                shape.layer_weights * BYTES_PER_WEIGHT
                + rows * activation * (3 * shape.hidden + shape.qkv + query + 3 * shape.inner)
            ),
            layers * 2 * rows * shape.layer_weights,
        ),
        Work(
            "rope_kv",
            layers * rows * (activation * (2 * query + 2 * shape.kv_heads * shape.head_dim) + kv_token),
            layers * rows * 6 * query,
        ),
        Work(
            "paged_attention",
            layers * (keys_read * kv_token + 2 * rows * query * activation),
            layers * 4 * pairs * query,
        ),
        Work("silu_and_mul", layers * rows * 3 * shape.inner * activation, layers * rows * shape.inner * 5),
        Work(
            "head",
            shape.head_weights * BYTES_PER_WEIGHT + sampled * (shape.hidden * activation + shape.vocab * 4),
            2 * sampled * shape.head_weights,
        ),
    ]


def kv_bytes(shape: Shape, kv_form: str) -> float:
    """Key and value of one token in one layer, with what its block is padded by."""
    return shape.kv_heads * FORMS[kv_form].block_bytes(BLOCK_SIZE, shape.head_dim) / BLOCK_SIZE


def memory_gib(batch: int, kv_form: str, shape: Shape = LLAMA_8B) -> float:
    """Weights, and the KV of `batch` sequences of `CONTEXT_LEN` tokens."""
    weights = (shape.layers * shape.layer_weights + shape.head_weights) * BYTES_PER_WEIGHT + shape.head_weights * 2
    kv = batch * CONTEXT_LEN * shape.layers * kv_bytes(shape, kv_form)
    return (weights + kv) / 2**30


@dataclass(frozen=True, slots=True)
class FileForm:
    """How an 8B model's file has its weights: bits a number as a card holds them, scales included."""

    name: str
    layers: float
    head: float


# In Q4_K_M half of the values' and of the down projections' matrices, and the head, are Q6_K, which takes 8 bits and
# nested scales on a card; queries, keys and values are one product, all in the widest form of the three.
_Q4_K, _Q6_K = 4 + 16 / 32 + 32 / 256, 8 + 16 / 16 + 32 / 256


def file_forms(shape: Shape) -> tuple[FileForm, ...]:
    wide = shape.hidden * (shape.qkv + shape.inner) / 2 / shape.layer_weights
    return (
        FileForm("Q4_0", 5, 5),
        FileForm("Q4_K_M", _Q4_K + wide * (_Q6_K - _Q4_K), _Q6_K),
        FileForm("Q8_0", 9, 9),
        FileForm("16 bits", 16, 16),
    )


def file_rows(shape: Shape = LLAMA_8B) -> list[dict[str, Cell]]:
    """Weights of an 8B model by file, and the tokens of cache that the rest of a card of 8 GB holds beside them.

    As the engine sizes its pool where 7.5 GiB are free, for so few seats and so short contexts as such a card asks for.
    """
    reserved = {form: _reserved_bytes(shape, FORMS[form]) for form in KV_FORMS}
    rows: list[dict[str, Cell]] = []
    for form in file_forms(shape):
        layers, head = shape.layers * shape.layer_weights * form.layers / 8, shape.head_weights * form.head / 8
        weights = layers + head + shape.head_weights * 2  # the embedding in 16 bits
        row: dict[str, Cell] = {"file": form.name, "weights, GiB": round(weights / 2**30, 2)}
        for kv_form, reserve_bytes in reserved.items():
            try:
                pool = size_pool(
                    free_bytes=int(7.5 * 2**30 - weights),
                    share=USABLE_SHARE,
                    reserve_bytes=reserve_bytes,
                    bytes_per_block=int(shape.layers * kv_bytes(shape, kv_form) * BLOCK_SIZE),
                    block_size=BLOCK_SIZE,
                    max_num_seqs=SMALL_CARD_SEATS,
                    max_model_len=SMALL_CARD_CONTEXT,
                )
            except EngineError:
                row[f"tokens in {kv_form}"] = None
            else:
                row[f"tokens in {kv_form}"] = pool.num_tokens // 100 * 100
        rows.append(row)
    return rows


def _reserved_bytes(shape: Shape, form: KVForm) -> int:
    """What the engine keeps for a step beside weights and cache. Of a model without numbers, which no layer changes."""
    nowhere = torch.device("meta")
    theirs = random_llama(nowhere, shape, torch.bfloat16, num_layers=1)
    config = parse_decoder_config(theirs.config.to_dict())
    decoder = Decoder(config, GivenAway(theirs), torch.bfloat16, nowhere, lambda share, what: None, gathers_kv=False)
    seats, context = SMALL_CARD_SEATS, SMALL_CARD_CONTEXT
    return (
        decoder.activation_bytes(CHUNK, seats, context, form)
        + drawn_together(seats, seats) * shape.vocab * working_bytes_per_logit(sorts_logits=False)
        + graph_bytes(decoder, seats, context, shape.vocab, form, BLOCK_SIZE)
    )


# --- tables -----------------------------------------------------------------------------------------------------------


def kernel_rows() -> list[dict[str, Cell]]:
    """Each kernel of a decode step by batch: GB, GFLOP, and the floor on each card."""
    rows: list[dict[str, Cell]] = []
    for batch in BATCHES:
        for work in decode_step(batch):
            row: dict[str, Cell] = {"batch": batch, "kernel": work.kernel}
            row |= {"GB": round(work.num_bytes / 1e9, 3), "GFLOP": round(work.operations / 1e9, 1)}
            rows.append(row | {f"{card.name}, ms": round(work.floor_ms(card), 3) for card in CARDS})
    return rows


def step_rows() -> list[dict[str, Cell]]:
    """A whole step by card, batch and form of the cache; no floor for what does not fit."""
    rows: list[dict[str, Cell]] = []
    for card in CARDS:
        for batch in BATCHES:
            for form in KV_FORMS:
                gib = memory_gib(batch, form)
                floor_ms = sum(work.floor_ms(card) for work in decode_step(batch, kv_form=form))
                fits = gib < USABLE_SHARE * card.memory_gib
                row: dict[str, Cell] = {"card": card.name, "batch": batch, "KV": form, "GiB": round(gib, 1)}
                row["floor, ms"] = round(floor_ms, 2) if fits else None
                row["tokens/s"] = round(1e3 * batch / floor_ms) if fits else None
                rows.append(row)
    return rows


def prefill_rows() -> list[dict[str, Cell]]:
    """The first chunk of a prompt by card: the floor of each kernel, and tokens a second at the sum of them."""
    works, rows = prefill_step(), list[dict[str, Cell]]()
    for card in CARDS:
        row: dict[str, Cell] = {"card": card.name}
        row |= {f"{work.kernel}, ms": round(work.floor_ms(card), 2) for work in works}
        rows.append(row | {"tokens/s": round(1e3 * CHUNK / sum(work.floor_ms(card) for work in works))})
    return rows


# --- launches ---------------------------------------------------------------------------------------------------------


def count_launches(num_layers: int) -> int:
    """Kernels that a decode step of one sequence launches, up to its logits, in a Llama of so many layers."""
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    from transformers import AutoConfig, AutoModelForCausalLM

    from pagedd.engine.batch import build_batch
    from pagedd.engine.config import EngineConfig
    from pagedd.engine.kv.storage import KVStorage
    from pagedd.engine.model.load import load_model
    from pagedd.engine.request import Request
    from pagedd.engine.sampling_params import SamplingParams
    from pagedd.engine.sequence import Sequence
    from pagedd.engine.step import ScheduledSequence
    from pagedd.kernels import ops
    from pagedd.kernels.kv_form import FORMS

    config = AutoConfig.for_model(
        "llama",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    os.environ[ops.BACKEND_VARIABLE] = "triton"
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
        loaded = load_model(EngineConfig(model=folder, device="cpu", dtype="float32"), lambda share, what: None)
        ops.select_backend(loaded.device)
        del os.environ[ops.BACKEND_VARIABLE]
        storage = KVStorage(loaded.config, 1, BLOCK_SIZE, FORMS["float32"], loaded.device)
        request = Request(request_id="", prompt_token_ids=[1], params=SamplingParams(max_tokens=1))
        sequence = Sequence(
            request=request,
            choice_index=0,
            token_ids=[1],
            num_prompt_tokens=1,
            arrival_s=0.0,
            due_s=0.0,
            priority=0,
            order=0,
            block_table=[0],
        )
        batch = build_batch([ScheduledSequence(sequence, 0, 1, [sequence])], BLOCK_SIZE, loaded.device)
        with torch.inference_mode():
            recording = record(lambda: loaded.model.forward(batch, storage))
        ops.select_backend(loaded.device)
    return len(recording.launches)


def launch_rows() -> list[dict[str, Cell]]:
    """Of an 8B model's decode step: counted at one and two layers, and the rest is more of the same."""
    first, second = count_launches(1), count_launches(2)
    per_layer = second - first
    return [
        {
            "launches of a layer": per_layer,
            "beside the layers": first - per_layer,
            "of a step, one by one": first + (LLAMA_8B.layers - 1) * per_layer,
            "of a step, as a graph": 1,
        }
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs/gpu.md instead")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the line of JSON there")
    args = parser.parse_args()
    tables = {
        "kernels": kernel_rows(),
        "step": step_rows(),
        "prefill": prefill_rows(),
        "launches": launch_rows(),
        "files": file_rows(),
    }
    if args.markdown:
        print("\n\n".join(markdown(rows) for rows in tables.values()))
    else:
        print_report("roofline", tables["step"], tables, output=args.output)


if __name__ == "__main__":
    main()
