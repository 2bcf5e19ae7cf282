"""The network parts that the models share: what their own tests do not see from outside."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from fastcl.recsys.models.layers import GELU, Dropout, attention, shortened

TRACED = """
import torch
from fastcl.recsys.models.layers import GELU
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


@pytest.mark.parametrize("shape", [(300, 37), (7,), (3, 5, 11)])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_share_and_the_mean(shape: tuple[int, ...], rate: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, requires_grad=True)
    seen, counted = torch.zeros(shape), 200 if len(shape) == 2 else 2_000
    for _ in range(counted):
        y = Dropout(rate)(x)
        (slope,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(y, x * slope)
        scale = slope.max()
        assert torch.equal(slope, torch.where(slope == 0, 0.0, scale))
        seen += slope != 0
    share = round((1 - rate) * 2**16) / 2**16
    torch.testing.assert_close(scale, torch.tensor(1 / share))
    error = (share * (1 - share) / counted) ** 0.5
    assert abs(seen / counted - share).max() < 6 * error  # each element, of up to 11,100
    assert abs(float(seen.mean() / counted) - share) < 6 * error / x.numel() ** 0.5
    neighbours = (seen[..., 1:] - counted * share) * (seen[..., :-1] - counted * share)  # counts, nearly normal
    assert abs(float(neighbours.mean())) < 6 * counted * share * (1 - share) / neighbours.numel() ** 0.5


def test_dropout_repeats_by_seed_and_does_nothing_else() -> None:
    x, layer = torch.randn(9, 10), Dropout(0.3)
    torch.manual_seed(1)
    first, later = layer(x), layer(x)
    torch.manual_seed(1)
    assert torch.equal(first, layer(x))
    assert not torch.equal(first, later)
    assert torch.equal(layer.eval()(x), x)
    assert torch.equal(Dropout(0.0)(x), x)
    assert not Dropout(1.0)(x).any()
    assert layer.train()(x.bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("kind", ["causal", "added", "boolean"])
def test_attention_drops_weights_and_nothing_else(kind: str) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 3, 9, 8, dtype=torch.float64)  # [B, heads, L, d] each
    seen = torch.rand(4, 1, 1, 9) < 0.7
    mask = {"causal": None, "added": torch.where(seen, torch.randn(4, 1, 1, 9), -1e4).double(), "boolean": seen}[kind]
    value = torch.eye(9, dtype=torch.float64).expand(4, 3, 9, 9)  # what comes out are the weights
    weights = attention(query, key, value, mask, Dropout(0.3).eval())
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1) if kind == "causal" else ~seen.expand(4, 3, 9, 9)
    assert not weights[hidden.expand_as(weights)].any()
    kept = round(0.7 * 2**16) / 2**16
    dropped, counted = Dropout(0.3), torch.zeros_like(weights)
    for _ in range(50):
        found = attention(query, key, value, mask, dropped)
        torch.testing.assert_close(found, torch.where(found == 0, 0.0, weights / kept), rtol=1e-12, atol=1e-300)
        counted += found != 0
    assert abs(float(counted[weights > 0].mean()) / 50 - kept) < 0.02
    torch.testing.assert_close(attention(query, key, value, mask, Dropout(0.0)), weights)


def test_attention_is_torchs_own_where_that_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, mask, rate, is_causal: rates.append(rate))
    for device, dropout in (("meta", Dropout(0.3)), ("cpu", Dropout(0.3)), ("cpu", Dropout(0.3).eval())):
        x = torch.zeros(1, 1, 2, 4, device=device)
        attention(x, x, x, None, dropout)
    assert rates == [0.3, 0.0]  # not on a CPU in training


@pytest.mark.parametrize("power", [0.0, 0.3, 1.0])
def test_rows_are_divided_by_a_power_of_their_length(power: float) -> None:
    rows = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.3, -0.4]], dtype=torch.float64)
    expected = torch.stack([rows[0], rows[1] / 5.0**power, rows[2] / 0.5**power])
    torch.testing.assert_close(shortened(rows, power), expected, rtol=1e-14, atol=0.0)
