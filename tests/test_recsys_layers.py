"""The network parts that the models share: what their own tests do not see from outside."""

import os
import subprocess
import sys

import torch
import torch.nn.functional as F

from fastcl.recsys.layers import GELU

TRACED = """
import torch
from fastcl.recsys.layers import GELU
gelu = {gelu}
for n in (3, 5):
    x = torch.randn(n, 256, requires_grad=True)
    gelu(x).sum().backward()
"""


def onednn_kernels(gelu: str) -> int:
    """How often oneDNN was called; a traced process, because nothing inside one tells."""
    command = [sys.executable, "-c", TRACED.format(gelu=gelu)]
    done = subprocess.run(
        command, env={**os.environ, "ONEDNN_VERBOSE": "1"}, capture_output=True, text=True, check=True
    )
    return done.stdout.count("eltwise_gelu")


def test_gelu_is_exact_in_both_directions() -> None:
    x = torch.linspace(-6.0, 6.0, 35, dtype=torch.float64).reshape(7, 5).requires_grad_()
    normal = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), 1.0)
    torch.testing.assert_close(GELU()(x), x * normal.cdf(x), rtol=1e-12, atol=1e-12)
    torch.autograd.gradcheck(GELU(), x)


def test_gelu_compiles_no_kernel_for_each_length() -> None:
    assert onednn_kernels("GELU()") == 0
    # Where torch itself calls oneDNN the trace must show it, or the line above proves nothing.
    x = torch.randn(3, 256)
    if torch.backends.mkldnn.is_available():
        assert onednn_kernels("torch.nn.GELU()") > 0
    torch.testing.assert_close(GELU()(x), F.gelu(x))
    assert GELU()(x).is_contiguous()
