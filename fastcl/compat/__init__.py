"""The losses of other packages by their own names and arguments, computed by fastcl: only the import changes.

    from fastcl.compat.lightly import NTXentLoss            # in the place of lightly.loss
    from fastcl.compat.open_clip import ClipLoss            # in the place of open_clip
    from fastcl.compat.pytorch_metric_learning import ...   # in the place of pytorch_metric_learning.losses

A module here imports nothing of the package whose names it has. Values and gradients are those of the original; where
they differ on purpose, the class says so. Formulas stay with fastcl's losses.
"""
