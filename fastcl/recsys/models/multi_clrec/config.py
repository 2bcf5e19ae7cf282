"""The settings of Multi-CLRec."""

from dataclasses import dataclass
from typing import Any, ClassVar

from fastcl.recsys.models.clrec.config import DUPLICATES, DUPLICATES_MEANING, TIME_CUTS_MEANING, TIME_UNIT_MEANING
from fastcl.recsys.models.clrec.times import TIME_CUTS, UNITS, check_cuts
from fastcl.recsys.models.rowtable import RATE_MEANING, RULE_MEANING, RULES, TABLE_MEANING, TABLES, check_table
from fastcl.recsys.options import above, at_least, between
from fastcl.recsys.settings import check_choices, setting

CLICKS = ("all", "own")


@dataclass(frozen=True)
class MultiCLRecConfig:
    """Settings of `MultiCLRec`."""

    EARLIER: ClassVar[dict[str, Any]] = {"clicks": "own"}  # what runs that do not record these settings had

    dim: int = setting(64, "Width of the item and intention vectors.")
    intents: int = setting(16, "Number of intents, H; the paper has 16 on public data.")
    served: int = setting(
        1,
        """For how many of a user's intents items are retrieved, at most `intents`. Training takes 1; more give lists of
        several intents.""",
    )
    category: str = setting(
        "",
        """The item feature that intents are clusters of; "" for the first feature there is. It should divide the items
        into many more values than intents, none of which holds a large share of the items.""",
    )
    clicks: str = setting(
        "all",
        """The clicks that an intention vector has. "own": those of its own intent, as in the paper. "all": those of the
        other intents too, and its own twice. Loss and serving take one vector of a user, and "own" tells it nothing of
        the user's other interests: on Amazon Toys "all" is above CLRec and "own" below it.""",
        CLICKS,
    )
    hidden: int = setting(64, "Width of all MLPs.")
    max_len: int = setting(20, "Clicks of a history that the model reads, the newest ones.")
    dropout: float = setting(0.2, "Dropout rate of the clicks' vectors.")
    batch: int = setting(256, "(history, next click) pairs in a batch.")
    main: int = setting(1280, "Negatives of the main queue, the batch's own among them; the paper has 1,280.")
    secondary: int = setting(1280, "Negatives of each intent's queue; the paper has 1,280.")
    negatives_from: str = setting(
        "ids",
        """What a queue keeps of an item. "ids": its number, to encode it again at each step. "vectors": its vector.
        With vectors the encoder's MLP, which moves all items at once, learns to tell new vectors from old ones instead
        of items.""",
        ("ids", "vectors"),
    )
    temperature: float = setting(0.07, "Scores are cosines / temperature.")
    polarity: float = setting(1.0, "Weight of the loss of Eq. 10, which routes each target to a single intent.")
    separation: float = setting(
        0.0,
        """Weight of the loss of Eq. 11, which tells the target's intent from the others; 1 in the paper, 0 here. It
        also drives the chosen intent away from every target of another one, and costs accuracy on the bundled movies
        (`python -m benchmarks.choices separation`); where targets share an intent it may help.""",
    )
    balance: float = setting(1.0, "Weight of the loss of Eq. 12, which spreads the items evenly over the intents.")
    duplicates: str = setting("keep", DUPLICATES_MEANING.format(""), DUPLICATES)
    lr: float = setting(3e-3, "Learning rate of the first step.")
    time_cuts: tuple[float, ...] = setting(TIME_CUTS, TIME_CUTS_MEANING)
    time_unit: str = setting("second", TIME_UNIT_MEANING, UNITS)
    table: str = setting("auto", TABLE_MEANING, TABLES)
    table_rule: str = setting("adam", RULE_MEANING, RULES)
    table_rate: float = setting(1.0, RATE_MEANING)

    def __post_init__(self) -> None:
        for name in ("dim", "intents", "served", "hidden", "max_len", "batch", "secondary"):
            at_least(1, name, getattr(self, name))
        at_least(self.batch + 1, "main", self.main)
        between(0.0, 1.0, "dropout", self.dropout)
        for name in ("polarity", "separation", "balance"):
            between(0.0, float("inf"), name, getattr(self, name))
        for name in ("temperature", "lr"):
            above(0.0, name, getattr(self, name))
        check_choices(self)
        if self.served > self.intents:
            raise ValueError(f"served: expected at most intents={self.intents}, got {self.served}")
        check_table(self.table_rate)
        check_cuts(self.time_cuts)
