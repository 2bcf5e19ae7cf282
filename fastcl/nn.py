"""The losses as modules: the constructor fixes temperature, reduction and other settings, forward takes the batch.

There is one class for each loss of the registry; it adds no behaviour to the function of the same name. A setting that
is an nn.Parameter learns with the model; any other tensor is a buffer: both are in the state dict and move with
`.to()`. `print` shows the settings.

>>> import torch, fastcl
>>> loss = fastcl.nn.InfoNCE(0.5)
>>> loss
InfoNCE(temperature=0.5, reduction='mean', normalize=True, symmetric=False, label_smoothing=0.0, z_loss=0.0)
>>> round(loss(torch.eye(2), torch.eye(2)).item(), 4)
0.1269
>>> loss(torch.eye(2), torch.eye(2), reduction="none")  # what a call says has precedence
tensor([0.1269, 0.1269])

A temperature given as an nn.Parameter learns, but nothing keeps it above 0: an optimizer's step that takes it to 0 or
below ends in the ValueError of the next call on the CPU. Its logarithm stays positive: keep `log_temperature =
nn.Parameter(torch.tensor(0.1).log())` in the model and call the function with `temperature=log_temperature.exp()`.
"""

from fastcl import buckets, cosines, denominators, directions, losses, pairwise, positives, soft, softmax, views  # noqa: F401  whose losses fill the registry
from fastcl.module import module_of
from fastcl.registry import LOSSES

# For type checkers and editors the classes are written out in nn.pyi.
globals().update({loss.module: module_of(loss, __name__) for loss in LOSSES.values()})
__all__ = [loss.module for loss in LOSSES.values()]
