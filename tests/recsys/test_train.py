"""Training, run folders and recommendations: what is learned, what repeats, what is stored, what is refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import fastcl
from fastcl.recsys import (
    Cases,
    CLRec,
    ContrastVAE,
    Feature,
    Histories,
    Interactions,
    Items,
    MultiCLRec,
    Popularity,
    SASRec,
    Split,
    bundled,
    evaluate,
    fit,
    load,
    recommend,
    save,
)
from fastcl.recsys.models.losses import full_softmax, scalable, scored
from fastcl.recsys.training.checkpoint import read_config

MODELS = [SASRec, CLRec]
pytestmark = pytest.mark.usefixtures("one_thread")


def memory(users: int = 50, length: int = 4, count: int = 120) -> Split:
    """Random histories without repeats whose every click is to be learned by heart: validation is on the train
    clicks.
    """
    rng = np.random.default_rng(7)
    lists = [(rng.permutation(count)[:length] + 1).tolist() for _ in range(users)]
    times = [np.cumsum(rng.integers(1, 10**6, length)).tolist() for _ in range(users)]
    train = Histories.from_lists(lists, times)
    pairs = [(u, n) for u in range(users) for n in range(2, length)]
    history = Histories.from_lists([lists[u][:n] for u, n in pairs], [times[u][:n] for u, n in pairs])
    cases = Cases(np.array([u for u, _ in pairs]), history, np.array([lists[u][n] for u, n in pairs]))
    features = {"third": Feature.from_labels([[str(n % 3)] for n in range(count)])}
    items = Items(tuple(f"i{n + 1}" for n in range(count)), None, features)
    names = tuple(f"u{u}" for u in range(users))
    return Split(items, names, train, cases, cases, np.bincount(train.item, minlength=count + 1))


def small(model_class, split, seed=0):
    """A model and the settings that train it in a second or two."""
    options = {"dim": 32, "batch": 16, "dropout": 0.1} | ({"negatives": 64} if model_class is CLRec else {})
    return model_class(split.items, seed=seed, **options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One trained run of each model: (model, split, history, folder)."""
    torch.set_num_threads(1)  # a fixture of the module is made before `one_thread` of the test
    split = memory()
    made = {}
    for model_class in MODELS:
        folder = tmp_path_factory.mktemp(model_class.name) / "run"
        model = small(model_class, split)
        history = fit(model, split, epochs=3, out=folder, lr=1e-2, record={"note": "a test"}, progress=False)
        made[model_class] = (model, split, history, folder)
    return made


@pytest.mark.parametrize(
    ("model_class", "options", "epochs"),
    [
        (SASRec, {"loss": "softmax", "batch": 10, "dropout": 0.0}, 60),
        pytest.param(SASRec, {"loss": "bce", "batch": 10, "dropout": 0.0}, 200, marks=pytest.mark.slow),
        (CLRec, {"negatives": 64}, 60),
        (CLRec, {"negatives": 64, "duplicates": "exclude"}, 60),
    ],
)
def test_fifty_users_are_learned_by_heart(model_class, options, epochs):
    split = memory()
    model = model_class(split.items, seed=0, **{"batch": 32} | options)
    before = evaluate(model.eval(), split.test, counts=split.counts, k=(1,))["recall@1"]
    fit(model, split, epochs=epochs, lr=1e-2, progress=False)
    assert before < 0.1
    assert evaluate(model, split.test, counts=split.counts, k=(1,))["recall@1"] > 0.9


def test_fifty_users_are_learned_by_heart_in_several_intents():
    """Whose choice is a matter of its own: the click is among the ten best, one in twelve by chance."""
    split = memory()
    options = {"batch": 32, "main": 48, "secondary": 16, "intents": 4, "hidden": 128, "dropout": 0.0}
    model = MultiCLRec(split.items, seed=0, **options)
    assert evaluate(model.eval(), split.test, counts=split.counts)["recall@10"] < 0.2
    fit(model, split, epochs=80, lr=1e-2, progress=False)
    assert evaluate(model, split.test, counts=split.counts)["recall@10"] > 0.95


@pytest.mark.parametrize("model_class", MODELS)
def test_same_seed_same_weights(model_class, runs):
    model, split, history, _ = runs[model_class]
    torch.manual_seed(99)
    state = torch.get_rng_state()
    again = small(model_class, split)
    repeated = fit(again, split, epochs=3, lr=1e-2, progress=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert [line["loss"] for line in repeated] == [line["loss"] for line in history]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    other = small(model_class, split)
    assert fit(other, split, epochs=1, lr=1e-2, seed=1, progress=False)[0]["loss"] != history[0]["loss"]


@pytest.mark.parametrize("model_class", MODELS)
def test_two_threads_repeat_bit_for_bit(model_class):
    split = memory(users=80, length=20)
    weights = []
    torch.set_num_threads(2)
    for _ in range(2):
        model = model_class(split.items, seed=0, batch=200)
        fit(model, split, epochs=1, progress=False)
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_best_epoch_is_kept(tmp_path):
    split = memory()
    # Targets that have nothing to do with the train clicks: which epoch does best on them is chance.
    target = np.random.default_rng(3).permutation(split.valid.target)
    split = dataclasses.replace(split, valid=Cases(split.valid.user, split.valid.history, target))
    model = small(SASRec, split)
    history = fit(model, split, epochs=8, lr=1e-2, out=tmp_path / "run", progress=False)
    scores = [line["ndcg@10"] for line in history]
    assert [line["best"] for line in history] == [s > max(scores[:n], default=-1) for n, s in enumerate(scores)]
    best = int(np.argmax(scores))
    assert best < len(scores) - 1, "the last epoch is the best one, so this shows nothing"
    for kept in (model, load(tmp_path / "run")):
        assert evaluate(kept, split.valid, counts=split.counts)["ndcg@10"] == scores[best]


@pytest.mark.parametrize("model_class", MODELS)
def test_run_folder(model_class, runs):
    model, split, history, folder = runs[model_class]
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "items.json",
        "last.safetensors",
        "metrics.jsonl",
        "model.safetensors",
    ]
    assert [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] == history
    config = read_config(folder)
    assert config["model"] == model_class.name
    assert config["config"]["dim"] == 32
    assert (config["note"], config["epochs"], config["seed"], config["lr"]) == ("a test", 3, 0, 1e-2)
    assert config["versions"]["torch"] == torch.__version__
    assert config["versions"]["fastcl"] == fastcl.__version__


@pytest.mark.parametrize("model_class", MODELS)
def test_checkpoint_round_trip_is_exact(model_class, runs, tmp_path):
    model, split, _, folder = runs[model_class]
    save(model, tmp_path / "copy")
    for loaded in (load(folder), load(tmp_path / "copy")):
        assert not loaded.training
        assert torch.equal(loaded.scores(split.test.history), model.scores(split.test.history))
        assert loaded.items.ids == split.items.ids
        assert loaded.items.features["third"].values == ("0", "1", "2")
        if model_class is CLRec:
            assert len(loaded.queue) == len(model.queue) == 48
            assert torch.equal(loaded.queue.keys, model.queue.keys)
            assert torch.equal(loaded.queue.ids, model.queue.ids)
            pushed = torch.arange(5.0 * model.queue.dim).reshape(5, -1)
            assert torch.equal(loaded.queue.push(pushed).keys, load(folder).queue.push(pushed).keys)


def flip_last_byte(run: Path) -> None:
    data = bytearray((run / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (run / "model.safetensors").write_bytes(data)


def cut_in_half(run: Path) -> None:
    data = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").write_bytes(data[: len(data) // 2])


def foreign_weights(run: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(2)}, run / "model.safetensors")


def edit(run: Path, name: str, **changes: object) -> None:
    content = json.loads((run / name).read_text())
    (run / name).write_text(json.dumps(content | changes))


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (flip_last_byte, ValueError, r"model\.safetensors: damaged, its content does not match its checksum"),
        (cut_in_half, ValueError, r"model\.safetensors: damaged, or not a file that fastcl saved"),
        (foreign_weights, ValueError, r"model\.safetensors: damaged, or not a file that fastcl saved"),
        (lambda run: (run / "model.safetensors").unlink(), FileNotFoundError, r"no model\.safetensors"),
        (lambda run: (run / "items.json").write_text("["), ValueError, r"items\.json, one of which was changed"),
        (lambda run: edit(run, "items.json", ids=["x"]), ValueError, r"items\.json, one of which was changed"),
        (lambda run: edit(run, "config.json", config={"dim": 16}), ValueError, r"does not belong to config\.json"),
        (
            lambda run: edit(run, "config.json", config={"size": 1}),
            ValueError,
            r"config: expected one of dim, .*'size'",
        ),
        (
            lambda run: edit(run, "config.json", model="clrec", config={}),
            ValueError,
            r"expected model clrec, got model sasrec",
        ),
        (
            lambda run: edit(run, "config.json", model="gru"),
            ValueError,
            r"expected a model of sasrec, clrec, .*got 'gru'",
        ),
        (lambda run: edit(run, "config.json", format="x"), ValueError, r"expected a run of fastcl, got .* format 'x'"),
        (
            lambda run: edit(run, "config.json", version=3),
            ValueError,
            rf"version 1 to 2, got version 3, made by fastcl '{fastcl.__version__}'",
        ),
        (lambda run: (run / "config.json").write_text("{"), ValueError, r"config\.json: damaged"),
        (lambda run: (run / "config.json").unlink(), FileNotFoundError, r"not a run folder"),
    ],
)
def test_damaged_and_foreign_runs_are_refused(runs, tmp_path, damage, error, message):
    run = tmp_path / "run"
    shutil.copytree(runs[SASRec][3], run)
    assert load(run).name == "sasrec"
    damage(run)
    with pytest.raises(error, match=message):
        load(run)


def test_a_folder_with_content_is_refused_unless_forced(tmp_path):
    split = memory(users=4)
    out = tmp_path / "run"
    fit(small(SASRec, split), split, epochs=2, out=out, progress=False)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="exists and is not empty; --force overwrites"):
        fit(small(SASRec, split, seed=1), split, epochs=1, out=out, progress=False)
    assert (out / "model.safetensors").read_bytes() == before
    fit(small(SASRec, split, seed=1), split, epochs=1, out=out, force=True, progress=False)
    assert (out / "model.safetensors").read_bytes() != before
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="expected a folder for the run, got a file"):
        fit(small(SASRec, split), split, epochs=1, out=tmp_path / "file", progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs: expected at least 1, got 0"),
        ({"epochs": 1, "lr": -1.0}, "lr: expected a finite number above 0, got -1.0"),
        ({"epochs": 1, "seen": "hide"}, "seen: expected one of mask, keep, got 'hide'"),
        ({"epochs": 1, "patience": 0}, "patience: expected at least 1, got 0"),
        ({"epochs": 1, "schedule": "cosine"}, "schedule: expected one of linear, plateau, constant, got 'cosine'"),
        ({"epochs": 1, "metric": "gini"}, "metric: expected one of recall, .*, such as ndcg@10, got 'gini'"),
        ({"epochs": 1, "precision": "fp8"}, "precision: expected one of float32, bfloat16, got 'fp8'"),
        ({"epochs": 1, "accumulate": 0}, "accumulate: expected at least 1, got 0"),
        ({"epochs": 1, "save_every": -1.0}, "save_every: expected at least 0 and below inf, got -1.0"),
    ],
)
def test_bad_options_are_refused(options, message, tmp_path):
    split = memory(users=4)
    with pytest.raises(ValueError, match=message):
        fit(small(SASRec, split), split, out=tmp_path / "run", progress=False, **options)
    assert not (tmp_path / "run").exists()


def test_without_a_number_of_epochs_training_ends_when_validation_stops_improving(tmp_path):
    split = memory(users=12)
    history = fit(small(SASRec, split), split, lr=3e-2, patience=2, out=tmp_path / "run", progress=False)
    best = [line["epoch"] for line in history if line["best"]][-1]
    assert len(history) == best + 2 < 100
    config = read_config(tmp_path / "run")
    assert (config["epochs"], config["patience"], config["schedule"]) == (200, 2, "plateau")


def test_a_loss_that_explodes_stops_the_training(tmp_path):
    split = memory()
    with pytest.raises(FloatingPointError, match="loss: expected a finite number, got .* try a lower lr than 1e"):
        fit(small(SASRec, split), split, epochs=2, lr=1e30, out=tmp_path / "run", progress=False)
    with pytest.raises(FileNotFoundError, match="no epoch is finished yet; fastcl resume"):
        load(tmp_path / "run")


def test_accumulated_batches_are_one_large_one(tmp_path):
    """Uneven batches too: the step weighs them by their targets."""
    split = memory(users=45, length=6)
    lengths = split.train.lengths.copy()
    lengths[:15] = 3
    split = dataclasses.replace(split, train=split.train.slice(split.train.offsets[:-1], lengths))
    options = {"epochs": 4, "lr": 1e-2, "progress": False}
    losses = {}
    for batch, accumulate in ((45, 1), (10, 5), (10, 1)):
        model = SASRec(split.items, dim=16, dropout=0.0, batch=batch, seed=0)
        losses[batch, accumulate] = [line["loss"] for line in fit(model, split, accumulate=accumulate, **options)]
    assert losses[10, 5] == pytest.approx(losses[45, 1], abs=1e-5)
    assert losses[10, 1][3] < losses[45, 1][3] - 0.01  # five times as many steps


def test_a_model_counts_steps_not_batches() -> None:
    split = memory(users=45, length=6)
    model = ContrastVAE(split.items, dim=16, batch=10, seed=0)
    fit(model, split, epochs=2, accumulate=2, progress=False)
    assert model.step == 2 * 3


@pytest.mark.parametrize("model_class", MODELS)
def test_bfloat16_is_close_and_leaves_weights_in_float32(model_class):
    split = memory()
    losses = []
    for precision in ("float32", "bfloat16"):
        model = small(model_class, split)
        losses.append(fit(model, split, epochs=2, precision=precision, progress=False)[1]["loss"])
        assert all(p.dtype == torch.float32 for p in model.parameters())
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


@pytest.mark.parametrize("loss", [full_softmax, scalable])
def test_a_loss_over_all_items_multiplies_in_the_type_of_autocast(loss):
    # In float32 it would miss the units that multiply 16-bit numbers, which its products are most of the work for.
    g = torch.Generator().manual_seed(0)
    hidden, table, bias = (torch.randn(*shape, generator=g) for shape in ((6, 8), (21, 8), (20,)))
    target = torch.tensor([1, 5, 20, 3, 3, 9])
    found, rounded = [], (hidden.bfloat16(), table.bfloat16())
    for states, rows in ((hidden, table), rounded):
        with torch.autocast("cpu", torch.bfloat16, enabled=states is hidden):
            torch.manual_seed(1)  # SCE's random directions
            found.append(loss(states, scored(rows, bias), target, None))
    assert torch.equal(*found)
    torch.manual_seed(1)
    assert not torch.equal(loss(hidden, scored(table, bias), target, None), found[0])


def test_progress_is_plain_lines_off_a_terminal(capsys):
    split = memory(users=4)
    fit(small(SASRec, split), split, epochs=2, progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [line.split(":")[0] for line in shown.err.splitlines()] == ["sasrec epoch 1/2", "sasrec epoch 2/2"]


@pytest.mark.parametrize("model_class", MODELS)
def test_recommend_speaks_external_ids(model_class, runs):
    model, split, _, _ = runs[model_class]
    first, second = recommend(model, [["i3", "nonsense", "i5"], ["i7"]], k=4)
    assert len(first) == len(second) == 4
    scores = model.scores(Histories.from_lists([[3, 5], [7]]))
    scores[0, [3, 5]] = scores[1, 7] = -torch.inf
    assert [item for item, _ in first] == [split.items.ids[n - 1] for n in scores[0].topk(4).indices]
    assert [score for _, score in second] == scores[1].topk(4).values.tolist()
    everything = recommend(model, [["i3", "i5"]], k=1000)[0]
    assert {item for item, _ in everything} == set(split.items.ids) - {"i3", "i5"}
    kept = recommend(model, [["i3", "i5"]], k=1000, seen="keep")[0]
    assert {item for item, _ in kept} == set(split.items.ids)
    assert recommend(model, []) == []


def test_recommend_refuses_what_it_cannot_read(runs):
    model = runs[SASRec][0]
    with pytest.raises(TypeError, match="expected sequences of ids, got the string 'i1' in row 0"):
        recommend(model, ["i1"])


@pytest.mark.slow
def test_sasrec_beats_popularity_on_the_purchases():
    split = bundled("purchases").split()
    model = SASRec(split.items, batch=16, seed=0)
    fit(model, split, epochs=3, lr=2e-3, seen="keep", progress=False)
    options = {"counts": split.counts, "seen": "keep"}
    found, floor = (evaluate(s, split.test, **options) for s in (model, Popularity(split.counts)))
    assert found["recall@10"] > 1.1 * floor["recall@10"]
    assert found["ndcg@10"] > 1.1 * floor["ndcg@10"]


@pytest.mark.slow
def test_clrec_beats_popularity_on_toys(data_dir):
    split = Interactions.read(data_dir / "amazon" / "Toys_and_Games.txt.gz").split()
    model = CLRec(split.items, time_cuts=(), seed=0)
    fit(model, split, epochs=4, progress=False)
    found, floor = (evaluate(s, split.test, counts=split.counts) for s in (model, Popularity(split.counts)))
    assert found["recall@10"] > 2 * floor["recall@10"]
    assert found["ndcg@10"] > 2 * floor["ndcg@10"]
