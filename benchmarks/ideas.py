"""Ideas for a better SASRec, each alone: what one change does to the row 'SASRec softmax' of the ContrastVAE study.

    python -m benchmarks.ideas [--set Office] [--only "weight decay 0.1" ...] [--seeds 0,1,2] [--epochs 40]
        [--data shared/data] [--states build/ideas]

A training has the settings that studies/contrastvae.json has for its data set, one idea of IDEAS, and its own number of
epochs. Validation cases alone are ranked; no test figure is computed. A training that was cut off goes on from its last
epoch, one that is in the results is not repeated. Writes benchmarks/results/ideas.json after each training.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastcl
from benchmarks import study
from benchmarks.common import RESULTS, machine, write_json
from benchmarks.quality import HERE, revision
from benchmarks.sources import last_one
from benchmarks.study import Plan
from fastcl.recsys import SASRec
from fastcl.recsys.data import Split
from fastcl.recsys.models.batching import Packed
from fastcl.recsys.models.layers import CausalBlock, merged, seeded, split
from fastcl.recsys.models.sasrec import Batch

SETS = {"Office": "amazon/Office_Products", "Beauty": "amazon/Beauty"}
BASE = "SASRec softmax"  # its label in the manifest
WATCHED = "ndcg@20"


class Filtered(SASRec):
    """SASRec with a frequency filter beside the attention of each block, as in BSARec (Shin et al. 2024)."""

    def __init__(self, *args: Any, alpha: float, kept: int = 5, seed: int = 0, **options: Any) -> None:
        super().__init__(*args, seed=seed, **options)
        config = self.config
        with seeded(seed):
            blocks = [FilteredBlock(config.dim, config.heads, config.dropout) for _ in self.blocks]
        for block, plain in zip(blocks, self.blocks, strict=True):
            block.load_state_dict(plain.state_dict(), strict=False)
            block.alpha, block.low = alpha, low_pass(config.max_len, kept)
        self.blocks = nn.ModuleList(blocks)


class FilteredBlock(CausalBlock):
    """x + (1 - alpha) Attention(u) + alpha Filter(u) with u = LN(x), then the FFN of `CausalBlock`.

    Filter(u) = low(u) + beta^2 (u - low(u)), with a learned beta [D] that begins as N(0, 1). BSARec normalises behind
    the sum, and its low(u) reads the whole window. Here every click is a target, so that low(u) of a click reads the
    clicks up to it: what BSARec computes at the last place of a window that ends there.
    """

    alpha: float
    low: Tensor  # [L, L]

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__(dim, heads, dropout)
        self.beta = nn.Parameter(torch.randn(dim))

    def forward(self, x: Tensor, clicks: Packed) -> Tensor:
        def attended(qkv: Tensor, block: int) -> Tensor:
            return merged(F.scaled_dot_product_attention(*split(qkv, self.heads), is_causal=True))

        def smooth(u: Tensor, block: int) -> Tensor:  # [b, L, D]; padding is behind the clicks
            return self.low[: u.shape[1], : u.shape[1]] @ u

        u = self.norm_attention(x)
        low = clicks.by_length(u, smooth)
        filtered = low + self.beta**2 * (u - low)
        attention = self.out(clicks.by_length(self.qkv(u), attended))
        x = x + self.dropout((1 - self.alpha) * attention + self.alpha * filtered)
        return x + self.dropout(self.feed(self.norm_feed(x)))


def low_pass(width: int, kept: int) -> Tensor:
    """[width, width]: row t has the weights of the clicks 0..t in the last value of a window of `width` that ends with
    click t and begins with zeros, after its Fourier transform lost all frequencies but those from 0 to kept // 2.
    """
    apart = torch.arange(width)[:, None] - torch.arange(width)
    waves = torch.arange(1, kept // 2 + 1)
    kernel = (1 + 2 * torch.cos(2 * math.pi / width * waves[:, None, None] * apart).sum(0)) / width
    return kernel.tril()


class Cosine(SASRec):
    """Softmax of cosines over a temperature, in training and in scoring. `normalize` shortens item vectors in scoring
    alone.
    """

    def __init__(self, *args: Any, temperature: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.temperature = temperature

    def user_vectors(self, about: Sequence[Tensor], bucket: Tensor, clicks: Packed) -> Tensor:
        return F.normalize(super().user_vectors(about, bucket, clicks), dim=-1)

    def item_vectors(self) -> Tensor:
        return F.normalize(self.item.weight, dim=-1) / self.temperature

    def vectors_of(self, item: Tensor) -> Tensor:
        return F.normalize(self.item(item), dim=-1) / self.temperature

    def loss(self, batch: Batch) -> Tensor:
        hidden = F.normalize(self(batch.item, batch.clicks), dim=-1)
        rows = F.normalize(self.item.weight[1:], dim=-1)
        return fastcl.linear_cross_entropy(hidden, rows, batch.target - 1, self.bias, self.temperature)


class Averaged(SASRec):
    """Validates with an exponential average of its weights over the steps; the training goes on with the weights.

    The average of step t is `decay`, or where that is less (1 + t) / (10 + t), times the one before it, so that the
    first weights are soon forgotten. In eval mode parameters hold the averages and `others` the weights, in training
    the other way round; `swapped`, which a checkpoint has too, tells which it is.
    """

    swapped: Tensor
    taken: Tensor  # steps

    def __init__(self, *args: Any, decay: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.decay = decay
        self.register_buffer("swapped", torch.zeros((), dtype=torch.bool))
        self.register_buffer("taken", torch.zeros((), dtype=torch.int64))
        for nth, parameter in enumerate(self.parameters()):
            self.register_buffer(f"other{nth}", parameter.detach().clone())

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return [(parameter.data, getattr(self, f"other{nth}")) for nth, parameter in enumerate(self.parameters())]

    def after_step(self, batch: Batch) -> None:
        self.taken += 1
        taken = int(self.taken)
        for weight, average in self._pairs():
            average.lerp_(weight, 1 - min(self.decay, (1 + taken) / (10 + taken)))

    def train(self, mode: bool = True) -> "Averaged":
        if mode == bool(self.swapped):
            for one, other in self._pairs():
                kept = one.clone()
                one.copy_(other)
                other.copy_(kept)
            self.swapped.fill_(not mode)
        return super().train(mode)


class Idea(NamedTuple):
    """model: made like SASRec. options: settings, and plan: fields of the plan, each in place of the manifest's."""

    model: Callable[..., SASRec] = SASRec
    options: dict[str, Any] = {}
    plan: dict[str, Any] = {}


IDEAS = {
    "as it is": Idea(),
    "frequency filter, alpha 0.7": Idea(partial(Filtered, alpha=0.7)),
    "cosines, temperature 0.1": Idea(partial(Cosine, temperature=0.1)),
    "label smoothing 0.1": Idea(options={"label_smoothing": 0.1}),
    "weight decay 0.1": Idea(plan={"decay": 0.1}),
    "average of weights, decay 0.99": Idea(partial(Averaged, decay=0.99)),
    "width 128": Idea(options={"dim": 128}),
    "dropout 0.4": Idea(options={"dropout": 0.4}),
    "dropout 0.6": Idea(options={"dropout": 0.6}),
    "frequency filter, alpha 0.3": Idea(partial(Filtered, alpha=0.3)),
    "cosines, temperature 0.05": Idea(partial(Cosine, temperature=0.05)),
    "label smoothing 0.3": Idea(options={"label_smoothing": 0.3}),
    "weight decay 0.5": Idea(plan={"decay": 0.5}),
    "average of weights, decay 0.998": Idea(partial(Averaged, decay=0.998)),
}


def base(name: str) -> dict[str, Any]:
    """The settings and the plan that the manifest of the study has for a data set."""
    found = json.loads((HERE / "studies" / "contrastvae.json").read_text())["runs"]
    (row,) = (row for row in found if (row["label"], row["data"]) == (BASE, SETS[name]))
    return {"options": row["options"], "plan": row["plan"]}


def measured(idea: Idea, of: dict[str, Any], epochs: int, seed: int, parts: Split, folder: Path) -> dict[str, Any]:
    """Trains one idea in `folder`, going on where it was cut off. of: what `base` gives."""
    plan = {**of["plan"], **idea.plan, "epochs": epochs, "patience": epochs}
    options = {**of["options"], **idea.options}
    model = idea.model(parts.items, seed=seed, **options)
    log = study.train(model, Plan(**plan), seed, parts, folder, _say)
    return {"options": options, "plan": plan, **log, "revision": revision(), "machine": machine()}


def _say(log: dict[str, Any]) -> None:
    print(log["epochs"], *log["curve"][-1], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=SETS, default="Office")
    parser.add_argument("--only", choices=IDEAS, nargs="+", default=list(IDEAS))
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--data", type=Path, default=Path("shared/data"))
    parser.add_argument("--states", type=Path, default=Path("build/ideas"))
    parser.add_argument("--output", type=Path, default=RESULTS / "ideas.json")
    args = parser.parse_args()
    rows = json.loads(args.output.read_text())["rows"] if args.output.is_file() else []
    parts = last_one(SETS[args.set], args.data).split
    for name in args.only:
        for seed in args.seeds:
            about = {"set": args.set, "idea": name, "seed": seed, "epochs planned": args.epochs}
            if any(about.items() <= row.items() for row in rows):
                continue
            print(about, flush=True)
            folder = args.states / "-".join(str(value).replace(" ", "_") for value in about.values())
            rows.append(about | measured(IDEAS[name], base(args.set), args.epochs, seed, parts, folder))
            write_json(args.output, {"rows": rows})


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
