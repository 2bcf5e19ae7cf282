"""The settings of CLRec. The tables behind their names are in encoders.py, objectives.py, queues.py, tasks.py and
propensities.py. Those files import the settings, so this file imports none of them.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from fastcl.recsys.models.clrec.times import TIME_CUTS, UNITS, check_cuts
from fastcl.recsys.models.rowtable import RATE_MEANING, RULE_MEANING, RULES, TABLE_MEANING, TABLES, check_table
from fastcl.recsys.options import above, at_least, between, up_to
from fastcl.recsys.settings import check_choices, setting

TASKS = (("u2i",), ("u2i", "u2u"))  # u2i is always there, since serving recommends items
DUPLICATES = ("keep", "exclude")
TIME_CUTS_MEANING = """Rising limits of the time buckets, in seconds; a click's bucket is that of the time from it to
    the newest click of its history. Empty for data without times."""
TIME_UNIT_MEANING = "Unit of the data's times."
DUPLICATES_MEANING = """What to do with further clicks of the positive's item among the negatives. "keep": they stay
    in the sum, as the paper and its Theorem 1 have it{}. "exclude": they are left out."""


@dataclass(frozen=True)
class CLRecConfig:
    """Settings of `CLRec`. The defaults are the paper's production model, but for `log_q`, which is 0 in the paper. The
    models that the paper compares it with are a few settings away.
    """

    EARLIER: ClassVar[dict[str, Any]] = {"log_q": 0.0}  # what runs that do not record these settings had

    encoder: str = setting(
        "pooling",
        """User encoder. "pooling": the paper's two-step pooling. "sasrec": the Transformer of the paper's public
        tables, which are made with lr 5e-3, max_len 50 and more dropout. The commands train and tune begin with it
        where users have less than 20 clicks on average.""",
        ("pooling", "sasrec"),
    )
    objective: str = setting(
        "clrec",
        """Training loss. "clrec": the paper's, with the newest clicks as negatives. "sampled_softmax": `negatives`
        items drawn by their clicks, with log q. "negative_sampling": binary decisions over `samples` items for each
        pair, drawn by clicks ** 0.75. "shared_negatives": the same over `negatives` items for all pairs.
        "full_softmax": over all items. "ipw": the full softmax, each pair weighted by 1 / propensity.""",
        ("clrec", "sampled_softmax", "negative_sampling", "shared_negatives", "full_softmax", "ipw"),
    )
    tasks: tuple[str, ...] = setting(
        ("u2i",),
        """What is learned. "u2i": a user's next click. "u2i,u2u": also to tell a user's later clicks (up to nine) from
        those of other users. The second task has a queue of its own, which holds vectors, unless negatives_from is
        "batch".""",
    )
    dim: int = setting(64, 'Width of the item and user vectors; with encoder "sasrec" a multiple of heads.')
    heads: int = setting(4, "Attention heads of the user encoder.")
    hidden: int = setting(64, 'Width of the attention MLP of encoder "pooling".')
    blocks: int = setting(2, 'Transformer blocks of encoder "sasrec".')
    max_len: int = setting(
        20, "Clicks of a history that the model reads, the newest ones; 20 is that of the paper's production code."
    )
    dropout: float = setting(0.2, "Dropout rate of the user encoder.")
    batch: int = setting(
        256,
        """Spans in a batch. With encoder "pooling" a span is one (history, next click) pair; with "sasrec" it is a
        window of at most max_len clicks, each of which predicts the next one.""",
    )
    negatives: int = setting(
        2560,
        """Number of negatives: the newest clicks, those of the batch among them. The queue holds what a batch has too
        few.""",
    )
    negatives_from: str = setting(
        "ids",
        """Where negatives beside the batch come from. "ids": a queue of earlier positives' item numbers, encoded again
        at each step so that they learn too (the paper's variant b, which it uses for u2i). "vectors": a queue of their
        vectors (c), which is faster where features are costly to encode; then only the batch pushes items away from
        users. "batch": nowhere (a).""",
        ("batch", "ids", "vectors"),
    )
    momentum: float = setting(
        0.0,
        """Above 0, queued vectors come from encoders that follow the trained ones: momentum * old + (1 - momentum) *
        new after each batch (MoCo, He et al. 2020, has 0.999). The batch's own positives still learn.""",
    )
    features: str = setting(
        "everywhere",
        """Where item features are used: "everywhere", or for "clicks" of the history alone and not for targets and
        negatives (the paper's Table 6).""",
        ("everywhere", "clicks"),
    )
    id_dropout: float = setting(
        0.0,
        """Share of the items of a batch that are encoded by their features alone, drawn anew for each batch: dropout
        of whole ids. Needs features everywhere. It was meant for items without clicks. Of two sets it ranked these
        better among themselves on one and worse on the other, and found fewer of them among all items on both.""",
    )
    samples: int = setting(64, 'Items that objective "negative_sampling" draws for each pair.')
    propensity: str = setting(
        "popularity",
        """Propensity of objective "ipw". "popularity": the item's share of the clicks. "learned": a small multinomial
        model of the click before, trained alongside. For a module of your own, set `model.propensity`.""",
        ("popularity", "learned"),
    )
    weight_limit: float = setting(
        10.0, 'Largest weight of a pair with objective "ipw"; 1 is the weight at equal propensities.'
    )
    log_q: float = setting(
        1.0,
        """How much of the sampled softmax's correction objective "clrec" makes, from 0 to 1: log_q * log(share of the
        train clicks) is subtracted from the scores of positives and negatives in training. 1: all of it, and the
        optimum is the click probability, as for both softmaxes. 0: none, as in the paper, and the optimum is the click
        probability divided by the share. Between them the optimum is divided by share ** (1 - log_q), which is what
        SASRec has with a debias of 1 - log_q. Of the values tried 1 was the best for what users click next, and also
        for what they click when items are shown at random; 0 was the best in a simulation of exposure by popularity.
        The other objectives do not read it.""",
    )
    temperature: float = setting(0.07, "Scores are cosines / temperature.")
    duplicates: str = setting(
        "keep", DUPLICATES_MEANING.format(", except for the clicks of the same window"), DUPLICATES
    )
    lr: float = setting(3e-3, "Learning rate of the first step.")
    time_cuts: tuple[float, ...] = setting(TIME_CUTS, f'{TIME_CUTS_MEANING} Read by encoder "pooling" alone.')
    time_unit: str = setting("second", TIME_UNIT_MEANING, UNITS)
    table: str = setting("auto", TABLE_MEANING, TABLES)
    table_rule: str = setting("adam", RULE_MEANING, RULES)
    table_rate: float = setting(1.0, RATE_MEANING)

    def __post_init__(self) -> None:
        check_choices(self)
        if self.tasks not in TASKS:
            raise ValueError(f"tasks: expected u2i or u2i,u2u, got {','.join(self.tasks) or 'none'}")
        for name in ("dim", "heads", "hidden", "blocks", "max_len", "batch", "samples"):
            at_least(1, name, getattr(self, name))
        queued = self.negatives_from != "batch" and (self.objective == "clrec" or "u2u" in self.tasks)
        at_least(self.batch + 1 if queued else 1, "negatives", self.negatives)
        for name in ("dropout", "momentum", "id_dropout"):
            between(0.0, 1.0, name, getattr(self, name))
        if self.momentum and not (queued and ("u2u" in self.tasks or self.negatives_from == "vectors")):
            raise ValueError(f"momentum: expected 0 where no vectors are queued, got {self.momentum}")
        if self.id_dropout and self.features != "everywhere":
            raise ValueError(f"id_dropout: expected 0 with features={self.features}, got {self.id_dropout}")
        up_to(1.0, "log_q", self.log_q)
        if self.log_q not in (0.0, 1.0) and self.objective != "clrec":
            raise ValueError(f"log_q: expected 0 or 1 with objective={self.objective}, got {self.log_q}")
        for name in ("temperature", "weight_limit", "lr"):
            above(0.0, name, getattr(self, name))
        check_table(self.table_rate)
        check_cuts(self.time_cuts)
        if self.encoder == "sasrec" and self.dim % self.heads:
            raise ValueError(f"dim: expected a multiple of heads={self.heads}, got {self.dim}")
