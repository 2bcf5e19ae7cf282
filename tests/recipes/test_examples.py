"""The scripts of examples/ train on real data, and what they learn shows: each beats its untrained encoder by more than
seeds differ.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLES = Path(__file__).parents[2] / "examples"
# By how much the trained one is to be better.
GAIN = {"cpc": 0.07, "deep_infomax": 0.02, "dgi": 0.2, "moco": 0.02, "simclr": 0.03, "simcse": 0.015}
SHARED = ("__init__", "shared")
# The scripts that train nothing, and the files that test them.
ELSEWHERE = {"serve": "test_serve", "spark_clicks": "test_spark_clicks"}


@pytest.mark.parametrize("name", GAIN)
def test_what_is_learnt_shows(name: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTCL_DATA", str(data_dir))
    untrained, trained = importlib.import_module(f"examples.{name}").main()
    assert trained > untrained + GAIN[name]


def test_every_example_is_tested_and_short() -> None:
    scripts = {path.stem: path for path in EXAMPLES.glob("*.py") if path.stem not in SHARED}
    assert scripts.keys() == {*GAIN, *ELSEWHERE}
    assert all((Path(__file__).parent / f"{test}.py").is_file() for test in ELSEWHERE.values())
    for path in scripts.values():
        assert len(path.read_text().splitlines()) < 100
