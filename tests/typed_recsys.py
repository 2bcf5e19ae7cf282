"""Right and wrong calls of fastcl.recsys, for type checkers: a line that ends in `# wrong` is an error to them.

Never run: test_typing.py has mypy and pyright read this file.
"""

from typing import Any, assert_type

from fastcl.recsys import (
    Batcher,
    Histories,
    Interactions,
    MultiCLRec,
    Popularity,
    SASRec,
    SASRecConfig,
    Split,
    bundled,
    by_group,
    compare,
    evaluate,
    export,
    fit,
    frozen,
    intents,
    load,
    log_to,
    merge,
    rank_cases,
    recommend,
    recommend_users,
    resume,
    robustness,
    save,
    study,
    top_k,
    tune,
)

data = bundled("purchases")
bundled(3)  # wrong
assert_type(Interactions.read("log.csv", user="u", time=None), Interactions)
Interactions.read("log.csv", users="u")  # wrong
assert_type(merge(data, data), Interactions)
split = data.split("time", at=5.0, ties="random", seed=1)
assert_type(split, Split)
data.split(ties=0)  # wrong

model = SASRec(split.items, SASRecConfig(dim=32, loss="bce"), seed=1)
SASRec(split.items, dim=32, seed=1)
SASRecConfig(dmi=32)  # wrong
SASRecConfig(dim="32")  # wrong
SASRec(split.items, {"dim": 32})  # wrong
SASRec(seed=1)  # wrong

assert_type(fit(model, split, epochs=3, metric="recall@20", patience=None), list[dict[str, Any]])
fit(model, split, epochs=3, on_epoch=lambda epoch: epoch.metrics["ndcg@10"] > 0.5)
fit(model, split, epochs=3, on_epoch=5)  # wrong
fit(model, split, epochs=3, on_epoch=log_to("mlflow", "runs/first"))
fit(model, split)
fit(model)  # wrong
fit(model, split, epochs=3, paitence=2)  # wrong
resume("runs/first", epochs=20)
resume("runs/first", epochs="20")  # wrong
tune(SASRec, split, {"dim": [16, 32]}, out="runs/search", trials=2).to_csv()
study("study.json", run=True, only=["SASRec"]).to_latex()
study({"runs": []})  # wrong
tune(model, split, {"dim": [16, 32]}, out="runs/search")  # wrong
save(model, "runs/kept")
load("runs/kept").scores(split.test.history)
load(5)  # wrong

floor = Popularity(split.counts, split.items)
assert_type(evaluate(floor, split.test, k=10), dict[str, float])
evaluate(model, split.test, k=(10, 50), metrics="recall@10,ndcg")
evaluate(model, split.test, k="10,50", metrics=["recall@10", "ndcg"], seen="keep")
evaluate(model, split.test, k=1.5)  # wrong
evaluate(model, split.test, metric="recall")  # wrong
evaluate(model)  # wrong
found = rank_cases(model, split.test, k=10)
by_group(found, split.test, by=("length",))
by_group(found)  # wrong
compare({"sasrec": [model], "popular": [floor]}, split.test, k=(5, 10)).to_csv()
compare([model], split.test)  # wrong
robustness(model, split.test, ratios=(0.0, 0.5), k=10)
robustness(model, split.test, ratio=0.5)  # wrong
top_k(model.scores(split.train), split.train, k=5)
top_k(split.train, 5)  # wrong

with Batcher(model, batch=8, seen="keep") as batcher:
    assert_type(batcher.submit(["a"], k=5).result(), list[tuple[str, float]])
    batcher.submit([3])  # wrong
Batcher(model, k=5)  # wrong
with frozen(model):
    recommend(model, [["BANANAS"]], k=5)
recommend(model, ["BANANAS"], k=5.5)  # wrong
recommend_users(model, data, 5, strict=True)
recommend_users(model, split)  # wrong
export(model, "vectors", to="npy", k=10)
export("vectors", model)  # wrong
intents(MultiCLRec(split.items), Histories.from_lists([[1]]), k=5)
intents(model, split.train)  # wrong
