"""One thread over few rows, all of them over many, and as many as before in the end."""

import pytest
import torch

from pagedd.engine.threads import FEW_ROWS, threads_for


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("num_rows", "num_threads"), [(0, 1), (1, 1), (FEW_ROWS, 1), (FEW_ROWS + 1, 3)])
def test_few_rows_take_one_thread(num_rows: int, num_threads: int) -> None:
    with threads_for(num_rows):
        assert torch.get_num_threads() == num_threads
    assert torch.get_num_threads() == 3


def test_a_fault_leaves_as_many_threads_as_there_were() -> None:
    with pytest.raises(ValueError, match="broken"), threads_for(1):
        raise ValueError("broken")
    assert torch.get_num_threads() == 3
