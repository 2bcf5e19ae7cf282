"""Tables cut by rows over two and three processes train as they do in one, and one failing process ends the others."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import rows_ranks
import torch
from forks import run_together

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    data = rows_ranks.split()
    return {name: rows_ranks.trained(kind, data, options) for name, (kind, options) in rows_ranks.ALONE.items()}


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder, count = tmp_path_factory.mktemp("ranks"), request.param
    run_together(count, folder / "store", partial(rows_ranks.main, folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


# No loss depends on a number that is added to all logits of a softmax, so that the gradient of these is rounding.
IDLE = ("attention.mlp.2.bias", "qkv.bias")


@pytest.mark.parametrize("name", rows_ranks.ALONE)
def test_several_processes_train_what_one_does(
    name: str, alone: dict[str, Any], shared: list[dict[str, Any]]
) -> None:
    truth = alone[name]
    for rank, found in enumerate(shared):
        for table, rows in found[name]["rows"].items():
            assert rows == len(range(rank, truth["rows"][table], len(shared)))
        for one, other in zip(truth["losses"], found[name]["losses"], strict=True):
            assert one == pytest.approx(other, abs=1e-12)
        for part in ("weights", "state"):
            assert truth[part].keys() == found[name][part].keys()
            for key, tensor in truth[part].items():
                if key.endswith(IDLE):
                    continue
                torch.testing.assert_close(found[name][part][key], tensor, rtol=0, atol=1e-12)


def test_several_processes_train_by_rows_what_they_train_with_whole_tables(shared: list[dict[str, Any]]) -> None:
    for found in shared:
        for one, other in zip(found["rows"]["losses"], found["dense"]["losses"], strict=True):
            assert one == pytest.approx(other, abs=1e-9)
        rows, dense = found["rows"]["weights"], found["dense"]["weights"]
        for key in ("item.id.weight", "user.position.weight"):
            torch.testing.assert_close(rows[key], dense[key], rtol=0, atol=1e-7)
        assert torch.equal(rows["item.id.weight"], shared[0]["rows"]["weights"]["item.id.weight"])


def test_lookups_of_any_rows_and_of_none(shared: list[dict[str, Any]]) -> None:
    start = torch.arange(6.0, dtype=torch.float64).view(3, 2)
    for rank, results in enumerate(shared):
        asked = [0], [], [2, 0, 1, 1], [1] * rank, [2] if rank == 0 else []
        for ids, found in zip(asked, results["lookups"]["found"], strict=True):
            assert torch.equal(found, start[ids])
        # Adam's first step is the sign of the gradient, which is positive for each row.
        torch.testing.assert_close(results["lookups"]["table"], start - 1e-2, rtol=0, atol=1e-8)


def test_an_id_that_is_in_no_table_is_refused_by_all(shared: list[dict[str, Any]]) -> None:
    told = [results["refused"] for results in shared]
    assert told[1] == "reads: expected rows 0 to 2, got 7"
    assert told[0] == f"reads: expected rows 0 to 2, got others in process 1 of {len(shared)}"
