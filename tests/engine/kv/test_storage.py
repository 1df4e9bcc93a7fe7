"""Sizing with numbers, and the one tensor that holds all KV."""

import pytest
import torch

from pagedd.engine.errors import EngineError
from pagedd.engine.kv import storage
from pagedd.engine.kv.storage import KVStorage, free_bytes, host_memory, pool_of, size_pool, total_bytes
from pagedd.engine.model.config import ModelConfig
from pagedd.kernels.kv_form import FORMS

CPU = torch.device("cpu")
MIB, GIB = 2**20, 2**30
CONFIG = ModelConfig(architecture="llama", vocab_size=9, num_layers=3, num_kv_heads=2, head_dim=8, max_position=64)


def sized(**changes):
    numbers = {
        "free_bytes": 1000,
        "share": 0.5,
        "reserve_bytes": 100,
        "bytes_per_block": 10,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_model_len": 64,
    }
    return size_pool(**(numbers | changes))


def test_the_pool_is_the_share_of_free_memory_less_the_reserve() -> None:
    pool = sized()  # 1000 · 0.5 − 100 = 400 bytes of 10-byte blocks
    assert (pool.num_blocks, pool.num_tokens, pool.num_bytes) == (40, 160, 400)
    assert pool.num_full_requests == 2.5  # 16 blocks each


def test_memory_that_seats_cannot_use_stays_free_and_is_offered_for_prefixes() -> None:
    plenty, scarce = sized(free_bytes=100_000), sized()
    assert plenty.num_blocks == 8 * 16
    assert plenty.describe().endswith(
        "8.0 full-length requests fit, one for each seat, and num_blocks makes room for more prefixes"
    )
    assert scarce.describe().endswith("2.5 full-length requests fit")


def test_a_card_with_3_22_of_4_gib_free_is_sized_by_what_is_free() -> None:
    pool = sized(
        free_bytes=int(3.22 * GIB),
        share=0.9,
        reserve_bytes=512 * MIB,
        bytes_per_block=360 * 1024,
        block_size=16,
        max_num_seqs=256,
        max_model_len=8192,
    )
    assert pool.num_blocks == 6984  # (3.22 · 0.9 − 0.5) GiB / 360 KiB
    assert pool.num_bytes + 512 * MIB < 3.22 * GIB * 0.9
    assert pool.describe() == "the KV pool has 6984 blocks for 111744 tokens in 2.40 GiB; 13.6 full-length requests fit"


def test_the_pool_is_no_larger_than_all_seats_at_full_length_could_use() -> None:
    assert sized(free_bytes=10**9, max_num_seqs=3, max_model_len=65).num_blocks == 3 * 17


def test_a_part_of_a_block_is_not_a_block() -> None:
    assert sized(free_bytes=238).num_blocks == 1  # 19 bytes


def test_not_one_block_is_refused_with_the_numbers() -> None:
    with pytest.raises(EngineError) as refusal:
        sized(free_bytes=8 * MIB, reserve_bytes=3 * MIB, bytes_per_block=2 * MIB)
    assert refusal.value.code == "no_kv_memory"
    for number in ("8.0 MiB free × 0.5", "3.0 MiB reserved", "leaves 1.0 MiB", "one block needs 2.0 MiB"):
        assert number in refusal.value.message


def test_a_reserve_larger_than_the_share_is_refused_too() -> None:
    with pytest.raises(EngineError, match=r"leaves 0\.0 MiB"):
        sized(reserve_bytes=10**6)


def test_an_exact_number_of_blocks_has_the_same_figures() -> None:
    assert pool_of(40, 10, 4, 64) == sized()


def test_storage_has_the_documented_layout() -> None:
    kv = KVStorage(CONFIG, num_blocks=5, block_size=4, form=FORMS["float32"], device=CPU)
    assert kv.layer(2).shape == (2, 5, 2, 4, 8)
    assert KVStorage.bytes_per_block(CONFIG, FORMS["float32"], 4) == 4 * 384
    assert kv.num_bytes == 5 * 4 * 384


def test_layers_are_views_of_one_allocation() -> None:
    kv = KVStorage(CONFIG, num_blocks=5, block_size=4, form=FORMS["bf16"], device=CPU)
    assert kv.layer(1).data_ptr() - kv.layer(0).data_ptr() == kv.num_bytes // 3


def test_block_copies_reach_every_layer_and_touch_nothing_else() -> None:
    kv = KVStorage(CONFIG, num_blocks=6, block_size=4, form=FORMS["float32"], device=CPU)
    for index in range(3):
        kv.layer(index).copy_(torch.randn(2, 6, 2, 4, 8))
    before = [kv.layer(index).clone() for index in range(3)]
    kv.copy_blocks([(0, 3), (1, 5), (0, 4)])
    for index in range(3):
        assert torch.equal(kv.layer(index), before[index][:, [0, 1, 2, 0, 0, 1]])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_block_that_is_read_and_written_elsewhere_is_the_same_in_every_layer_and_form(form) -> None:
    kv = KVStorage(CONFIG, num_blocks=5, block_size=4, form=form, device=CPU)
    kv.data.random_(256)
    planes = [plane.view(torch.uint8) for plane in kv.planes]
    before = [plane.clone() for plane in planes]
    memory = host_memory(kv.block_bytes, CPU)
    assert kv.block_bytes == KVStorage.bytes_per_block(CONFIG, form, 4)
    kv.read_blocks([(1, memory)])
    kv.write_blocks([(4, memory), (0, bytearray(memory))])
    for plane, was in zip(planes, before, strict=True):
        assert torch.equal(plane, was[:, [1, 1, 2, 3, 1]])


def test_no_copies_is_nothing_to_do() -> None:
    KVStorage(CONFIG, num_blocks=1, block_size=4, form=FORMS["float32"], device=CPU).copy_blocks([])


def test_an_allocation_that_fails_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match=r"no_kv_memory: .*lower num_blocks"):
        KVStorage(CONFIG, num_blocks=2**45, block_size=4, form=FORMS["float32"], device=CPU)


def test_host_memory_that_is_not_given_is_an_error_of_its_own_with_value_limit_and_next_step() -> None:
    with pytest.raises(EngineError, match=r"no_host_memory: kv_host_gib needs .* GiB .*, the host has .* GiB free"):
        host_memory(1 << 60, CPU)


def test_free_memory_of_a_cpu_is_what_the_machine_or_the_control_group_still_gives(monkeypatch) -> None:
    monkeypatch.setattr(storage, "_available_ram", lambda: 900)
    monkeypatch.setattr(storage, "_cgroup_memory", lambda: [(1000, 300), (900, 100)])
    assert free_bytes(CPU) == 700
    assert total_bytes(CPU) == 900
    monkeypatch.setattr(storage, "_cgroup_memory", list)
    assert free_bytes(CPU) == 900
    assert total_bytes(CPU) > 2**28


def test_free_memory_of_a_card_is_what_its_driver_says_whoever_has_the_rest(monkeypatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append(device) or (int(3.22 * GIB), 4 * GIB))
    assert free_bytes(torch.device("cuda", 1)) == int(3.22 * GIB)
    assert asked == [torch.device("cuda", 1)]


def test_free_memory_of_this_machine_is_positive() -> None:
    assert free_bytes(CPU) > MIB


def test_a_quantized_pool_is_records_of_values_and_scales() -> None:
    kv = KVStorage(CONFIG, num_blocks=5, block_size=4, form=FORMS["int8"], device=CPU)
    layer = kv.layer(2)
    assert [plane.shape for plane in layer.planes] == [
        (5, 2, 64)
    ] * 2  # 4 rows of 8 values and a scale of 2 bytes, in one cache line
    assert (layer.block_size, layer.head_dim, layer.form.name) == (4, 8, "int8")
    assert kv.num_bytes == 5 * KVStorage.bytes_per_block(CONFIG, FORMS["int8"], 4) == 5 * 3 * 2 * 2 * 64


def test_keys_and_values_may_have_records_of_their_own_size() -> None:
    kv = KVStorage(CONFIG, num_blocks=5, block_size=16, form=FORMS["k8v4"], device=CPU)
    keys, values = kv.layer(1).planes
    assert (keys.shape, values.shape) == ((5, 2, 192), (5, 2, 128))  # 16 × (8 + 2) and 16 × (4 + 4), in whole lines
    assert keys.data_ptr() == kv.data[1].data_ptr()
    assert values.data_ptr() == keys.data_ptr() + keys.nbytes
    assert kv.num_bytes == 5 * KVStorage.bytes_per_block(CONFIG, FORMS["k8v4"], 16) == 3 * (keys.nbytes + values.nbytes)


@pytest.mark.parametrize("form", ["k8v4", "int4"])
def test_block_copies_take_the_scales_along(form) -> None:
    kv = KVStorage(CONFIG, num_blocks=4, block_size=4, form=FORMS[form], device=CPU)
    kv.data.copy_(torch.randint(256, kv.data.shape, generator=torch.Generator().manual_seed(0)))
    before = [plane.clone() for plane in kv.planes]
    kv.copy_blocks([(0, 3), (1, 2)])
    for plane, was in zip(kv.planes, before, strict=True):
        assert torch.equal(plane, was[:, [0, 1, 1, 0]])


def test_a_cpus_pool_begins_on_a_cache_line() -> None:
    kv = KVStorage(CONFIG, num_blocks=1000, block_size=16, form=FORMS["int8"], device=CPU)
    assert kv.data.data_ptr() % 64 == 0
