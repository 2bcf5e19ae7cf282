"""What a caller may change about similarities on their way into a loss: weights of hard negatives, a cap, a margin.

Each is a rule for one kind of similarity, of negatives or of positives, and applies to every loss over rows. They are
independent of each other, so they are arguments side by side. No loss formula belongs here, and no similarity is
computed here.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastcl.checks import check_constant, check_tensor, positive_number

# Similarities of the positives [N] -> those that the loss takes in their place.
Margin = Callable[[Tensor], Tensor]
# Sources of negatives, by the names of the arguments that they come from.
SOURCES = ("in_batch", "negative_keys", "queue")
Hardness = float | Mapping[str, float]
# A similarity, one for each row [N], or a function of the similarities of the positives [N] that returns such.
Cap = float | Tensor | Callable[[Tensor], Tensor]


class Adjustments(NamedTuple):
    """A caller's, as given."""

    hardness: Hardness | None = None
    margin: Margin | None = None
    cap: Cap | None = None

    def check(self, n: int, device: torch.device) -> None:
        if isinstance(self.hardness, Mapping):
            for source, beta in self.hardness.items():
                if source not in SOURCES:
                    raise ValueError(f"hardness: expected sources among {', '.join(SOURCES)}, got {source!r}")
                _check_hardness(beta)
        elif self.hardness is not None:
            _check_hardness(self.hardness)
        if self.margin is not None and not callable(self.margin):
            kind = type(self.margin).__name__
            raise TypeError(f"margin: expected a function of the similarities [N] of positives, got {kind}")
        if isinstance(self.cap, Tensor):
            check_tensor("cap", self.cap, (n,), device)
        elif self.cap is not None and not callable(self.cap):
            check_constant("cap", self.cap, lambda _: True, "of any sign", "a number, a tensor or a function")

    def hardness_of(self, source: str) -> float:
        """beta for the negatives of one source; 0 where nothing is said of it."""
        if isinstance(self.hardness, Mapping):
            return self.hardness.get(source, 0.0)
        return self.hardness or 0.0

    def moved(self, similarity: Tensor) -> Tensor:
        """The similarities of positives [N] with their margin."""
        if self.margin is None:
            return similarity
        moved = self.margin(similarity)
        check_tensor("margin", moved, tuple(similarity.shape), similarity.device)
        return moved

    def limit(self, similarity: Tensor) -> Tensor:
        """The similarity [N] above which a row's negatives are left out, given those of the positives."""
        if isinstance(self.cap, Tensor):
            return self.cap.detach().to(similarity)
        if not callable(self.cap):
            assert self.cap is not None
            return torch.full_like(similarity, self.cap)
        limit = self.cap(similarity.detach())
        check_tensor("cap", limit, tuple(similarity.shape), similarity.device)
        return limit.detach().to(similarity)


NOTHING = Adjustments()


def _check_hardness(beta: Any) -> None:
    check_constant("hardness", beta, lambda x: x >= 0, "at least 0")


class Harder(NamedTuple):
    """How a log-sum-exp over weighted negatives is one over similarities at another scale.

        exp(s x + beta stopgrad(x)) = exp((s + beta) x)

    in value. In the gradient by x the left side has s where the right has s + beta: a factor `share`, the same for all
    negatives of a row.
    """

    scale: float | Tensor  # s + beta
    bias: Tensor | None
    share: float | Tensor  # s / (s + beta): a number, [] or [N]

    @staticmethod
    def of(scale: float | Tensor, bias: Tensor | None, beta: float) -> "Harder":
        raised = scale + beta
        share = (scale / raised).detach() if isinstance(scale, Tensor) else scale / raised
        # What is no similarity has its whole gradient: it is raised here as much as `graded` lowers it.
        if isinstance(raised, Tensor):
            raised = graded(raised, 1.0 / share)
        if bias is not None and bias.requires_grad:
            if isinstance(share, Tensor) and share.dim():
                raise ValueError("log_q: expected no gradient with hardness and a temperature a row, got one")
            bias = graded(bias, 1.0 / share)
        return Harder(raised, bias, share)


def graded(x: Tensor, factor: float | Tensor) -> Tensor:
    """`x`, whose gradient is multiplied by `factor`; infinities, of which it would be NaN, pass none on. The gradient
    itself has none: a RuntimeError says so.
    """
    if torch.compiler.is_compiling():  # which takes no second derivatives
        kept = x.detach()
        return kept + factor * torch.nan_to_num(x - kept, nan=0.0)
    found: Tensor = _Graded.apply(x, factor)
    return found


class _Graded(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, factor: float | Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float | Tensor], output: Tensor) -> None:
        x, factor = inputs
        ctx.number = None if isinstance(factor, Tensor) else factor
        ctx.save_for_backward(x.isinf(), *([factor] if isinstance(factor, Tensor) else []))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        infinite, *factor = ctx.saved_tensors
        return _Last.apply((grad * (factor[0] if factor else ctx.number)).masked_fill(infinite, 0.0)), None


class _Last(torch.autograd.Function):
    """The same, without a derivative: what a weight of the negatives adds to it is not in the graph."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError("hardness: expected no second derivative of a loss with it, got one")


def cosface(margin: float = 0.35) -> Margin:
    """CosFace (Wang et al. 2018, Eq. 4): the positive's cosine less a margin. A `margin` for the losses.

        cos(t) -> cos(t) - margin

    >>> import torch, fastcl
    >>> fastcl.cosface(0.25)(torch.tensor([0.5, 1.0]))
    tensor([0.2500, 0.7500])
    >>> round(fastcl.infonce(torch.eye(2), torch.eye(2), margin=fastcl.cosface(0.25), temperature=0.5).item(), 4)
    0.2014
    """
    check_constant("margin", margin, lambda x: x >= 0, "at least 0")
    return functools.partial(_additive, margin=margin)


def _additive(similarity: Tensor, margin: float) -> Tensor:
    return similarity - margin


def arcface(margin: float = 0.5) -> Margin:
    """ArcFace (Deng et al. 2019, Eq. 3): a margin on the positive's angle. A `margin` for losses of cosines.

        cos(t) -> cos(t + margin)              where t + margin <= pi
                  cos(t) - margin sin(margin)  beyond, where the cosine would rise again

    margin: in (0, pi). The slope is infinite at a cosine of 1; it is bounded there as if the cosine were 1 - 5e-8.

    >>> import torch, fastcl
    >>> fastcl.arcface(0.5)(torch.tensor([0.0, 0.8]))  # -sin(0.5), and cos(0.5 + acos(0.8))
    tensor([-0.4794,  0.4144])
    """
    positive_number("margin", margin)
    if margin >= math.pi:
        raise ValueError(f"margin: expected a number below pi, got {margin}")
    return functools.partial(_angular, margin=margin)


def _angular(similarity: Tensor, margin: float) -> Tensor:
    square = 1.0 - similarity.square()
    # Below its bound, in the last digits of a cosine of 1, the square has the bound's value and passes the gradient on.
    passed = torch.where(square > -1e-6, square - square.detach(), 0.0)
    sine = (square.clamp(min=1e-7).detach() + passed).sqrt()
    turned = similarity * math.cos(margin) - sine * math.sin(margin)
    return torch.where(similarity > -math.cos(margin), turned, similarity - margin * math.sin(margin))
