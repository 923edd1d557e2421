"""Who tests the tests? A fault planted in a chapter must make that chapter's tests fail."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

# What is planted: the chapter, the text as it stands there (exactly once), what replaces it, and,
# where a chapter's tests fill several files, the one that has to find it (else any of them may).
FAULTS = {
    "attention is not scaled": (
        "ch01",
        "scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))  # (..., T, S)",
        "scores = query @ key.transpose(-2, -1)",
    ),
    "the causal mask shows one future word": (
        "ch01",
        "return torch.ones(1, size, size, dtype=torch.bool, device=device).tril()",
        "return torch.ones(1, size, size, dtype=torch.bool, device=device).tril(1)",
    ),
    "a row with nothing to see becomes uniform": (
        "ch01",
        "    return weights.masked_fill(empty, 0.0)\n",
        "    return weights\n",
    ),
    "LayerNorm takes the unbiased variance": (
        "ch04",
        "torch.var_mean(x, dim=-1, correction=0, keepdim=True)  # (..., 1) each",
        "torch.var_mean(x, dim=-1, correction=1, keepdim=True)",
    ),
    "label smoothing spreads over V - 2": (
        "ch06",
        "spread = log_z - logits.mean(dim=-1)",
        "spread = log_z - logits.sum(dim=-1) / (logits.size(-1) - 2)",
    ),
    "accumulation averages batches, not tokens": (
        "ch06",
        "(loss / per).backward()",
        "(loss / batch.ntokens / len(group)).backward()",
    ),
    "the schedule runs a step ahead": (
        "ch06",
        "min(step**-0.5, step * warmup**-1.5)",
        "min((step + 1) ** -0.5, (step + 1) * warmup**-1.5)",
    ),
    "attention's gradient goes through dropped weights": (
        "ch08",
        "            grad_weights *= kept\n",
        "            pass\n",
    ),
    "the fast loss forgets that smoothing pulls at every bias": (
        "ch08",
        "by_bias -= smoothing / vocab * len(x)",
        "pass",
    ),
    "a packed row forgets its position": (
        "ch08",
        "self.positions = self.slots % real.size(1)",
        "self.positions = torch.arange(len(self.slots)) % real.size(1)",
    ),
    "beam search forgets whom a token continues": (
        "ch09",
        "ids = torch.cat((ids[chosen], ids.new_tensor(token).unsqueeze(1)), dim=1)",
        "ids = torch.cat((ids, ids.new_tensor(token).unsqueeze(1)), dim=1)",
        "test_ch09_recipe.py",
    ),
    "sampling forgets its temperature": (
        "ch10",
        "log_probs = ((log_probs - best) / temperature).log_softmax(dim=-1)",
        "log_probs = (log_probs - best).log_softmax(dim=-1)",
        "test_ch10_decoding_and_bleu.py",
    ),
    "the cache mixes up the families of a beam": (
        "ch10",
        "self.ancestors = self.ancestors.gather(1, where)",
        "self.ancestors = self.ancestors[:, :1].expand(where.shape)",
        "test_ch10_cache.py",
    ),
    "an exact search stops like any other": (
        "ch10",
        "enough = self.worst(source, alpha) >= hope",
        "enough = True",
        "test_ch10_cache.py",
    ),
    "the coarse product is believed without a proof": (
        "ch10",
        "least = peaks.amax(dim=-1) - (2 * error).ceil().to(rough.dtype)  # (N,)",
        "least = peaks.amax(dim=-1)  # (N,)",
        "test_ch10_cache.py",
    ),
    "a silenced head stays silent": (
        "ch11",
        "            columns.copy_(before)",
        "            pass",
    ),
    "a prefix sees one token of the answer": (
        "ch12",
        "torch.arange(size, device=prefix.device) < prefix[:, None]",
        "torch.arange(size, device=prefix.device) <= prefix[:, None]",
        "test_ch12_variants.py",
    ),
    "no residual, but for the residual": (
        "ch13",
        "            return self.dropout(sublayer(self.norm(x)))",
        "            return x + self.dropout(sublayer(self.norm(x)))",
        "test_ch13_ablations_and_scaling.py",
    ),
    "risks are taken over raw probabilities": (
        "ch13",
        "(alpha * logs).softmax(dim=0) @ marks",
        "(alpha * logs).exp() @ marks",
        "test_ch13_recipes.py",
    ),
    "the online softmax forgets to shrink what it has": (
        "ch14",
        "mixed = shrink * mixed + weights @ v[..., columns, :]",
        "mixed = mixed + weights @ v[..., columns, :]",
        "test_ch14_since_2017.py",
    ),
}
CHAPTERS_AT_FAULT = sorted({fault[0] for fault in FAULTS.values()})


@pytest.fixture
def copy(tmp_path) -> Path:
    """The series again, with scripts and tests of its own to spoil."""
    for name in ("scripts", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in ("models", "results", "notebooks"):
        if (ROOT / name).is_dir():
            (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run_tests(pattern: str, *options: str, cwd: Path):
    """pytest on the files in tests/ that fit `pattern`, up to the first failure."""
    tests = sorted(map(str, cwd.glob(f"tests/{pattern}")))
    assert tests, f"no tests/{pattern}: say anew which file has to find the fault"
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", *tests, "-x", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *options], cwd=cwd, env=plain, capture_output=True, text=True, timeout=900
    )


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, copy):
    chapter, right, wrong, *finder = FAULTS[name]
    (script,) = copy.glob(f"scripts/{chapter}_*.py")
    text = script.read_text("utf-8")
    assert text.count(right) == 1, f"{script.name} has changed: say anew where this fault goes"
    script.write_text(text.replace(right, wrong), "utf-8")
    done = run_tests(finder[0] if finder else f"test_{chapter}_*.py", cwd=copy)
    assert done.returncode == 1, done.stdout[-2000:]  # 1: tests ran, and one failed
    assert "1 failed" in done.stdout and "error" not in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("chapter", CHAPTERS_AT_FAULT)
def test_the_unspoiled_copy_is_sound(chapter, copy):
    """The copy's tests are found and belong to the copy: what fails above, fails by its fault."""
    done = run_tests(f"test_{chapter}_*.py", "--collect-only", cwd=copy)
    assert done.returncode == 0, done.stdout[-2000:]
