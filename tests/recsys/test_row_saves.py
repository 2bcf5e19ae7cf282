"""Checkpoints of tables that several processes share out: one file a process behind one file that names them, read by
any number of processes, whole after a kill at any moment."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import rows_ranks
import saves_ranks
import torch
from forks import ended, first_end_kills, run_together, started
from torch import Tensor

from fastcl.recsys import evaluate, load, resume
from fastcl.recsys.cli import main
from fastcl.recsys.cli.runs import inputs_of
from fastcl.recsys.training import checkpoint, parts, tensorfile
from fastcl.recsys.writing import check_output

pytestmark = pytest.mark.usefixtures("one_thread")
ITEMS = 70  # of rows_ranks.split()


def put(path: Path, of: int, number: int = 0) -> list[Path]:
    """A file with `of` parts, as parts.py describes it."""
    alike, rows = saves_ranks.saved(number)
    files, named = [], []
    for rank in range(of):
        files.append(path.with_name(f"{path.stem}-{rank}-of-{of}-{number:016x}.safetensors"))
        checksum = tensorfile.write_tensors(files[-1], {"rows": rows[rank::of]}, {"number": str(number)})
        named.append([files[-1].name, checksum])
    tensorfile.write_tensors(path, {"alike": alike}, {"number": str(number), "parts": json.dumps(named)})
    return files


def check_saved(found: dict[str, Tensor], facts: dict[str, str], width: int = 3) -> int:
    alike, rows = saves_ranks.saved(int(facts["number"]), width)
    assert torch.equal(found["alike"], alike)
    assert torch.equal(found["rows"], rows)
    return int(facts["number"])


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 12])
def test_any_number_of_processes_reads_the_rows_of_any_other(rows: int) -> None:
    whole = torch.arange(2.0 * rows).view(rows, 2)
    for count in range(1, 6):
        cut = [whole[rank::count] for rank in range(count)]
        for of in range(1, 6):
            for rank in range(of):
                found = parts.joined(cut, parts.Share(rank, of))
                assert found is not None
                assert torch.equal(found, whole[rank::of])


def test_parts_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    first, second, third = put(path, 3)
    assert check_saved(*parts.read(path)) == 0
    rows = saves_ranks.saved(0)[1]
    for change in (
        lambda: shutil.copy(second, first),
        lambda: tensorfile.write_tensors(first, {"rows": rows[:3] + 1}, {}),
        lambda: put(path, 3, 1)[0].unlink(),
        lambda: tensorfile.write_tensors(path, {}, {"parts": '[["../last-0-of-1-0123456789abcdef.safetensors", "0"]]'}),
        lambda: tensorfile.write_tensors(path, {}, {"parts": "{}"}),
    ):
        put(path, 3)
        change()
        with pytest.raises(ValueError, match=r"damaged|expected"):
            parts.read(path)
    for wrong in (rows[:1], rows[:4], rows[:3].double(), rows[:3, :2], torch.tensor(1.0)):
        assert parts.joined([wrong, rows[1::3], rows[2::3]], parts.ALL) is None


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    for file in (path, *put(path, 2)):
        data = file.read_bytes()
        for place in range(0, len(data), 7):
            file.write_bytes(data[:place] + bytes([data[place] ^ 0x21]) + data[place + 1 :])
            refused = []
            for rank in (0, 1):  # of two processes that read, one at least finds it
                try:
                    parts.read(path, ["rows"], parts.Share(rank, 2))
                except ValueError as error:
                    refused.append(str(error))
            assert refused, (file.name, place)
            assert all(str(tmp_path) in text for text in refused)
        file.write_bytes(data)
    assert check_saved(*parts.read(path)) == 0


def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    old, true = put(path, 2), tensorfile.mapped

    def replaced(part: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
        if part == old[0] and old[0].exists():
            put(path, 3, 1)
            for one in old:
                one.unlink()
        return true(part)

    monkeypatch.setattr(tensorfile, "mapped", replaced)
    assert check_saved(*parts.read(path)) == 1


def test_a_kill_at_any_change_of_names_leaves_a_whole_save(tmp_path: Path) -> None:
    path, told, found = tmp_path / "last.safetensors", tmp_path / "told", set()
    for victim in (0, 1):
        for point in range(20):
            for file in tmp_path.glob("*.safetensors"):
                file.unlink()
            told.unlink(missing_ok=True)
            first_end_kills(started(2, tmp_path / "store", partial(saves_ranks.save_twice, path, victim, point, told)))
            found.add(check_saved(*parts.read(path)))
            if told.exists():
                break
        assert point > victim  # the first process has more to change than its part
    assert found == {0, 1}
    # What a kill has left goes at the next save; parts of other files stay.
    others = put(tmp_path / "model.safetensors", 2)
    run_together(2, tmp_path / "store", partial(saves_ranks.save_often, path, 1))
    assert len(parts.found_in(tmp_path)) == 2 + len(others)


@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_kill_at_a_random_moment_leaves_the_last_whole_save(times: int, tmp_path: Path) -> None:
    path, done, width = tmp_path / "last.safetensors", tmp_path / "done", 50_000
    chance = random.Random(times)
    for _ in range(times):
        done.unlink(missing_ok=True)
        children = started(3, tmp_path / "store", partial(saves_ranks.save_often, path, 10**6, width, done))
        while not done.exists():
            time.sleep(0.01)
        time.sleep(0.3 * chance.random())
        for child in chance.sample(children, 3):
            os.kill(child, signal.SIGKILL)
            time.sleep(0.01 * chance.random())
        # A process may notice that another has gone, and end with an error, before it is killed itself.
        ends = {ended(child) for child in children}
        assert -signal.SIGKILL in ends
        assert ends <= {-signal.SIGKILL, 1}
        assert check_saved(*parts.read(path), width) >= int(done.read_text() or 0)


def test_two_then_three_then_one_process_train_as_one_does(tmp_path: Path) -> None:
    saves_ranks.go_on(tmp_path / "none", tmp_path / "alone", None)
    folder = tmp_path / "run"
    folder.mkdir()
    steps = 2 * 5  # of both epochs
    run_together(2, tmp_path / "store", partial(saves_ranks.go_on, folder, None, 2))
    assert len(parts.found_in(folder)) == 2
    run_together(3, tmp_path / "store", partial(saves_ranks.go_on, folder, None, steps - 4))
    assert len(parts.found_in(folder)) == 3
    saves_ranks.go_on(folder, tmp_path / "shared", None)
    alone, shared = (torch.load(tmp_path / name) for name in ("alone", "shared"))
    assert alone.keys() == shared.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(shared[name], tensor, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes, and one that was interrupted in each of its epochs."""
    out = tmp_path_factory.mktemp("runs")
    run_together(2, out / "store", partial(saves_ranks.train, out / "whole"))
    run_together(2, out / "store", partial(saves_ranks.train, out / "stopped", 3))
    run_together(2, out / "store", partial(saves_ranks.train, out / "stopped", 4, True))
    shutil.copytree(out / "stopped", out / "within")
    run_together(2, out / "store", partial(saves_ranks.train, out / "stopped", None, True))
    return out


def test_as_many_processes_go_on_with_the_same_bits(runs: Path) -> None:
    for name in ("last.safetensors", "model.safetensors"):
        whole, stopped = (parts.read(runs / run / name)[0] for run in ("whole", "stopped"))
        assert whole.keys() == stopped.keys()
        for key, tensor in whole.items():
            assert torch.equal(tensor, stopped[key]), key
    assert len(parts.read(runs / "within" / "last.safetensors")[0]["model/item.weight"]) == ITEMS + 1
    assert len(parts.found_in(runs / "whole")) == 4  # of each process one of the state and one of the weights


def test_a_run_of_two_processes_is_a_run_like_any_other(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows_ranks.split()
    model = load(runs / "whole")
    assert len(data.items) == ITEMS
    assert model.scores(data.test.history)[:, 1:].isfinite().all()
    alone = resume(runs / "within", data, progress=False)  # in one process
    assert [line["epoch"] for line in alone] == [1, 2]
    # The state is in one file from now on; weights of an epoch of two processes may still be the best ones.
    assert not any(part.name.startswith("last") for part in parts.found_in(runs / "within"))
    assert {path.name for path in runs.glob("within/*") if not parts.is_part(path.name)} <= set(checkpoint.FILES)
    # Everything is written over, and nothing else.
    again = tmp_path / "again"
    shutil.copytree(runs / "whole", again)
    checkpoint.save(model, again)
    assert sorted(os.listdir(again)) == ["config.json", "items.json", "model.safetensors"]
    assert torch.equal(load(again).item_vectors(), model.item_vectors())
    for words in (["recommend", "--history", "i1,i2"], ["export", "--to", "npy", "-o", str(tmp_path / "vectors")]):
        assert main.main([words[0], str(runs / "whole"), *words[1:]]) == 0, capsys.readouterr().err
    part = parts.found_in(runs / "whole")[2]
    with pytest.raises(ValueError, match=r"expected another file than model-0-of-2-\w+\.safetensors of the run"):
        check_output("-o", part, inputs_of(runs / "whole"))


def test_a_run_of_two_processes_is_measured_and_reported(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, log = rows_ranks.split(), tmp_path / "log.csv"
    log.write_text("user,item\n" + "".join(f"{user},{item}\n" for user, item in rows_ranks.clicks()))
    table = parts.read(runs / "whole" / "model.safetensors")[0]["item.weight"]
    model = saves_ranks.small(data)
    model.load_state_dict(parts.read(runs / "whole" / "model.safetensors")[0])
    assert torch.equal(model.item_vectors(), table)
    truth = evaluate(model, data.test, counts=data.counts)
    assert main.main(["evaluate", str(runs / "whole"), "--data", str(log), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["results"]["sasrec"]
    assert 0 < found["ndcg@10"] < 1
    assert {name: found[name] for name in ("recall@10", "ndcg@10")} == {
        name: pytest.approx(truth[name], rel=1e-6) for name in ("recall@10", "ndcg@10")
    }
    assert main.main(["report", str(runs / "whole"), "--data", str(log), "-o", str(tmp_path / "page")]) == 0
    numbers = json.loads((tmp_path / "page" / "numbers.json").read_text())
    assert numbers["results"]["whole"]["ndcg@10"] == pytest.approx(found["ndcg@10"], rel=1e-12)
    assert [line["epoch"] for line in numbers["curves"]["whole"]] == [1, 2]


def test_a_row_out_of_range_in_one_process_ends_all(tmp_path: Path) -> None:
    begun = time.perf_counter()
    run_together(3, tmp_path / "store", partial(saves_ranks.misread, tmp_path))
    assert time.perf_counter() - begun < 50  # the group's time-out is 60
    said = [(tmp_path / f"said{rank}").read_text() for rank in range(3)]
    assert said[1] == f"reads: expected rows 0 to {ITEMS}, got 999"
    assert said[0] == said[2] == f"reads: expected rows 0 to {ITEMS}, got others in process 1 of 3"


@pytest.mark.slow
def test_trainings_killed_at_random_moments_end_alike(runs: Path, tmp_path: Path) -> None:
    run, chance = tmp_path / "run", random.Random(0)
    kills = 0
    while kills < 20:
        again = (run / "config.json").exists()
        children = started(2, tmp_path / "store", partial(saves_ranks.train, run, None, again))
        time.sleep(0.2 + 1.5 * chance.random())
        for child in chance.sample(children, 2):
            os.kill(child, signal.SIGKILL)
        ends = [ended(child) for child in children]
        kills += 1
        if ends == [0, 0]:
            shutil.rmtree(run)
    if (run / "config.json").exists():
        run_together(2, tmp_path / "store", partial(saves_ranks.train, run, None, True))
    else:
        run_together(2, tmp_path / "store", partial(saves_ranks.train, run))
    whole, killed = (parts.read(folder / "model.safetensors")[0] for folder in (runs / "whole", run))
    for key, tensor in whole.items():
        assert torch.equal(tensor, killed[key]), key
