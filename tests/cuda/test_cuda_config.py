"""What fastcl says about its CUDA part, and how it reads torch's settings; no GPU and no compiler needed."""

import importlib.util
import subprocess
import sys

import pytest
import torch

import fastcl
from fastcl import _cuda, fallback


def loaded(monkeypatch: pytest.MonkeyPatch, *, built: bool, cuda: str | None, forced: bool = False) -> str:
    """What `load` answers in another world than this one."""
    monkeypatch.setattr(fallback, "WANTED", forced)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if built else None)
    return _cuda.load.__wrapped__()


def test_why_the_kernels_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded(monkeypatch, built=True, cuda="13.0", forced=True).endswith("because of FASTCL_FALLBACK=1")
    assert loaded(monkeypatch, built=False, cuda=None).endswith("not a CUDA build; our kernels are not built")
    assert loaded(monkeypatch, built=True, cuda=None).endswith("not a CUDA build; our kernels are built")
    assert "our kernels are not built; install with nvcc" in loaded(monkeypatch, built=False, cuda="13.0")


def test_an_extension_that_cannot_be_loaded_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastcl._C_cuda", None)  # an import of it fails
    assert "cannot be loaded: import of fastcl._C_cuda halted" in loaded(monkeypatch, built=True, cuda="13.0")


def test_show_config_tells_it(capsys: pytest.CaptureFixture[str]) -> None:
    fastcl.show_config()
    assert f"cuda           {_cuda.load()}" in capsys.readouterr().out.splitlines()


SETTINGS = {
    "pass": False,
    "torch.set_float32_matmul_precision('high')": True,
    "torch.set_float32_matmul_precision('high'); torch.set_float32_matmul_precision('highest')": False,
    "torch.backends.cuda.matmul.allow_tf32 = True": True,
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": True,
    "torch.backends.fp32_precision = 'tf32'": True,
    "torch.backends.fp32_precision = 'tf32'; torch.backends.cuda.matmul.fp32_precision = 'ieee'": False,
}
# The settings are the process's: each is tried in a fork of its own.
_EACH = """
import os, sys, torch
from fastcl import _cuda
for setting in sys.argv[1:]:
    if os.fork() == 0:
        exec(setting)
        print(_cuda.tf32_allowed(), flush=True)
        os._exit(0)
    os.wait()
"""


def test_tf32_is_read_from_either_of_torchs_settings() -> None:
    command = [sys.executable, "-c", _EACH, *SETTINGS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert dict(zip(SETTINGS, done.stdout.split(), strict=True)) == {k: str(v) for k, v in SETTINGS.items()}
