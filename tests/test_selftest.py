"""The self-test of an installation: it passes here, and a wrong result or NaN in any operator fails it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

import fastcl
from fastcl import selftest

pytestmark = pytest.mark.usefixtures("one_thread")


def test_it_passes_and_prints_what_a_report_needs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fastcl.selftest"],
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    dtypes = [f"{isa} float16 " for isa in fastcl.config()["isas"]]
    for start in ("version ", "torch ", "python ", "system ", "cpu ", *dtypes):
        assert [line for line in lines if line.startswith(start)], start
    assert re.match(r"all good after \d+\.\d s", lines[-1])


@pytest.mark.parametrize("change", [1 + 1e-3, float("nan")])
@pytest.mark.parametrize("name", list(selftest.OPERATORS))
def test_a_wrong_gradient_fails_it(
    name: str, change: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, textbook = selftest.OPERATORS[name]

    def wrong(query: torch.Tensor, key: torch.Tensor, **options: object) -> torch.Tensor:
        if key.requires_grad:
            key.register_hook(lambda gradient: gradient * change)
        return ours(query, key, **options)

    monkeypatch.setitem(selftest.OPERATORS, name, (wrong, textbook))
    monkeypatch.setattr(selftest, "SHAPES", selftest.SHAPES[:2])
    before = fastcl.set_isa("baseline")
    assert selftest.main() == 1
    assert fastcl.set_isa(before) == "baseline"
    printed = capsys.readouterr().out
    assert re.search(rf"baseline float32 +WRONG  .*{name} (nan|1\.0e-03|9\.\de-04)", printed)
    assert re.search(r"^\d+ wrong after", printed, re.M)
