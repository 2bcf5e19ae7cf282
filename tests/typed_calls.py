"""Right and wrong calls of everything public, for type checkers: a line that ends in `# wrong` is an error to them.

Never run: test_typing.py has mypy and pyright read this file.
"""

from typing import assert_type

import torch
from torch import Tensor, nn

import fastcl

x = torch.eye(2)
ids = torch.tensor([0, 1])
queue = fastcl.NegativeQueue(8, 2)

# The losses over rows: each has the arguments that all share, and its own.
assert_type(fastcl.infonce(x, x), Tensor)
fastcl.infonce(x, x, x, 0.1, "mean", None, normalize=False, in_batch=True, queue=queue, ids=ids, weight=x[0])
fastcl.infonce(x, positive_key=x, temperature=x[0], log_q=x[0], negative_log_q=x[0], symmetric=True)
fastcl.infonce(x, x, temprature=0.1)  # wrong
fastcl.infonce(x)  # wrong
fastcl.infonce(x, x, temperature="cold")  # wrong
fastcl.infonce(x, x, queue=x)  # wrong
fastcl.infonce(x, x, epsilon=0.5)  # wrong
fastcl.infonce(x, x, None, 0.1, "mean", None, False)  # wrong
fastcl.infonce(x, x, hardness=5.0, margin=fastcl.cosface(0.3))
fastcl.infonce(x, x, hardness={"in_batch": 5.0}, margin=lambda similarity: similarity - 0.1)
fastcl.infonce(x, x, cap=0.9)
fastcl.infonce(x, x, cap=lambda similarity: similarity + 0.1)
fastcl.infonce(x, x, cap="0.9")  # wrong
fastcl.infonce(x, x, margin=0.3)  # wrong
fastcl.infonce(x, x, margin=fastcl.arcface(0.5))
fastcl.arcface("0.5")  # wrong
fastcl.cosface("0.3")  # wrong
assert_type(fastcl.dcl(x, x, ids=ids), Tensor)
fastcl.dcl(x, x, lam=1.2)  # wrong
fastcl.dclw(x, x, weight_fn=fastcl.mises_fisher_weights)
fastcl.dclw(x, x, weight_fn=0.5)  # wrong
fastcl.debiased_infonce(x, x, tau_plus=0.2, beta=1.0)
fastcl.debiased_infonce(x, x, tau=0.2)  # wrong
fastcl.infonce_plus(x, x, epsilon=0.5, lam=1.2)
fastcl.infonce_plus(x, x, epsilon="0.5")  # wrong
fastcl.mine(x, x, x, in_batch=True)
fastcl.mine(x, x, lam=1.2)  # wrong
fastcl.mine_plus(x, x, lam=1.2)
fastcl.mine_plus(x, x, lamb=1.2)  # wrong
fastcl.mises_fisher_weights(x, x, sigma=0.2)
fastcl.mises_fisher_weights(x)  # wrong

# The others.
fastcl.sampled_softmax(x, x, x, 0.5, ids=ids, log_q=x[0], negative_log_q=x[0])
fastcl.sampled_softmax(x, x, normalize=True)  # wrong
fastcl.linear_cross_entropy(x, x, ids, x[0], 0.5, row_weight=x[0], weight=x[0], label_smoothing=0.1)
fastcl.linear_cross_entropy(x, x)  # wrong
fastcl.linear_cross_entropy(query=x, table=x, target=ids)  # wrong
fastcl.soft_cross_entropy(x, x, x, ids[:, None])
fastcl.soft_cross_entropy(x, x)  # wrong
fastcl.distill_kl(x, x, x, teacher_temperature=2.0)
fastcl.distill_kl(x, x, x, teacher_temperature="2")  # wrong
fastcl.bsl(x, x, positive_temperature=0.2, group=ids)
fastcl.bsl(x, x, positive_temperature="0.2")  # wrong
fastcl.sl_at_k(x, x, threshold=x[0], weight_temperature=0.5)
fastcl.sl_at_k(x, x, threshold="0.5")  # wrong
fastcl.ccl(x, x, x, margin=0.5, ids=ids, negative_ids=ids)
fastcl.ccl(x, x)  # wrong
fastcl.directau(x, x, 2.0)
fastcl.directau(x)  # wrong
fastcl.psl(x, x, x, surrogate=fastcl.psl_tanh)
fastcl.psl(x, x, x, surrogate=fastcl.psl_atan)
fastcl.psl(x, x, x, surrogate=fastcl.psl_relu)
fastcl.psl(x, x, x, surrogate="tanh")  # wrong
fastcl.psl_tanh(0.5)  # wrong
fastcl.psl_atan(0.5)  # wrong
fastcl.psl_relu(0.5)  # wrong
fastcl.sogclr(x, x, ids, fastcl.Denominators(9, gamma=0.5))
fastcl.sogclr(x, x, ids)  # wrong
fastcl.Denominators("9")  # wrong
fastcl.nn.BSL(positive_temperature=0.2)(x, x, group=ids)
fastcl.nn.BSL(positive_temperature="0.2")  # wrong
fastcl.nn.SLatK(weight_temperature=0.5)(x, x, threshold=x[0])
fastcl.nn.SLatK(threshold="0.5")  # wrong
fastcl.nn.CCL(margin=0.5)(x, x, x)
fastcl.nn.CCL(margin="0.5")  # wrong
fastcl.nn.DirectAU(2.0)(x, x)
fastcl.nn.DirectAU("2.0")  # wrong
fastcl.nn.PSL(0.2)(x, x, x)
fastcl.nn.PSL("0.2")  # wrong
fastcl.nn.SogCLR(fastcl.Denominators(9))(x, x, ids)
fastcl.nn.SogCLR()  # wrong
fastcl.gbce(x, x, x, catalogue=9, calibration=0.5, ids=ids, negative_ids=ids)
fastcl.gbce(x, x, x)  # wrong
fastcl.sce(x, x, ids, buckets=4, bucket_rows=2, bucket_classes=2)
fastcl.sce(x, x, ids, buckets=0.5)  # wrong
fastcl.nn.GBCE(catalogue=9)(x, x, x)
fastcl.nn.GBCE()  # wrong
fastcl.nn.SCE(bucket_classes=2)(x, x, ids)
fastcl.nn.SCE(bucket_classes="2")  # wrong
fastcl.margin_mse(x, x, x[:, None], x[:, :1])
fastcl.margin_mse(x, x, x)  # wrong
fastcl.multi_positive(x, x, ids, form=fastcl.log_in)
fastcl.multi_positive(x, x, ids, form=fastcl.log_out)
fastcl.multi_positive(x, x, ids, form=fastcl.supcon_in)
fastcl.multi_positive(x, x, ids, form=fastcl.supcon_out)
fastcl.multi_positive(x, x, ids, form="log_in")  # wrong
fastcl.log_in(x)  # wrong
fastcl.log_out(x)  # wrong
fastcl.supcon_in(x)  # wrong
fastcl.supcon_out(x)  # wrong
fastcl.nn.SoftCrossEntropy(0.5)(x, x, x)
fastcl.nn.SoftCrossEntropy("0.5")  # wrong
fastcl.nn.DistillKL(0.5, teacher_temperature=2.0)(x, x, x)
fastcl.nn.DistillKL(teacher_temperature="2")  # wrong
fastcl.nn.MarginMSE("sum")(x, x, x, x)
fastcl.nn.MarginMSE(0.5)  # wrong
fastcl.nn.MultiPositive(form=fastcl.log_in)(x, x, ids)
fastcl.nn.MultiPositive(form=0.5)  # wrong
fastcl.directional_infonce(x, x, directions=("query_to_doc", "doc_to_doc"), partition="per_direction")
fastcl.directional_infonce(x, x, directions=1)  # wrong
fastcl.nn.DirectionalInfoNCE(0.1, partition="joint")(x, x, ids=ids)
fastcl.nn.DirectionalInfoNCE(partition=1)  # wrong
fastcl.matryoshka(fastcl.infonce, dims=(1, 2), weights=[0.5, 1.0])(x, x)
fastcl.matryoshka(fastcl.infonce, 2)  # wrong
fastcl.over_rows(beside=lambda **constants: 0.0)
fastcl.over_rows("Own", None)  # wrong
fastcl.hard_negatives(x, x, 1, cap=0.9)
fastcl.hard_negatives(x, queue, 1, ids=ids)
fastcl.hard_negatives(x, x, 1.5)  # wrong
fastcl.nt_xent(x, x, temperature=0.5, weight=x[0])
fastcl.nt_xent(x, x, normalize=False)  # wrong
fastcl.supcon(x, ids, 0.1, "none")
fastcl.supcon(x, labels=[0, 1])  # wrong
fastcl.alignment(x, x, alpha=1.0)
fastcl.alignment(x, x, temperature=1.0)  # wrong
fastcl.uniformity(x, t=1.0)
fastcl.uniformity(x, reduction="none")  # wrong
fastcl.bpr(x, x, x, "sum", x[0])
fastcl.bpr(x, x)  # wrong
fastcl.negative_sampling(x, x, x, reduction="sum")
fastcl.negative_sampling(x, x, x, temperature=0.1)  # wrong
fastcl.jensen_shannon(x, x, x)
fastcl.jensen_shannon(x, x, x, margin=1.0)  # wrong
fastcl.siglip(x, x, logit_scale=x.sum(), logit_bias=-10.0)
fastcl.siglip(x, x, scale=10.0)  # wrong
fastcl.triplet(x, x, x, margin=0.5)
fastcl.triplet(x, x)  # wrong

# The ops under them, the queue, and what is about the package.
pos, lse = fastcl.contrast(x, x, x, scale=2.0, bias=x[0], row_id=ids, col_id=ids)
assert_type(pos, Tensor | None)
assert_type(lse, Tensor)
fastcl.contrast(x, x, x, expected=None)  # wrong
assert_type(fastcl.softplus_sum(x, x, offset=x[0]), Tensor)
fastcl.softplus_sum(x, x, x)  # wrong
assert_type(fastcl.maxsim(x, x, ids, query_lengths=ids), Tensor)
fastcl.maxsim(x, x, normalize=True)  # wrong
fastcl.NegativeQueue(8, 2, torch.bfloat16).push(x, ids)
fastcl.NegativeQueue(8)  # wrong
assert_type(queue.push(x, ids), fastcl.Evicted)
isinstance(queue.push(x), fastcl.Evicted) and fastcl.infonce(x, x, queue=queue.push(x))
queue.push(x, age=ids)  # wrong
fastcl.Evicted(keys=x)  # wrong
fastcl.cached([nn.Linear(2, 2), torch.tanh], fastcl.infonce, chunk=fastcl.token_chunks(64, mask="mask"))(x, {"x": x})
fastcl.cached(nn.Linear(2, 2), fastcl.infonce, chunk="2")  # wrong
fastcl.token_chunks("64")  # wrong
fastcl.momentum_update(nn.Linear(2, 2), nn.Linear(2, 2), m=0.99)
fastcl.momentum_update(nn.Linear(2, 2), nn.Linear(2, 2))  # wrong
assert_type(fastcl.set_isa("auto"), str)
fastcl.set_isa(2)  # wrong
fastcl.show_config()
fastcl.show_config(True)  # wrong
fastcl.config()["isa"]
fastcl.config("isa")  # wrong

# The modules: settings when they are made, a batch when they are called.
module: fastcl.nn.InfoNCE = fastcl.nn.InfoNCE(0.07, normalize=False, symmetric=True)
assert_type(module(x, x, ids=ids), Tensor)
module(x)  # wrong
module(x, x, id=ids)  # wrong
module.forward(x, x, id=ids)  # wrong
fastcl.nn.InfoNCE(0.07, query=x)  # wrong
fastcl.nn.InfoNCE(nn.Parameter(torch.tensor(0.07)), queue=queue).state_dict()
fastcl.nn.InfoNEC(0.07)  # wrong
fastcl.nn.DCL(temperature=0.1)
fastcl.nn.DCL(lam=1.2)  # wrong
fastcl.nn.DCLW(weight_fn=fastcl.mises_fisher_weights)
fastcl.nn.DCLW(sigma=0.5)  # wrong
fastcl.nn.DebiasedInfoNCE(tau_plus=0.1, beta=0.5)
fastcl.nn.DebiasedInfoNCE(0.1, "mean", None, 0.1)  # wrong
fastcl.nn.InfoNCEPlus(epsilon=0.5, lam=1.0)
fastcl.nn.InfoNCEPlus(eps=0.5)  # wrong
fastcl.nn.MINE(reduction="sum")
fastcl.nn.MINE(lam=1.0)  # wrong
fastcl.nn.MINEPlus(lam=1.2)
fastcl.nn.MINEPlus(lam="1.2")  # wrong
fastcl.nn.SampledSoftmax(0.5, "sum")
fastcl.nn.SampledSoftmax(normalize=True)  # wrong
fastcl.nn.LinearCrossEntropy(0.5, ignore_index=0)
fastcl.nn.LinearCrossEntropy(table=x)  # wrong
fastcl.nn.NTXent(0.5)(x, x)
fastcl.nn.NTXent(0.5)(x)  # wrong
fastcl.nn.SupCon(0.1)(x, ids)
fastcl.nn.SupCon(base_temperature=0.1)  # wrong
fastcl.nn.Alignment(2.0)(x, x)
fastcl.nn.Alignment(beta=2.0)  # wrong
fastcl.nn.Uniformity(t=2.0)(x)
fastcl.nn.Uniformity(reduction="sum")  # wrong
fastcl.nn.BPR("sum")(x, x, x)
fastcl.nn.BPR(temperature=0.1)  # wrong
fastcl.nn.NegativeSampling()(x, x, x)
fastcl.nn.NegativeSampling()(x, x)  # wrong
fastcl.nn.JensenShannon()(x, x, x, weight=x[0])
fastcl.nn.JensenShannon()(x, x, x, temperature=0.1)  # wrong
fastcl.nn.SigLIP(logit_scale=nn.Parameter(torch.tensor(10.0)))(x, x)
fastcl.nn.SigLIP(scale=10.0)  # wrong
fastcl.nn.Triplet(margin=0.5)(x, x, x)
fastcl.nn.Triplet(0.5)(x, x)  # wrong
