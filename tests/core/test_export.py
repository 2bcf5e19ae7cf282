"""torch.export of every loss, of any number of rows, strictly and not; and packages of AOTInductor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_citizenship import LOSSES, Pair, _views
from torch import Tensor

import fastcl

pytestmark = pytest.mark.usefixtures("one_thread")


class _Loss(torch.nn.Module):
    def __init__(self, loss: Pair) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.loss(a, b)


def _exported(loss: Pair, strict: bool) -> torch.export.ExportedProgram:
    torch._dynamo.reset()
    rows = torch.export.Dim("rows", min=2)
    shapes = {"a": {0: rows}, "b": {0: rows}}
    return torch.export.export(_Loss(loss), _views(6, dtype=torch.float32), strict=strict, dynamic_shapes=shapes)


def _assert_exports(name: str, strict: bool) -> None:
    program = _exported(LOSSES[name], strict).module()
    for n in (2, 9):
        a, b = _views(n, dtype=torch.float32, seed=1)
        torch.testing.assert_close(program(a, b), LOSSES[name](a, b))


# Each asks for its number of rows in another place; `test_export` in test_citizenship.py has infonce.
@pytest.mark.parametrize("name", ["dclw", "nt_xent", "supcon", "alignment", "uniformity", "triplet", "bpr", "siglip"])
def test_any_number_of_rows(name: str) -> None:
    _assert_exports(name, strict=False)


def test_any_number_of_rows_strictly() -> None:
    _assert_exports("bpr", strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", list(LOSSES))
def test_every_loss(name: str, strict: bool) -> None:
    _assert_exports(name, strict)


def test_the_graph_holds_no_infinite_argument() -> None:
    # The JSON in which AOTInductor keeps the arguments of an op has none.
    for name in ("infonce", "bpr"):
        for node in _exported(LOSSES[name], strict=False).graph.nodes:
            if "fastcl" in str(node.target):
                assert all(abs(x) < float("inf") for x in node.args if isinstance(x, float)), node.args


@pytest.mark.slow
@pytest.mark.parametrize("name", ["infonce", "siglip"])
def test_a_package_of_aotinductor(name: str, tmp_path: Path) -> None:
    path = torch._inductor.aoti_compile_and_package(
        _exported(LOSSES[name], strict=False), package_path=str(tmp_path / "loss.pt2")
    )
    package = torch._inductor.aoti_load_package(path)
    for n in (3, 9):
        a, b = _views(n, dtype=torch.float32, seed=2)
        torch.testing.assert_close(package(a, b), LOSSES[name](a, b))


def test_a_model_with_a_queue() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queue = fastcl.NegativeQueue(7, 4)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            value = fastcl.infonce(a, b, queue=self.queue)
            self.queue.push(b)
            return value

    rows = torch.export.Dim("rows", min=2, max=7)
    model, plain = Model(), fastcl.NegativeQueue(7, 4)
    shapes = {"a": {0: rows}, "b": {0: rows}}
    program = torch.export.export(model, _views(3, dtype=torch.float32), dynamic_shapes=shapes).module()
    for n in (2, 5, 4):
        a, b = _views(n, dtype=torch.float32, seed=n)
        torch.testing.assert_close(program(a, b), fastcl.infonce(a, b, queue=plain))
        plain.push(b)
