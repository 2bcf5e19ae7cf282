"""`fastcl.cached`: value and gradients are those of the plain step, in the memory of one chunk."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastcl

pytestmark = pytest.mark.usefixtures("one_thread")
N, L, D = 13, 6, 8


class Encoder(nn.Module):
    """Tokens [n, L] and a mask -> [n, D]: a small Transformer, whose rows see themselves alone."""

    def __init__(self, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.token = nn.Embedding(20, D, dtype=dtype)
        self.layer = nn.TransformerEncoderLayer(D, 2, 16, dropout, batch_first=True, dtype=dtype)
        self.rows_at_once: list[tuple[int, int]] = []

    def forward(self, token: Tensor, attention_mask: Tensor) -> Tensor:
        self.rows_at_once.append((token.shape[0], token.shape[1]))
        x = self.layer(self.token(token), src_key_padding_mask=attention_mask == 0)
        here = attention_mask[:, :, None].to(x.dtype)
        return (x * here).sum(1) / here.sum(1)


def _batch(seed: int, n: int = N) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    length = torch.randint(1, L, (n,), generator=g)
    mask = (torch.arange(L) < length[:, None]).long()
    return {"token": torch.randint(20, (n, L), generator=g) * mask, "attention_mask": mask}


def _grads(loss: Tensor, *modules: nn.Module) -> list[Tensor]:
    parameters = [p for module in modules for p in module.parameters()]
    found = torch.autograd.grad(loss, parameters)
    assert any(grad.abs().max() > 1e-3 for grad in found)
    return list(found)


def _same(ours: list[Tensor], plain: list[Tensor], within: float) -> None:
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=within * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize("chunk", [1, 4, N, 100, fastcl.token_chunks(9)])
def test_gradients_are_those_of_the_plain_step(chunk: Any) -> None:
    torch.manual_seed(0)
    encoder = Encoder()
    loss = fastcl.nn.InfoNCE(temperature=nn.Parameter(torch.tensor(0.3, dtype=torch.float64)))
    step = fastcl.cached(encoder, loss, chunk)
    query, key = _batch(1), _batch(2)
    ours, plain = step(query, key), loss(encoder(**query), encoder(**key))
    torch.testing.assert_close(ours, plain, rtol=1e-13, atol=0)
    _same(_grads(ours, encoder, loss), _grads(plain, encoder, loss), 1e-12)
    assert {id(p) for p in step.parameters()} == {id(p) for m in (encoder, loss) for p in m.parameters()}


def test_gradients_in_float32() -> None:
    torch.manual_seed(0)
    encoder = Encoder(dtype=torch.float32)
    step = fastcl.cached(encoder, fastcl.infonce, 4)
    query, key = _batch(1), _batch(2)
    _same(_grads(step(query, key), encoder), _grads(fastcl.infonce(encoder(**query), encoder(**key)), encoder), 1e-6)


def test_several_encoders_batches_of_their_own_and_options_of_the_loss() -> None:
    torch.manual_seed(0)
    one, other = Encoder(), nn.Linear(3, D, dtype=torch.float64)
    image = torch.randn(N, 3, dtype=torch.float64, requires_grad=True)
    hard = torch.randn(5, 3, dtype=torch.float64)
    step = fastcl.cached((one, other, lambda x: other(x).tanh()), fastcl.infonce, 4)
    query, ids = _batch(1), torch.arange(N) % 4
    options: dict[str, Any] = {"ids": ids, "negative_ids": torch.arange(5) % 4, "in_batch": True, "temperature": 0.5}
    ours = step(query, [image], hard, **options)
    plain = fastcl.infonce(one(**query), other(image), other(hard).tanh(), **options)
    found, wanted = (torch.autograd.grad(loss, image, retain_graph=True)[0] for loss in (ours, plain))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)
    _same(_grads(ours, one, other), _grads(plain, one, other), 1e-12)


def test_dropout_is_the_same_in_both_passes() -> None:
    """The second pass draws what the first drew, or the gradient would not be that of the value."""
    torch.manual_seed(0)
    encoder = Encoder(dropout=0.4)
    query, key = _batch(1), _batch(2)
    step = fastcl.cached(encoder, fastcl.infonce, 4)
    torch.manual_seed(3)
    ours = _grads(step(query, key), encoder)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    parts = [
        torch.cat([encoder(**{k: x[a : a + 4] for k, x in batch.items()}) for a in range(0, N, 4)])
        for batch in (query, key)
    ]
    plain = _grads(fastcl.infonce(*parts), encoder)
    assert torch.equal(after, torch.get_rng_state())
    _same(ours, plain, 1e-12)


def test_autocast_holds_in_the_second_pass() -> None:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, D))
    x, y = torch.randn(N, 3), torch.randn(N, 3)
    seen: list[torch.dtype] = []
    encoder[1].register_forward_hook(lambda module, given, out: seen.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        ours = fastcl.cached(encoder, fastcl.infonce, 4)(x, y)
        plain = fastcl.infonce(encoder(x), encoder(y))
    ours_grads = _grads(ours, encoder)  # outside of autocast, as backward passes are
    assert set(seen) == {torch.bfloat16}
    assert len(seen) == 2 * 2 * 4 + 2
    for a, b in zip(ours_grads, _grads(plain, encoder), strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * b.abs().max().item())  # sums of bfloat16 per chunk


def _peak(step: Callable[[], Tensor]) -> int:
    """The most bytes that forward and backward hold at once, from the allocator's own events."""
    step().backward()  # gradients and workspaces are there from now on
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step().backward()
    assert profile.profiler is not None
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def test_memory_is_that_of_one_chunk() -> None:
    width, n = 64, 1024
    encoder = nn.Sequential(nn.Linear(3, width), *(m for _ in range(4) for m in (nn.Tanh(), nn.Linear(width, width))))
    end = nn.Linear(width, D)
    encoder.append(end)
    x, y = torch.randn(n, 3), torch.randn(n, 3)
    whole = _peak(lambda: fastcl.infonce(encoder(x), encoder(y)))
    parts = _peak(lambda: fastcl.cached(encoder, fastcl.infonce, n // 16)(x, y))
    assert whole > 2 * 4 * n * width * 4  # two batches, four layers' activations
    assert parts < whole / 4


def test_rows_that_tokens_are_cut_into() -> None:
    torch.manual_seed(0)
    encoder = Encoder()
    batch = _batch(1)
    fastcl.cached(encoder, lambda x: x.sum(), fastcl.token_chunks(7))(batch)
    shapes = encoder.rows_at_once
    assert sum(n for n, _ in shapes) == N
    assert all(n * width <= 7 for n, width in shapes)
    assert len({width for _, width in shapes}) > 2
    long = torch.ones(2, 9, dtype=torch.long)
    assert [row.tolist() for row, _ in fastcl.token_chunks(7, mask=1)([long, long])] == [[0], [1]]


def test_without_gradients_and_without_rows() -> None:
    encoder = nn.Linear(3, D)
    step = fastcl.cached(encoder, fastcl.infonce, 4)
    x = torch.randn(N, 3)
    with torch.no_grad():
        assert not step(x, x).requires_grad
    assert step(x[:0], x[:0]).item() == 0
    table, none = nn.EmbeddingBag(20, D), [torch.ones(0, L, dtype=torch.long)]
    loss = fastcl.cached(table, fastcl.infonce, fastcl.token_chunks(9, mask=0))(none, none)
    loss.backward()
    assert loss.item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64], ids=str)
def test_masks_of_any_dtype_without_columns(dtype: torch.dtype) -> None:
    empty = torch.ones(3, 0, dtype=dtype)
    assert [row.tolist() for row, _ in fastcl.token_chunks(2, mask=0)([empty])] == [[0, 1], [2]]


@pytest.mark.parametrize("chunk", [4, fastcl.token_chunks(9)])
def test_a_step_is_pickled_and_copied(chunk: Any) -> None:
    step = fastcl.cached((Encoder(), _tanh), fastcl.nn.InfoNCE(0.3), chunk)
    other = pickle.loads(pickle.dumps(step))
    query, key = _batch(1), {"x": torch.randn(N, D, dtype=torch.float64), "attention_mask": _batch(2)["attention_mask"]}
    torch.testing.assert_close(other(query, key), step(query, key))


def _tanh(x: Tensor, attention_mask: Tensor) -> Tensor:
    return x.tanh()


def test_modules_that_take_the_place_of_an_encoder_are_called() -> None:
    """As tools do that quantise or convert a model."""
    x, new = torch.randn(N, 3), nn.Linear(3, D)
    for encoder in (nn.Linear(3, D), nn.ModuleList([nn.Linear(3, D), nn.Linear(3, D)])):
        step = fastcl.cached(encoder, fastcl.infonce, 4)
        step.encoder = nn.ModuleList([new for _ in step.encoder])
        torch.testing.assert_close(step(x, x), fastcl.infonce(new(x), new(x)))


def test_a_module_list_is_one_encoder_for_each_batch() -> None:
    x, encoders = torch.randn(N, 3), nn.ModuleList([nn.Linear(3, D), nn.Linear(3, D)])
    step = fastcl.cached(encoders, fastcl.infonce, 4)
    torch.testing.assert_close(step(x, x), fastcl.infonce(encoders[0](x), encoders[1](x)))


@pytest.mark.parametrize(
    ("make", "error", "named"),
    [
        (lambda x: fastcl.cached(3, fastcl.infonce), TypeError, "encoder"),
        (lambda x: fastcl.cached(nn.Identity(), 3), TypeError, "loss"),
        (lambda x: fastcl.cached(nn.Identity(), fastcl.infonce, 0), ValueError, "chunk: expected at least 1, got 0"),
        (lambda x: fastcl.cached(nn.Identity(), fastcl.infonce, 2.0), TypeError, "chunk"),
        (lambda x: fastcl.cached(nn.Identity(), fastcl.infonce, True), TypeError, "chunk"),
        (lambda x: fastcl.token_chunks(0), ValueError, "most"),
        (lambda x: fastcl.cached(nn.Identity(), fastcl.infonce, fastcl.token_chunks(5))(x, x), ValueError, "mask"),
        (lambda x: fastcl.cached([nn.Identity()], fastcl.infonce)(x, x), ValueError, "encoder: expected one for each"),
        (lambda x: fastcl.cached(nn.Identity(), fastcl.infonce)(x, 3), TypeError, "batch"),
        (lambda x: fastcl.cached(nn.Identity(), fastcl.infonce)(x, []), TypeError, "batch"),
        (lambda x: fastcl.cached(nn.Identity(), fastcl.infonce)([x, x[:2]]), ValueError, "batch: .* rows"),
        (lambda x: fastcl.cached(lambda t: (t,), fastcl.infonce)(x, x), TypeError, "encoder: expected a tensor"),
        (lambda x: fastcl.cached(lambda t: t.mean(0), fastcl.infonce)(x, x), ValueError, "encoder: expected a row"),
        (lambda x: fastcl.cached(nn.BatchNorm1d(3), fastcl.infonce)(x, x), ValueError, "BatchNorm1d in training"),
        (
            lambda x: fastcl.cached(nn.BatchNorm1d(3, track_running_stats=False).eval(), fastcl.infonce)(x, x),
            ValueError,
            "encoder: .* got BatchNorm1d without running statistics",
        ),
    ],
)
def test_refused(make: Callable[[Tensor], Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        make(torch.randn(5, 3))


def test_batch_normalisation_is_taken_where_it_is_fixed() -> None:
    norm = nn.BatchNorm1d(3).eval()
    x = torch.randn(5, 3)
    torch.testing.assert_close(fastcl.cached(norm, fastcl.infonce, 2)(x, x), fastcl.infonce(norm(x), norm(x)))
