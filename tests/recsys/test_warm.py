"""A training that begins with the weights of an earlier run: rows by id, new items from their features, refusals,
what config.json records, and resuming.
"""

from __future__ import annotations

import hashlib
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from fastcl.recsys import MODELS, Feature, Histories, Interactions, Items, Model, fit, load, resume, save
from fastcl.recsys.cli import main
from fastcl.recsys.cli.runs import Run, groups_of
from fastcl.recsys.models.base import UserModel, make
from fastcl.recsys.models.carrying import MAY_DIFFER, carry
from fastcl.recsys.training import state, warm

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL: dict[str, Any] = {"dim": 8, "batch": 8, "max_len": 4, "hidden": 4, "intents": 2, "main": 16, "secondary": 4}
SMALL |= {"negatives": 16, "heads": 1, "blocks": 1}
WITH_TABLES = [name for name, model in MODELS.items() if model.Config.__dataclass_fields__.keys() & {"dim"}]


def log(first: int, users: str, features: bool = True) -> Interactions:
    """Users who each click on five of nine items from i{first} on; an item's tag is the parity of its number."""
    rows = [(user, f"i{first + (3 * n + step) % 9}", step) for n, user in enumerate(users) for step in range(5)]
    columns = dict(zip(("user", "item", "time"), map(list, zip(*rows, strict=True)), strict=True))
    data = Interactions.read(columns)
    tags = [["even" if int(item[1:]) % 2 == 0 else "odd"] for item in data.items.ids]
    found = Feature.from_labels(tags)
    return data if not features else Interactions(
        Items(data.items.ids, features={"tag": found}), data.users, data.log, data.report
    )  # fmt: skip


def tiny(name: str, data: Interactions, seed: int, **more: Any) -> Model:
    known = MODELS[name].Config.__dataclass_fields__
    options = {key: value for key, value in {**SMALL, **more}.items() if key in known}
    if name in ("mf", "lightgcn"):
        options.pop("negatives", None)
    return make(MODELS[name], data.split("none"), seed=seed, **options)


@pytest.mark.parametrize("features", [False, True])
@pytest.mark.parametrize("name", WITH_TABLES)
def test_rows_are_found_by_their_names(name: str, features: bool, tmp_path: Path) -> None:
    before, after = log(0, "abcdef", features), log(4, "defgh", features)
    earlier = tiny(name, before, seed=0)
    fit(earlier, before.split("none"), epochs=1, out=tmp_path / "run", progress=False)
    fresh, model = tiny(name, after, seed=1), tiny(name, after, seed=1)
    record = warm.start(model, tmp_path / "run")
    assert (record["items"], record["gone_items"]) == (5, 4)
    assert (record["like_others"], record["new_items"]) == ((4, 0) if features else (0, 4))
    state, drawn, old = model.state_dict(), fresh.state_dict(), earlier.state_dict()
    names = model.named_rows()
    tables = [key for key, rows in names.items() if rows.names is model.items.ids]
    assert tables
    for key in tables:
        begin, their = names[key].first, earlier.named_rows()[key].first
        for n, item in enumerate(model.items.ids):
            row = state[key][n + begin]
            if item in before.items.ids:
                torch.testing.assert_close(row, old[key][before.items.ids.index(item) + their], rtol=0, atol=0)
            elif features:
                alike = [k for k, other in enumerate(before.items.ids) if int(other[1:]) % 2 == int(item[1:]) % 2]
                mean = torch.stack([old[key][k + their] for k in alike]).mean(0)
                torch.testing.assert_close(row, mean)
            else:
                torch.testing.assert_close(row, drawn[key][n + begin], rtol=0, atol=0)
        assert torch.equal(state[key][:begin], old[key][:their])  # padding
        behind, their_behind = begin + len(after.items), their + len(before.items)
        assert torch.equal(state[key][behind:], old[key][their_behind:])  # the mask token
    if isinstance(model, UserModel):
        (key,) = [key for key, rows in names.items() if rows.names is model.users]
        for n, user in enumerate(model.users):
            expected = old[key][before.users.index(user)] if user in before.users else drawn[key][n]
            assert torch.equal(state[key][n], expected)
        assert (record["users"], record["new_users"], record["gone_users"]) == (3, 2, 3)
    for key, tensor in state.items():
        if key not in names and not any(part in key for part in ("queue", "graph")):
            assert torch.equal(tensor, old[key]), key
        if "counters" in key:
            assert not tensor.any(), key  # nothing is in a queue
    fit(model, after.split("none"), epochs=1, progress=False)


def test_a_run_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    data = log(0, "abc")
    save(tiny("sasrec", data, 0), tmp_path / "run")
    for model, message in (
        (tiny("clrec", data, 0), "init: expected a run of clrec, got one of sasrec"),
        (tiny("sasrec", data, 0, dim=4), "init: expected a run with dim=4, got 8; these may differ: dropout, batch, "),
        (tiny("sasrec", data, 0, max_len=5), "init: expected a run with max_len=5, got 4"),
    ):
        untouched = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            fit(model, data.split("none"), epochs=1, init=tmp_path / "run", out=tmp_path / "other", progress=False)
        assert not (tmp_path / "other").exists()
        assert all(torch.equal(tensor, untouched[name]) for name, tensor in model.state_dict().items())
    other = tiny("clrec", log(0, "abc", features=False), 0)
    with pytest.raises(ValueError, match="init: expected a run with the item features tag, got none"):
        carry(tiny("clrec", data, 0), other)
    for free in ({"lr": 0.5}, {"dropout": 0.0}, {"batch": 4}, {"loss": "bce"}):
        carry(tiny("sasrec", data, 0, **free), tiny("sasrec", data, 0))
    for name, order in (
        ("mf", {"sampling": "users"}),
        ("lightgcn", {"sampling": "users"}),
        ("s3rec", {"pretrain": 0}),
        ("s3rec", {"pretrain_batch": 3}),
    ):
        carry(tiny(name, data, 0, **order), tiny(name, data, 0))


def test_tensors_that_only_a_setting_of_training_makes_stay_as_drawn() -> None:
    data = log(0, "abc")
    for name, options, prefix in (
        ("contrastvae", {"augment": ("crop",)}, "alpha_logit"),
        ("clrec", {"objective": "ipw", "propensity": "popularity"}, "propensity."),
    ):
        other = {} if name == "contrastvae" else {"objective": "ipw", "propensity": "learned"}
        model, earlier = tiny(name, data, 0, **other), tiny(name, data, 1, **options)
        before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        carry(model, earlier)
        theirs = earlier.state_dict()
        drawn = {key for key in before if key.startswith(prefix)}
        assert drawn
        assert drawn == before.keys() - theirs.keys()
        for key, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor, before[key] if key in drawn else theirs[key], rtol=0, atol=0)


@pytest.mark.parametrize("tables", [("dense", "rows"), ("rows", "dense")])
def test_biases_go_from_one_kind_of_table_to_the_other(tables: tuple[str, str]) -> None:
    data = log(0, "abc")
    earlier, model = (tiny("bert4rec", data, seed, table=table, loss="sampled") for seed, table in enumerate(tables))
    bias = earlier.bias.weight if tables[0] == "rows" else earlier.bias
    with torch.no_grad():
        bias.copy_(torch.arange(len(bias)).reshape(bias.shape))
    carry(model, earlier)
    torch.testing.assert_close(model.item_vectors(), earlier.item_vectors())


def test_settings_that_may_differ_leave_the_tensors_alone() -> None:
    """No setting of the list is one of width, depth or of what an input means."""
    fields = {name for model in MODELS.values() for name in model.Config.__dataclass_fields__}
    assert set(MAY_DIFFER) - {"id_dropout"} <= fields
    assert not set(MAY_DIFFER) & {"dim", "heads", "blocks", "hidden", "max_len", "positions", "encoder", "features"}
    assert not set(MAY_DIFFER) & {"similarity", "layers", "intents", "time_cuts", "time_unit", "category", "tasks"}


def test_the_run_of_a_command_goes_on_and_says_where_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"u{user},i{(user * 3 + step) % 9},{10 * step + user}" for user in range(9) for step in range(5)]
    Path("log.csv").write_text("\n".join(["user,item,time", *rows]) + "\n")
    Path("both.csv").write_text("\n".join(["user,item,time", *rows, "u1,new,100", "u2,i4,101", "u9,i4,102"]) + "\n")
    settings = ["--set", "dim=8", "batch=8", "max_len=4", "--seen", "keep"]
    assert main.main(["train", "log.csv", "--model", "sasrec", "--epochs", "2", *settings, "-o", "first"]) == 0
    capsys.readouterr()
    again = ["train", "both.csv", "--init", "first", "--epochs", "2", "--seed", "1", "--set", "dropout=0.1"]
    assert main.main([*again, "-o", "whole"]) == 0
    told = capsys.readouterr().err
    assert "whole begins with first: 9 items by id, 0 new ones like others of their features, 1 drawn anew" in told
    assert "queues and the optimiser's moments begin empty" in told
    config = json.loads(Path("whole/config.json").read_text())
    assert config["init"]["sha256"] == hashlib.sha256(Path("first/model.safetensors").read_bytes()).hexdigest()
    assert (config["model"], config["config"]["dim"], config["config"]["dropout"]) == ("sasrec", 8, 0.1)
    assert (config["seen"], config["init"]["items"]) == ("keep", 9)
    saved = state.save

    def save_and_stop(*args: Any) -> None:
        saved(*args)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "save", save_and_stop)
        assert main.main([*again, "-o", "stopped"]) == 128 + signal.SIGINT
    assert [line["epoch"] for line in resume("stopped", progress=False)] == [1, 2]
    for one, other in zip(load("whole").state_dict().values(), load("stopped").state_dict().values(), strict=True):
        assert torch.equal(one, other)
    anew = ["train", "both.csv", "--model", "sasrec", "--epochs", "2", "--seed", "1", *settings, "-o", "new"]
    assert main.main(anew) == 0
    histories = Histories.from_lists([[1, 2]])
    assert not torch.allclose(*(load(run).scores(histories)[:, 1:] for run in ("new", "whole")))
    assert main.main(["compare", "whole", "new"]) == 0
    assert f"init=first@{config['init']['sha256'][:8]}" in capsys.readouterr().out
    assert main.main([*again[:-4], "--seed", "1,2", "--epochs", "1", "-o", "seeds"]) == 0
    kept = {file: file.read_bytes() for file in Path("seeds").rglob("*") if file.is_file()}
    capsys.readouterr()
    over = ["train", "both.csv", "--init", "seeds/seed-1", "--seed", "1,2", "--epochs", "1", "-o", "seeds", "--force"]
    assert main.main(over) == 2
    assert "--init: expected a run that is none of those of --seed 1,2" in capsys.readouterr().err
    assert kept == {file: file.read_bytes() for file in Path("seeds").rglob("*") if file.is_file()}
    for words, text in (
        (["train", "both.csv", "-o", "x"], "--model: expected one of sasrec, "),
        (["train", "both.csv", "--init", "nowhere", "-o", "x"], "--init: nowhere: not a run folder"),
        (["train", "both.csv", "--init", "first", "--model", "mf", "-o", "x"], "--init: expected a run of mf, got one"),
        (["train", "both.csv", "--init", "first", "--set", "dim=4", "-o", "x"], "--init: expected a run with dim=4"),
    ):
        assert main.main(words) == 2
        assert text in capsys.readouterr().err
        assert not Path("x/config.json").exists()


def test_a_setting_that_an_earlier_run_does_not_record_is_what_it_had(tmp_path: Path) -> None:
    old = Path(__file__).parent / "runs_of_format_1"
    before = json.loads((old / "clrec" / "config.json").read_text())
    assert "log_q" not in before["config"]
    words = ["train", str(old / "log.csv"), "--init", str(old / "clrec"), "--epochs", "1", "-o", str(tmp_path / "new")]
    assert main.main(words) == 0
    after = json.loads((tmp_path / "new" / "config.json").read_text())
    assert after["config"]["log_q"] == 0.0
    # Whether a run records a setting or has it by its time, it is the same setting.
    recorded = {**before, "config": after["config"]}
    runs = [Run(Path(name), config, load(tmp_path / "new")) for name, config in (("a", before), ("b", recorded))]
    assert len(groups_of(runs)) == 1
