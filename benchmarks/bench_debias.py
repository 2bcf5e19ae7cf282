"""Which losses learn what users like from a log that also depends on what users were shown? A simulation.

    python -m benchmarks.bench_debias

Models are trained on clicks from a simulated world and compared with its true preferences. Two policies decide what is
shown: one shows everybody the same items, by popularity; the other mostly follows a user's intents. Beside the trained
models stand the optima of their losses, computed from the world. A feedback loop follows, in which each round shows the
recommendations of the model trained on all earlier rounds. Writes results/debias.json, .md and .png.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.common import RESULTS, hardware, markdown, write_json, write_text
from benchmarks.debias_methods import METHODS, Log, Method
from benchmarks.optima import optima
from benchmarks.simulator import divergence, joined, rank_correlation, show, world
from fastcl.recsys.data import Histories
from fastcl.recsys.evaluation.measures import gini
from fastcl.recsys.models import Model
from fastcl.recsys.reporting import pictures
from fastcl.recsys.writing import write_bytes

POLICIES = {"popularity": 0.0, "intents": 0.8}  # name -> World.policy's share of the intents
K = 10
ABOUT = f"""KL: KL divergence in nats from p(click | user, item), normalised over the items, to the softmax of the
scores. rank corr.: Spearman's correlation of scores and p(click). recall@{K}: probability that a user's list of {K} has
the item of a click, if all items are shown equally often. recall@{K}, log: the same if items are shown by the log's
policy. taste: mean p(click) of the listed items. diversity: number of distinct items in all lists. popularity: mean
impressions of a listed item in the log, divided by the largest mean of a trained method. Figures are means (standard
deviations) over the seeds, each with a world of its own. Optima are computed from the world, as if the history told
everything about a user and every item had many clicks."""


class Setting(NamedTuple):
    """The size of the world and of the training: rare items get some clicks, and a training takes about a minute."""

    users: int = 1500
    items: int = 400
    intents: int = 8
    clicks: int = 20
    epochs: int = 12
    rounds: int = 5
    clicks_a_round: int = 6
    epochs_a_round: int = 5
    explore: float = 0.2  # share of a round's impressions that the first policy chooses
    shown: int = 20  # items in a user's list in the loop


def logits(model: Model, clicks: Histories) -> np.ndarray:
    """The scores of all items for all users, float64 [U, I]."""
    with torch.inference_mode():
        return model.scores(clicks)[:, 1:].double().numpy()


def against_truth(scores: np.ndarray, log: Log) -> dict[str, float]:
    """How near the scores [U, I] are to the users' preferences, and measures of the lists of the K best items; ABOUT
    explains them. All are expectations over the world's probabilities, without random draws.
    """
    truth = log.world.preference()
    best = np.argpartition(-scores, K, axis=1)[:, :K]

    def mass(weight: np.ndarray) -> float:
        return float((np.take_along_axis(weight, best, axis=1).sum(1) / weight.sum(1)).mean())

    return {
        "KL": divergence(truth, scores),
        "rank corr.": rank_correlation(truth, scores),
        f"recall@{K}": mass(truth),
        f"recall@{K}, log": mass(truth * log.policy),
        "taste": float(np.take_along_axis(truth, best, axis=1).mean()),
        "diversity": float(len(np.unique(best))),
        "popularity": float(log.impressions[best + 1].mean()),
    }


def loop(method: Method, log: Log, setting: Setting, seed: int, rng: np.random.Generator) -> list[dict[str, float]]:
    """The feedback loop: a model trained on all clicks so far chooses most of the next round's impressions, the first
    policy chooses the rest. Returns one row for each round; round 0 is the first policy's alone.
    """
    truth = log.world.preference()
    head = np.argsort(-log.impressions[1:])[: setting.items // 10] + 1  # the tenth of the items shown most often
    shown, clicks = log.impressions, len(log.clicks.item)
    rows = []
    for number in range(setting.rounds + 1):
        if number:
            scores = logits(method(log, setting.epochs_a_round, seed), log.clicks)
            listed = np.zeros_like(truth)
            np.put_along_axis(listed, np.argpartition(-scores, setting.shown, axis=1)[:, : setting.shown], 1.0, axis=1)
            policy = setting.explore * log.policy + (1 - setting.explore) * listed / setting.shown
            new = show(policy, truth, setting.clicks_a_round, rng)
            shown, clicks = new.impressions, len(new.clicks.item)
            log = log._replace(clicks=joined(log.clicks, new.clicks), impressions=log.impressions + shown)
        rows.append(
            {
                "head's share": float(shown[head].sum() / shown.sum()),
                "gini": gini(shown, shown),
                "clicks an impression": float(clicks / shown.sum()),
            }
        )
    return rows


def spread(values: Sequence[float], digits: int) -> str:
    mean = f"{round(statistics.mean(values), digits) + 0.0:.{digits}f}"  # no minus before a zero
    return f"{mean} ({statistics.stdev(values):.{digits}f})" if len(values) > 1 else mean


LOOPED = ("full softmax", "IPW, popularity", "CLRec, batch")


def run(setting: Setting, seeds: Sequence[int], found: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Adds the missing rows to found["measured"] (one for each policy, method and seed) and found["looped"] (one for
    each method, seed and round); yields the rows that each method added.
    """
    measured, looped = found["measured"], found["looped"]
    done = {(row["policy"], row["method"], row["seed"]) for row in measured}
    done |= {("loop", row["method"], row["seed"]) for row in looped}
    for seed in seeds:
        rng = np.random.default_rng(seed)
        made = world(setting.users, setting.items, setting.intents, rng)
        logs = {}
        for name, personal in POLICIES.items():
            policy = made.policy(personal)
            logs[name] = Log(*show(policy, made.preference(), setting.clicks, rng), policy, made)
            for label, scores in optima(logs[name]).items():
                row = {"policy": name, "method": f"optimum: {label}", "seed": seed}
                if tuple(row.values()) not in done:
                    measured.append(row | against_truth(scores, logs[name]))
        for name, label in [(name, label) for name in POLICIES for label in METHODS]:
            row = {"policy": name, "method": label, "seed": seed}
            if tuple(row.values()) not in done:
                scores = logits(METHODS[label](logs[name], setting.epochs, seed), logs[name].clicks)
                measured.append(row | against_truth(scores, logs[name]))
                yield measured[-1:]
        for label in LOOPED:
            if ("loop", label, seed) not in done:
                rounds = loop(METHODS[label], logs["popularity"], setting, seed, np.random.default_rng((seed, 1)))
                rows = [{"method": label, "seed": seed, "round": n} | row for n, row in enumerate(rounds)]
                looped += rows
                yield rows


def table(measured: Sequence[dict[str, Any]], policy: str) -> str:
    """Mean (standard deviation) over the seeds; popularity relative to the greatest of the trained methods."""
    of_policy = [row for row in measured if row["policy"] == policy]
    labels = list(dict.fromkeys(row["method"] for row in of_policy))
    greatest = max(row["popularity"] for row in of_policy if not row["method"].startswith("optimum"))
    digits = {"diversity": 0}
    rows = []
    for label in labels:
        found = [row for row in of_policy if row["method"] == label]
        cells = {}
        for name in [name for name in found[0] if name not in ("policy", "method", "seed")]:
            unit = greatest if name == "popularity" else 1.0
            cells[name] = spread([row[name] / unit for row in found], digits.get(name, 3))
        rows.append({"": label} | cells)
    return markdown(rows)


def loop_table(looped: Sequence[dict[str, Any]]) -> str:
    rows = []
    for label in dict.fromkeys(row["method"] for row in looped):
        for name in ("head's share", "gini", "clicks an impression"):
            by_round: dict[int, list[float]] = {}
            for row in looped:
                if row["method"] == label:
                    by_round.setdefault(row["round"], []).append(row[name])
            rows.append({"": label, "of a round": name} | {str(n): spread(v, 3) for n, v in by_round.items()})
    return markdown(rows)


def draw(found: dict[str, Any]) -> bytes:
    """A picture: KL from the truth by method for each policy, and the feedback loop's measures over the rounds."""

    def left(policy: str) -> pictures.Draw:
        rows = [row for row in found["measured"] if row["policy"] == policy]
        values = {m: statistics.mean(row["KL"] for row in rows if row["method"] == m) for m in METHODS}
        return lambda axes: pictures.bars(axes, values, f"exposure by {policy}", "KL from the truth, nats")

    def over_rounds(name: str) -> pictures.Draw:
        lines: dict[str, list[float]] = {}
        for label in LOOPED:
            rows = [row for row in found["looped"] if row["method"] == label]
            rounds = range(1 + max(row["round"] for row in rows))
            lines[label] = [statistics.mean(row[name] for row in rows if row["round"] == n) for n in rounds]
        return lambda axes: pictures.curves(axes, lines, "feedback loop", name, x="round", first=0)

    panels = [left(policy) for policy in POLICIES] + [over_rounds(n) for n in ("head's share", "clicks an impression")]
    return pictures.png(pictures.side_by_side(*panels))


def page(setting: Setting, found: dict[str, Any]) -> str:
    seeds = len({row["seed"] for row in found["measured"]})
    parts = [
        f"Seeds {seeds}; {', '.join(f'{name} {value}' for name, value in setting._asdict().items())}.\n{ABOUT}",
        *(f"**Exposure by {policy}**\n\n{table(found['measured'], policy)}" for policy in POLICIES),
        f"**Feedback loop, exposure by popularity first**\n\n{loop_table(found['looped'])}",
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    option = parser.add_argument
    option("--seeds", type=int, default=3, help="(default: %(default)s)")
    for name, default in Setting._field_defaults.items():
        option(f"--{name.replace('_', '-')}", type=type(default), default=default, help="(default: %(default)s)")
    option("--output", type=Path, default=RESULTS / "debias", help="path without suffix (default: %(default)s)")
    option("--resume", action="store_true", help="keep the rows of the output file, add those that it lacks")
    args = parser.parse_args()
    torch.set_num_threads(1)
    setting = Setting(*(getattr(args, name) for name in Setting._fields))
    path = args.output.with_suffix(".json")
    found: dict[str, Any] = {"machine": hardware(), "setting": setting._asdict(), "measured": [], "looped": []}
    if args.resume and path.is_file():
        earlier = json.loads(path.read_text())
        if earlier["setting"] != found["setting"]:
            parser.error(f"--resume: expected the setting of {path}, {earlier['setting']}, got {found['setting']}")
        found = earlier
    for rows in run(setting, range(args.seeds), found):
        for row in rows:
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        write_json(path, found)
    text = page(setting, found)
    write_text(args.output.with_suffix(".md"), text)
    write_bytes(args.output.with_suffix(".png"), draw(found))
    print(text)


if __name__ == "__main__":
    main()
