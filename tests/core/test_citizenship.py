"""The losses, their modules and the queue as citizens of torch: compile, export, torch.func, autocast, checkpoint,
hooks, GradCache, copies. The op under them is tested in test_contrast_torch.py, double backward in its own file.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fastcl
import fastcl.nn

pytestmark = pytest.mark.usefixtures("one_thread")

Pair = Callable[[Tensor, Tensor], Tensor]
# Every loss as a function of two views [N, D]; those that take constants are called with and without.
LOSSES: dict[str, Pair] = {
    "infonce": lambda a, b: fastcl.infonce(a, b),
    "infonce, symmetric": lambda a, b: fastcl.infonce(a, b, temperature=0.3, symmetric=True),
    "infonce, private negatives": lambda a, b: fastcl.infonce(a, b, torch.stack([a, b.flip(0)], 1)),
    "infonce, ids, log q": lambda a, b: fastcl.infonce(
        a, b, ids=torch.arange(a.shape[0]) // 2, log_q=-torch.arange(a.shape[0]).to(a), reduction="sum"
    ),
    "dcl": lambda a, b: fastcl.dcl(a, b),
    # The default weights are constants of a step, which no finite difference takes them for.
    "dclw": lambda a, b: fastcl.dclw(a, b, weight_fn=lambda q, p: 2.0 - (q * p).sum(1).sigmoid()),
    "debiased_infonce": lambda a, b: fastcl.debiased_infonce(a, b),
    "infonce_plus": lambda a, b: fastcl.infonce_plus(a, b),
    "mine": lambda a, b: fastcl.mine(a, b),
    "mine_plus": lambda a, b: fastcl.mine_plus(a, b),
    "nt_xent": lambda a, b: fastcl.nt_xent(a, b),
    "supcon": lambda a, b: fastcl.supcon(torch.cat([a, b]), torch.arange(a.shape[0]).repeat(2)),
    "sampled_softmax": lambda a, b: fastcl.sampled_softmax(a, b),
    "linear_cross_entropy": lambda a, b: fastcl.linear_cross_entropy(a, b, torch.arange(a.shape[0])),
    "alignment": lambda a, b: fastcl.alignment(a, b),
    "uniformity": lambda a, b: fastcl.uniformity(a + b),
    "triplet": lambda a, b: fastcl.triplet(a, b, b.flip(0)),
    "bpr": lambda a, b: fastcl.bpr(a, b, b.flip(0)),
    "negative_sampling": lambda a, b: fastcl.negative_sampling(a, b, b.flip(0)),
    "siglip": lambda a, b: fastcl.siglip(a, b, a.new_tensor(5.0), a.new_tensor(-2.0)),
    "jensen_shannon": lambda a, b: fastcl.jensen_shannon(a, b, b.flip(0)),
}
every_loss = pytest.mark.parametrize("loss", list(LOSSES.values()), ids=list(LOSSES))
# Each way to the op once: torch takes seconds to compile one, and the others are formulas above the same op.
COMPILED = ("infonce, symmetric", "infonce, private negatives", "infonce, ids, log q", "mine_plus", "supcon", "siglip")


def _views(n: int, d: int = 4, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(n, d, generator=g, dtype=torch.float64)
    return a.to(dtype), (a + 0.6 * torch.randn(n, d, generator=g, dtype=torch.float64)).to(dtype)


def _with_gradients(loss: Pair, a: Tensor, b: Tensor) -> list[Tensor]:
    a, b = a.detach().clone().requires_grad_(), b.detach().clone().requires_grad_()
    value = loss(a, b)
    return [value.detach(), *torch.autograd.grad(value, (a, b))]


def _assert_same(ours: list[Tensor], truth: list[Tensor]) -> None:
    for x, y in zip(ours, truth, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    "loss",
    [pytest.param(loss, id=name, marks=() if name in COMPILED else pytest.mark.slow) for name, loss in LOSSES.items()],
)
def test_compile_fullgraph_with_dynamic_shapes(loss: Pair) -> None:
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, backend=graphs)

    def dynamic(a: Tensor, b: Tensor) -> Tensor:
        for x in (a, b):
            torch._dynamo.mark_dynamic(x, 0)
        return compiled(a, b)

    for n in (5, 8):
        _assert_same(_with_gradients(dynamic, *_views(n)), _with_gradients(loss, *_views(n)))
    assert graphs.frame_count == 1


def test_compile_with_dynamic_numbers() -> None:
    torch._dynamo.reset()
    loss = torch.compile(fastcl.mine_plus, fullgraph=True, dynamic=True, backend="aot_eager")
    for n, temperature, lam in ((5, 0.2, 1.1), (8, 0.3, 1.2)):
        a, b = _views(n)
        expected = fastcl.mine_plus(a, b, temperature=temperature, lam=lam)
        torch.testing.assert_close(loss(a, b, temperature=temperature, lam=lam), expected)


def test_compile_with_inductor_a_learning_temperature_and_a_queue() -> None:
    torch._dynamo.reset()
    module = fastcl.nn.InfoNCE(temperature=torch.nn.Parameter(torch.tensor(0.2)))
    queue = fastcl.NegativeQueue(16, 4)
    compiled = torch.compile(module, fullgraph=True)
    for n in (5, 8, 6):
        queue.push(_views(5, dtype=torch.float32, seed=3)[0])
        a, b = _views(n, dtype=torch.float32)
        expected, found = (call(a, b, queue=queue, in_batch=True) for call in (module, compiled))
        torch.testing.assert_close(found, expected)
        ours, truth = (torch.autograd.grad(value, module.temperature)[0] for value in (found, expected))
        torch.testing.assert_close(ours, truth)


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = torch.nn.Linear(4, 3)
        self.loss = fastcl.nn.InfoNCE(temperature=torch.nn.Parameter(torch.tensor(0.2)))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.loss(self.encode(a), self.encode(b))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    # What is exported computes values; to train, the module itself is there.
    model, rows = _Model(), torch.export.Dim("rows", min=2)
    shapes = {"a": {0: rows}, "b": {0: rows}}
    program = torch.export.export(model, _views(6, dtype=torch.float32), strict=strict, dynamic_shapes=shapes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for again in (program, torch.export.load(file)):
        a, b = _views(9, dtype=torch.float32, seed=1)
        torch.testing.assert_close(again.module()(a, b), model(a, b))
    assert "fastcl.contrast_forward" in program.graph_module.print_readable(print_output=False)


@every_loss
def test_func_grad_vmap_and_vmap_of_grad(loss: Pair) -> None:
    views = [_views(5, seed=seed) for seed in range(3)]
    a, b = (torch.stack(x) for x in zip(*views, strict=True))
    singles = [_with_gradients(loss, x, y) for x, y in views]
    gradient = torch.func.grad_and_value(loss, argnums=(0, 1))
    (grad_a, grad_b), value = gradient(*views[0])
    _assert_same([value, grad_a, grad_b], singles[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where it has to loop over the batch by itself
        values = torch.func.vmap(loss)(a, b)
        (grad_a, grad_b), again = torch.func.vmap(gradient)(a, b)
    wanted = [torch.stack(x) for x in zip(*singles, strict=True)]
    _assert_same([values, again, grad_a, grad_b], [wanted[0], *wanted])


def test_vmap_over_another_dimension_and_over_one_argument() -> None:
    a = torch.stack([_views(5, seed=seed)[0] for seed in range(3)], 1)  # [N, batch, D]
    b = _views(5)[1]
    found = torch.func.vmap(fastcl.infonce, in_dims=(1, None))(a, b)
    torch.testing.assert_close(found, torch.stack([fastcl.infonce(x, b) for x in a.unbind(1)]))


def test_forward_mode_is_refused() -> None:
    a, b = _views(5)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(fastcl.infonce, (a, b), (a, b))
    with torch.autograd.forward_ad.dual_level(), pytest.raises((NotImplementedError, RuntimeError), match="jvp"):
        fastcl.infonce(torch.autograd.forward_ad.make_dual(a, b), b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [n for n in LOSSES if "private" not in n])
def test_autocast_has_no_effect(name: str, dtype: torch.dtype) -> None:
    # Rows are read in the type they come in, everything else is float32, with autocast and without.
    a, b = _views(7, dtype=dtype)
    expected = _with_gradients(LOSSES[name], a, b)
    with torch.autocast("cpu", torch.bfloat16):
        found = _with_gradients(LOSSES[name], a, b)
    assert found[0].dtype == torch.float32
    assert found[1].dtype == found[2].dtype == dtype
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


def test_autocast_of_an_encoder_and_its_loss() -> None:
    model = _Model()
    a, b = _views(9, dtype=torch.float32)
    expected = torch.autograd.grad(model(a, b), list(model.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        assert model.encode(a).dtype == torch.bfloat16
        value = model(a, b)
    assert value.dtype == torch.float32
    for x, y in zip(torch.autograd.grad(value, list(model.parameters())), expected, strict=True):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x, y, rtol=0.1, atol=0.05 * y.abs().max().item())


@every_loss
def test_checkpoint_retain_graph_and_backward_twice(loss: Pair) -> None:
    a, b = (x.requires_grad_() for x in _views(6))
    value = loss(a, b)
    first = torch.autograd.grad(value, (a, b), retain_graph=True)
    twice = torch.autograd.grad(value, (a, b), torch.tensor(2.0, dtype=value.dtype), retain_graph=True)
    third = torch.autograd.grad(value, (a, b))
    again = torch.autograd.grad(checkpoint(loss, a, b, use_reentrant=False), (a, b))
    for x, y, z, w in zip(first, twice, third, again, strict=True):
        torch.testing.assert_close(2 * x, y)
        assert torch.equal(x, z)
        assert torch.equal(x, w)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(value, (a, b))


@every_loss
def test_create_graph_and_second_order(loss: Pair) -> None:
    a, b = (x.requires_grad_() for x in _views(4, 3))
    plain = torch.autograd.grad(loss(a, b), (a, b))
    for x, y in zip(plain, torch.autograd.grad(loss(a, b), (a, b), create_graph=True), strict=True):
        torch.testing.assert_close(x, y)
    assert torch.autograd.gradgradcheck(loss, (a, b))


@every_loss
def test_inference_mode(loss: Pair) -> None:
    a, b = _views(6)
    expected = loss(a.requires_grad_(), b)
    with torch.inference_mode():
        value = loss(a, b)
        assert value.is_inference()
        assert not value.requires_grad
        torch.testing.assert_close(value, loss(*_views(6)))  # tensors made in inference mode
    torch.testing.assert_close(value.clone(), expected.detach())


def test_hooks_see_and_change_gradients() -> None:
    a, b = (x.requires_grad_() for x in _views(6))
    expected, _ = torch.autograd.grad(fastcl.infonce(a, b), (a, b))
    seen: list[Tensor] = []
    inner = a * 1.0
    inner.register_hook(lambda g: seen.append(g.clone()) or 3 * g)
    inner.retain_grad()
    module, calls = fastcl.nn.InfoNCE(), list[str]()
    module.register_forward_hook(lambda *_: calls.append("forward"))
    module.register_full_backward_hook(lambda *_: calls.append("backward"))
    module(inner, b).backward()
    assert calls == ["forward", "backward"]
    torch.testing.assert_close(seen[0], expected)
    torch.testing.assert_close(inner.grad, 3 * expected)
    torch.testing.assert_close(a.grad, 3 * expected)


@every_loss
def test_gradcache(loss: Pair) -> None:
    """Gao et al. 2021: encode without graph, take the gradient at the embeddings, encode again chunk by chunk."""
    torch.manual_seed(0)
    encode = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    inputs = _views(10)
    direct = torch.autograd.grad(loss(*map(encode, inputs)), list(encode.parameters()))
    with torch.no_grad():
        embeddings = [torch.cat([encode(chunk) for chunk in x.split(3)]) for x in inputs]
    leaves = [x.requires_grad_() for x in embeddings]
    loss(*leaves).backward()
    for x, leaf in zip(inputs, leaves, strict=True):
        for chunk, grad in zip(x.split(3), leaf.grad.split(3), strict=True):
            encode(chunk).backward(grad)
    for parameter, wanted in zip(encode.parameters(), direct, strict=True):
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-9, atol=1e-12)


def _modules() -> Iterator[type[torch.nn.Module]]:
    for name, found in vars(fastcl.nn).items():
        public = isinstance(found, type) and found.__module__ == "fastcl.nn" and not name.startswith("_")
        if public and issubclass(found, torch.nn.Module):
            yield found


def _copies(x: Any) -> list[Any]:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return [copy.deepcopy(x), pickle.loads(pickle.dumps(x)), torch.load(file, weights_only=False)]


# Settings without a default.
REQUIRED: dict[str, dict[str, Any]] = {"GBCE": {"catalogue": 9}, "SogCLR": {"denominators": fastcl.Denominators(3)}}


@pytest.mark.parametrize("kind", list(_modules()), ids=lambda kind: kind.__name__)
def test_modules_are_copied_and_pickled(kind: type[torch.nn.Module]) -> None:
    given = REQUIRED.get(kind.__name__, {})
    learns = "temperature" in vars(kind(**given))
    module = kind(**given, **({"temperature": torch.nn.Parameter(torch.tensor(0.25))} if learns else {}))
    for again in _copies(module):
        assert type(again) is kind
        assert repr(again) == repr(module)
        assert {n: p.item() for n, p in again.named_parameters()} == {n: p.item() for n, p in module.named_parameters()}
        assert len(list(again.parameters())) == int(learns)
        assert all(p is not q for p, q in zip(again.parameters(), module.parameters(), strict=True))
    if kind is fastcl.nn.InfoNCE:
        a, b = _views(6)
        assert all(torch.equal(again(a, b), module(a, b)) for again in _copies(module))


def test_queues_are_copied_and_pickled() -> None:
    queue = fastcl.NegativeQueue(4, 3, torch.bfloat16)
    queue.push(torch.randn(6, 3), torch.arange(6), -torch.arange(6.0))
    for again in _copies(queue):
        assert len(again) == len(queue)
        before = queue.keys.clone(), queue.ids.clone(), queue.log_q.clone()
        for x, y in zip((again.keys, again.ids, again.log_q), before, strict=True):
            assert torch.equal(x, y)
        again.push(torch.randn(1, 3), torch.tensor([9]), torch.zeros(1))
        reference = copy.deepcopy(queue)
        reference.push(torch.zeros(1, 3), torch.tensor([9]), torch.zeros(1))
        assert torch.equal(again.ids, reference.ids), "the same slot is next"
        assert torch.equal(queue.keys, before[0]), "the copy has storage of its own"
