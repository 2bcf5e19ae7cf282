"""examples/serve.py answers many clients at once with the lists of the model; skipped where FastAPI is missing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fastcl.recsys import Batcher, Items, SASRec, recommend

pytestmark = pytest.mark.usefixtures("one_thread")
FILE = Path(__file__).parents[2] / "examples" / "serve.py"


@pytest.mark.parametrize(("threads", "batch"), [(1, 32), (4, 1)])
def test_clients_get_the_lists_of_the_model(threads: int, batch: int) -> None:
    for package in ("fastapi", "uvicorn", "httpx"):
        pytest.importorskip(package, reason="needs fastapi, uvicorn and httpx")
    from fastapi.testclient import TestClient

    from examples.serve import service

    items = Items(tuple(f"i{number}" for number in range(60)))
    model = SASRec(items, dim=16, seed=0).eval()
    histories = [[items.ids[(7 * nth + step) % 60] for step in range(1 + nth % 5)] for nth in range(40)]
    answers = Batcher(model, threads=threads, batch=batch)
    with answers as batcher, TestClient(service(batcher)) as client, ThreadPoolExecutor(8) as pool:

        def ask(nth: int) -> list[tuple[str, float]]:
            found = client.post("/recommend", json={"history": histories[nth], "k": 1 + nth % 7})
            assert found.status_code == 200
            return [(item, score) for item, score in found.json()]

        for nth, found in enumerate(pool.map(ask, range(40))):
            (expected,) = recommend(model, [histories[nth]], k=1 + nth % 7)
            assert [item for item, _ in found] == [item for item, _ in expected]
            assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-4)
        assert client.post("/recommend", json={"history": ["nobody's"]}).json() == []
        assert client.post("/recommend", json={"history": ["i1"], "k": 0}).status_code == 422


def test_it_is_short() -> None:
    assert len(FILE.read_text().splitlines()) <= 40
