"""Pictures: the numbers behind them against slow counts, and the page as a reader without a network gets it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastcl.recsys import CLRec, Histories, Interactions, Items, MultiCLRec, SASRec, fit, save
from fastcl.recsys.cli import main
from fastcl.recsys.models.clrec.model import Batch
from fastcl.recsys.reporting import pictures
from fastcl.recsys.reporting.pages import TRAINED, _figures, _Look, measured, plot, queue_replay
from fastcl.recsys.reporting.tables import popularity_shares, shown_shares

pytestmark = pytest.mark.usefixtures("one_thread")
ITEMS = Items(tuple(f"i{n}" for n in range(30)))


def log() -> Interactions:
    rng = np.random.default_rng(0)
    lists = [np.minimum(rng.geometric(0.1, 10), 30).tolist() for _ in range(40)]
    return Interactions(ITEMS, tuple(f"u{n}" for n in range(40)), Histories.from_lists(lists))


class Latent(SASRec):
    """Stands for a model with latent variables."""

    def diagnostics(self, histories: Histories) -> dict[str, float]:
        return {"kl": float(len(histories)), "variance": 0.5}


def test_shares_of_shown_items() -> None:
    counts = np.array([0, 0, 1, 2, 3, 4, 9])
    assert popularity_shares(np.array([[1, 2], [3, 4], [5, 6], [6, 6]]), counts) == [0.125, 0.125, 0.25, 0.125, 0.375]
    assert shown_shares(np.array([0, 1, 1, 1, 1, 1, 3]), counts) == [0.125, 0.125, 0.25, 0.125, 0.375]


class Watched(CLRec):
    """Writes down what its queue held before each step."""

    def parts(self, batch: Batch) -> dict[str, torch.Tensor]:
        assert self.queue is not None
        ids = self.queue.ids
        held = [] if ids is None else ids.tolist()
        pairs = [target == entry for target in batch.target.tolist() for entry in held]
        hits.append(float(np.mean(pairs or [0.0])))
        return super().parts(batch)


hits: list[float] = []


@pytest.mark.parametrize("encoder", ["pooling", "sasrec"])
def test_replay_is_what_the_queue_held_in_training(encoder: str) -> None:
    options: dict[str, Any] = {"dim": 8, "batch": 16, "negatives": 64, "time_cuts": (), "encoder": encoder}
    split = log().split()
    hits.clear()
    fit(Watched(ITEMS, **options), split, epochs=1, seed=5, progress=False)
    model = CLRec(ITEMS, **options)
    replay = queue_replay(model, split.train, seed=5)
    assert replay["hits"] == pytest.approx(hits)
    assert len(set(hits)) > 2
    assert len(replay["age"]) == len(hits) == model.steps(split.train)
    if encoder == "pooling":  # 48 places for batches of 16, one of them smaller
        assert all(oldest - min(step, 3) in (0, 1) for step, oldest in enumerate(replay["oldest"]))
    with pytest.raises(ValueError, match="model: expected one with a queue, got objective 'full_softmax'"):
        queue_replay(CLRec(ITEMS, dim=8, objective="full_softmax"), split.train, seed=5)


class Sources(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.images: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.images += [value or "" for name, value in attributes if name == "src"]


def test_page_and_pictures(tmp_path: Path) -> None:
    split = log().split()
    models = {
        "<first>": SASRec(ITEMS, dim=8, seed=0).eval(),
        "queue": CLRec(ITEMS, dim=8, batch=16, negatives=64, time_cuts=()).eval(),
        "latent": Latent(ITEMS, dim=8, seed=1).eval(),
        "several": MultiCLRec(ITEMS, dim=8, time_cuts=()).eval(),
    }
    line = {"epoch": 1, "loss": 2.0, "recall@10": 0.1, "ndcg@10": 0.05}
    parts = {"loss": 3.0, "loss_parts": {"kl": 1.0, "reconstruction": 2.0}, "ndcg@10": 0.1}
    logs = {"<first>": [line, {**line, "loss": 1.0}], "latent": [parts, parts]}
    files = plot(models, split, tmp_path / "out", logs=logs, ratios=(0.0, 0.5))
    names = ["training", "validation", "impressions", "diversity", "popularity", "groups-popularity"]
    names += ["groups-frequency", "groups-length", "robustness-delete", "robustness-replace", "queue-age", "queue-hits"]
    names += ["intents-1", "diagnostics-1", "diagnostics-2"]
    assert [file.name for file in files] == [*(f"{name}.png" for name in names), "numbers.json", "index.html"]
    assert all((tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in names)

    numbers = json.loads((tmp_path / "out" / "numbers.json").read_text())
    assert set(numbers["results"]) == {*models, "popularity", "co-occurrence"}
    assert set(numbers["impressions"]) == {TRAINED, *models}
    assert numbers["impressions"][TRAINED] == popularity_shares(split.train.item, split.counts)
    assert list(numbers["intents"]) == ["several"]
    assert sum(numbers["intents"]["several"]["items"]) == 30
    assert numbers["diagnostics"] == {"latent": {"kl": 40.0, "variance": 0.5}}

    page = (tmp_path / "out" / "index.html").read_text()
    found = Sources()
    found.feed(page)
    assert len(found.images) == len(names)
    assert all(source.startswith("data:image/png;base64,") for source in found.images)
    assert '<meta name="viewport" content="width=device-width,initial-scale=1">' in page
    assert not found.tags & {"script", "link", "iframe"}
    assert not re.search(r"https?://|url\(", page)
    assert "&lt;first&gt;" in page


def test_seeds_are_one_line_and_a_model_has_one_colour_everywhere() -> None:
    split = log().split()
    models = {name: SASRec(ITEMS, dim=8, seed=seed).eval() for seed, name in enumerate(("a/1", "a/2", "b"))}
    logs = {
        "a/1": [{"loss": 3.0, "ndcg@10": 0.1}, {"loss": 1.0, "ndcg@10": 0.2}],
        "a/2": [{"loss": 1.0, "ndcg@10": 0.3}],  # stopped early
        "b": [{"loss": 5.0, "ndcg@10": 0.0}],
    }
    numbers = measured(models, split, logs, {}, "mask", (0.0, 0.5))
    look = _Look(models, ["popularity", "co-occurrence"], {"a/1": "a", "a/2": "a"})
    assert len(set(look.colours.values())) == len(look.colours) == 4
    for section in _figures(numbers, look).values():
        for name, draw in section.items():
            figure = pictures.alone(draw)
            (axes,) = figure.axes
            assert axes.get_legend() is None  # nothing lies over the data
            named = {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
            assert {label.split()[0] for label in named} <= {"a", "b", "popularity", "co-occurrence", "training"}, name
            for label, line in named.items():
                if label != TRAINED:
                    assert line.get_color() == look.colours[label.split()[0]]
            if name == "training":
                assert named["a loss"].get_ydata().tolist() == [2.0, 1.0]
                (band,) = axes.collections
                assert (band.get_datalim(axes.transData).y0, band.get_datalim(axes.transData).y1) == (1.0, 3.0)
            if name.startswith("groups"):
                by = name.removeprefix("groups-")
                for row, value in zip(numbers["groups"]["b"][by], named["b"].get_ydata(), strict=True):
                    assert np.isnan(value) == (row["cases"] < pictures.FEW)  # pale, and no part of the line


def test_plot_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "log.csv"
    rows = [f"u{user},i{(user * 7 + step * step) % 20},{step}" for user in range(20) for step in range(6)]
    table.write_text("user,item,time\n" + "\n".join(rows) + "\n")
    run = tmp_path / "run"
    save(SASRec(Interactions.read(table).items, dim=8).eval(), run, {"data": {"path": str(table)}})
    (run / "metrics.jsonl").write_text('{"epoch": 1, "loss": 1.0, "recall@10": 0.1, "ndcg@10": 0.1, "best": true}\n')
    assert main.main(["plot", str(run), "-o", str(tmp_path / "out"), "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert all(Path(file).is_file() for file in files)
    assert "training.png" in {Path(file).name for file in files}
    (run / "metrics.jsonl").write_text("{broken\n")
    assert main.main(["plot", str(run), "-o", str(tmp_path / "out")]) == 2
    assert "metrics.jsonl: damaged" in capsys.readouterr().err
    assert torch.is_grad_enabled()
