"""What the CUDA kernels need of the GPU, from their machine code (SASS). Needs no GPU, and nothing is measured.

    python -m benchmarks.sass_report [--archs 80,90,100] [--output benchmarks/results/sass.json]

Needs nvcc, and cuobjdump and nvdisasm (`pip install 'fastcl[test]'`). For each kernel it lists registers, the blocks of
128 threads that fit a multiprocessor with these, stack and local memory.

For each walk it also finds the loop with the most matrix instructions. In this loop it takes the path that has every
copy, matrix and exponential instruction and the fewest others, since equal ids and incomplete last tiles are rare. The
instructions on the path are summed to cycles of each unit of one multiprocessor of an H100, per 64 x 64 logits. The
largest sum is a lower bound for the time of the loop. Rates per multiprocessor and cycle: 4 warp instructions, 16
exponentials, 64 integer and comparison lanes, 128 multiply-add lanes, 128 bytes of shared memory, 4096 tensor FLOP in
16 bits and 2048 in TF32; mma.sync is reported to reach 0.62 of the last two.
"""

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, markdown, write_json

ROOT = Path(__file__).resolve().parents[1]
ARCHS = ("80", "90", "100")
WARPS = 4  # in a block
MMA_SYNC = 0.62
ALU = frozenset(["FMNMX", "FMNMX3", "FSEL", "FSETP", "ISETP", "LOP3", "IADD3", "SEL", "PLOP3", "PRMT", "SHF", "LEA",
                 "VIADD", "IABS", "IMNMX", "VIMNMX", "F2FP", "MOV"])  # fmt: skip
FMA = frozenset(["FFMA", "FMUL", "FADD", "IMAD", "HFMA2", "HADD2", "HMUL2"])
WANTED = ("HMMA", "MUFU", "LDGSTS", "BAR")
WALKS = {
    ("LogSumExp", "false"): "lse",
    ("LogSumExp", "true"): "forward",
    ("KnownSum", "false"): "backward",
    ("SoftplusSum", ""): "softplus",
    ("KnownSum", "true"): "sigmoid",
}

Code = list[tuple[int, str]]  # address and instruction


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    usual = Path(home) / "bin" / "nvcc"
    return str(usual) if usual.exists() else shutil.which("nvcc")


def find_tool(name: str) -> str | None:
    """The path of cuobjdump or nvdisasm, from its PyPI package or from PATH; None if there is neither."""
    try:
        files = importlib.metadata.files(f"nvidia-cuda-{name}") or []
    except importlib.metadata.PackageNotFoundError:
        return shutil.which(name)
    return next((str(file.locate()) for file in files if file.name == name), None)


def missing() -> str | None:
    """A sentence that names the missing tools, or None."""
    if find_nvcc() is None:
        return "nvcc was not found; install the CUDA toolkit or set CUDA_HOME"
    absent = [name for name in ("cuobjdump", "nvdisasm") if find_tool(name) is None]
    return f"{' and '.join(absent)} not found; pip install 'fastcl[test]'" if absent else None


def compiled(source: Path, arch: str, folder: Path) -> Path:
    """Compiles the kernels of one file for one compute capability; returns the cubin file."""
    nvcc = find_nvcc()
    assert nvcc is not None
    cubin = folder / f"{source.stem}.sm_{arch}.cubin"
    command = [nvcc, "-O3", "-std=c++17", "--expt-relaxed-constexpr", f"-I{ROOT / 'csrc'}", f"-arch=sm_{arch}"]
    subprocess.run([*command, "-cubin", str(source), "-o", str(cubin)], check=True, cwd=ROOT)
    return cubin


def dump(cubin: Path, option: str) -> str:
    tool, disassembler = find_tool("cuobjdump"), find_tool("nvdisasm")
    assert tool is not None
    assert disassembler is not None
    path = os.pathsep.join([str(Path(disassembler).parent), os.environ.get("PATH", os.defpath)])
    command = [tool, option, str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PATH": path}).stdout
    return subprocess.run(["c++filt"], input=text, capture_output=True, text=True, check=True).stdout


def short(name: str) -> str:
    """`walk<BFloat16, 64, KnownSum<BFloat16, false>, true>(WalkArgs)` as "walk bfloat16 64 backward"."""
    name = name.strip().replace("fastcl::cuda::", "").removeprefix("void ")
    walk = re.match(r"walk<(\w+), (\d+), (\w+)<\w+(?:, (\w+))?>, \w+>\(", name)
    return f"walk {walk[1].lower()} {walk[2]} {WALKS[walk[3], walk[4] or '']}" if walk else name.split("(")[0]


def blocks_by_registers(registers: int) -> int:
    """Blocks that fit the 65,536 registers of a multiprocessor; a warp gets registers in units of 256."""
    return 65536 // (-(-registers * 32 // 256) * 256 * WARPS)


def usage(cubin: Path) -> dict[str, dict[str, Any]]:
    """Registers, blocks, and bytes of stack and local memory of each kernel."""
    pattern = r"Function (.*):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)"
    return {
        short(name): {
            "registers": int(registers),
            "blocks": blocks_by_registers(int(registers)),
            "local bytes": int(stack) + int(local),
        }
        for name, registers, stack, local in re.findall(pattern, dump(cubin, "-res-usage"))
    }


def codes(cubin: Path) -> dict[str, Code]:
    """The instructions of each kernel."""
    found = {}
    for part in re.split(r"\n\s*Function : ", dump(cubin, "-sass"))[1:]:
        name, body = part.split("\n", 1)
        lines = re.finditer(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", body)
        found[short(name)] = [(int(line[1], 16), line[2].strip()) for line in lines]
    return found


def opcode(instruction: str) -> str:
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0]


def target(instruction: str) -> int | None:
    found = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", instruction)
    return int(found[1], 16) if found else None


def local_accesses(code: Code) -> int:
    return sum(opcode(instruction).startswith(("LDL", "STL")) for _, instruction in code)


def main_loop(code: Code) -> Code:
    """The loop with the most matrix instructions; of several the shortest."""
    loops = []
    for address, instruction in code:
        begin = target(instruction)
        if begin is not None and begin < address:
            loops.append([(a, i) for a, i in code if begin <= a <= address])
    return max(loops, key=lambda loop: (sum("HMMA" in i for _, i in loop), -len(loop)), default=[])


def hot_path(loop: Code) -> list[str]:
    """The opcodes of the shortest path through the loop that has all WANTED instructions."""
    step = loop[1][0] - loop[0][0]
    heads = {loop[0][0]} | {target(i) for _, i in loop} | {a + step for a, i in loop if target(i) is not None}
    blocks: dict[int, list[str]] = {}
    for address, instruction in loop:
        if address in heads:
            blocks[address] = []
        blocks[max(blocks)].append(instruction)
    order = list(blocks)
    gain: dict[int, int] = {}
    choice: dict[int, int | None] = {}
    for n in reversed(range(len(order))):
        own = blocks[order[n]]
        jump = target(own[-1])
        ways = [jump] if jump is not None else []
        if (jump is None or own[-1].startswith("@")) and n + 1 < len(order):
            ways.append(order[n + 1])
        ahead = [way for way in ways if way in gain and way > order[n]]
        best = max(ahead, key=gain.__getitem__, default=None)
        worth = sum(10_000 if opcode(i).startswith(WANTED) else -1 for i in own)
        choice[order[n]], gain[order[n]] = best, worth + (0 if best is None else gain[best])
    path: list[str] = []
    at: int | None = order[0]
    while at is not None:
        path += [opcode(i) for i in blocks[at]]
        at = choice[at]
    return path


def width(op: str) -> int:
    """Bytes of shared memory that a load or store moves for a warp."""
    if op.startswith("LDSM"):
        return 128 * int(op[-1])
    return 32 * (16 if ".128" in op or op.startswith("LDGSTS") else 8 if ".64" in op else 4)


def cycles(name: str, path: list[str]) -> dict[str, int]:
    """Cycles of each unit for 64 x 64 logits."""
    base = Counter(op.split(".")[0] for op in path)
    _, element, dim, which = name.split()
    short_type = element in ("bfloat16", "float16")
    products = (1 if which == "lse" else 2) * (3 if element == "float32" else 1)
    logits = base["HMMA"] * 16 * 8 * (16 if short_type else 8) * WARPS / (int(dim) * products)
    share = WARPS / 4  # warps on each of the four schedulers
    tensor = sum(4 if ".16816." in op or "TF32" in op else 2 for op in path if op.startswith("HMMA")) * share
    shared = sum(width(op) for op in path if op.startswith(("LDS", "STS", "LDGSTS"))) * WARPS / 128
    units = {
        "tensor": tensor / MMA_SYNC,
        "exponential": base["MUFU"] * 8 * share,
        "shared": shared,
        "integer": sum(base[op] for op in ALU) * 2 * share,
        "multiply-add": sum(base[op] for op in FMA) * share,
        "issue": len(path) * share,
    }
    return {unit: round(value * 4096 / logits) for unit, value in units.items()}


def report(arch: str, folder: Path, files: str = "*.cu") -> list[dict[str, Any]]:
    """A row for each kernel of the files of csrc/cuda that match, compiled for one compute capability."""
    sources = sorted((ROOT / "csrc" / "cuda").glob(files))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        cubins = list(pool.map(lambda source: compiled(source, arch, folder), sources))
    rows = []
    for cubin in cubins:
        code = codes(cubin)
        for name, facts in usage(cubin).items():
            row = {"kernel": name, "arch": arch, **facts, "local accesses": local_accesses(code[name])}
            if name.startswith("walk "):
                path = hot_path(main_loop(code[name]))
                spent = cycles(name, path)
                mix = Counter(op.split(".")[0] for op in path).most_common(12)
                row |= {"loop": len(path), "cycles": spent}
                row |= {"bound": max(spent, key=spent.__getitem__), "mix": dict(mix)}
            rows.append(row)
    return rows


def shown(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if k not in ("cycles", "mix")} | row["cycles"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", default=",".join(ARCHS), help="compute capabilities, separated by commas")
    parser.add_argument("--output", type=Path, default=RESULTS / "sass.json")
    args = parser.parse_args()
    reason = missing()
    if reason is not None:
        parser.error(reason)
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for arch in args.archs.split(",") for row in report(arch, Path(folder))]
    print(markdown([shown(row) for row in rows if "cycles" in row]))
    write_json(args.output, rows)


if __name__ == "__main__":
    main()
