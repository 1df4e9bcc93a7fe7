"""The benchmark of attention, as far as a machine without a card can run it."""

import pytest
import torch

from pagedd.bench.kernels import paged_attention


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so_and_ends() -> None:
    with pytest.raises(SystemExit, match="kernels-aot"):
        paged_attention.main([])


def test_a_form_that_no_variant_has_is_refused_by_name() -> None:
    with pytest.raises(SystemExit, match="'fp4' is not one of bf16, fp16, int8, fp8, k8v4, int4"):
        paged_attention.main(["--forms", "bf16,fp4"])
