"""Runs the tests that other packages publish for their losses, with the adapters of fastcl.compat in the losses' place.

    python -m benchmarks.peer_suites NAME=FOLDER ... [--only FILE ...] [--output benchmarks/results/peer-suites.json]

NAME is a key of `SUITES`, FOLDER a checkout of that package's repository. Tests and package are those of the checkout;
what the package itself needs must be installed. What fails with the adapters is run again with the package's own
classes, in the same random numbers; a test that only the adapters fail is a difference. The program exits with 1 where
the differences are not those of `DIFFERENCES`. Nothing is downloaded: a model of the hub is replaced by a small one of
the same kind with random weights. With --only the results of other files stay as they are.

pytest loads this module as a plugin, which puts the adapters in their place.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common import RESULTS, write_json

ROOT = Path(__file__).parents[1]


class Suite(NamedTuple):
    package: str  # as it is called on PyPI
    modules: list[str]  # imported first, so that none binds an original's name later
    classes: list[str]  # the names that the adapters' module has, too
    tests: list[str]


SUITES = {
    "lightly": Suite(
        "lightly", ["lightly.loss"], ["NTXentLoss", "DCLLoss", "DCLWLoss", "negative_mises_fisher_weights"],
        ["tests/loss/test_ntx_ent_loss.py", "tests/loss/test_dcl_loss.py"],
    ),
    "open_clip": Suite(
        "open_clip_torch", ["open_clip", "open_clip.loss"], ["ClipLoss", "SigLipLoss"],
        ["tests/test_siglip_chunked_loss.py"],
    ),
    "pytorch_metric_learning": Suite(
        "pytorch-metric-learning", ["pytorch_metric_learning.losses"], ["NTXentLoss", "SupConLoss", "CrossBatchMemory"],
        [f"tests/losses/test_{name}.py" for name in
         ("ntxent_loss", "cross_batch_memory", "losses_without_labels", "self_supervised_loss")],
    ),
    "sentence_transformers": Suite(
        "sentence-transformers", ["sentence_transformers.sentence_transformer.losses"],
        ["MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"],
        [f"tests/sentence_transformer/losses/test_{name}.py" for name in
         ("merged_forward", "cmnrl", "gradcache", "adaptive_layer")],
    ),
}  # fmt: skip
_INSIDE = "it replaces or reads an inner part of the original, which the adapter has not"
_WORDS = "it expects an error in the original's words; the adapter raises the same error in its own"
# By suite and test, without its parameters: why the adapters fail it.
DIFFERENCES: dict[str, dict[str, str]] = {
    "lightly": {"TestNTXentLoss::test_forward_pass_neg_temp": "a temperature below 0 is refused"},
    "open_clip": {},
    "pytorch_metric_learning": {},
    "sentence_transformers": {
        "test_anchor_losses_keep_the_anchor_on_its_own_forward":
            "the original encodes all columns but the first in one call of the model; the adapter calls it for each",
        "test_cmnrl_attributes_and_config_back_compat": _WORDS,
        "TestMinibatchRanges::test_non_positive_budget_rejected_at_construction": _WORDS,
        "test_cmnrl_hyperparameters_stay_assignable": _INSIDE,
        "test_cmnrl_gather_across_devices_offset": _INSIDE,
        "test_gradcache_replays_dropout_in_the_backward_pass": _INSIDE,
        "test_gradcache_token_budget_replays_dropout": _INSIDE,
        "test_gradcache_replays_through_prompt_exclusion": _INSIDE,
        "test_gradcache_backward_releases_the_hook_state":
            "it expects the features to be held until the loss is dropped; the adapter drops them after backward",
    },
}  # fmt: skip


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--adapters", choices=SUITES, help="whose losses fastcl's adapters take the place of")


def pytest_configure(config: Any) -> None:
    name = config.getoption("--adapters")
    if name:
        swap(SUITES[name], importlib.import_module(f"fastcl.compat.{name}"))


def pytest_collection(session: Any) -> None:
    if package := sys.modules.get("sentence_transformers"):
        use_local_models(package)


def pytest_runtest_setup(item: Any) -> None:
    torch.manual_seed(0)


def swap(suite: Suite, adapters: Any) -> None:
    """Puts the adapters wherever a module of the package has the original."""
    first = [importlib.import_module(name) for name in suite.modules][0]
    replaced = {id(getattr(first, name)): getattr(adapters, name) for name in suite.classes if hasattr(first, name)}
    inside = suite.modules[0].partition(".")[0]
    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] == inside]:
        for name, value in list(vars(module).items()):
            if id(value) in replaced:
                setattr(module, name, replaced[id(value)])


def use_local_models(package: Any) -> None:
    """A model that is named as one of the hub is a small BERT with random weights and a vocabulary of characters."""
    make, folder = package.SentenceTransformer.__init__, small_bert()

    def init(self: Any, name: Any = None, *args: Any, **options: Any) -> None:
        make(self, folder if isinstance(name, str) and name.count("/") == 1 else name, *args, **options)

    package.SentenceTransformer.__init__ = init


def small_bert() -> str:
    transformers: Any = importlib.import_module("transformers")
    folder = tempfile.mkdtemp()
    letters = list("abcdefghijklmnopqrstuvwxyz0123456789.,'?!-")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    Path(folder, "vocab.txt").write_text("\n".join(vocabulary))
    transformers.BertTokenizerFast(f"{folder}/vocab.txt").save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512
    )
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def outcomes(name: str, folder: Path, tests: list[str], *options: str) -> dict[tuple[str, str], str]:
    """By file and test, with its parameters: passed, failed or skipped."""
    source = folder / "src" if (folder / "src").is_dir() else folder
    path = os.pathsep.join([str(source), str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    settings = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TEST_DEVICE": "cpu"}
    with tempfile.TemporaryDirectory() as temporary:
        report = f"{temporary}/report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.peer_suites", "-p", "no:cacheprovider"]
        done = subprocess.run([*command, *options, "--junitxml", report, *tests], cwd=folder, text=True, check=False,
                              env=os.environ | settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        print(done.stdout, flush=True)
        if done.returncode not in (0, 1):
            raise SystemExit(f"{name}: expected {folder} to hold tests that run")
        return dict(_read(ET.parse(report).iter("testcase")))


def _read(cases: Iterable[ET.Element]) -> Iterable[tuple[tuple[str, str], str]]:
    words = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    for case in cases:
        found = [words[part.tag] for part in case if part.tag in words]
        file, *classes = case.attrib["classname"].partition(".test_")[2].split(".")
        yield (f"test_{file}.py", "::".join([*classes, case.attrib["name"]])), found[0] if found else "passed"


def tried(name: str, folder: Path, tests: list[str]) -> dict[str, Any]:
    """Of each file: how many tests pass and are skipped; what fails with the adapters, and how it ends without them."""
    ours = outcomes(name, folder, tests, "--adapters", name)
    paths = {Path(file).name: file for file in tests}
    failed = [f"{paths[file]}::{test}" for (file, test), found in ours.items() if found == "failed"]
    own = outcomes(name, folder, failed) if failed else {}
    rows = {}
    for file in paths:
        found = [outcome for (where, _), outcome in ours.items() if where == file]
        counts = {word: found.count(word) for word in ("passed", "skipped")}
        rows[file] = counts | {"failed": {test: outcome for (where, test), outcome in own.items() if where == file}}
    return rows


def unexplained(failed: dict[str, str], reasons: dict[str, str]) -> list[str]:
    """What is wrong with the reasons for the tests that fail with the adapters."""
    differ = {test.partition("[")[0] for test, own in failed.items() if own != "failed"}
    return [f"{test}: expected to pass, or a reason in DIFFERENCES" for test in sorted(differ - reasons.keys())] + [
        f"{test}: has a reason in DIFFERENCES, and passes or is not there" for test in sorted(reasons.keys() - differ)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--only", nargs="+", help="names of files")
    parser.add_argument("--output", type=Path, default=RESULTS / "peer-suites.json")
    args = parser.parse_args()
    rows = json.loads(args.output.read_text()) if args.output.exists() else {}
    wrong = []
    for given in args.suites:
        name, _, text = given.partition("=")
        folder = Path(text).resolve()
        if name not in SUITES or not (folder / SUITES[name].tests[0]).is_file():
            parser.error(f"expected NAME=FOLDER, NAME one of {', '.join(SUITES)}, FOLDER its checkout, got {given}")
        commit = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], cwd=folder, text=True, check=True,
                                stdout=subprocess.PIPE).stdout.strip()  # fmt: skip
        facts = {"package": SUITES[name].package, "version": version(name, folder), "commit": commit,
                 "torch": torch.__version__}  # fmt: skip
        files = rows.get(name, {}).get("files", {}) if args.only else {}
        tests = [file for file in SUITES[name].tests if not args.only or Path(file).name in args.only]
        files |= tried(name, folder, tests)
        rows[name] = facts | {"files": files}
        write_json(args.output, rows)
        failed = {test: own for file in files.values() for test, own in file["failed"].items()}
        wrong += [f"{name}: {problem}" for problem in unexplained(failed, DIFFERENCES[name])]
    if wrong:
        raise SystemExit("\n".join(wrong))


def version(name: str, folder: Path) -> str:
    """Of the checkout's package, which need not be that of an installed one."""
    texts = [file.read_text() for source in ("", "src") for part in ("__init__.py", "version.py")
             if (file := folder / source / name / part).is_file()]  # fmt: skip
    (found,) = {line.split("=")[1].strip(" \"'") for text in texts for line in text.splitlines()
                if line.startswith("__version__ =")}  # fmt: skip
    return found


if __name__ == "__main__":
    main()
