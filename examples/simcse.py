"""SimCSE (Gao et al. 2021) on STS-B sentences: a sentence and itself under another dropout mask, `fastcl.infonce`.

A linear encoder of hashed words and letter pieces stands in for the transformer.

    python -m examples.simcse
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastcl
import fastcl.eval
from examples.shared import batches, hashed_words, sentence_pairs, spearman


def encoder() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.5), nn.Linear(1024, 128))


def train(sentences: Tensor, epochs: int = 6) -> nn.Module:
    model = encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for rows in batches(len(sentences), 256, epochs):
        x = sentences[rows]
        loss = fastcl.infonce(model(x), model(x), temperature=0.05)  # the two calls draw different masks
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def main(seed: int = 0) -> tuple[float, float]:
    """Spearman correlation of the cosines with human similarity on the test pairs, before and after training. Prints
    how often a sentence finds its partner, among the partners of all pairs with the highest human score.
    """
    first, second, _ = sentence_pairs("train")
    sentences = hashed_words(list(dict.fromkeys(first + second))[:6000], 1024)
    first, second, human = sentence_pairs("test")
    a, b = hashed_words(first, 1024), hashed_words(second, 1024)
    equal = human == 5
    torch.manual_seed(seed)
    untrained = encoder().eval()
    torch.manual_seed(seed)
    correlations = []
    for name, model in (("untrained", untrained), ("trained", train(sentences))):
        x, y = model(a), model(b)
        found = fastcl.eval.retrieval(x[equal], y[equal], k=1)
        print(f"{name}: recall@1 {found['recall@1']:.3f}, in the other direction {found['reverse recall@1']:.3f}")
        correlations.append(spearman(F.cosine_similarity(x, y), human))
    return correlations[0], correlations[1]


if __name__ == "__main__":
    print("correlation with human similarity: untrained {:.3f}, trained {:.3f}".format(*main()))
