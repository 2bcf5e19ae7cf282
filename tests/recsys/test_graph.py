"""The user encoder as a graph: it computes what the model does, for any number of rows and clicks, and stands alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made import made
from torch import Tensor

from fastcl.recsys import MODELS, Histories, Items, Model, SASRec, export, recommend, save
from fastcl.recsys.cli import main
from fastcl.recsys.data.containers import Feature
from fastcl.recsys.serving.graph import onnx_graph, padded, torch_graph

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # of torch.export about itself
]
ENCODERS = ["sasrec", "clrec", "multi_clrec", "bert4rec", "contrastvae"]
SIZES: dict[str, dict[str, Any]] = {
    "clrec": {"batch": 16, "negatives": 48},
    "multi_clrec": {"batch": 16, "main": 32, "secondary": 8, "intents": 4, "served": 3},
}
OTHERS = [
    ("clrec", {"encoder": "sasrec", "heads": 2}),
    ("clrec", {"features": "clicks", "momentum": 0.9, "negatives_from": "vectors", "tasks": ("u2i", "u2u")}),
    ("sasrec", {"positions": "newest", "table": "rows", "loss": "popular", "samples": 8}),
    ("sasrec", {"max_len": 1}),
    ("contrastvae", {"compat": "paper-code", "augment": (), "dim": 16, "heads": 2}),
]
GRAPHS = {"torch": torch_graph, "onnx": onnx_graph}


def items() -> Items:
    kinds = Feature(("x", "y", "z"), np.append(0, 1 + np.arange(60) % 3)[:, None])
    return Items(tuple(f"i{number}" for number in range(60)), features={"kind": kinds})


def histories(rows: int = 40) -> Histories:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 12, rows)
    times = np.concatenate([np.sort(rng.integers(0, 10**8, length)) for length in lengths])
    return Histories(np.append(0, lengths.cumsum()), rng.integers(1, 61, lengths.sum()), times)


def model(name: str, **options: Any) -> Model:
    built = made(name, items(), **{"seed": 3, "dim": 16, "max_len": 7, **SIZES.get(name, {}), **options}).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    return built


def assert_equals_the_model(to: str, built: Model) -> None:
    if to == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package, reason="needs the extra onnx")
    graph, reading = GRAPHS[to](built), built.reading()
    every = histories()
    for some in (every, every.take(np.array([3])), Histories.from_lists([[5]]), Histories.from_lists([[1, 2], [3]])):
        with torch.inference_mode():
            expected = built.encode(some).numpy()
        inputs = padded(reading, some)
        found = graph.run(inputs)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        behind = np.arange(inputs["items"].shape[1]) >= inputs["lengths"][:, None]  # padding means nothing
        junk = {name: np.where(behind, 7, x) if x.ndim == 2 else x for name, x in inputs.items()}
        np.testing.assert_array_equal(graph.run(junk), found)
    wrong = inputs | {"lengths": np.array([0, 3])}
    assert np.isnan(graph.run(wrong)).all()


@pytest.mark.parametrize("name", ENCODERS)
def test_a_torch_program_computes_what_the_model_does(name: str) -> None:
    assert_equals_the_model("torch", model(name))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), OTHERS)
def test_so_it_does_with_other_settings(name: str, options: dict[str, Any]) -> None:
    assert_equals_the_model("torch", model(name, **options))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in ENCODERS), *OTHERS])
def test_onnxruntime_computes_what_the_model_does(name: str, options: dict[str, Any]) -> None:
    assert_equals_the_model("onnx", model(name, **options))


@pytest.mark.parametrize("name", sorted(set(MODELS) - set(ENCODERS)))
def test_a_model_without_an_encoder_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"model: expected one .*, got {name}"):
        export(made(name, items(), seed=0, dim=16).eval(), tmp_path / "out", to="torch")
    assert not (tmp_path / "out").exists()


def test_a_graph_that_computes_something_else_is_not_written(tmp_path: Path) -> None:
    class Other(SASRec):
        def user_vectors(self, about: Any, bucket: Tensor, clicks: Any) -> Tensor:
            return super().user_vectors(about, bucket, clicks) + (not clicks.source.size)

    with pytest.raises(ValueError, match="model: expected a user encoder whose graph computes the same, got sasrec"):
        export(Other(items(), dim=16, seed=0).eval(), tmp_path / "out", to="torch")
    assert not (tmp_path / "out").exists()


# What a service without fastcl does.
ALONE = """
import json, sys
import numpy as np, torch

about, ids = (json.load(open(f"out/{name}.json")) for name in ("export", "ids"))
number = {item: row + 1 for row, item in enumerate(ids)}
encode = torch.export.load(f"out/{about['encoder']}").module()
vectors = torch.from_numpy(np.load("out/vectors.npy"))
history = [number[item] for item in ["i3", "i20", "i5"]][-about["clicks"]:]
query = encode(items=torch.tensor([history]), lengths=torch.tensor([len(history)]))
best = (query @ vectors.T)[0].topk(5).indices
print(json.dumps([ids[row] for row in best.tolist()]))
assert "fastcl" not in sys.modules
"""


def test_the_command_writes_files_that_stand_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    built = model("sasrec")
    save(built, tmp_path / "run")
    out = tmp_path / "out"
    assert main.main(["export", str(tmp_path / "run"), "--to", "torch", "-o", str(out)]) == 0
    assert "encoder.pt2: items, lengths of a history's newest 7 clicks to a vector" in capsys.readouterr().out
    about = json.loads((out / "export.json").read_text())
    assert about["inputs"] == {"items": "int64", "lengths": "int64"}
    assert sorted(file.name for file in out.iterdir()) == ["encoder.pt2", "export.json", "ids.json", "vectors.npy"]
    content = (out / "encoder.pt2").read_bytes()
    assert str(Path(__file__).parent.parent.parent).encode() not in content  # no paths of this machine
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALONE], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (expected,) = recommend(built, [["i3", "i20", "i5"]], k=5, seen="keep")
    assert json.loads(done.stdout) == [item for item, _ in expected]
    assert main.main(["export", str(tmp_path / "run"), "--to", "torch", "-k", "5", "-o", str(out)]) == 2
    assert "-k: expected --to faiss with it" in capsys.readouterr().err
    assert (out / "encoder.pt2").read_bytes() == content


def test_a_program_holds_what_the_encoder_reads_and_no_more() -> None:
    """Item table and network once each, and neither queues nor followers nor the tables behind the items' vectors."""
    built = model("clrec", tasks=("u2i", "u2u"), momentum=0.9, negatives_from="vectors", negatives=4096)
    weights = 4 * sum(x.numel() for x in (built.click_tables()[0], *built.user.parameters()))  # type: ignore[union-attr]
    assert len(torch_graph(built).content) < weights + 200_000 < 4 * 16 * 3840  # a queue


def test_missing_packages_are_named_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert main.main(["export", str(tmp_path / "nowhere"), "--to", "onnx", "-o", str(tmp_path / "out")]) == 2
    message = "--to: onnx needs the packages onnx, onnxscript and onnxruntime: pip install 'fastcl[onnx]'"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
