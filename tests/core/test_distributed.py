"""Losses over several ranks: starts the processes of ranks.py and asserts that their checks passed.

One start runs all of them, for every number of ranks. What needs no second rank is tested in this process, as
the only rank of a group.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from rank_inputs import FORMS, D
from torch import Tensor

import fastcl
from fastcl import distributed

COUNTS = (2, 3)


@functools.cache
def _printed() -> str:
    """What the ranks of all groups print."""
    command = [sys.executable, ranks.__file__, *map(str, COUNTS)]
    folders = (Path(__file__).parents[1], os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, folders))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    return done.stdout + ("" if done.returncode == 0 else done.stderr[-2000:])


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", list(ranks.CHECKS))
def test_ranks(count: int, name: str) -> None:
    output = _printed()
    assert re.search(rf"^passed {name} on {count}$", output, re.MULTILINE), output[-6000:]


@pytest.fixture
def _only_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


ONES = torch.ones(3, D)


@pytest.mark.usefixtures("_only_rank")
@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"positive_key": "k"}, TypeError, "positive_key.*tensor.*str"),
        ({"positive_key": torch.ones(2, D)}, ValueError, r"positive_key.*\[3, 4\].*\[2, 4\]"),
        ({"ids": torch.ones(3)}, TypeError, "ids.*integer.*float32"),
        ({"ids": torch.ones(2).long()}, ValueError, r"ids.*\[3\].*\[2\]"),
        ({"log_q": torch.ones(3).long()}, TypeError, "log_q.*int64"),
        ({"log_q": torch.ones(4)}, ValueError, r"log_q.*\[3\].*\[4\]"),
        ({"weight": torch.ones(4)}, ValueError, r"weight.*3.*\[4\]"),
        ({"temperature": 0.0}, ValueError, "temperature.*0"),
        ({"reduction": "max"}, ValueError, "reduction.*'mean'.*'max'"),
        ({"symmetric": True, "log_q": torch.ones(3)}, ValueError, "symmetric.*no log_q"),
        ({"symmetric": True, "temperature": torch.ones(3)}, ValueError, r"symmetric: expected a single temp.*\[3\]"),
        ({"cap": torch.ones(2)}, ValueError, r"cap: expected shape \[3\], got \[2\]"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_refused(form: str, change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FORMS[form](fastcl.infonce)(**{"query": ONES, "positive_key": ONES, **change})


@pytest.mark.usefixtures("_only_rank")
def test_refused_by_one_form() -> None:
    for name in ("negative_keys", "negative_ids", "negative_log_q", "in_batch"):
        with pytest.raises(ValueError, match=f"{name}: expected none, the keys of all ranks take its place"):
            distributed.gathered(fastcl.infonce)(ONES, ONES, **{name: ONES})
    queue = fastcl.NegativeQueue(3, D)
    with pytest.raises(ValueError, match="symmetric: expected no queue"):
        distributed.gathered(fastcl.infonce)(ONES, ONES, symmetric=True, queue=queue)
    for name, value in (("queue", queue), ("negative_keys", ONES), ("negative_ids", ONES), ("in_batch", False)):
        with pytest.raises(ValueError, match=f"{name}: expected none"):
            distributed.ring(fastcl.infonce)(ONES, ONES, **{name: value})
    with pytest.raises(TypeError, match="loss: expected a formula over pos and lse.*sampled_softmax"):
        distributed.ring(fastcl.sampled_softmax)
    with pytest.raises(TypeError, match=r"x: expected a tensor, got list"):
        distributed.gather([1.0])
    with pytest.raises(ValueError, match=r"x: expected rows.*\[\]"):
        distributed.gather(torch.tensor(1.0))
    with pytest.raises(TypeError, match=r"ids: expected a tensor of an integer dtype"):
        distributed.push(queue, ONES, torch.ones(3))
    with pytest.raises(TypeError, match="queue: expected a NegativeQueue, got Linear"):
        distributed.push(torch.nn.Linear(2, 2), ONES)
    with pytest.raises(TypeError, match="model: expected a module, got int"):
        distributed.keep_local(3)
    for count, error in ((-1, ValueError), (2.5, TypeError), ("3", TypeError), (True, TypeError)):
        with pytest.raises(error, match="count: expected"):
            distributed.row_ids(count)
    for dtype in (torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match=f"x: expected dtype float64.* where it has a gradient, got {dtype}"):
            distributed.gather(ONES.to(dtype).requires_grad_())


@pytest.mark.usefixtures("_only_rank")
@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("loss", [fastcl.infonce, fastcl.dcl])
@pytest.mark.parametrize("learns", ["query", "key", "both"])
def test_double_backward_is_never_silently_wrong(form: str, loss: Callable[..., Tensor], learns: str) -> None:
    # dcl too, whose mean sends back a constant, from which one cannot tell that it will be differentiated again.
    query = torch.eye(D).requires_grad_(learns != "key")
    key = (2 * torch.eye(D)).requires_grad_(learns != "query")
    inputs = [t for t in (query, key) if t.requires_grad]
    if form == "gathered" and learns == "query":
        # Gathered keys that do not learn have no backward pass; the op itself cannot differentiate frozen keys twice.
        (first,) = torch.autograd.grad(FORMS[form](loss)(query, key, normalize=False), inputs, create_graph=True)
        with pytest.raises(RuntimeError, match="pass a key that requires grad"):
            torch.autograd.grad((first**2).sum(), inputs)
        return
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(FORMS[form](loss)(query, key, normalize=False), inputs, create_graph=True)


@pytest.mark.usefixtures("_only_rank")
@pytest.mark.parametrize("learns", ["query", "shard", "temperature"])
def test_double_backward_of_a_shared_table_is_refused(learns: str) -> None:
    inputs = {"query": torch.eye(D), "shard": 2 * torch.eye(D), "temperature": torch.tensor(0.5)}
    inputs[learns].requires_grad_()
    loss = distributed.sharded_cross_entropy(**inputs, target=torch.arange(D))
    with pytest.raises(RuntimeError, match="sharded_cross_entropy: double backward"):
        torch.autograd.grad(loss, inputs[learns], create_graph=True)


@pytest.mark.usefixtures("_only_rank")
@pytest.mark.parametrize(
    "name", ["nt_xent", "supcon", "siglip", "bpr", "uniformity", "alignment", "linear_cross_entropy"]
)
@pytest.mark.parametrize("form", list(FORMS))
def test_losses_of_other_arguments_name_the_way(form: str, name: str) -> None:
    with pytest.raises(TypeError, match=r"loss: expected.*call the loss with gathered arguments.*gather\(x\)"):
        FORMS[form](getattr(fastcl, name))


@pytest.mark.usefixtures("_only_rank")
@pytest.mark.parametrize("form", list(FORMS))
def test_the_group_of_bsl_is_refused(form: str) -> None:
    """Its rows may lie on several ranks, and each rank would take the mean over its own."""
    options = {"group": torch.tensor([7, 7, 8]), "positive_temperature": 0.2}
    for loss, given in ((fastcl.bsl, options), (functools.partial(fastcl.bsl, **options), {})):
        with pytest.raises(ValueError, match=r"group: expected none.*several ranks.*gather\(x\)"):
            FORMS[form](loss)(ONES, ONES, **given)


@pytest.mark.usefixtures("_only_rank")
@pytest.mark.parametrize("form", list(FORMS))
def test_the_keywords_of_a_partial_are_defaults_of_the_call(form: str) -> None:
    g = torch.Generator().manual_seed(0)
    query, key = (torch.randn(6, D, generator=g) for _ in range(2))
    log_q, queue = -torch.rand(6, generator=g), fastcl.NegativeQueue(8, D)
    queue.push(torch.randn(3, D, generator=g))
    settings: list[dict[str, Any]] = [
        {"reduction": "none"},
        {"ids": torch.arange(6) // 2},
        {"log_q": log_q},
        {"symmetric": True, "reduction": "sum"},
        {"temperature": 0.3, "weight": log_q},
    ]
    for given in settings + ([{"queue": queue}] if form == "gathered" else []):
        fixed = FORMS[form](functools.partial(fastcl.infonce, **given))
        torch.testing.assert_close(fixed(query, key), FORMS[form](fastcl.infonce)(query, key, **given))
    fixed = FORMS[form](functools.partial(fastcl.infonce, reduction="sum"))
    assert torch.equal(fixed(query, key, reduction="mean"), FORMS[form](fastcl.infonce)(query, key))
    with pytest.raises(TypeError, match="loss: expected a function such as fastcl.infonce.*InfoNCE"):
        FORMS[form](fastcl.nn.InfoNCE(0.2))
