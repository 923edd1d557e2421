"""Who tests the tests? A fault planted in the code must make the named tests fail."""

import shutil
from pathlib import Path

import pytest
from conftest import ROOT
from warm import pytest_elsewhere

pytestmark = pytest.mark.audit

# By a module of scripts/ and the file whose tests have to find them: each fault, the text as it is
# in the module (exactly once), and what replaces it.
FAULTS = {
    ("ch01_*", "test_ch01_*"): {
        "attention is not scaled": (
            " / math.sqrt(query.size(-1))  # (..., T, S)\n    weights = masked",
            "\n    weights = masked",
        ),
        "the causal mask shows one future word": (
            "device=device).tril()",
            "device=device).tril(1)",
        ),
        "a row with nothing to see becomes NaN": ("weights.masked_fill(hidden, 0.0)", "weights"),
    },
    ("ch02_*", "test_ch02_*"): {
        "values are made from the keys' input": (
            "(self.project_value(value)",
            "(self.project_value(key)",
        ),
    },
    ("ch04_*", "test_ch04_*"): {
        "the feed-forward layer has no dropout": (
            "self.dropout(self.expand(x).relu())",
            "self.expand(x).relu()",
        ),
        "LayerNorm takes the unbiased variance": ("correction=0", "correction=1"),
    },
    ("ch06_*", "test_ch06_*"): {
        "label smoothing spreads over V - 2": (
            "spread = log_z - logits.mean(dim=-1)",
            "spread = log_z - logits.sum(dim=-1) / (logits.size(-1) - 2)",
        ),
        "accumulation averages batches, not tokens": (
            "(loss / per).backward()",
            "(loss / batch.ntokens / len(group)).backward()",
        ),
        "the schedule runs a step ahead": (
            "min(step**-0.5, step * warmup**-1.5)",
            "min((step + 1) ** -0.5, (step + 1) * warmup**-1.5)",
        ),
    },
    ("ch08_*", "test_ch08_*"): {
        "beam search forgets whom a token continues": (
            "(rows_of(prefixes, origin), ",
            "(prefixes.repeat(1, 2, 1), ",
        ),
        "sampling forgets its temperature": (
            "(log_probs / temperature)",
            "log_probs",
        ),
    },
    ("ch09_*", "test_ch09_*"): {
        "an average of checkpoints is their sum": ("loaded]).mean(dim=0)", "loaded]).sum(dim=0)"),
        "a run resumes from nothing": ("self.load(*read_state(path))", "read_state(path)"),
    },
    ("ch10_*", "test_ch10_*"): {
        "swaps keep one side": ("first.sum(0) + moved", "first.sum(0)"),
        "long outputs are punished as short ones": (
            "return min(1.0, math.exp(",
            "return (math.exp(",
        ),
    },
    ("ch12_*", "test_fast_path"): {
        "the fast loss forgets that smoothing pulls at every word": (
            ".sub_(eps_each)",
            ".sub_(0.0)",
        ),
        "a packed row forgets its position": (
            "self.positions = self.slots %",
            "self.positions = torch.arange(len(self.slots)) %",
        ),
    },
    ("ch13_*", "test_fast_decoding"): {
        "the cache mixes up the families of a beam": (
            "self.ancestors.gather(1, where)",
            "self.ancestors[:, :1].expand(where.shape)",
        ),
        "the coarse product is believed without a proof": (" - 2 * self.error(x)", ""),
    },
    ("ch15_*", "test_ch15_*"): {
        "a link is looked for in the wrong direction": (
            "{(i, j) for j, i in",
            "{(j, i) for j, i in",
        ),
    },
    ("ch16_*", "test_ch16_*"): {
        "another head is changed": (
            "range(head * d_k, (head + 1) * d_k)",
            "range((head - 1) * d_k, head * d_k)",
        ),
        "noise is as long as the head's words, not as their sum": (
            "noise * lengths[0] / lengths[1]",
            "noise",
        ),
        "a patched run begins a layer late": (
            "encoder.layers[done:]",
            "encoder.layers[done + 1 :]",
        ),
    },
    ("ch17_*", "test_ch17_*"): {
        "a shorter context counts how often": (
            "Counter(gram[1:] for gram in counts)",
            "Counter(gram[1:] for gram in counts.elements())",
        ),
    },
    ("ch18_*", "test_ch18_*"): {
        "a prefix sees one token of the answer": (
            "device=prefix.device) < prefix",
            "device=prefix.device) <= prefix",
        ),
        "hidden words are all masked": ("fate < 0.8", "fate < 1.0"),
        "a target stands behind padding": (
            "self.lengths = self.real.sum(1)",
            "self.lengths = torch.full_like(self.real.sum(1), src.size(1))",
        ),
    },
    ("ch19_*", "test_ch19_*"): {
        "no residual, but for the residual": ("return self.dropout(", "return x + self.dropout("),
        "what a sweep found counts": ('if run["seed"] in COUNTED_SEEDS and run', "if run"),
    },
    ("ch20_*", "test_ch20_*"): {
        "passes count from zero": ("cumcount() + 1", "cumcount()"),
    },
    ("ch21_*", "test_ch21_*"): {
        "risks are taken over raw probabilities": (
            "logs).softmax(dim=0) @ marks",
            "logs).exp() @ marks",
        ),
        "what a model wrote back is learned, not read": (
            "pairs[i] = (source, pairs[i][1])",
            "pairs[i] = (pairs[i][0], source)",
        ),
    },
    ("ch22_*", "test_ch22_*"): {
        "groups are dealt out in turns": (
            "part.repeat_interleave(self.h // self.groups, dim=1)",
            "part.repeat(1, self.h // self.groups, 1, 1)",
        ),
        "keys are normed after they are turned": (
            "return rotated(k, start), split_heads(",
            "return self.key_norm(rotated(k, start)), split_heads(",
        ),
    },
    ("ch23_*", "test_ch23_*"): {
        "the online softmax forgets to shrink what it has": ("shrink * mixed +", "mixed +"),
        "a chunk forgets the state before it": ("queries @ state + (q", "(q"),
        "the delta rule adds": ("value - key @ state if correct", "value if correct"),
    },
    ("ch24_*", "test_ch24_*"): {
        "an expert's visits lose their weights": ("weights.flatten()[order]", "weights.flatten()"),
        "padding is routed": ("self.feed_forward(x, real)", "self.feed_forward(x)"),
        "the bias for balance isn't stored": (
            "torch.zeros(experts))",
            "torch.zeros(experts), persistent=False)",
        ),
    },
    ("book/verdict", "test_ch16_*"): {
        "every test of many is judged alone": ("level / (len(p) - rank)", "level"),
    },
    ("book/verdict", "test_ch19_*"): {
        "a spread is taken over all values, not within rows": (
            "sum(row) / len(row)",
            "sum(rows[0]) / len(rows[0])",
        ),
    },
    ("core/checkpoints", "test_core_files"): {
        "a spoiled file is believed": ("if digest(tensors, text) != expected:", "if False:"),
    },
    ("core/checkpoints", "test_training"): {
        "the state before the last is gone": (
            "saved_states(folder), 2)",
            "saved_states(folder), 1)",
        ),
    },
    ("core/data", "test_core_recipe"): {
        "the pieces are learned from validation, too": (
            'learn_pieces(config, corpus["train"], fewer)',
            'learn_pieces(config, corpus["train"] + corpus["val"], fewer)',
        ),
        "each epoch has the same order": (
            'rng = random.Random(f"{config.seed}:{epoch}")',
            "rng = random.Random(1)",
        ),
    },
    ("core/optimizers", "test_core_recipe"): {
        "Muon forgets what momentum it has": (
            "torch.lerp(grad, torch.stack(buffers), keep)",
            "grad",
        ),
    },
    ("core/steps", "test_core_steps"): {
        "after a step that isn't finite the next is taken": (
            "torch.maximum(self.bad, 1 - ",
            "(1 - ",
        ),
    },
    ("core/training", "test_training"): {
        "a resume takes another clipping": ('("beam", "alpha")', '("beam", "alpha", "clip")'),
        "a resumed run draws other dropout": ("set_rng_states(rngs[", "str(rngs["),
        "a resumed run begins anew": ("        if resume:\n", "        if not self:\n"),
    },
    ("evaluate", "test_ch08_*"): {
        "the rival's lead is called ours": (
            "texts = theirs, outputs, ",
            "texts = outputs, theirs, ",
        ),
    },
    ("fast/decoding", "test_fast_kernels"): {
        "8 bits forget the norm before a product": ("round_rows(x, norm)", "round_rows(x)"),
    },
    ("fast/lines", "test_translate"): {
        "another character ends a line, too": (
            r'chunk.split(b"\n")',
            r'chunk.replace(b"\x0b", b"\n").split(b"\n")',
        ),
    },
    ("fast/losses", "test_core_recipe"): {
        "R-Drop counts padding": (".masked_fill(labels == criterion.padding_idx, 0.0)", ""),
    },
    ("fast/searching", "test_fast_decoding"): {
        "an exact search stops like any other": (
            "sorted(h.score(alpha) for h in self.finished[source])[-self.beam] >= bound",
            "True",
        ),
    },
    ("fast/translating", "test_fast_kernels"): {
        "a model made ready outlives its weights": (
            "if before != now or not bias.equal(small):",
            "if ready is None:",
        ),
    },
    ("fast/translating", "test_translate"): {
        "texts come in the order of their lengths": (
            "zip(itertools.chain(*batches), itertools.chain(*answers), strict=True)",
            "enumerate(itertools.chain(*answers))",
        ),
    },
    ("studies/lessons", "test_studies_best"): {
        "pairs that a model wrote replace people's": ("[*people, *filter(", "[*filter("),
    },
    ("studies/race_training", "test_races"): {
        "a benchmark counts the start sign": ("len(e.tgt) - 1) for e", "len(e.tgt)) for e"),
    },
    ("studies/rows", "test_studies_rows"): {
        "the last epoch's weights stay": ("if losses[-1] == min(losses):", "if losses:"),
    },
    ("studies/runner", "test_studies_runner"): {
        "a sweep ends at its edge": ("rates |= {best / 2, 2 * best}", "pass"),
    },
    ("studies/speedrun", "test_studies_speedrun"): {
        "the test ends a training": ('corpus["val"], config.beam', 'corpus["test"], config.beam'),
    },
}


@pytest.fixture
def copy(tmp_path) -> Path:
    """A copy of the series, with its own scripts and tests to spoil."""
    for name in ("scripts", "tests"):  # compiled files too: a spoiled one is compiled again
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in ("models", "results", "notebooks", "docs"):
        if (ROOT / name).is_dir():
            (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


PLANTED = [(*places, name) for places, faults in FAULTS.items() for name in faults]


@pytest.mark.parametrize(("module", "finder", "name"), PLANTED)
def test_a_planted_fault_is_found(module, finder, name, copy):
    right, wrong = FAULTS[module, finder][name]
    (script,), (tests,) = copy.glob(f"scripts/{module}.py"), copy.glob(f"tests/{finder}.py")
    text = script.read_text("utf-8")
    assert text.count(right) == 1, f"{script.name} has changed: update where this fault goes"
    script.write_text(text.replace(right, wrong), "utf-8")
    log = copy / "log.txt"
    code = pytest_elsewhere(copy, log, str(tests), "-x", "-q", "-p", "no:cacheprovider")
    said = log.read_text("utf-8")
    assert code == 1, said[-2000:]  # 1: tests ran, and one failed
    assert "1 failed" in said and "error" not in said.splitlines()[-1]
    assert "FileNotFoundError" not in said  # a file that the copy lacks is no fault found
