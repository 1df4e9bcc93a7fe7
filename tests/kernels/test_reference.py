"""The specification itself, against numbers worked out by hand."""

import math

import pytest
import torch

from pagedd.kernels import reference


def test_rms_norm_divides_by_the_root_of_the_mean_square() -> None:
    # mean of 9 and 16 is 12.5
    y = reference.rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), eps=0.0)
    torch.testing.assert_close(y, torch.tensor([[3 / math.sqrt(12.5), 8 / math.sqrt(12.5)]]))


def test_add_rms_norm_returns_the_sum_for_the_next_layer() -> None:
    y, total = reference.add_rms_norm(torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 3.0]]), torch.ones(2), eps=0.0)
    assert total.tolist() == [[3.0, 4.0]]
    torch.testing.assert_close(y, reference.rms_norm(total, torch.ones(2), eps=0.0))


def test_rope_turns_the_pair_of_both_halves_by_the_rows_angle() -> None:
    x = torch.tensor([[[1.0, 10.0, 2.0, 20.0]]])  # pairs (1, 2) and (10, 20)
    quarter_and_none = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])  # cosines, sines of 90° and 0°
    reference.apply_rope(x, *quarter_and_none)
    assert x.tolist() == [[[-2.0, 10.0, 1.0, 20.0]]]


def test_silu_and_mul_gates_the_second_half_by_the_first() -> None:
    y = reference.silu_and_mul(torch.tensor([[0.0, 1.0, 5.0, 2.0]]))
    torch.testing.assert_close(y, torch.tensor([[0.0, 2 / (1 + math.exp(-1))]]))


def test_write_kv_puts_each_row_in_its_slot_and_nothing_elsewhere() -> None:
    kv_layer = torch.zeros(2, 3, 1, 4, 1)
    key, value = torch.tensor([1.0, 2.0]).view(2, 1, 1), torch.tensor([3.0, 4.0]).view(2, 1, 1)
    reference.write_kv(key, value, kv_layer, torch.tensor([9, 0]))  # block 2 offset 1, block 0 offset 0
    assert kv_layer[0, :, 0, :, 0].tolist() == [[2, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]]
    assert kv_layer[1, :, 0, :, 0].tolist() == [[4, 0, 0, 0], [0, 0, 0, 0], [0, 3, 0, 0]]


def test_attention_weighs_values_by_the_softmax_of_scaled_scores(paged) -> None:
    batch = paged([(1, 2)], num_heads=1, num_kv_heads=1, head_dim=1)
    block = int(batch.block_tables[0, 0])
    batch.kv_layer[0, block, 0, :2, 0] = torch.tensor([0.0, 1.0])
    batch.kv_layer[1, block, 0, :2, 0] = torch.tensor([10.0, 20.0])
    batch.query[0] = 2.0
    y = reference.paged_attention(batch.query, batch.kv_layer, batch, scale=0.5)
    second = math.exp(1) / (1 + math.exp(1))  # scores 0 and 2 · 0.5
    assert y.item() == pytest.approx(10 * (1 - second) + 20 * second)


def test_a_row_does_not_see_the_keys_after_it(paged) -> None:
    batch = paged([(3, 5)])
    y = reference.paged_attention(batch.query, batch.kv_layer, batch, scale=1.0)
    block, offset = int(batch.block_tables[0, 1]), 0  # position 4, the last row's own
    batch.kv_layer[:, block, :, offset] = 100.0
    z = reference.paged_attention(batch.query, batch.kv_layer, batch, scale=1.0)
    assert torch.equal(y[:2], z[:2])
    assert not torch.equal(y[2], z[2])


def test_a_window_of_one_returns_the_rows_own_value(paged) -> None:
    batch = paged([(1, 6)], num_heads=2, num_kv_heads=2)
    y = reference.paged_attention(batch.query, batch.kv_layer, batch, scale=1.0, sliding_window=1)
    assert torch.equal(y[0], batch.kv_layer[1, int(batch.block_tables[0, 1]), :, 1])


def test_query_heads_share_kv_heads_in_order(paged) -> None:
    batch = paged([(1, 1)], num_heads=4, num_kv_heads=2)
    y = reference.paged_attention(batch.query, batch.kv_layer, batch, scale=1.0)
    value = batch.kv_layer[1, int(batch.block_tables[0, 0]), :, 0]
    assert torch.equal(y[0], value[[0, 0, 1, 1]])


def test_a_soft_cap_bounds_the_scores(paged) -> None:
    batch = paged([(1, 2)], num_heads=1, num_kv_heads=1, head_dim=1)
    block = int(batch.block_tables[0, 0])
    batch.kv_layer[0, block, 0, :2, 0] = torch.tensor([-1000.0, 1000.0])
    batch.kv_layer[1, block, 0, :2, 0] = torch.tensor([0.0, 1.0])
    batch.query[0] = 1.0
    y = reference.paged_attention(batch.query, batch.kv_layer, batch, scale=1.0, soft_cap=1.0)
    assert y.item() == pytest.approx(math.exp(1) / (math.exp(-1) + math.exp(1)))


def test_float64_stays_float64(paged) -> None:
    batch = paged([(2, 3)], dtype=torch.float64)
    assert reference.paged_attention(batch.query, batch.kv_layer, batch, scale=1.0).dtype == torch.float64


def test_rotation_in_float64_keeps_the_length_of_every_pair() -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], dtype=torch.float64)
    angles = torch.tensor([[0.3, 1.1]], dtype=torch.float64)
    reference.apply_rope(x, angles.cos(), angles.sin())
    assert torch.allclose(x[0, 0, :2] ** 2 + x[0, 0, 2:] ** 2, torch.tensor([10.0, 20.0], dtype=torch.float64))
