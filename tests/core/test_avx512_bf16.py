"""bfloat16 by AVX512_BF16: which processors take it unasked, what goes to AVX-512, and which weights keep more bits."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest
import torch
from compiler import compiler_or_skip
from problems import BF16

import fastcl

ROOT = Path(__file__).resolve().parents[2]
HERE = pytest.mark.skipif("avx512_bf16" not in fastcl.config()["isas"], reason="no AVX512_BF16 here")

_CHOICE = """
#include <cstdio>
#include "cpu/features_x86.h"
using namespace fastcl;
int main() {
  const struct { const char* vendor; unsigned family; } known[] = {
      {"AuthenticAMD", 23}, {"AuthenticAMD", 25}, {"AuthenticAMD", 26},
      {"GenuineIntel", 6},  {"HygonGenuine", 25}, {"", 25}};
  for (const auto& k : known) std::printf("%d", pairs_pay(k.vendor, k.family));
  std::printf(" %s %u\\n", x86().vendor, x86().family);
}
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="asks an x86-64 processor")
def test_amd_from_zen_4_on_takes_it_unasked(tmp_path: Path) -> None:
    source, program = tmp_path / "choice.cpp", tmp_path / "choice"
    source.write_text(_CHOICE)
    subprocess.run(
        [compiler_or_skip(), "-std=c++17", f"-I{ROOT / 'csrc'}", str(source), "-o", str(program)], check=True
    )
    chosen, *processor = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.split()
    assert chosen == "011000"
    facts = Path("/proc/cpuinfo")
    if facts.exists():
        lines = [line.split(":") for line in facts.read_text().splitlines() if ":" in line]
        known = {name.strip(): value.strip() for name, value in lines}
        assert processor == [known["vendor_id"], known["cpu family"]]


@HERE
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e25, None], ids=["infinite", "nan", "huge", "tiny"])
def test_what_it_cannot_hold_goes_to_avx512(value: float | None, side: int) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(40, 24), torch.randn(300, 24)]
    if value is None:
        tensors[side] *= 1e-25
    else:
        tensors[side][7, 3] = value
    found = []
    for isa in ("avx512", "avx512_bf16"):
        before = fastcl.set_isa(isa)
        query, key = (t.to(BF16).requires_grad_() for t in tensors)
        loss = fastcl.dcl(query, torch.ones(40, 24, dtype=BF16), key, normalize=False, temperature=1.0)
        found.append([loss, *torch.autograd.grad(loss, (query, key))])
        fastcl.set_isa(before)
    for a, b in zip(*found, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


@HERE
@pytest.mark.parametrize(("columns", "scale"), [(40, 7.0), (41, 8.0)])
def test_what_a_large_weight_and_the_positive_leave_is_not_drowned(columns: int, scale: float) -> None:
    # Rows that are nearly right: what their weight of about 0.95 on the positive leaves is the gradient. With the 8
    # bits of one bfloat16 for this weight, up to a tenth of the gradient would be wrong.
    torch.manual_seed(0)
    key = torch.nn.functional.normalize(torch.randn(columns, 64), dim=1).to(BF16)
    target = torch.randint(columns, (30,))
    query = (key[target] + 0.02 * torch.randn(30, 64)).to(BF16)
    weights = torch.softmax(scale * query.double() @ key.double().T, 1)
    assert 0.9 < weights.gather(1, target[:, None]).median() < 0.9999
    truth = scale * (weights @ key.double() - key[target].double())
    before = fastcl.set_isa("avx512_bf16")
    leaf = query.clone().requires_grad_()
    pos, lse = fastcl.contrast(leaf, key, key[target], scale=scale)
    (lse - pos).sum().backward()
    fastcl.set_isa(before)
    error = (leaf.grad.double() - truth).norm(dim=1) / truth.norm(dim=1)
    assert error.max() <= 2.0**-8, error.max()
