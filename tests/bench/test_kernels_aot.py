"""Compiling kernels ahead of time: for every architecture, on a machine without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagedd.bench.kernels_aot import (
    ARCHS,
    OPS,
    PROCESSORS,
    Compiled,
    faults_of,
    occupancy_of,
    summary_rows,
    variants_of,
)
from pagedd.bench.report import markdown
from pagedd.kernels.triton.variant import Variant


def variant(**flags: bool) -> Variant:
    return Variant(name="op", kernel=None, signature={}, constants={}, **flags)


def compiled(*, spilled: int = 0, products: str | None = "mma.sync", wide_loads: int = 4) -> Compiled:
    return Compiled(
        variant="op",
        arch=90,
        num_warps=4,
        registers=64,
        spilled=spilled,
        shared=0,
        occupancy=0.5,
        limit="registers",
        products=products,
        wide_loads=wide_loads,
    )


def test_an_operation_is_compiled_and_its_resources_are_read_from_the_cubin(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    command = [sys.executable, "-P", "-m", "pagedd.bench.kernels_aot", "--ops", "silu_and_mul", "--archs", "80,120"]
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([*command, "--output", output], env=environment, capture_output=True, text=True, check=True)
    figures = json.loads(output.read_text())
    assert figures == json.loads(done.stdout.splitlines()[-1])
    assert {(row["variant"], row["arch"]) for row in figures["compiled"]} == {
        (f"silu_and_mul.{kind}", arch) for kind in ("bf16", "fp16") for arch in (80, 120)
    }
    assert all(0 < row["registers"] < 256 and row["wide_loads"] > 0 for row in figures["compiled"])


def test_an_unknown_operation_is_refused_with_the_known_ones() -> None:
    command = [sys.executable, "-P", "-m", "pagedd.bench.kernels_aot", "--ops", "softmax"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "'softmax' is not one of rms_norm" in done.stderr


@pytest.mark.parametrize(
    ("arch", "num_warps", "registers", "shared", "expected"),
    [
        (90, 4, 32, 0, (1.0, "warps")),
        (90, 4, 128, 0, (0.25, "registers")),
        (90, 8, 255, 0, (0.125, "registers")),
        (90, 4, 32, 100 * 1024, (0.125, "shared memory")),
        (86, 1, 32, 0, (16 / 48, "programs")),
        (86, 4, 32, 100 * 1024, (0.0, "shared memory")),
    ],
)
def test_the_scarcest_resource_limits_the_resident_warps(
    arch: int, num_warps: int, registers: int, shared: int, expected: tuple[float, str]
) -> None:
    assert occupancy_of(PROCESSORS[arch], num_warps, registers, shared) == expected


def test_spills_are_a_fault_only_where_a_common_model_would_meet_them() -> None:
    assert list(faults_of(variant(must_fit=True), compiled(spilled=16))) == ["op on sm_90 spills 16 bytes a thread"]
    assert not list(faults_of(variant(), compiled(spilled=16)))


def test_products_without_matrix_instructions_or_wide_loads_are_a_fault() -> None:
    assert not list(faults_of(variant(has_products=True), compiled()))
    assert list(faults_of(variant(has_products=True), compiled(products=None, wide_loads=0))) == [
        "op on sm_90 multiplies matrices without a matrix instruction",
        "op on sm_90 has no load of 16 bytes",
    ]
    assert not list(faults_of(variant(), compiled(products=None, wide_loads=0)))


@pytest.mark.parametrize("arch", ARCHS)
def test_every_operation_has_variants_with_names_of_their_own(arch: int) -> None:
    names = [one.name for one in variants_of(OPS, arch)]
    assert len(names) == len(set(names))
    assert {name.partition(".")[0] for name in names} == set(OPS)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_variant_says_what_each_argument_is(arch: int) -> None:
    for one in variants_of(OPS, arch):
        assert one.signature.keys() | one.constants.keys() == set(one.kernel.arg_names), one.name
        assert one.aligned <= one.signature.keys(), one.name


def test_the_page_shows_the_figures_of_the_last_run() -> None:
    root = Path(__file__).parents[2]
    figures = json.loads((root / "bench" / "results" / "kernels-aot.json").read_text())
    compiled = [Compiled(**one) for one in figures["compiled"]]
    page = (root / "docs" / "gpu.md").read_text()
    assert markdown(summary_rows(compiled)) in page, "paste the output of: kernels_aot --markdown FILE"
    assert f"{len(compiled)} variants" in page
    assert not figures["faults"]
