"""Packed products as lesser processors compute them, against float64; the one that tests run on has to be able to."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from pagedd.kernels import cpu
from pagedd.kernels.cpu import build

SOURCES = Path(cpu.__file__).parent
# What the compiler is told, what the processor needs for it, and how the kernels name it.
LEVELS = {
    "portable": (["-march=x86-64-v2"], "sse4_2", None),
    "AVX2": (["-march=haswell"], "avx2", b"AVX2"),
    "AVX2 with VNNI": (["-march=haswell", "-mavxvnni"], "avx_vnni", b"AVX2 with VNNI"),
    "AVX-512": (["-march=skylake-avx512"], "avx512bw", b"AVX-512"),
}
FORMS = {"float32": 0, "bf16": 1, "int8": 2, "int4": 3}


@pytest.fixture(scope="module", params=LEVELS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    flags, needed, name = LEVELS[request.param]
    if needed not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"this processor has no {needed}")
    made = tmp_path_factory.mktemp("levels") / "driver.so"
    sources = [SOURCES / f"{part}.cpp" for part in ("linear", "packing", "wide_product")]
    command = ["g++", "-shared", "-fPIC", f"-I{SOURCES}", *build.FLAGS, *flags, "-O2"]
    subprocess.run(
        [*command, *map(str, [*sources, Path(__file__).with_name("linear_driver.cpp")]), "-o", made], check=True
    )
    loaded = ctypes.CDLL(str(made))
    loaded.instructions_of_driver.restype = ctypes.c_char_p
    assert loaded.instructions_of_driver() == name
    return loaded


def multiply(
    library: ctypes.CDLL, weight: torch.Tensor, bias: torch.Tensor, form: str, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product, and the weight as it is held."""
    y, unpacked = torch.full((len(x), len(weight)), torch.nan), torch.empty_like(weight)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (weight, bias, x, y, unpacked)]
    library.multiply_rows(*pointers[:2], *weight.shape, FORMS[form], pointers[2], len(x), *pointers[3:])
    return y, unpacked


@pytest.mark.parametrize("form", FORMS)
def test_products_equal_float64_on_the_weights_that_are_held(library: ctypes.CDLL, form: str) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(80, 352, generator=generator) / 16, torch.randn(80, generator=generator)
    x = torch.randn(70, 352, generator=generator)
    for num_rows in (1, 2, 3, 5, 7, 16, 70):
        y, held = multiply(library, weight, bias, form, x[:num_rows])
        exact = x[:num_rows].double() @ held.double().T + bias.double()
        # Rounding of the inputs: none, 2⁻⁹ each, or half a 127th of the group's largest.
        tolerance = {"float32": 1e-5, "bf16": 0.03, "int8": 0.04, "int4": 0.04}[form]
        assert (y.double() - exact).abs().max() < tolerance


@pytest.mark.parametrize("form", FORMS)
def test_a_row_is_the_same_alone_and_among_others(library: ctypes.CDLL, form: str) -> None:
    generator = torch.Generator().manual_seed(2)
    weight, bias = torch.randn(48, 96, generator=generator), torch.randn(48, generator=generator)
    x = torch.randn(11, 96, generator=generator)
    together, _ = multiply(library, weight, bias, form, x)
    for row in range(len(x)):
        alone, _ = multiply(library, weight, bias, form, x[row : row + 1].contiguous())
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_the_largest_numbers_overflow_no_sum(library: ctypes.CDLL, form: str) -> None:
    weight = torch.zeros(16, 64)
    weight[:, 1:32] = 1.0  # the largest q everywhere but in one place, which has the smallest
    for sign in (1.0, -1.0):
        y, held = multiply(library, weight, torch.zeros(16), form, torch.full((3, 64), 127.0 * sign))
        torch.testing.assert_close(y[0], held.sum(1) * 127.0 * sign, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_no_number_stays_visible(library: ctypes.CDLL, form: str, broken: float) -> None:
    weight, x = torch.ones(32, 64), torch.ones(3, 64)
    weight[5, 40] = broken
    x[1, 7] = broken
    y, _ = multiply(library, weight, torch.zeros(32), form, x)
    assert not y[:, 5].isfinite().any()
    assert not y[1].isfinite().any()
    assert y[[0, 2]][:, [*range(5), *range(6, 32)]].isfinite().all()
