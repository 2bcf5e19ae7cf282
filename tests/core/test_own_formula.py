"""A formula of the user's own becomes a member of the family: `fastcl.over_rows`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from problems import F64, Batch, batches
from torch import Tensor
from twins import assert_family_equals_twin

import fastcl
import fastcl.distributed
from fastcl import reference
from fastcl.recsys import ContrastVAE, Items, load
from fastcl.recsys.cli import main
from fastcl.registry import LOSSES, formula_of

pytestmark = pytest.mark.usefixtures("one_thread")


def poly(rows: fastcl.rows.Rows, *, epsilon: float = 1.0) -> Tensor:
    """-log p + epsilon (1 - p) (PolyLoss, Leng et al. 2022)."""
    above = rows.lse - rows.pos
    return torch.logaddexp(above, torch.zeros_like(above)) + epsilon * torch.sigmoid(above)


def textbook(query: Tensor, positive_key: Tensor, negative_keys: Tensor | None = None, temperature: Any = 0.1,
             reduction: str = "mean", *, epsilon: float = 1.0, **options: Any) -> Tensor:  # fmt: skip
    def head(pos: Tensor, neg: Tensor, count: Tensor) -> Tensor:
        log_p = torch.log_softmax(torch.cat([pos[:, None], neg], 1), 1)
        return -log_p[:, 0] + epsilon * log_p[:, 1:].exp().sum(1)

    return reference._loss(head, query, positive_key, negative_keys, temperature, reduction, **options)


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    known = dict(LOSSES)
    yield
    LOSSES.clear()
    LOSSES.update(known)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    made = fastcl.over_rows()(poly)
    monkeypatch.setattr(fastcl, "poly", made, raising=False)
    monkeypatch.setattr(reference, "poly", textbook, raising=False)
    return made


def test_equals_the_textbook_with_every_kind_of_negatives(own: Callable[..., Tensor]) -> None:
    @given(batch=batches())
    def check(batch: Batch) -> None:
        assert_family_equals_twin("poly", batch, {"epsilon": 0.5})

    check()


def test_a_wrong_word_on_speed_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "poly", textbook, raising=False)
    monkeypatch.setattr(fastcl, "poly", fastcl.over_rows(beside=lambda **constants: 0.3)(poly), raising=False)
    for batch in (Batch(33, 17), Batch(33, 17, symmetric=True), Batch(33, 17, negatives="shared", in_batch=True)):
        assert_family_equals_twin("poly", batch, {"epsilon": 2.0})


def test_processes_share_it(own: Callable[..., Tensor]) -> None:
    g = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 6, 4, generator=g, dtype=F64)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for form in (fastcl.distributed.gathered, fastcl.distributed.ring):
            for options in ({"epsilon": 0.5}, {"symmetric": True}, {"ids": torch.arange(6) % 4, "log_q": query[:, 0]}):
                torch.testing.assert_close(form(own)(query, key, **options), own(query, key, **options))
    finally:
        dist.destroy_process_group()


def test_processes_take_an_option_that_is_not_one_for_each_row() -> None:
    def levels(rows: fastcl.rows.Rows, *, level: Tensor) -> Tensor:
        return torch.nn.functional.softplus(rows.lse - rows.pos) + level[1]

    made, given, level = fastcl.over_rows()(levels), torch.eye(3), torch.tensor([0.5, 0.25])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for form in (fastcl.distributed.gathered, fastcl.distributed.ring):
            torch.testing.assert_close(form(made)(given, given, level=level), made(given, given, level=level))
    finally:
        dist.destroy_process_group()


def test_two_views_are_contrasted_by_it(own: Callable[..., Tensor]) -> None:
    assert ContrastVAE(Items(("a", "b")), dim=8, contrast="poly").config.contrast == "poly"
    LOSSES.pop("poly")
    with pytest.raises(ValueError, match="contrast: expected one of infonce, .*, nt_xent, got 'poly'"):
        ContrastVAE(Items(("a", "b")), dim=8, contrast="poly")


USED = """
import torch, fastcl
calls = []

@fastcl.over_rows()
def counted(rows, *, epsilon: float = 1.0):
    calls.append(len(rows.pos))
    return torch.nn.functional.softplus(rows.lse - rows.pos)
"""


def test_the_command_line_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(USED)
    Path("log.csv").write_text("user,item,time\n" + "".join(f"u{n % 9},i{n % 7},{n}\n" for n in range(72)))
    train = ["train", "log.csv", "--model", "contrastvae", "--epochs", "1", "--set", "contrast=counted", "dim=8"]
    assert main.main(["--use", "own.py", *train, "-o", "run"]) == 0
    import fastcl_used_own  # type: ignore[import-not-found]  # the file that --use ran

    assert fastcl_used_own.calls == [18]  # both directions of nine windows
    LOSSES.pop("counted")
    with pytest.raises(ValueError, match="contrast: expected one of .* got 'counted'"):
        load("run")
    capsys.readouterr()
    assert main.main([*train, "-o", "other"]) == 2
    assert "--set contrast: expected one of infonce" in capsys.readouterr().err


def test_what_is_no_formula_is_refused() -> None:
    def infonce(rows: Any) -> Tensor:
        return rows.lse  # type: ignore[no-any-return]

    with pytest.raises(ValueError, match=r"formula: expected a name that is free, got 'infonce', that of fastcl\.loss"):
        fastcl.over_rows()(infonce)
    assert fastcl.infonce is LOSSES["infonce"].function

    def positional(rows: Any, epsilon: float = 1.0) -> Tensor:
        return rows.lse  # type: ignore[no-any-return]

    def taken(rows: Any, *, temperature: float = 1.0) -> Tensor:
        return rows.lse  # type: ignore[no-any-return]

    def nothing(*, epsilon: float = 1.0) -> Tensor:
        return torch.zeros(())

    messages = {"epsilon in positional": positional, "temperature in taken": taken, "nothing without a first": nothing}
    for message, formula in messages.items():
        with pytest.raises(TypeError, match=f"formula: expected .* got {message}"):
            fastcl.over_rows()(formula)
    with pytest.raises(TypeError, match=r"formula: expected a function of rows, got 3; write @fastcl.over_rows\(\)"):
        fastcl.over_rows()(3)  # type: ignore[arg-type]

    def mean(rows: Any) -> Tensor:
        return rows.lse.mean()  # type: ignore[no-any-return]

    with pytest.raises(ValueError, match=r"mean: expected a loss for each row, \[4\], got \[\]"):
        fastcl.over_rows()(mean)(torch.eye(4), torch.eye(4))

    def forgets(rows: Any) -> Any:
        rows.lse.sum()

    with pytest.raises(TypeError, match="forgets: expected a loss for each row, got NoneType"):
        fastcl.over_rows()(forgets)(torch.eye(4), torch.eye(4))
    without_brackets: Any = mean
    with pytest.raises(TypeError, match=r"the decorator has brackets: @fastcl.over_rows\(\)"):
        fastcl.over_rows(without_brackets)


def test_a_cell_may_run_twice() -> None:
    first, second = (fastcl.over_rows()(poly) for _ in range(2))
    assert formula_of(second) is poly
    assert LOSSES["poly"].function is second
    assert torch.equal(first(torch.eye(3), torch.eye(3)), second(torch.eye(3), torch.eye(3)))
