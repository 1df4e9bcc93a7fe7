"""Compiles every variant of every Triton kernel for every architecture, without a GPU, and prints what each one takes.

    python -P -m pagedd.bench.kernels_aot --ops linear,rms_norm --archs 80,90 --output FILE
    python -P -m pagedd.bench.kernels_aot --markdown FILE        the table of docs/gpu.md, of figures that are there

    registers    of a thread
    spilled      bytes of a thread that do not fit its registers and go through memory
    shared       bytes of a program
    occupancy    share of a processor's warps that can be resident, and which resource the limit is
    products     the matrix instruction in the PTX, if there is one
    wide_loads   loads of 16 bytes in the PTX, asynchronous copies included

Registers, spills and shared memory are read from the cubin: what runs is decided there, whatever was asked for. Fails
where a variant of a common model spills, where one takes more shared memory than there is, or where one with
products lacks matrix instructions or 16-byte loads (on 75, for which Triton makes none, it may).
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pagedd.bench.report import Cell, markdown, print_report
from pagedd.kernels.triton.card import WITHOUT_BFLOAT16, WITHOUT_MATRIX_INSTRUCTIONS
from pagedd.kernels.triton.variant import Variant

# Modules of kernels/triton/ with `variants(arch)`.
OPS = (
    "rms_norm",
    "silu_and_mul",
    "rope_kv",
    "close_blocks",
    "linear",
    "top_k_top_p",
    "paged_attention",
    "split_decode",
    "limits",
)
ARCHS = (75, 80, 86, 89, 90, 100, 120)

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_PRODUCTS = re.compile(r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync)\b")
_WIDE_LOAD = re.compile(
    r"\bld\.global[.\w:]*\.(?:v4\.[bfsu]32|v2\.[bfsu]64|v8\.[bfsu]32|v4\.[bfsu]64)\b"
    r"|\bcp\.async\.cg\.shared\.global\b[^;]*\], *(?:0x10|16)\b"
    r"|\bcp\.async\.bulk\b"
)


@dataclass(frozen=True, slots=True)
class Processor:
    """What one streaming multiprocessor has, and one program of it, by NVIDIA's table of compute capabilities."""

    max_warps: int
    max_programs: int
    shared_bytes: int
    shared_bytes_of_a_program: int

    @property
    def shared_bytes_of_the_system(self) -> int:
        """Beside what a program asks for."""
        return self.shared_bytes - self.shared_bytes_of_a_program


_LARGE = Processor(64, 32, 228 * 1024, 227 * 1024)
PROCESSORS = {
    75: Processor(32, 16, 64 * 1024, 64 * 1024),
    80: Processor(64, 32, 164 * 1024, 163 * 1024),
    86: Processor(48, 16, 100 * 1024, 99 * 1024),
    89: Processor(48, 24, 100 * 1024, 99 * 1024),
    90: _LARGE,
    100: _LARGE,
    120: Processor(48, 24, 100 * 1024, 99 * 1024),
}
_REGISTERS = 65_536  # of a processor, on all of them
_REGISTERS_AT_ONCE = 256  # a warp gets multiples of this


@dataclass(frozen=True, slots=True)
class Compiled:
    """A variant on one architecture; the fields as in the module's docstring."""

    variant: str
    arch: int
    num_warps: int
    registers: int
    spilled: int
    shared: int
    occupancy: float
    limit: str
    products: str | None
    wide_loads: int


def compile_variant(variant: Variant, arch: int) -> Compiled:
    """
    Raises:
        RuntimeError: it does not compile.
    """
    names = variant.kernel.arg_names
    source = ASTSource(
        fn=variant.kernel,
        signature={name: variant.signature.get(name, "constexpr") for name in names},
        constexprs=variant.constants,
        # In one order: it is part of the key by which Triton finds what it compiled before.
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in sorted(variant.aligned)},
    )
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    try:
        kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:
        raise RuntimeError(f"{variant.name} does not compile for sm_{arch}: {error}") from error
    registers, spilled = _resources(kernel.asm["cubin"])
    shared = kernel.metadata.shared
    occupancy, limit = occupancy_of(PROCESSORS[arch], variant.num_warps, registers, shared)
    ptx = kernel.asm["ptx"]
    products = _PRODUCTS.search(ptx)
    return Compiled(
        variant=variant.name,
        arch=arch,
        num_warps=variant.num_warps,
        registers=registers,
        spilled=spilled,
        shared=shared,
        occupancy=occupancy,
        limit=limit,
        products=products[1] if products else None,
        wide_loads=len(_WIDE_LOAD.findall(ptx)),
    )


def occupancy_of(processor: Processor, num_warps: int, registers: int, shared: int) -> tuple[float, str]:
    """Share of `processor`'s warps that programs of this kind can fill, and what stops them from filling more."""
    warp_registers = -(-registers * 32 // _REGISTERS_AT_ONCE) * _REGISTERS_AT_ONCE
    num_programs = {
        "warps": processor.max_warps // num_warps,
        "programs": processor.max_programs,
        "registers": _REGISTERS // warp_registers // num_warps,
        "shared memory": processor.shared_bytes // max(1, shared + processor.shared_bytes_of_the_system),
    }
    limit = min(num_programs, key=num_programs.__getitem__)
    return num_programs[limit] * num_warps / processor.max_warps, limit


def faults_of(variant: Variant, compiled: Compiled) -> Iterator[str]:
    """What is wrong with it, in sentences."""
    where = f"{variant.name} on sm_{compiled.arch}"
    if variant.must_fit and compiled.spilled:
        yield f"{where} spills {compiled.spilled} bytes a thread"
    most = PROCESSORS[compiled.arch].shared_bytes_of_a_program
    if compiled.shared > most:
        yield f"{where} takes {compiled.shared} bytes of shared memory, a program may have {most}"
    if compiled.arch in WITHOUT_MATRIX_INSTRUCTIONS:
        return
    if variant.has_products and compiled.products is None:
        yield f"{where} multiplies matrices without a matrix instruction"
    if variant.has_products and not compiled.wide_loads:
        yield f"{where} has no load of 16 bytes"


def variants_of(ops: Sequence[str], arch: int) -> Iterator[Variant]:
    """Those that a card of that architecture is served with: in bfloat16 only where it has that."""
    for op in ops:
        for variant in import_module(f"pagedd.kernels.triton.{op}").variants(arch):
            if arch not in WITHOUT_BFLOAT16 or "bf16" not in variant.name.split("."):
                yield variant


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes in local memory, of the one kernel in it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        dump = subprocess.run(
            [_CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", dump)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def _table_row(compiled: Compiled) -> dict[str, Cell]:
    return {
        "variant": compiled.variant,
        "sm": compiled.arch,
        "warps": compiled.num_warps,
        "registers": compiled.registers,
        "spilled": compiled.spilled,
        "shared": compiled.shared,
        "occupancy": f"{compiled.occupancy:.0%}",
        "limited by": compiled.limit,
        "products": compiled.products or "",
        "wide loads": compiled.wide_loads,
    }


def summary_rows(compiled: Sequence[Compiled]) -> list[dict[str, Cell]]:
    """The least and the most of each operation, those with mma together, by architectures beside it."""
    rows: list[dict[str, Cell]] = []
    for op in OPS:
        for name, archs in (("75", {75}), ("80, 86, 89, 120", {80, 86, 89, 120}), ("90", {90}), ("100", {100})):
            found = [one for one in compiled if one.variant.partition(".")[0] == op and one.arch in archs]
            if found:
                registers, occupancies = [one.registers for one in found], [one.occupancy for one in found]
                row: dict[str, Cell] = {"operation": op, "sm": name, "variants": len(found)}
                row |= {
                    "registers": f"{min(registers)}–{max(registers)}",
                    "that spill": sum(one.spilled > 0 for one in found),
                }
                row["most shared memory, KiB"] = f"{max(one.shared for one in found) / 1024:.1f}"
                rows.append(row | {"occupancy, %": f"{min(occupancies):.0%}–{max(occupancies):.0%}".replace("%", "")})
    return rows


def _chosen(known: Sequence[str], given: str | None) -> list[str]:
    """
    Raises:
        SystemExit: a name that is not known.
    """
    chosen = list(known) if given is None else given.split(",")
    for name in chosen:
        if name not in known:
            raise SystemExit(f"{name!r} is not one of {', '.join(known)}")
    return chosen


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compiles the Triton kernels ahead of time; needs no GPU.")
    parser.add_argument("--ops", help=f"some of {','.join(OPS)}; all by default")
    parser.add_argument("--archs", help=f"some of {','.join(map(str, ARCHS))}; all by default")
    parser.add_argument("--output", type=Path, help="also write the figures to this file")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="compile nothing: the table of the figures in it")
    arguments = parser.parse_args(argv)
    if arguments.markdown is not None:
        figures = json.loads(arguments.markdown.read_text())
        print(markdown(summary_rows([Compiled(**one) for one in figures["compiled"]])))
        return
    ops = _chosen(OPS, arguments.ops)
    archs = [int(arch) for arch in _chosen([str(arch) for arch in ARCHS], arguments.archs)]

    compiled: list[Compiled] = []
    faults: list[str] = []
    for arch in archs:
        for variant in variants_of(ops, arch):
            compiled.append(compile_variant(variant, arch))
            faults += faults_of(variant, compiled[-1])
    compiled.sort(key=lambda one: (one.variant, one.arch))
    figures = {"ops": ops, "archs": archs, "compiled": [asdict(one) for one in compiled], "faults": faults}
    print_report("kernels_aot", [_table_row(one) for one in compiled], figures, output=arguments.output)
    if faults:
        raise SystemExit("\n".join(["kernels that must not be served:", *faults]))


if __name__ == "__main__":
    main()
