"""Who tests the tests? A fault planted in the code must make the named tests fail."""

import shutil
from pathlib import Path

import pytest
import warm
from conftest import ROOT

pytestmark = pytest.mark.audit

# What is planted: the module below scripts/, the text as it is there (exactly once), what replaces
# it, and the tests that have to find it.
FAULTS = {
    "the feed-forward layer has no dropout": (
        "ch04_*",
        "return self.contract(self.dropout(self.expand(x).relu()))",
        "return self.contract(self.expand(x).relu())",
        "test_ch04_encoder_decoder.py",
    ),
    "values are made from the keys' input": (
        "ch02_*",
        "v = split_heads(self.project_value(value), self.h)",
        "v = split_heads(self.project_value(key), self.h)",
        "test_ch02_multi_head_attention.py",
    ),
    "attention is not scaled": (
        "ch01_*",
        "scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))  # (..., T, S)",
        "scores = query @ key.transpose(-2, -1)",
        "test_ch01_*.py",
    ),
    "the causal mask shows one future word": (
        "ch01_*",
        "return torch.ones(1, size, size, dtype=torch.bool, device=device).tril()",
        "return torch.ones(1, size, size, dtype=torch.bool, device=device).tril(1)",
        "test_ch01_*.py",
    ),
    "a row with nothing to see becomes uniform": (
        "ch01_*",
        "    return weights.masked_fill(empty, 0.0)\n",
        "    return weights\n",
        "test_ch01_*.py",
    ),
    "LayerNorm takes the unbiased variance": (
        "ch04_*",
        "torch.var_mean(x, dim=-1, correction=0, keepdim=True)  # (..., 1) each",
        "torch.var_mean(x, dim=-1, correction=1, keepdim=True)",
        "test_ch04_*.py",
    ),
    "label smoothing spreads over V - 2": (
        "ch06_*",
        "spread = log_z - logits.mean(dim=-1)",
        "spread = log_z - logits.sum(dim=-1) / (logits.size(-1) - 2)",
        "test_ch06_training.py",
    ),
    "accumulation averages batches, not tokens": (
        "ch06_*",
        "(loss / per).backward()",
        "(loss / batch.ntokens / len(group)).backward()",
        "test_ch06_training.py",
    ),
    "the schedule runs a step ahead": (
        "ch06_*",
        "min(step**-0.5, step * warmup**-1.5)",
        "min((step + 1) ** -0.5, (step + 1) * warmup**-1.5)",
        "test_ch06_training.py",
    ),
    "attention's gradient goes through dropped weights": (
        "ch12_*",
        "            by_weights *= kept\n",
        "            pass\n",
        "test_fast_path.py::test_hand_written_backward_passes_are_the_derivatives",
    ),
    "the fast loss forgets that smoothing pulls at every bias": (
        "ch12_*",
        "by_bias -= smoothing / len(weight) * len(x)",
        "pass",
        "test_fast_path.py::test_hand_written_backward_passes_are_the_derivatives",
    ),
    "a packed row forgets its position": (
        "ch12_*",
        "self.positions = self.slots % real.size(1)",
        "self.positions = torch.arange(len(self.slots)) % real.size(1)",
        "test_fast_path.py",
    ),
    "beam search forgets whom a token continues": (
        "ch08_*",
        "ids = torch.cat((ids[list(rows)], ids.new_tensor(tokens).unsqueeze(1)), dim=1)",
        "ids = torch.cat((ids, ids.new_tensor(tokens).unsqueeze(1)), dim=1)",
        "test_ch08_decoding.py::test_a_wide_beam_finds_what_brute_force_finds",
    ),
    "sampling forgets its temperature": (
        "ch08_*",
        "log_probs = ((log_probs - best) / temperature).log_softmax(dim=-1)",
        "log_probs = (log_probs - best).log_softmax(dim=-1)",
        "test_ch08_decoding.py",
    ),
    "the cache mixes up the families of a beam": (
        "ch13_*",
        "self.ancestors = self.ancestors.gather(1, where)",
        "self.ancestors = self.ancestors[:, :1].expand(where.shape)",
        "test_fast_decoding.py",
    ),
    "8 bits forget the norm before a product": (
        "fast/decoding",
        "whole, unit = round_rows(x, norm)",
        "whole, unit = round_rows(x)",
        "test_fast_kernels.py::test_products_of_fewer_bits_are_near",
    ),
    "a model made ready outlives its weights": (
        "fast/translating",
        "if before != now or not bias.equal(small):",
        "if ready is None:",
        "test_fast_kernels.py::test_a_model_is_made_ready_once_until_its_weights_change",
    ),
    "an exact search stops like any other": (
        "fast/searching",
        "enough = sorted(h.score(alpha) for h in self.finished[source])[-self.beam] >= bound",
        "enough = True",
        "test_fast_decoding.py::test_exact_is_never_stopping_and_better_than_hasty",
    ),
    "the coarse product is believed without a proof": (
        "fast/decoding",
        "least = peaks.amax(dim=-1) - (2 * error).ceil().to(rough.dtype)  # (N,)",
        "least = peaks.amax(dim=-1)  # (N,)",
        "test_fast_decoding.py::test_the_screen_finds_what_the_whole_product_finds",
    ),
    "a silenced head stays silent": (
        "ch16_intervening",
        "            columns.copy_(before)",
        "            pass",
        "test_ch16_intervening.py",
    ),
    "a head's mean is forgotten": (
        "ch16_intervening",
        "bias += columns @ instead[number]",
        "pass",
        "test_ch16_intervening.py",
    ),
    "a patched run begins a layer late": (
        "ch16_intervening",
        "for layer in model.encoder.layers[done:]:",
        "for layer in model.encoder.layers[done + 1 :]:",
        "test_ch16_intervening.py::test_a_run_patched_whole_is_the_other_run",
    ),
    "a prefix sees one token of the answer": (
        "ch18_one_stack",
        "torch.arange(size, device=prefix.device) < prefix[:, None]",
        "torch.arange(size, device=prefix.device) <= prefix[:, None]",
        "test_ch18_one_stack.py",
    ),
    "no residual, but for the residual": (
        "ch19_*",
        "            return self.dropout(sublayer(self.norm(x)))",
        "            return x + self.dropout(sublayer(self.norm(x)))",
        "test_ch19_ablations.py::test_without_the_residual_only_the_sublayer_is_left",
    ),
    "a fit looks at the places that are held out": (
        "ch20_*",
        "theta = fit_law(law, N[inside], D[inside], losses[inside])",
        "theta = fit_law(law, N, D, losses)",
        "test_ch20_scaling.py::test_the_held_out_places_are_not_looked_at",
    ),
    "risks are taken over raw probabilities": (
        "ch21_*",
        "(alpha * logs).softmax(dim=0) @ marks",
        "(alpha * logs).exp() @ marks",
        "test_ch21_learning_from_models.py::test_each_source_has_its_own_denominator",
    ),
    "what a model wrote back is learned, not read": (
        "ch21_*",
        "(made.get(i, pair[0]), pair[1])",
        "(pair[0], made.get(i, pair[1]))",
        "test_ch21_learning_from_models.py::test_back_translation_keeps_every_target_and_the_pairs_that_are_known",
    ),
    "the online softmax forgets to shrink what it has": (
        "ch23_*",
        "mixed = shrink * mixed + weights @ v[..., columns, :]",
        "mixed = mixed + weights @ v[..., columns, :]",
        "test_ch23_long_memory.py::test_tiles_equal_the_textbook",
    ),
    "the delta rule adds": (
        "ch23_*",
        "missing = value - key @ state",
        "missing = value",
        "test_ch23_long_memory.py::test_the_delta_rule_and_its_gradients_by_a_triangular_system",
    ),
    "a resume takes another clipping": (
        "core/training",
        'SCORING = ("beam", "alpha")',
        'SCORING = ("beam", "alpha", "clip")',
        "test_training.py::test_a_resume_refuses_every_other_recipe",
    ),
    "the pieces are learned from validation, too": (
        "core/data",
        'for pair in corpus["train"] for line in pair)',
        'for pair in corpus["train"] + corpus["val"] for line in pair)',
        "test_core_recipe.py::test_pieces_come_from_the_training_split_alone",
    ),
    "a benchmark counts the start sign": (
        "studies/race_training",
        "(len(e.src), len(e.tgt) - 1) for e in examples",
        "(len(e.src), len(e.tgt)) for e in examples",
        "test_races.py::test_batches_hold_their_budget_and_predicted_tokens_count",
    ),
    "an average of checkpoints is their sum": (
        "ch09_*",
        "for tensors in loaded]).mean(dim=0)",
        "for tensors in loaded]).sum(dim=0)",
        "test_ch09_training_run.py::test_erratum_23_the_average_of_equals_is_the_same",
    ),
    "Muon forgets what momentum it has": (
        "core/optimizers",
        "mean = torch.lerp(grad, torch.stack(buffers), keep)",
        "mean = grad",
        "test_core_recipe.py::test_our_muon_is_pytorchs",
    ),
    "R-Drop counts padding": (
        "fast/losses",
        "apart = apart.masked_fill(labels == criterion.padding_idx, 0.0).sum()",
        "apart = apart.sum()",
        "test_core_recipe.py::test_r_drop_is_the_papers_with_torchs_kl_div",
    ),
    "a spoiled file is believed": (
        "core/checkpoints",
        "if digest(tensors, text) != expected:",
        "if False:",
        "test_core_files.py::test_any_flipped_bit_is_noticed",
    ),
    "after a step that isn't finite the next is taken": (
        "core/steps",
        "self.bad.copy_(torch.maximum(self.bad, 1 - ",
        "self.bad.copy_((1 - ",
        "test_core_steps.py::test_every_kind_takes_the_textbooks_steps",
    ),
    "every test of many is judged alone": (
        "book/verdict",
        "if p[i] > level / (len(p) - rank):",
        "if p[i] > level:",
        "test_ch16_intervening.py::test_holms_steps",
    ),
    "a spread is taken over all values, not within rows": (
        "book/verdict",
        "squares = sum((x - sum(row) / len(row)) ** 2 for row in rows for x in row)",
        "squares = sum((x - sum(rows[0]) / len(rows[0])) ** 2 for row in rows for x in row)",
        "test_ch19_ablations.py::test_the_spread_is_that_within_rows",
    ),
    "swaps keep one side": (
        "ch10_*",
        "bleu_of_sums(second.sum(0) - moved) - bleu_of_sums(first.sum(0) + moved)",
        "bleu_of_sums(second.sum(0) - moved) - bleu_of_sums(first.sum(0))",
        "test_ch10_judging.py::test_p_agrees_with_swapping_the_texts_themselves",
    ),
    "long outputs are punished as short ones": (
        "ch10_*",
        "return min(1.0, math.exp(1 - self.reference_length / self.output_length))",
        "return math.exp(1 - self.reference_length / self.output_length)",
        "test_ch10_judging.py::test_bleu_by_hand_equals_sacrebleu",
    ),
    "a link is looked for in the wrong direction": (
        "ch15_*",
        "return {(i, j) for j, i in enumerate(weights.argmax(-1).tolist())}",
        "return {(j, i) for j, i in enumerate(weights.argmax(-1).tolist())}",
        "test_ch15_looking_inside.py",
    ),
    "hidden words are all masked": (
        "ch18_one_stack",
        "chosen & (fate < 0.8)",
        "chosen & (fate < 1.0)",
        "test_ch18_one_stack.py",
    ),
    "counts behind <s> are continuations": (
        "ch17_small_gpt",
        "for gram, count in plain.items() if gram[0] == BOS",
        "for gram, count in plain.items() if gram[0] == EOS",
        "test_ch17_small_gpt.py",
    ),
    "the last epoch's weights stay": (
        "studies/rows",
        "        if losses[-1] == min(losses):",
        "        if losses:",
        "test_studies_rows.py",
    ),
    "what a sweep found counts": (
        "ch19_ablations",
        'if run["seed"] and run["loss"] is not None:',
        'if run["loss"] is not None:',
        "test_ch19_ablations.py",
    ),
    "a target stands behind padding": (
        "ch18_one_stack",
        "self.lengths = self.real.sum(1)",
        "self.lengths = torch.full_like(self.real.sum(1), src.size(1))",
        "test_ch18_one_stack.py",
    ),
    "groups are dealt out in turns": (
        "ch22_*",
        "k, v = (x.repeat_interleave(each, dim=1) for x in (k, v))",
        "k, v = (x.repeat(1, each, 1, 1) for x in (k, v))",
        "test_ch22_todays_block.py",
    ),
    "queries are normed after they are turned": (
        "ch22_*",
        "class TodaysAttention(RotaryAttention, NormedAttention)",
        "class TodaysAttention(NormedAttention, RotaryAttention)",
        "test_ch22_todays_block.py",
    ),
    "an expert's visits lose their weights": (
        "ch24_*",
        "weighted = done * share.flatten()[order].unsqueeze(-1)",
        "weighted = done * share.flatten().unsqueeze(-1)",
        "test_ch24_experts.py",
    ),
    "padding is routed": (
        "ch24_*",
        "lambda x: self.feed_forward(x, real)",
        "lambda x: self.feed_forward(x)",
        "test_ch24_experts.py",
    ),
    "the bias for balance isn't stored": (
        "ch24_*",
        'self.register_buffer("bias", torch.zeros(experts))',
        'self.register_buffer("bias", torch.zeros(experts), persistent=False)',
        "test_ch24_experts.py",
    ),
    "each epoch has the same order": (
        "core/data",
        'rng = random.Random(f"{config.seed}:{epoch}")',
        'rng = random.Random(f"{config.seed}")',
        "test_core_*.py",
    ),
    "a resumed run draws other dropout": (
        "core/training",
        "set_rng_states(rngs[self.ranks.rank], self.device, otherwise=luck.getrandbits(63))",
        "pass",
        "test_training.py",
    ),
    "the state before the last is gone": (
        "core/checkpoints",
        "keep_newest(saved_states(folder), 2)",
        "keep_newest(saved_states(folder), 1)",
        "test_training.py",
    ),
    "texts come in the order of their lengths": (
        "fast/translating",
        "for i, result in zip(itertools.chain(*batches), itertools.chain(*answers), strict=True):",
        "for i, result in enumerate(itertools.chain(*answers)):",
        "test_translate.py",
    ),
    "another character ends a line, too": (
        "fast/lines",
        'end, *others = chunk.split(b"\\n")',
        'end, *others = chunk.replace(b"\\x0b", b"\\n").split(b"\\n")',
        "test_translate.py",
    ),
    "a sweep ends at its edge": (
        "studies/runner",
        "rates |= {best / 2, 2 * best}",
        "pass",
        "test_studies_runner.py",
    ),
    "the rival's lead is called ours": (
        "evaluate",
        "paired_difference(theirs, outputs, references)",
        "paired_difference(outputs, theirs, references)",
        "test_ch08_decoding.py",
    ),
}


@pytest.fixture(scope="module")
def server():
    """Runs pytest elsewhere: takes (folder, log, arguments), gives the exit code."""
    with warm.server() as ask:
        yield ask


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


def run_tests(server, finders: set[str], *options: str, cwd: Path) -> tuple[int, str]:
    """pytest on `finders`, up to the first failure: files in tests/, patterns, or single tests.

    Gives its exit code and what it printed.
    """
    tests = []
    for file, colons, test in (finder.partition("::") for finder in sorted(finders)):
        found = sorted(cwd.glob(f"tests/{file}"))
        assert found, f"no tests/{file}: update which file has to find the fault"
        tests += [f"{path}{colons}{test}" for path in found]
    log = cwd / "log.txt"
    code = server(cwd, log, *tests, "-x", "-q", "-p", "no:cacheprovider", *options)
    return code, log.read_text("utf-8")


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, copy, server):
    module, right, wrong, finder = FAULTS[name]
    (script,) = copy.glob(f"scripts/{module}.py")
    text = script.read_text("utf-8")
    assert text.count(right) == 1, f"{script.name} has changed: update where this fault goes"
    script.write_text(text.replace(right, wrong), "utf-8")
    code, said = run_tests(server, {finder}, cwd=copy)
    assert code == 1, said[-2000:]  # 1: tests ran, and one failed
    assert "1 failed" in said and "error" not in said.splitlines()[-1]
    assert "FileNotFoundError" not in said  # a file that the copy lacks is no fault found


def test_the_tests_that_have_to_find_the_faults_are_there(copy, server):
    finders = {finder for *_, finder in FAULTS.values()}
    code, said = run_tests(server, finders, "--collect-only", cwd=copy)
    assert code == 0, said[-2000:]
