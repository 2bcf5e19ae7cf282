"""S3-Rec from its authors' weights: our network with these weights is the authors' network, and their logs are read.

The authors' network is written out here on left-padded windows, by its paper and the layout of its published weights.
No figure of a result is looked at.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import s3rec_published
from benchmarks.study import Plan
from fastcl.recsys import Histories, Items
from fastcl.recsys.baselines.s3rec import WEIGHTS, S3Rec
from fastcl.recsys.data import Feature

pytestmark = pytest.mark.usefixtures("one_thread")

ITEMS = 9
VALUES = ("1", "10", "2", "3")
LENGTH = 6
DIM = 8


def weights(dim: int = DIM, length: int = LENGTH) -> dict[str, Tensor]:
    """As the authors' files have them: tables by item and attribute number, row 0 for none, the mask token last."""
    torch.manual_seed(0)
    made = {
        "item_embeddings.weight": torch.randn(ITEMS + 2, dim),
        "attribute_embeddings.weight": torch.randn(11, dim),
        "position_embeddings.weight": torch.randn(length, dim),
    }
    square = ["aap_norm", "mip_norm", "map_norm", "sp_norm"]
    norms = ["LayerNorm"]
    for block in range(2):
        of = f"item_encoder.layer.{block}"
        square += [f"{of}.attention.{name}" for name in ("query", "key", "value", "dense")]
        norms += [f"{of}.attention.LayerNorm", f"{of}.intermediate.LayerNorm"]
        for name, rows, columns in (("dense_1", 4 * dim, dim), ("dense_2", dim, 4 * dim)):
            made[f"{of}.intermediate.{name}.weight"] = torch.randn(rows, columns) / 4
            made[f"{of}.intermediate.{name}.bias"] = torch.randn(rows)
    for name in square:
        made |= {f"{name}.weight": torch.randn(dim, dim), f"{name}.bias": torch.randn(dim)}
    for name in norms:
        made |= {f"{name}.weight": torch.randn(dim), f"{name}.bias": torch.randn(dim)}
    return made


def theirs(made: dict[str, Tensor], window: list[int]) -> Tensor:
    """[DIM], the state after the newest click of a window that is padded with 0 on the left to LENGTH clicks."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, made[f"{name}.weight"], made[f"{name}.bias"])

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (DIM,), made[f"{name}.weight"], made[f"{name}.bias"], 1e-12)

    item = torch.tensor([0] * (LENGTH - len(window)) + window)
    x = norm("LayerNorm", made["item_embeddings.weight"][item] + made["position_embeddings.weight"])
    hidden = (item == 0)[None, :] | torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    for block in range(2):
        of = f"item_encoder.layer.{block}"
        names = [f"{of}.attention.{name}" for name in ("query", "key", "value")]
        query, key, value = (linear(name, x).view(LENGTH, 2, -1) for name in names)
        logits = torch.einsum("qhd,khd->hqk", query, key) / (DIM // 2) ** 0.5 - 1e4 * hidden
        mixed = torch.einsum("hqk,khd->qhd", logits.softmax(-1), value).reshape(LENGTH, DIM)
        x = norm(f"{of}.attention.LayerNorm", x + linear(f"{of}.attention.dense", mixed))
        wide = F.gelu(linear(f"{of}.intermediate.dense_1", x))
        x = norm(f"{of}.intermediate.LayerNorm", x + linear(f"{of}.intermediate.dense_2", wide))
    return x[-1]


def test_our_network_with_the_authors_weights_is_theirs() -> None:
    numbers = [3, 1, 9, 2, 4, 8, 5, 7, 6]  # of our rows
    feature = Feature(VALUES, torch.zeros(ITEMS + 1, 1, dtype=torch.int64).numpy())
    items = Items(ids=tuple(map(str, numbers)), features={"attribute": feature})
    model = S3Rec(items, dim=DIM, heads=2, blocks=2, max_len=LENGTH).eval()
    made = weights()
    s3rec_published.fill(model, made)
    windows = [[3, 7], [1, 2, 3, 4, 5, 9], [8]]
    rows = [[1 + numbers.index(item) for item in window] for window in windows]
    expected = torch.stack([theirs(made, window) for window in windows])
    torch.testing.assert_close(model.encode(Histories.from_lists(rows)), expected, rtol=1e-4, atol=1e-5)
    scored = made["item_embeddings.weight"][numbers]
    torch.testing.assert_close(model.item_vectors()[1:], scored, rtol=0, atol=0)
    torch.testing.assert_close(model.attribute.weight.data, made["attribute_embeddings.weight"][[1, 10, 2, 3]])


LOG = (
    "Namespace(lr=0.001)\n"
    "{'epoch': 0, 'rec_avg_loss': '1.25', 'rec_cur_loss': '1.0'}\n"
    "{'Epoch': 0, 'HIT@10': '0.25', 'NDCG@10': '0.125'}\n"
    "{'epoch': 1, 'rec_avg_loss': '1.125', 'rec_cur_loss': '1.0'}\n"
    "{'Epoch': 1, 'HIT@10': '0.5', 'NDCG@10': '0.25'}\n"
    "Finetune\n"
    "{'Epoch': 0, 'HIT@10': '0.375', 'NDCG@10': '0.1875'}\n"
)
READ = {"loss": [1.25, 1.125], "valid hr@10": [0.25, 0.5], "test": {"hr@10": 0.375, "ndcg@10": 0.1875}}


def test_a_log_of_the_authors(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(LOG)
    assert s3rec_published.log(path) == READ


def test_the_program_trains_from_the_weights_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, authors = tmp_path / "data" / "amazon", tmp_path / "reproduce"
    data.mkdir(parents=True)
    authors.mkdir()
    rows = [f"{user} " + " ".join(str(1 + (user + step) % ITEMS) for step in range(6)) for user in range(1, 31)]
    with gzip.open(data / "Beauty.txt.gz", "wt") as file:
        file.write("\n".join(rows) + "\n")
    with gzip.open(data / "Beauty.item2attributes.json.gz", "wt") as file:
        json.dump({str(item): [1 + item % 3] for item in range(1, ITEMS + 1)}, file)
    torch.save(weights(64, 50), authors / "Beauty-epochs-150.pt")
    for passes in (0, 150):
        (authors / f"Finetune_sample-Beauty-{passes}.txt").write_text(LOG)
    output = tmp_path / "results.json"
    paths = {"data": data.parent, "authors": authors, "states": tmp_path / "states", "output": output, "only": "Beauty"}
    monkeypatch.setattr("sys.argv", ["s3rec_published", *(f"--{name}={path}" for name, path in paths.items())])
    monkeypatch.setattr(s3rec_published, "PLAN", Plan(epochs=2, patience=2, schedule="constant"))
    s3rec_published.main()
    (run,) = json.loads(output.read_text())["runs"]
    assert run["authors"] == {"0": READ, "150": READ}
    assert run["epochs"] == len(run["curve"]) == 2  # of the next item alone: no pre-training came first
    assert {"recall@20", "uniform100 hr@10", "uniform100 ndcg@10"} <= run["test"].keys()
    ours, after = run["pre-training"].values()
    assert ours.keys() == after.keys() == WEIGHTS.keys()
    assert ours != after
    assert all(loss > 0 for loss in ours.values())
    written = output.read_bytes()
    (authors / "Beauty-epochs-150.pt").unlink()
    s3rec_published.main()
    assert output.read_bytes() == written
