"""The settings of ContrastVAE."""

from dataclasses import dataclass

from fastcl.recsys.models.contrastvae.rules import RULES
from fastcl.recsys.models.contrastvae.views import CONTRASTS, SEQUENCE
from fastcl.recsys.models.layers import NORMALIZE_MEANING, POSITIONS, SMOOTHING_MEANING
from fastcl.recsys.options import above, at_least, between, one_of, up_to
from fastcl.recsys.settings import check_choices, setting

# Second views of an unchanged sequence: a second pass with other dropout (MA), and learned noise on sigma (VA).
MODEL, VARIATIONAL = "dropout", "variational"
ALPHAS = {"scalar": lambda config: (), "dimension": lambda c: (c.dim,), "position": lambda c: (c.max_len, 1)}
TEMPERATURES = ("fixed", "learned")
RECONSTRUCTIONS = ("softmax", "sampled", "bce")


@dataclass(frozen=True)
class ContrastVAEConfig:
    """Settings of `ContrastVAE`. With compat="paper-code" the defaults are those of the authors' program
    (rules.PAPER_CODE).
    """

    dim: int = setting(64, "Width of the item vectors, the latent variable and every layer; a multiple of heads.")
    heads: int = setting(2, "Attention heads of each block.")
    blocks: int = setting(1, "Blocks of each of the three Transformers (mean, log-variance, decoder).")
    max_len: int = setting(
        50,
        """Clicks of a history that the model reads: the newest ones when serving. Training cuts longer histories into
        windows of at most this many clicks.""",
    )
    positions: str = setting(
        "newest",
        """Which end of a window its positions are counted from: its "newest" click or its "oldest" one. It must be
        "newest" with compat="paper-code".""",
        POSITIONS,
    )
    dropout: float = setting(0.5, "Dropout rate of embeddings and blocks.")
    attention_dropout: float = setting(0.0, "Dropout rate of the attention weights.")
    batch: int = setting(128, "Windows in a batch.")
    augment: tuple[str, ...] = setting(
        (VARIATIONAL,),
        """What makes the second view of a sequence; several names combine. "crop", "mask", "reorder": a changed
        sequence (the paper's DA), one of those named by chance. "dropout": a second pass with other dropout (MA).
        "variational": learned noise on sigma (VA). Empty: one view and no contrast (the paper's AVAE).""",
    )
    alpha: str = setting(
        "scalar",
        'Shape of the factor on sigma that "variational" learns: one for all, or one a dimension or a position.',
        tuple(ALPHAS),
    )
    sigma_dropout: float = setting(
        0.2,
        'Dropout rate of sigma in the second view, with compat="paper-code" alone and where augment is a changed '
        'sequence or "dropout".',
    )
    reconstruction: str = setting(
        "softmax",
        """Loss of the decoder. "softmax": cross-entropy over all items. "sampled": over the target and `samples` items.
        "bce": binary cross-entropy of the next item against one item that the user never clicked.""",
        RECONSTRUCTIONS,
    )
    samples: int = setting(512, 'Items that reconstruction "sampled" draws for each batch, uniformly.')
    debias: float = setting(
        0.0,
        """Strength of logit adjustment (Menon et al. 2021). Training adds debias * log(share of the train clicks) to
        each item's logit and scoring does not, so that the scores leave out this part of an item's popularity.""",
    )
    label_smoothing: float = setting(0.0, SMOOTHING_MEANING)
    normalize: float = setting(0.0, NORMALIZE_MEANING)
    contrast: str = setting(
        "infonce",
        """Contrastive loss between the two views of a sequence, over cosines / temperature. "nt_xent" has the other
        sequences of the same view as negatives too. All others are losses of fastcl with their defaults, in both
        directions: "infonce", "dcl", "mine_plus", ..., or one of your own that `fastcl.over_rows` has made.""",
        CONTRASTS,
    )
    contrast_weight: float = setting(0.3, "Weight of the contrast in the loss.")
    temperature: float = setting(0.2, "Temperature of the contrast, or its first value where it is learned.")
    temperature_is: str = setting("fixed", 'Whether the temperature stays "fixed" or is "learned".', TEMPERATURES)
    kl_weight: float = setting(0.005, "Weight of the KL divergence in the loss, once it has risen to it.")
    kl_steps: int = setting(1000, "The weight of the KL divergence is min(kl_weight, optimiser steps / kl_steps).")
    lr: float = setting(3e-3, "Learning rate of the first step.")
    compat: str = setting(
        "none",
        '"none": the mathematics of the paper. "paper-code": what the authors\' program does where it differs.',
        RULES,
    )

    def __post_init__(self) -> None:
        for name in ("dim", "heads", "blocks", "max_len", "batch", "samples", "kl_steps"):
            at_least(1, name, getattr(self, name))
        for name in ("dropout", "attention_dropout", "sigma_dropout"):
            between(0.0, 1.0, name, getattr(self, name))
        for name in ("debias", "contrast_weight", "kl_weight"):
            between(0.0, float("inf"), name, getattr(self, name))
        up_to(1.0, "label_smoothing", self.label_smoothing)
        if self.label_smoothing and self.reconstruction != "softmax":
            wanted = f"expected 0 with reconstruction={self.reconstruction}"
            raise ValueError(f"label_smoothing: {wanted}, got {self.label_smoothing}")
        up_to(1.0, "normalize", self.normalize)
        for name in ("temperature", "lr"):
            above(0.0, name, getattr(self, name))
        for name in self.augment:
            one_of((*SEQUENCE, MODEL, VARIATIONAL), "augment", name)
        check_choices(self)
        if self.compat != "none" and self.positions != "newest":
            raise ValueError(f'positions: expected "newest" with compat={self.compat!r}, got {self.positions!r}')
        if self.dim % self.heads:
            raise ValueError(f"dim: expected a multiple of heads={self.heads}, got {self.dim}")
