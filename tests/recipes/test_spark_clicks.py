"""examples/spark_clicks.py: its raw logs have what the recipe takes out, and where Spark is installed the clicks that
it leaves are those of a plain loop.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from examples import spark_clicks
from fastcl.recsys import prepare

ROOT = Path(__file__).parents[2]


def events(logs: Path) -> list[dict[str, str]]:
    files = sorted(logs.glob("*.json.gz"))
    assert len(files) == spark_clicks.FILES
    return [json.loads(line) for file in files for line in gzip.open(file, "rt")]


def test_raw_logs_have_what_the_recipe_for_spark_takes_out(tmp_path: Path) -> None:
    spark_clicks.make(16_000, tmp_path)
    made = events(tmp_path)
    lines = [json.dumps(event) for event in made]
    assert 200 < len(lines) - len(set(lines)) < 500
    assert 1_200 < sum(event["event"] == "view" for event in made) < 2_100
    assert 5 < sum("user" not in event for event in made) < 50
    assert all(event["at"].endswith("Z") for event in made)


@pytest.mark.slow
def test_the_recipe_for_spark_gives_the_clicks_of_a_plain_loop(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    logs, out = tmp_path / "logs", tmp_path / "clicks"
    spark_clicks.make(1_600, logs)
    command = [sys.executable, "-m", "examples.spark_clicks", "clicks", str(logs), str(out), "--master", "local[1]"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    kept = {(e["user"], e["item"], e["at"]) for e in events(logs) if e["event"] == "click" and "user" in e}
    assert f"{len(kept):,} clicks" in done.stdout
    data = prepare(out, tmp_path / "prepared")
    times = {user: sorted(at for who, _, at in kept if who == user) for user in data.users}
    found = [data.log.take([row]) for row in range(len(data.users))]
    for user, row in zip(data.users, found, strict=True):
        ids = sorted(data.items.ids[item - 1] for item in row.item)
        assert ids == sorted(item for who, item, _ in kept if who == user)
        seconds = [int(datetime.fromisoformat(at).timestamp()) for at in times[user]]
        assert row.time.tolist() == seconds
