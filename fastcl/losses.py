"""The losses: each is a line of arithmetic over `pos` and `lse`, the two numbers per row of `fastcl.contrast`.

Formulas and their documentation only: how a formula becomes a loss is family.py, how a batch becomes `Rows` is rows.py.
The textbook twin of each loss is in reference.py.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastcl.arithmetic import dot, logaddexp, softplus
from fastcl.checks import as_ids, check_constant, check_scale, check_tensor, in_memory, positive_number
from fastcl.family import over_rows
from fastcl.positives import Positives
from fastcl.rows import Rows


def _as_it_is(z_loss: float = 0.0, **constants: Any) -> float | None:
    return None if z_loss else 0.0


def _nothing(**constants: Any) -> float:
    return -math.inf


def _epsilon(epsilon: float = 0.0, **constants: Any) -> float:
    return math.log(epsilon) if isinstance(epsilon, (int, float)) and epsilon > 0 else -math.inf


@over_rows("InfoNCE", beside=_as_it_is)
def infonce(rows: Rows, *, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
    """InfoNCE (van den Oord et al. 2018, Eq. 4): -log of the positive's share in the softmax over it and the negatives.

        loss_i = logaddexp(pos_i, lse_i) - pos_i,    pos_i = <q_i, p_i> / T,    lse_i = log sum_j exp(<q_i, k_j> / T)

    Replacing the import is enough for code that calls the info-nce-pytorch package: the first six arguments behave as
    there.

    Args:
        query: [N, D], float64, float32, bfloat16 or float16.
        positive_key: [N, D], row i belongs to query i.
        negative_keys: [M, D], shared by all queries, or [N, K, D], private to each. Turns in-batch negatives off unless
            in_batch=True.
        temperature: T > 0: a number, a 0-d tensor (may learn) or one value per row [N] (may learn). A model had better
            learn the logarithm of T and pass `temperature=log_temperature.exp()`, which cannot cross 0. A tensor on the
            CPU with a value of 0 or below is a ValueError; on other devices, in compiled code and under torch.func
            looking at the values would cost time, and they are not checked.
        reduction: "mean" over the N rows, "sum" or "none" ([N]).
        negative_mode: "unpaired" (negative_keys is [M, D]), "paired" ([N, K, D]) or None: the number of dimensions
            decides.
        normalize: divide each row of query, positive_key and negative_keys by its length (16-bit inputs in float32). A
            row of zeros stays zero and gets zero gradient. The rows of a queue are used as they are stored.
        in_batch: whether the positive keys of the other rows are negatives. None: True without negative_keys, False
            with them; a queue makes no difference.
        queue: a `NegativeQueue`, whose keys are negatives without gradient. The loss never pushes to it. An empty queue
            adds nothing.
        ids: [N], any integer dtype, the ids of the positives. In the batch, and in every segment that has ids, columns
            whose id equals the row's are left out of its sum. Without ids only the row's own positive is left out of
            the in-batch sum; duplicates stay.
        negative_ids: [M] or [N, K], any integer dtype, the ids of negative_keys.
        log_q: [N], log probability with which each positive is sampled as a negative: subtracted from its logit,
            wherever it stands (sampled softmax). Given for every segment or for none; the queue keeps its own.
        negative_log_q: [M] or [N, K], the same for negative_keys.
        symmetric: half the sum of both directions (CLIP, Radford et al. 2021, Fig. 3); not with negative_keys, queue,
            log_q or a temperature per row. CLIP's learnable logit_scale = exp(parameter) is temperature = 1 /
            logit_scale. Up to 2,048 rows on the CPU, outside compiled code and transforms, both directions come from
            one product: one N x N matrix is held until the backward pass and two during it. Else none is ever stored.
        weight: [N], any floating dtype, each row's loss times its weight: mean = sum(weight * loss) / N. A weight of
            1 / q, the inverse of the probability with which the positive was shown, makes any loss of the family an
            inverse propensity weighted one (Zhou et al. 2021, CLRec, Eq. 4).
        hardness: beta >= 0: negative j weighs exp(beta stopgrad(<q_i, k_j>)) in the sum, so that the more similar ones
            count for more (Lan et al. 2025, LLaVE, Eq. 3, where beta is 9; 5 in EmbeddingGemma, Vera et al. 2025). The
            weights have no gradient, so that second derivatives are refused. A mapping gives each source its own,
            {"in_batch": 5.0}; the sources are in_batch, negative_keys and queue. No pass more: the sum is one at the
            scale 1 / T + beta.
        margin: a function of the positives' similarities [N], cosines if the loss normalises, that returns those which
            the loss takes in their place: `fastcl.cosface(0.35)`, `fastcl.arcface(0.5)`, or one of your own.
        cap: leaves out likely false negatives: those whose similarity <q_i, k_j> is above a number, above one for each
            row [N], or above what a function makes of the positives' similarities [N]: `lambda s: s + 0.1` (the rule of
            Qwen3-Embedding, Zhang et al. 2025, Eq. 2), `lambda s: 0.95 * s` (NV-Retriever, Moreira et al. 2024). The
            gradient is that of the sum without them. ValueError with a loss that averages over its negatives (mine,
            mine_plus, debiased_infonce): how many are left is not known.
        label_smoothing: of `infonce` alone, from 0 to 1: the share of the target that is spread evenly over the
            positive and the row's negatives (Szegedy et al. 2016). What it adds to a loss is that share of pos_i less
            the mean of all its logits, which follows from sums of keys: no pass more. ValueError with hardness or cap.
        z_loss: of `infonce` alone, >= 0: how much (log(exp(pos_i) + exp(lse_i)))^2 adds to a row's loss, which keeps
            logits from drifting (Chowdhery et al. 2022, PaLM, section 5).

    Returns: float32, or float64 if query or any keys are float64 (dtypes may be mixed), [] or [N]. A row without
    negatives has loss 0 and zero gradient, and counts in the mean. A batch without rows (N = 0) has loss 0, as sum and
    as mean, and zero gradient. Infinite logits (see `fastcl.contrast`) give the formula's limit, or NaN where it has
    none: a negative of +inf a loss of +inf with NaN gradient, a positive of +inf over finite negatives a loss of 0.

    Gradients: query, positive_key, negative_keys, temperature, log_q, negative_log_q and weight; the true ones, for any
    upstream gradient.

    Errors: TypeError for types and dtypes, ValueError for shapes and values, each naming the argument.

    >>> import torch, fastcl
    >>> query = torch.eye(2, requires_grad=True)
    >>> loss = fastcl.infonce(query, torch.eye(2), temperature=0.5)
    >>> loss.backward()
    >>> round(loss.item(), 4)  # log(1 + e^-2)
    0.1269
    >>> shown = torch.tensor([0.5, 0.25])  # how often the two positives were shown
    >>> round(fastcl.infonce(query, torch.eye(2), temperature=0.5, weight=1 / shown).item(), 4)  # 3 times that
    0.3808
    """
    # softplus, not logaddexp(pos, lse) - pos, which cancels to 0 at convergence.
    loss = softplus(rows.lse - rows.pos)
    if label_smoothing != 0:
        check_constant("label_smoothing", label_smoothing, lambda x: 0 <= x <= 1, "from 0 to 1")
        if rows.hardness:
            raise ValueError("label_smoothing: expected 0 with hardness, got another")
        loss = loss + label_smoothing * unless_empty(rows, rows.pos - rows.mean())
    if z_loss != 0:
        check_constant("z_loss", z_loss, lambda x: x >= 0, "at least 0")
        loss = loss + z_loss * unless_empty(rows, logaddexp(rows.pos, rows.lse)).square()
    return loss


@over_rows("DCL", beside=_nothing)
def dcl(rows: Rows) -> Tensor:
    """Decoupled contrastive loss (Yeh et al. 2022): InfoNCE without the positive in the denominator.

        loss_i = lse_i - pos_i

    Arguments, gradients and errors: `infonce`. The loss may be negative.

    >>> import torch, fastcl
    >>> round(fastcl.dcl(torch.eye(2), torch.eye(2), temperature=0.5).item(), 4)  # 0 - 2
    -2.0
    """
    return unless_empty(rows, rows.lse - rows.pos)


def mises_fisher_weights(query: Tensor, positive_key: Tensor, sigma: float = 0.5) -> Tensor:
    """The weights of DCLW (Yeh et al. 2022): w_i = 2 - exp(<q_i, p_i> / sigma) / mean_k exp(<q_k, p_k> / sigma).

    Pairs that are still far apart weigh more; the mean over the N pairs is 1.

    Args:
        query, positive_key: [N, D], floating; the paper's are normalised.
        sigma: > 0; another one by `functools.partial(mises_fisher_weights, sigma=...)`.

    Returns: [N]; float32 for 16-bit inputs. No gradient: the weights are constants of a step, as in lightly. Yeh et al.
    leave that open; a weight_fn of your own that does not detach gets its gradient.

    >>> import torch, fastcl
    >>> fastcl.mises_fisher_weights(torch.eye(2), torch.eye(2))
    tensor([1., 1.])
    """
    check_tensor("query", query, ("N", "D"))
    check_tensor("positive_key", positive_key, tuple(query.shape), query.device)
    positive_number("sigma", sigma)
    similarity = dot(query.detach(), positive_key.detach())
    return 2.0 - query.shape[0] * torch.softmax(similarity / sigma, 0)


@over_rows("DCLW", beside=_nothing)
def dclw(rows: Rows, *, weight_fn: Callable[[Tensor, Tensor], Tensor] = mises_fisher_weights) -> Tensor:
    """Weighted decoupled contrastive loss, DCLW (Yeh et al. 2022): DCL with a weight on the positive term.

        loss_i = lse_i - w_i pos_i,    w = weight_fn(query, positive_key)

    `weight_fn` gets query and positive_key [N, D], normalised if the loss normalises, and returns [N]; the paper's
    negative von Mises-Fisher weights with sigma = 0.5 by default. It has its gradient if it does not detach, as the
    default does. Other arguments, gradients and errors: `infonce`; `weight` multiplies the whole loss. The loss may be
    negative.

    >>> import torch, fastcl
    >>> round(fastcl.dclw(torch.eye(2), torch.eye(2), temperature=0.5).item(), 4)  # 0 - 1 * 2
    -2.0
    """
    weights = [weight_fn(*pair) for pair in rows.pairs]
    for each, (query, _) in zip(weights, rows.pairs, strict=True):
        check_tensor("weight_fn", each, (query.shape[0],), query.device)
    return unless_empty(rows, rows.lse - (weights[0] if len(weights) == 1 else torch.cat(weights)) * rows.pos)


@over_rows("DebiasedInfoNCE", beside=None)
def debiased_infonce(rows: Rows, *, tau_plus: float = 0.1, beta: float = 0.0) -> Tensor:
    """Debiased InfoNCE (Chuang et al. 2020, Eqs. 7 and 8); with beta > 0, hard negatives (Robinson et al. 2021).

        loss_i = log(1 + N_i / exp(pos_i))
        N_i = C max((E_i - tau_plus exp(pos_i)) / (1 - tau_plus), exp(-1 / T))
        E_i = sum_j exp((1 + beta) s_ij) / sum_j exp(beta s_ij),    s_ij = <q_i, k_j> / T

    over the C columns of the row that are not excluded; with beta=0, E_i is the mean of exp(s_ij).

    Args:
        tau_plus: in [0, 1), the probability that a negative is of the positive's class; what that adds to the mean is
            taken off.
        beta: >= 0, how much a negative counts for being similar; takes two more passes over the keys.

    The bound exp(-1 / T) is the least that normalised vectors can reach, and a row that it binds sends no gradient to
    its negatives. tau_plus=0, beta=0 is InfoNCE where vectors are normalised. The weights have their gradient, as in
    the authors' code. Other arguments, gradients and errors: `infonce`; log_q raises ValueError, since the mean is one
    over keys as they are drawn; so does hardness, which is beta here.

    >>> import torch, fastcl
    >>> round(fastcl.debiased_infonce(torch.eye(2), torch.eye(2), temperature=0.5, tau_plus=0.0).item(), 4)
    0.1269
    >>> round(fastcl.debiased_infonce(torch.eye(2), torch.eye(2), temperature=0.5).item(), 4)  # N = (1 - 0.1 e^2) / 0.9
    0.0385
    """
    check_constant("tau_plus", tau_plus, lambda x: 0 <= x < 1, "at least 0 and below 1")
    check_constant("beta", beta, lambda x: x >= 0, "at least 0")
    if rows.log_q:
        raise ValueError("log_q: expected none with debiased_infonce, got one")
    if rows.hardness:
        raise ValueError("hardness: expected none with debiased_infonce, which has its beta, got one")
    log_count = rows.count().clamp(min=1).to(rows.lse).log()
    # log N_i, all the way in logarithms: exp(1 / T) overflows float32 at T = 0.01.
    negative = rows.lse
    if beta:
        empty = rows.lse == -torch.inf
        negative = (log_count + rows.lse_at(1.0 + beta) - rows.lse_at(beta)).masked_fill(empty, -torch.inf)
    if tau_plus:
        share = math.log(tau_plus) + log_count + rows.pos - negative
        nothing_left = share >= 0
        rest = negative + torch.log(-torch.expm1(share.masked_fill(nothing_left, -1.0))) - math.log1p(-tau_plus)
        negative = rest.masked_fill(nothing_left, -torch.inf)
    return unless_empty(rows, softplus(torch.maximum(negative, log_count - rows.scale) - rows.pos))


@over_rows("InfoNCEPlus", beside=_epsilon)
def infonce_plus(rows: Rows, *, epsilon: float = 0.0, lam: float = 1.1) -> Tensor:
    """InfoNCE+ (Li et al. 2023, arXiv 2312.08520): `epsilon` weighs the positive in the denominator, `lam` repulsion.

        loss_i = lam * log(epsilon * exp(pos_i) + exp(lse_i)) - pos_i

    epsilon=1, lam=1 is InfoNCE; epsilon=0, lam=1 is DCL. epsilon >= 0, lam > 0; the paper favours epsilon=0, lam=1.1.
    Arguments, gradients and errors: `infonce`. The loss may be negative.

    >>> import torch, fastcl
    >>> round(fastcl.infonce_plus(torch.eye(2), torch.eye(2), temperature=0.5, epsilon=1.0, lam=1.0).item(), 4)
    0.1269
    """
    check_constant("epsilon", epsilon, lambda x: x >= 0, "at least 0")
    positive_number("lam", lam)
    if epsilon == 0:
        return unless_empty(rows, lam * rows.lse - rows.pos)
    z = rows.pos + math.log(epsilon)
    # lam * logaddexp(z, lse) - pos, regrouped so that what cancels for lam = 1 does so before anything small is added
    # to it.
    return unless_empty(rows, lam * softplus(rows.lse - z) + ((lam - 1) * rows.pos + lam * math.log(epsilon)))


@over_rows("MINE", beside=_nothing)
def mine(rows: Rows) -> Tensor:
    """MINE (Belghazi et al. 2018; for recommendation Li et al. 2023): the negative terms are averaged, not summed.

        loss_i = lse_i - log(count_i) - pos_i,    count_i: columns in row i's sum, over all segments, exclusions left
        out

    Arguments, gradients and errors: `infonce`. The loss may be negative.

    >>> import torch, fastcl
    >>> round(fastcl.mine(torch.eye(3), torch.eye(3), temperature=0.5).item(), 4)  # log(2) - log(2) - 2
    -2.0
    """
    return unless_empty(rows, log_mean(rows) - rows.pos)


@over_rows("MINEPlus", beside=_nothing)
def mine_plus(rows: Rows, *, lam: float = 1.1) -> Tensor:
    """MINE+ (Li et al. 2023, arXiv 2312.08520): MINE with a weight `lam` > 0 on repulsion (paper: 1.1 to 1.2).

        loss_i = lam * (lse_i - log(count_i)) - pos_i

    Arguments, gradients and errors: `infonce`. The loss may be negative.

    >>> import torch, fastcl
    >>> round(fastcl.mine_plus(torch.eye(3), torch.eye(3), temperature=0.5, lam=1.2).item(), 4)
    -2.0
    """
    positive_number("lam", lam)
    return unless_empty(rows, lam * log_mean(rows) - rows.pos)


@over_rows("BSL", beside=_nothing)
def bsl(rows: Rows, *, positive_temperature: float | None = None, group: Tensor | None = None) -> Tensor:
    """Bilateral softmax loss, BSL (Wu et al. 2024): a softmax over the positives of a user too, at its own temperature.

        loss_i = log mean_j exp(z_ij) - T+ / T log mean_p exp(s_p / T+),    z_ij = <q_i, k_j> / T

    s_p are the similarities <q_p, p_p> of the rows p with row i's `group`.

    Args:
        positive_temperature: T+ > 0; None: T.
        group: [N], any integer dtype, the users of the rows; None: every row has its own, which is MINE for any T+.
            The local forms of `fastcl.distributed` refuse it, since a user's rows may lie on several ranks.

    The sum over the rows is that of the paper's loss of each user times the rows of the user, divided by T. Other
    arguments, gradients and errors: `infonce`. The loss may be negative.

    >>> import torch, fastcl
    >>> query, user = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), torch.tensor([7, 7, 8])
    >>> round(fastcl.bsl(query, query, temperature=0.5, group=user, positive_temperature=1.0).item(), 4)
    -1.0441
    """
    ratio: float | Tensor = 1.0
    if positive_temperature is not None:
        positive_number("positive_temperature", positive_temperature)
        ratio = rows.scale * positive_temperature
    together = rows.pos
    if group is not None:
        query = rows.pairs[0][0]
        group = as_ids("group", group, (query.shape[0],), query.device)
        group = group if len(rows.pairs) == 1 else torch.cat([group, group])
        # A user is numbered by the first place of its id among the sorted ids, so that every shape stays [N].
        ordered = group.sort().values
        first = torch.searchsorted(ordered, group)
        count = torch.searchsorted(ordered, group, right=True) - first
        of_user = Positives(rows.pos / ratio, rows.pos, first, torch.ones_like(rows.pos)).logsumexp()
        together = ratio * (of_user[first] - count.to(rows.pos).log())
    return unless_empty(rows, log_mean(rows) - together)


@over_rows("SLatK")
def sl_at_k(rows: Rows, *, threshold: float | Tensor = 0.0, weight_temperature: float = 1.0) -> Tensor:
    """SL@K (Yang et al. 2025): the softmax loss of positives that are, or nearly are, among a user's best K.

        loss_i = w_i (lse_i - pos_i),    w_i = sigmoid((<q_i, p_i> - threshold_i) / weight_temperature)

    Args:
        threshold: the K-th largest similarity of the row's query: a number or one for each row [N], without gradient.
            `fastcl.hard_negatives(query, table, K)[0][:, -1]` finds it over a table, or over a sample of it.
        weight_temperature: > 0.

    The weight has its gradient, as in the authors' code. Similarities are cosines if the loss normalises. Other
    arguments, gradients and errors: `infonce`. The loss may be negative.

    >>> import torch, fastcl
    >>> round(fastcl.sl_at_k(torch.eye(2), torch.eye(2), temperature=0.5, threshold=1.0).item(), 4)  # (0 - 2) / 2
    -1.0
    """
    positive_number("weight_temperature", weight_temperature)
    query = rows.pairs[0][0]
    check_scale("threshold", threshold, query.shape[0], query.device)
    similarity = torch.cat([dot(*pair) for pair in rows.pairs])
    if isinstance(threshold, Tensor):
        in_memory("threshold", threshold)
        threshold = threshold.detach().to(similarity)
        threshold = threshold.repeat(len(rows.pairs)) if threshold.dim() else threshold
    share = torch.sigmoid((similarity - threshold) / weight_temperature)
    return share.to(rows.pos) * unless_empty(rows, rows.lse - rows.pos)


def log_mean(rows: Rows) -> Tensor:
    """[N], log of the mean of exp(logit) over the negatives; -inf where there are none."""
    return rows.lse - rows.count().clamp(min=1).to(rows.lse).log()


def unless_empty(rows: Rows, loss: Tensor) -> Tensor:
    """The loss, or a constant 0 in rows that have nothing to contrast with."""
    return torch.where(rows.lse == -torch.inf, 0.0, loss)
