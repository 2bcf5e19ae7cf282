# Written by tests/stubs.py (make stubs) from the registry of the losses.

import collections.abc

import torch

import fastcl.rows
from fastcl.module import LossModule

class InfoNCE(LossModule):
    def __init__(
        self,
        temperature: float | torch.Tensor = 0.1,
        reduction: str = 'mean',
        negative_mode: str | None = None,
        *,
        normalize: bool = True,
        in_batch: bool | None = None,
        queue: fastcl.rows.Queue | None = None,
        ids: torch.Tensor | None = None,
        negative_ids: torch.Tensor | None = None,
        log_q: torch.Tensor | None = None,
        negative_log_q: torch.Tensor | None = None,
        symmetric: bool = False,
        weight: torch.Tensor | None = None,
    ) -> None: ...
    def forward(
        self,
        query: torch.Tensor,
        positive_key: torch.Tensor,
        negative_keys: torch.Tensor | None = None,
        *,
        temperature: float | torch.Tensor = 0.1,
        reduction: str = 'mean',
        negative_mode: str | None = None,
        normalize: bool = True,
        in_batch: bool | None = None,
        queue: fastcl.rows.Queue | None = None,
        ids: torch.Tensor | None = None,
        negative_ids: torch.Tensor | None = None,
        log_q: torch.Tensor | None = None,
        negative_log_q: torch.Tensor | None = None,
        symmetric: bool = False,
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
    def __call__(
        self,
        query: torch.Tensor,
        positive_key: torch.Tensor,
        negative_keys: torch.Tensor | None = None,
        *,
        temperature: float | torch.Tensor = 0.1,
        reduction: str = 'mean',
        negative_mode: str | None = None,
        normalize: bool = True,
        in_batch: bool | None = None,
        queue: fastcl.rows.Queue | None = None,
        ids: torch.Tensor | None = None,
        negative_ids: torch.Tensor | None = None,
        log_q: torch.Tensor | None = None,
        negative_log_q: torch.Tensor | None = None,
        symmetric: bool = False,
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

class DCL(LossModule):
    def __init__(
        self,
        temperature: float | torch.Tensor = 0.1,
        reduction: str = 'mean',
        negative_mode: str | None = None,
        *,
        normalize: bool = True,
        in_batch: bool | None = None,
        queue: fastcl.rows.Queue | None = None,
        ids: torch.Tensor | None = None,
        negative_ids: torch.Tensor | None = None,
        log_q: torch.Tensor | None = None,
        negative_log_q: torch.Tensor | None = None,
        symmetric: bool = False,
        weight: torch.Tensor | None = None,
    ) -> None: ...
    def forward(
        self,
        query: torch.Tensor,
        positive_key: torch.Tensor,
        negative_keys: torch.Tensor | None = None,
        *,
        temperature: float | torch.Tensor = 0.1,
        reduction: str = 'mean',
        negative_mode: str | None = None,
        normalize: bool = True,
        in_batch: bool | None = None,
        queue: fastcl.rows.Queue | None = None,
        ids: torch.Tensor | None = None,
        negative_ids: torch.Tensor | None = None,
        log_q: torch.Tensor | None = None,
        negative_log_q: torch.Tensor | None = None,
        symmetric: bool = False,
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
    def __call__(
        self,
        query: torch.Tensor,
        positive_key: torch.Tensor,
        negative_keys: torch.Tensor | None = None,
        *,
        temperature: float | torch.Tensor = 0.1,
        reduction: str = 'mean',
        negative_mode: str | None = None,
        normalize: bool = True,
        in_batch: bool | None = None,
        queue: fastcl.rows.Queue | None = None,
        ids: torch.Tensor | None = None,
        negative_ids: torch.Tensor | None = None,
        log_q: torch.Tensor | None = None,
        negative_log_q: torch.Tensor | None = None,
        symmetric: bool = False,
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

class DCLW(LossModule):
    def __init__(
        self,
        temperature: float | torch.Tensor = 0.1,
        reduction: str = 'mean',
        negative_mode: str | None = None,
        *,
        normalize: bool = True,
        in_batch: bool | None = None,
        queue: fastcl.rows.Queue | None = None,
        ids: torch.Tensor | None = None,
        negative_ids: torch.Tensor | None = None,
        log_q: torch.Tensor | None = None,
        negative_log_q: torch.Tensor | None = None,
        symmetric: bool = False,
        weight: torch.Tensor | None = None,
        weight_fn: collections.abc.Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = ...,
    ) -> None: ...
    def forward(
        self,
        query: torch.Tensor,
        positive_key: torch.Tensor,
        negative_keys: torch.Tensor | None = None,
        *,
        temperature: float | torch.Tensor = 0.1,
        reduction: str = 'mean',
        negative_mode: str | None = None,
        normalize: bool = True,
        in_batch: bool | None = None,
        queue: fastcl.rows.Queue | None = None,
        ids: torch.Tensor | None = None,
        negative_ids: torch.Tensor | None = None,
        log_q: torch.Tensor | None = None,
        negative_log_q: torch.Tensor | None = None,
        symmetric: bool = False,
        weight: torch.Tensor | None = None,
        weight_fn: collections.abc.Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = ...,
    ) -> torch.Tensor: ...
    def __call__(
        self,
        query: torch.Tensor,
        positive_key: torch.Tensor,
        negative_keys: torch.Tensor | None = None,
        *,
        temperature: float | torch.Tensor = 0.1,
        reduction: str = 'mean',
        negative_mode: str | None = None,
        normalize: bool = True,
        in_batch: bool | None = None,
        queue: fastcl.rows.Queue | None = None,
        ids: torch.Tensor | None = None,
        negative_ids: torch.Tensor | None = None,
        log_q: torch.Tensor | None = None,
        negative_log_q: torch.Tensor | None = None,
        symmetric: bool = False,
        weight: torch.Tensor | None = None,
        weight_fn: collections.abc.Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = ...,
    ) -> torch.Tensor: ...

class DebiasedInfoNCE(LossModule):
    def __init__(
        self,
        temperature: float | torch.Tensor = 0.1,
        reduction: str = 'mean',
        negative_mode: str | None = None,
        *,
        normalize: bool = True,
        in_batch: bool | None = None,
        queue: fastcl.rows.Queue | None = None,
        ids: torch.Tensor | None = None,
        negative_ids: torch.Tensor | None = None,
        log_q: torch.Tensor | None = None,
        negative_log_q: torch.Tensor | None = None,
        symmetric: bool = False,
        weight: torch.Tensor | None = None,
        tau_plus: float = 0.1,
        beta: float = 0.0,
    ) -> None: ...
    def forward(
        self,
        query: torch.Tensor,
        positive_key: torch.Tensor,
        negative_keys: torch.Tensor | None = None,
        *,
        temperature: float | torch.Tensor = 0.1,
        reduction: str = 'mean',
        negative_mode: str | None = None,
        normalize: bool = True,
        in_batch: bool | None = None,
        queue: fastcl.rows.Queue | None = None,
        ids: torch.Tensor | None = None,
        negative_ids: torch.Tensor | None = None,
        log_q: torch.Tensor | None = None,
        negative_log_q: torch.Tensor | None = None,
        symmetric: bool = False,
        weight: torch.Tensor | None = None,
        tau_plus: float = 0.1,
        beta: float = 0.0,
    ) -> torch.Tensor: ...
    def __call__(
        self,
        query: torch.Tensor,
        positive_key: torch.Tensor,
        negative_keys: torch.Tensor | None = None,
        *,
        temperature: float | torch.Tensor = 0.1,
        reduction: str = 'mean',
        negative_mode: str | None = None,
        normalize: bool = True,
        in_batch: bool | None = None,
        queue: fastcl.rows.Queue | None = None,
        ids: torch.Tensor | None = None,
        negative_ids: torch.Tensor | None = None,
        log_q: torch.Tensor | None = None,
        negative_log_q: torch.Tensor | None = None,
        symmetric: bool = False,
        weight: torch.Tensor | None = None,
        tau_plus: float = 0.1,
        beta: float = 0.0,
    ) -> torch.Tensor: ...

class InfoNCEPlus(LossModule):
    def __init__(
        self,
        temperature: float | torch.Tensor = 0.1,
        reduction: str = 'mean',
        negative_mode: str | None = None,
        *,
        normalize: bool = True,
        in_batch: bool | None = None,
        queue: fastcl.rows.Queue | None = None,
        ids: torch.Tensor | None = None,
        negative_ids: torch.Tensor | None = None,
        log_q: torch.Tensor | None = None,
        negative_log_q: torch.Tensor | None = None,
        symmetric: bool = False,
        weight: torch.Tensor | None = None,
        epsilon: float = 0.0,
        lam: float = 1.1,
    ) -> None: ...
    def forward(
        self,
        query: torch.Tensor,
        positive_key: torch.Tensor,
        negative_keys: torch.Tensor | None = None,
        *,
        temperature: float | torch.Tensor = 0.1,
        reduction: str = 'mean',
        negative_mode: str | None = None,
        normalize: bool = True,
        in_batch: bool | None = None,
        queue: fastcl.rows.Queue | None = None,
        ids: torch.Tensor | None = None,
        negative_ids: torch.Tensor | None = None,
        log_q: torch.Tensor | None = None,
        negative_log_q: torch.Tensor | None = None,
        symmetric: bool = False,
        weight: torch.Tensor | None = None,
        epsilon: float = 0.0,
        lam: float = 1.1,
    ) -> torch.Tensor: ...
    def __call__(
        self,
        query: torch.Tensor,
        positive_key: torch.Tensor,
        negative_keys: torch.Tensor | None = None,
        *,
        temperature: float | torch.Tensor = 0.1,
        reduction: str = 'mean',
        negative_mode: str | None = None,
        normalize: bool = True,
        in_batch: bool | None = None,
        queue: fastcl.rows.Queue | None = None,
        ids: torch.Tensor | None = None,
        negative_ids: torch.Tensor | None = None,
        log_q: torch.Tensor | None = None,
        negative_log_q: torch.Tensor | None = None,
        symmetric: bool = False,
        weight: torch.Tensor | None = None,
        epsilon: float = 0.0,
        lam: float = 1.1,
    ) -> torch.Tensor: ...

class MINE(LossModule):
    def __init__(
        self,
        temperature: float | torch.Tensor = 0.1,
        reduction: str = 'mean',
        negative_mode: str | None = None,
        *,
        normalize: bool = True,
        in_batch: bool | None = None,
        queue: fastcl.rows.Queue | None = None,
        ids: torch.Tensor | None = None,
        negative_ids: torch.Tensor | None = None,
        log_q: torch.Tensor | None = None,
        negative_log_q: torch.Tensor | None = None,
        symmetric: bool = False,
        weight: torch.Tensor | None = None,
    ) -> None: ...
    def forward(
        self,
        query: torch.Tensor,
        positive_key: torch.Tensor,
        negative_keys: torch.Tensor | None = None,
        *,
        temperature: float | torch.Tensor = 0.1,
        reduction: str = 'mean',
        negative_mode: str | None = None,
        normalize: bool = True,
        in_batch: bool | None = None,
        queue: fastcl.rows.Queue | None = None,
        ids: torch.Tensor | None = None,
        negative_ids: torch.Tensor | None = None,
        log_q: torch.Tensor | None = None,
        negative_log_q: torch.Tensor | None = None,
        symmetric: bool = False,
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
    def __call__(
        self,
        query: torch.Tensor,
        positive_key: torch.Tensor,
        negative_keys: torch.Tensor | None = None,
        *,
        temperature: float | torch.Tensor = 0.1,
        reduction: str = 'mean',
        negative_mode: str | None = None,
        normalize: bool = True,
        in_batch: bool | None = None,
        queue: fastcl.rows.Queue | None = None,
        ids: torch.Tensor | None = None,
        negative_ids: torch.Tensor | None = None,
        log_q: torch.Tensor | None = None,
        negative_log_q: torch.Tensor | None = None,
        symmetric: bool = False,
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

class MINEPlus(LossModule):
    def __init__(
        self,
        temperature: float | torch.Tensor = 0.1,
        reduction: str = 'mean',
        negative_mode: str | None = None,
        *,
        normalize: bool = True,
        in_batch: bool | None = None,
        queue: fastcl.rows.Queue | None = None,
        ids: torch.Tensor | None = None,
        negative_ids: torch.Tensor | None = None,
        log_q: torch.Tensor | None = None,
        negative_log_q: torch.Tensor | None = None,
        symmetric: bool = False,
        weight: torch.Tensor | None = None,
        lam: float = 1.1,
    ) -> None: ...
    def forward(
        self,
        query: torch.Tensor,
        positive_key: torch.Tensor,
        negative_keys: torch.Tensor | None = None,
        *,
        temperature: float | torch.Tensor = 0.1,
        reduction: str = 'mean',
        negative_mode: str | None = None,
        normalize: bool = True,
        in_batch: bool | None = None,
        queue: fastcl.rows.Queue | None = None,
        ids: torch.Tensor | None = None,
        negative_ids: torch.Tensor | None = None,
        log_q: torch.Tensor | None = None,
        negative_log_q: torch.Tensor | None = None,
        symmetric: bool = False,
        weight: torch.Tensor | None = None,
        lam: float = 1.1,
    ) -> torch.Tensor: ...
    def __call__(
        self,
        query: torch.Tensor,
        positive_key: torch.Tensor,
        negative_keys: torch.Tensor | None = None,
        *,
        temperature: float | torch.Tensor = 0.1,
        reduction: str = 'mean',
        negative_mode: str | None = None,
        normalize: bool = True,
        in_batch: bool | None = None,
        queue: fastcl.rows.Queue | None = None,
        ids: torch.Tensor | None = None,
        negative_ids: torch.Tensor | None = None,
        log_q: torch.Tensor | None = None,
        negative_log_q: torch.Tensor | None = None,
        symmetric: bool = False,
        weight: torch.Tensor | None = None,
        lam: float = 1.1,
    ) -> torch.Tensor: ...

class BPR(LossModule):
    def __init__(
        self,
        reduction: str = 'mean',
        weight: torch.Tensor | None = None,
    ) -> None: ...
    def forward(
        self,
        query: torch.Tensor,
        positive_key: torch.Tensor,
        negative_keys: torch.Tensor,
        *,
        reduction: str = 'mean',
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
    def __call__(
        self,
        query: torch.Tensor,
        positive_key: torch.Tensor,
        negative_keys: torch.Tensor,
        *,
        reduction: str = 'mean',
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

class NegativeSampling(LossModule):
    def __init__(
        self,
        reduction: str = 'mean',
        weight: torch.Tensor | None = None,
    ) -> None: ...
    def forward(
        self,
        query: torch.Tensor,
        positive_key: torch.Tensor,
        negative_keys: torch.Tensor,
        *,
        reduction: str = 'mean',
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
    def __call__(
        self,
        query: torch.Tensor,
        positive_key: torch.Tensor,
        negative_keys: torch.Tensor,
        *,
        reduction: str = 'mean',
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

class SigLIP(LossModule):
    def __init__(
        self,
        logit_scale: float | torch.Tensor = 10.0,
        logit_bias: float | torch.Tensor = -10.0,
        reduction: str = 'mean',
        weight: torch.Tensor | None = None,
    ) -> None: ...
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        *,
        logit_scale: float | torch.Tensor = 10.0,
        logit_bias: float | torch.Tensor = -10.0,
        reduction: str = 'mean',
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        *,
        logit_scale: float | torch.Tensor = 10.0,
        logit_bias: float | torch.Tensor = -10.0,
        reduction: str = 'mean',
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

class Triplet(LossModule):
    def __init__(
        self,
        margin: float = 1.0,
        reduction: str = 'mean',
        weight: torch.Tensor | None = None,
    ) -> None: ...
    def forward(
        self,
        anchor: torch.Tensor,
        positive: torch.Tensor,
        negative: torch.Tensor,
        *,
        margin: float = 1.0,
        reduction: str = 'mean',
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
    def __call__(
        self,
        anchor: torch.Tensor,
        positive: torch.Tensor,
        negative: torch.Tensor,
        *,
        margin: float = 1.0,
        reduction: str = 'mean',
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

class JensenShannon(LossModule):
    def __init__(
        self,
        reduction: str = 'mean',
        weight: torch.Tensor | None = None,
    ) -> None: ...
    def forward(
        self,
        query: torch.Tensor,
        positive_key: torch.Tensor,
        negative_keys: torch.Tensor,
        *,
        reduction: str = 'mean',
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
    def __call__(
        self,
        query: torch.Tensor,
        positive_key: torch.Tensor,
        negative_keys: torch.Tensor,
        *,
        reduction: str = 'mean',
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

class SampledSoftmax(LossModule):
    def __init__(
        self,
        temperature: float | torch.Tensor = 1.0,
        reduction: str = 'mean',
        *,
        in_batch: bool | None = None,
        queue: fastcl.rows.Queue | None = None,
        ids: torch.Tensor | None = None,
        negative_ids: torch.Tensor | None = None,
        log_q: torch.Tensor | None = None,
        negative_log_q: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
    ) -> None: ...
    def forward(
        self,
        query: torch.Tensor,
        positive_key: torch.Tensor,
        negative_keys: torch.Tensor | None = None,
        *,
        temperature: float | torch.Tensor = 1.0,
        reduction: str = 'mean',
        in_batch: bool | None = None,
        queue: fastcl.rows.Queue | None = None,
        ids: torch.Tensor | None = None,
        negative_ids: torch.Tensor | None = None,
        log_q: torch.Tensor | None = None,
        negative_log_q: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
    def __call__(
        self,
        query: torch.Tensor,
        positive_key: torch.Tensor,
        negative_keys: torch.Tensor | None = None,
        *,
        temperature: float | torch.Tensor = 1.0,
        reduction: str = 'mean',
        in_batch: bool | None = None,
        queue: fastcl.rows.Queue | None = None,
        ids: torch.Tensor | None = None,
        negative_ids: torch.Tensor | None = None,
        log_q: torch.Tensor | None = None,
        negative_log_q: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

class LinearCrossEntropy(LossModule):
    def __init__(
        self,
        temperature: float | torch.Tensor = 1.0,
        ignore_index: int | None = None,
        reduction: str = 'mean',
        row_weight: torch.Tensor | None = None,
        *,
        weight: torch.Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> None: ...
    def forward(
        self,
        input: torch.Tensor,
        linear_weight: torch.Tensor,
        target: torch.Tensor,
        linear_bias: torch.Tensor | None = None,
        *,
        temperature: float | torch.Tensor = 1.0,
        ignore_index: int | None = None,
        reduction: str = 'mean',
        row_weight: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> torch.Tensor: ...
    def __call__(
        self,
        input: torch.Tensor,
        linear_weight: torch.Tensor,
        target: torch.Tensor,
        linear_bias: torch.Tensor | None = None,
        *,
        temperature: float | torch.Tensor = 1.0,
        ignore_index: int | None = None,
        reduction: str = 'mean',
        row_weight: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> torch.Tensor: ...

class NTXent(LossModule):
    def __init__(
        self,
        temperature: float | torch.Tensor = 0.5,
        reduction: str = 'mean',
        weight: torch.Tensor | None = None,
    ) -> None: ...
    def forward(
        self,
        view1: torch.Tensor,
        view2: torch.Tensor,
        *,
        temperature: float | torch.Tensor = 0.5,
        reduction: str = 'mean',
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
    def __call__(
        self,
        view1: torch.Tensor,
        view2: torch.Tensor,
        *,
        temperature: float | torch.Tensor = 0.5,
        reduction: str = 'mean',
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

class SupCon(LossModule):
    def __init__(
        self,
        temperature: float | torch.Tensor = 0.07,
        reduction: str = 'mean',
        weight: torch.Tensor | None = None,
    ) -> None: ...
    def forward(
        self,
        features: torch.Tensor,
        labels: torch.Tensor,
        *,
        temperature: float | torch.Tensor = 0.07,
        reduction: str = 'mean',
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
    def __call__(
        self,
        features: torch.Tensor,
        labels: torch.Tensor,
        *,
        temperature: float | torch.Tensor = 0.07,
        reduction: str = 'mean',
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

class Alignment(LossModule):
    def __init__(
        self,
        alpha: float = 2.0,
        reduction: str = 'mean',
        weight: torch.Tensor | None = None,
    ) -> None: ...
    def forward(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        *,
        alpha: float = 2.0,
        reduction: str = 'mean',
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
    def __call__(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        *,
        alpha: float = 2.0,
        reduction: str = 'mean',
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

class Uniformity(LossModule):
    def __init__(
        self,
        t: float = 2.0,
    ) -> None: ...
    def forward(
        self,
        x: torch.Tensor,
        *,
        t: float = 2.0,
    ) -> torch.Tensor: ...
    def __call__(
        self,
        x: torch.Tensor,
        *,
        t: float = 2.0,
    ) -> torch.Tensor: ...
