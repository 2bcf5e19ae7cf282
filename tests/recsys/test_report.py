"""The report: its numbers against slow counts, and the page as a reader without a network gets it."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastcl.recsys import (
    CLRec,
    CoOccurrence,
    Histories,
    Interactions,
    Items,
    MultiCLRec,
    Popularity,
    SASRec,
    fit,
    rank_cases,
    save,
)
from fastcl.recsys.cli import main
from fastcl.recsys.evaluation.measures import ndcg
from fastcl.recsys.models.clrec.model import Batch
from fastcl.recsys.reporting import pictures
from fastcl.recsys.reporting.figures import Look, figures
from fastcl.recsys.reporting.numbers import TRAINED, measured, period, queue_replay
from fastcl.recsys.reporting.report import report
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
        self.alts: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.images += [value or "" for name, value in attributes if name in ("src", "xlink:href") and value[:1] != "#"]
        self.ids += [value or "" for name, value in attributes if name == "id"]
        self.alts += [value or "" for name, value in attributes if tag == "svg" and name == "aria-label"]


def test_the_page_and_its_pictures(tmp_path: Path) -> None:
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
    notes = ["<two> of 3 epochs"]
    (tmp_path / "out").mkdir()
    for name in ("index.html", "numbers.json", "groups-9.png", "logo.png"):
        (tmp_path / "out" / name).write_bytes(b"of an earlier report, or of somebody")
    files = report(models, split, tmp_path / "out", title="<log>", logs=logs, ratios=(0.0, 0.5), notes=notes)
    names = ["validation-ndcg", "validation-recall", "training", "impressions", "diversity", "popularity", "groups-1"]
    names += ["groups-2", "groups-3", "robustness-delete", "robustness-replace", "intents-1", "queue-age", "queue-hits"]
    names += ["diagnostics-1", "diagnostics-2"]
    assert [file.name for file in files] == [*(f"{name}.png" for name in names), "numbers.json", "index.html"]
    assert all((tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in names)

    left = {file.name for file in (tmp_path / "out").iterdir()}
    assert left == {*(file.name for file in files), "logo.png"}  # the earlier report had more groups
    numbers = json.loads((tmp_path / "out" / "numbers.json").read_text())
    assert set(numbers["results"]) == {*models, "popularity", "co-occurrence"}
    assert set(numbers["impressions"]) == {TRAINED, *models}
    assert numbers["impressions"][TRAINED] == popularity_shares(split.train.item, split.counts)
    assert list(numbers["intents"]) == ["several"]
    assert sum(numbers["intents"]["several"]["items"]) == 30
    assert numbers["runs"]["<first>"]["changed"] == {"dim": 8}  # not the table, which the model has chosen
    assert numbers["diagnostics"] == {"latent": {"kl": 40.0, "variance": 0.5}}

    page = (tmp_path / "out" / "index.html").read_text()
    found = Sources()
    found.feed(page)
    assert [alt.partition(":")[0] for alt in found.alts[:2]] == ["Validation ndcg@10", "Validation recall@10"]
    assert len(found.alts) == len(names)
    assert all(re.search(r"\d", alt.partition(":")[2]) for alt in found.alts)  # the result, not the name
    assert len(found.ids) == len(set(found.ids))  # an id twice would make one picture use the other's shapes
    assert all(source.startswith("data:image/png;base64,") for source in found.images)
    assert '<meta name="viewport" content="width=device-width,initial-scale=1">' in page
    assert not found.tags & {"script", "link", "iframe"}
    assert not re.search(r"https?://|url\((?!#)|@import", page)
    assert "<h1>&lt;first&gt;, queue, latent, several on &lt;log&gt;</h1>" in page
    assert '<p class="note" role="note">&lt;two&gt; of 3 epochs</p>' in page
    assert page.count('<p class="verdict">') == len(models)
    assert page.index("<summary>For developers</summary>") < page.index("Age of the queue")


def test_seeds_are_one_line_and_a_model_has_one_colour_everywhere() -> None:
    split = log().split()
    models = {name: SASRec(ITEMS, dim=8, seed=seed).eval() for seed, name in enumerate(("a/1", "a/2", "b"))}
    logs = {
        "a/1": [{"loss": 3.0, "ndcg@10": 0.1}, {"loss": 1.0, "ndcg@10": 0.2}],
        "a/2": [{"loss": 1.0, "ndcg@10": 0.3}],  # stopped early
        "b": [{"loss": 5.0, "ndcg@10": 0.0}],
    }
    groups = {"a/1": "a", "a/2": "a"}
    numbers = measured(models, split, seen="mask", ratios=(0.0, 0.5), logs=logs, groups=groups)
    look = Look(list(models), ["popularity", "co-occurrence"], groups)
    assert len(set(look.colours.values())) == len(look.colours) == 4
    for section in figures(numbers, look).values():
        for name, picture in section.items():
            figure = pictures.alone(picture.draw)
            (axes,) = figure.axes
            assert axes.get_legend() is None  # nothing lies over the data
            named = {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
            assert {label.split()[0] for label in named} <= {"a", "b", "popularity", "co-occurrence", "training"}, name
            for label, line in named.items():
                if label != TRAINED:
                    assert line.get_color() == look.colours[label.split()[0]]
            if name == "training":
                assert named["a"].get_ydata().tolist() == [2.0, 1.0]
                (band,) = axes.collections
                assert (band.get_datalim(axes.transData).y0, band.get_datalim(axes.transData).y1) == (1.0, 3.0)
            if name.startswith("groups"):
                by = list(numbers["groups"]["b"])[int(name.removeprefix("groups-")) - 1]
                (of_b,) = (bars for bars in axes.containers if bars.get_label() == "b")
                rows = numbers["groups"]["b"][by]
                assert [bar.get_height() for bar in of_b] == [row["recall@40"] for row in rows]
                assert [bar.get_alpha() < 1 for bar in of_b] == [row["cases"] < pictures.FEW for row in rows]


def test_the_verdict_is_a_paired_comparison_with_the_best_floor() -> None:
    split = log().split()
    seeds = {f"a/{seed}": SASRec(ITEMS, dim=8, seed=seed).eval() for seed in range(2)}
    numbers = measured(seeds, split, seen="mask", ratios=(0.5,), by=(), groups=dict.fromkeys(seeds, "a"))
    floors = {"popularity": Popularity(split.counts), "co-occurrence": CoOccurrence(split.train, len(ITEMS))}
    gains = {name: ndcg(rank_cases(s, split.test).rank, 10) for name, s in {**seeds, **floors}.items()}
    best = max(floors, key=lambda name: gains[name].mean())
    (found,) = numbers["verdicts"]
    mean = (gains["a/0"] + gains["a/1"]) / 2
    assert (found["name"], found["floor"]) == ("a", best)
    assert found["difference"] == pytest.approx((mean - gains[best]).mean())
    half = 1.96 * mean.std(ddof=1) / len(mean) ** 0.5
    assert numbers["intervals"]["a"]["ndcg@10"] == pytest.approx([mean.mean() - half, mean.mean() + half])
    for example in numbers["examples"]:
        (case,) = np.flatnonzero(np.array(split.users)[split.test.user] == example["user"])
        assert example["next"] == [ITEMS.ids[split.test.target[case] - 1]]
        assert example["newest"][-1] == ITEMS.ids[split.test.history.take(np.array([case])).item[-1] - 1]
        assert list(example["shown"]) == ["a", best]
        assert not set(example["shown"]["a"]) & set(example["newest"])


def test_one_case_has_no_interval(tmp_path: Path) -> None:
    rows = [("u0", f"i{n}") for n in range(4)] + [(f"u{n}", f"i{n}") for n in range(1, 9)]
    split = Interactions.read({"user": [u for u, _ in rows], "item": [i for _, i in rows]}, time=None).split()
    assert len(split.test) == 1
    model = SASRec(split.items, dim=8, seed=0).eval()
    report({"a": model}, split, tmp_path)
    assert "there is one test case." in (tmp_path / "index.html").read_text()
    assert "Infinity" not in (tmp_path / "numbers.json").read_text()


def test_a_model_and_a_floor_do_not_share_a_name() -> None:
    models = {"popularity": SASRec(ITEMS, dim=8, seed=0).eval()}
    with pytest.raises(ValueError, match="models: expected other names than those of the floors, got popularity"):
        measured(models, log().split(), seen="mask", ratios=(0.5,), by=())


def test_the_period_is_told_of_unix_seconds_alone() -> None:
    lists = [[1, 2, 3, 4], [2, 3, 4, 5]]
    for first, expected in ((5, None), (1_500_000_000, ["2017-07-14", "2017-07-17"])):
        times = [[first + 86_400 * (step + user) for step in range(4)] for user in range(2)]
        timed = Interactions(ITEMS, ("u", "v"), Histories.from_lists(lists, times)).split()
        assert period(timed) == expected  # the test targets, of one day more, are nothing that a model reads
    assert period(log().split()) is None


def test_report_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "log.csv"
    rows = [f"u{user},i{(user * 7 + step * step) % 20},{step}" for user in range(20) for step in range(6)]
    table.write_text("user,item,time\n" + "\n".join(rows) + "\n")
    run = tmp_path / "run"
    save(SASRec(Interactions.read(table).items, dim=8).eval(), run, {"data": {"path": str(table)}})
    (run / "metrics.jsonl").write_text('{"epoch": 1, "loss": 1.0, "recall@10": 0.1, "ndcg@10": 0.1, "best": true}\n')
    assert main.main(["report", str(run), "-o", str(tmp_path / "out"), "--by", "length", "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert all(Path(file).is_file() for file in files)
    names = {Path(file).name for file in files}
    assert {"training.png", "groups-1.png"} <= names
    assert "groups-2.png" not in names
    assert main.main(["report", str(run), "-o", str(tmp_path / "out"), "--by", "age"]) == 2
    assert "--by: expected names among popularity, frequency, length, got 'age'" in capsys.readouterr().err
    twin = tmp_path / "popularity"
    shutil.copytree(run, twin)
    assert main.main(["report", str(twin), "-o", str(tmp_path / "other"), "--by", "length"]) == 0
    results = json.loads((tmp_path / "other" / "numbers.json").read_text())["results"]
    assert list(results) == [f"{tmp_path.name}/popularity", "popularity", "co-occurrence"]
    capsys.readouterr()
    (run / "metrics.jsonl").write_text("{broken\n")
    assert main.main(["report", str(run), "-o", str(tmp_path / "out")]) == 2
    assert "metrics.jsonl: damaged" in capsys.readouterr().err
    assert torch.is_grad_enabled()
