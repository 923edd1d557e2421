# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     notebook_metadata_filter: kernelspec,jupytext,-jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Chapter 10 · Judging
#
# After this chapter you can measure a translator, say whether another is really better, and test a test of significance.
#
# | | |
# |---|---|
# | In the paper | §6.1 of [Attention Is All You Need](https://arxiv.org/abs/1706.03762), and the BLEU columns of Table 2 |
# | Time | 20 minutes to read, 55 with the code; half a minute to run on a CPU |
# | Before, after | [Chapter 9 · The training run](ch09_training_run.ipynb) · [Chapter 11 · Where the time goes](ch11_where_the_time_goes.ipynb) |
#
# *If you read only three cells:* the bricks, the chart of *Swap by a coin*, the chart of the case.
#
# Shapes: **N** sentences, **R** tosses or draws.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import pandas as pd

from scripts.book.charts import titled
from scripts.book.exercises import check
from scripts.book.figures import judging as figures
from scripts.book.records import load_record
from scripts.book.verdict import Verdict, verdicts
from scripts.ch08_decoding import plain_translate
from scripts.core.models import STUDIED, load_model
from scripts.core.scores import corpus_bleu, corpus_chrf
from scripts.corpora.load import load_corpus

# %% [markdown]
# ## What a machine can count
#
# > **In short.** A good translation shares words, pairs, triples and quadruples of words with a human's. BLEU counts them.
#
# Two captions, by a human and the shipped translator:
#
# | the human: the *reference* | the translator: the *output* |
# |---|---|
# | A guy works on a building. | A guy working on a building. |
# | A group of people standing in front of an igloo. | A group of people are standing in front of an illuminum. |
#
# With the full stop the first output has 7 words, 6 pairs, 5 triples and 4 quadruples.
#
# **Predict.** One of the 7 words isn't in the reference. How many of the 6 pairs are in it, how many of the 4 quadruples?


# %%
def tokens_13a(text: str) -> list[str]:
    """The words that sacreBLEU's tokeniser "13a" counts: split at spaces, punctuation split off."""
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    return Tokenizer13a()(text).split()


# %%
first_ten = pd.DataFrame(load_record("multi30k-de-en")["samples"])  # the test set's first captions
sources, references, recorded = first_ten[["source", "reference", "translation"]].T.values.tolist()
titled(
    figures.match_walls([(tokens_13a(recorded[i]), tokens_13a(references[i])) for i in (8, 6)]),
    "A word without a match breaks up to two pairs, three triples and four quadruples",
    "Bricks: the output's n-grams, over the middle of their words. Blue: in the reference.",
)

# %% [markdown]
# In the first, 4 of the 6 pairs and 1 of the 4 quadruples: every n-gram that holds the odd word is lost. "working" counts as little as "illuminum".
#
# ## BLEU, by hand
#
# > **In short.** The shares of matching n-grams, their geometric mean, a penalty for short texts.
#
# BLEU (Papineni et al. 2002) sums over the *whole corpus*, and only then divides.
#
# 1. An **n-gram** is a run of n tokens. The precision $p_n$ is the share of the outputs' n-grams with a match.
# 2. Matches are **clipped**: in each sentence an n-gram matches at most as often as it occurs in the reference.
# 3. One safe word could have $p_1 = 1$. Hence the **brevity penalty**, for c tokens of output and r of reference: $\text{BP} = \min(1, e^{\,1 - r/c})$.
# 4. $\text{BLEU} = 100 \cdot \text{BP} \cdot (p_1\, p_2\, p_3\, p_4)^{1/4}$.
#
# **Your turn.** Write `ngram_counts`.


# %% tags=["yours"]
def ngram_counts(tokens: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    """Each run of n tokens, a tuple, and how often it occurs."""
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


# %%
rhyme = ["the", "cat", "and", "the", "cat"]
assert ngram_counts(rhyme, 2) == {("the", "cat"): 2, ("cat", "and"): 1, ("and", "the"): 1}

# %% [markdown]
# **Your turn.** Write `brevity_penalty`. **Predict.** What does a text lose that is 10% too short?


# %% tags=["yours"]
def brevity_penalty(output_length: int, reference_length: int) -> float:
    """1 for an output at least as long as the reference, else exp(1 − r/c); 0 for no output."""
    if output_length == 0:
        return 0.0
    return min(1.0, math.exp(1 - reference_length / output_length))


# %%
assert brevity_penalty(0, 100) == 0 and brevity_penalty(101, 100) == brevity_penalty(100, 100) == 1
assert math.isclose(math.log(brevity_penalty(50, 100)), -1)
print(f"90 tokens for 100: BP = {brevity_penalty(90, 100):.3f}")

# %% [markdown]
# It loses 10.5%.
#
# **Smoothing.** The mean is geometric: one $p_n$ of zero makes the score zero. sacreBLEU (Post 2018), the standard program, *smooths* zeros away before it multiplies.


# %%
def smoothed(matches: Sequence[int]) -> list[float]:
    """The matches without zeros: the first zero becomes 1/2, the second 1/4, and so on."""
    counts, zeros = [], 0
    for count in matches:
        zeros += count == 0
        counts.append(count or 0.5**zeros)
    return counts


@dataclass
class BleuParts:
    """What BLEU is made of, summed over a whole corpus; index n − 1 is about n-grams."""

    matches: list[int]  # n-grams of the outputs with a match, for n from 1 to 4
    totals: list[int]  # n-grams of the outputs
    output_length: int  # tokens
    reference_length: int  # tokens

    @property
    def score(self) -> float:
        """BLEU, from 0 to 100; 0 without any match, or without any n-gram of some length."""
        if not any(self.matches) or not all(self.totals):
            return 0.0
        precisions = [m / t for m, t in zip(smoothed(self.matches), self.totals, strict=True)]
        penalty = brevity_penalty(self.output_length, self.reference_length)
        return 100 * penalty * math.prod(precisions) ** (1 / 4)


# %% [markdown]
# **Your turn.** Write `bleu_parts`, with clipping. (For counters, `a & b` keeps the smaller count of each key.)
#
# **Predict.** "the the the the the the the" for "the cat is on the mat": what is $p_1$, and what would it be without clipping?


# %% tags=["yours"]
def bleu_parts(outputs: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> BleuParts:
    """BLEU's parts of tokenised outputs with one reference each, as `BleuParts` describes them."""
    matches, totals = [0] * 4, [0] * 4
    for output, reference in zip(outputs, references, strict=True):
        for n in range(1, 5):
            output_counts, reference_counts = ngram_counts(output, n), ngram_counts(reference, n)
            matches[n - 1] += (output_counts & reference_counts).total()
            totals[n - 1] += output_counts.total()
    return BleuParts(matches, totals, sum(map(len, outputs)), sum(map(len, references)))


# %%
corpora = {"ten captions": (recorded, references)}
corpora["the the the"] = ["the " * 7], ["the cat is on the mat"]
for name, (outputs, targets) in corpora.items():
    theirs = corpus_bleu(outputs, targets)  # sacreBLEU's
    parts = bleu_parts([*map(tokens_13a, outputs)], [*map(tokens_13a, targets)])
    assert astuple(parts) == (theirs.counts, theirs.totals, theirs.sys_len, theirs.ref_len)
    assert math.isclose(parts.score, theirs.score, rel_tol=1e-9), "not sacreBLEU's score"
    print(f"{name:12}  BLEU {parts.score:5.2f}: {parts.matches} of {parts.totals} match")
print(theirs.signature.split("|version")[0])

# %% [markdown]
# $p_1$ is 2/7; without clipping it would be 1. Without smoothing the three zeros would make BLEU 0.
#
# The last line is sacreBLEU's *signature*, without its version (2.6.0). It names what changes the number: references, capitals (`case:mixed`: they count), tokeniser, smoothing.
#
# ## Two translators
#
# > **In short.** One model, two searches. Which translates better?
#
# Greedy decoding, and a beam of 5 with α = 0.6. Seven of ten captions differ.
#
# **Predict.** Which has the higher BLEU?

# %%
trained = load_model(STUDIED)
trained.model.double()  # rounding hardly ever changes a word
greedy_outputs, beam_outputs = (plain_translate(trained, sources, beam=k) for k in (1, 5))
pd.set_option("display.max_colwidth", None)
two = {"greedy": greedy_outputs, "beam of 5": beam_outputs}
ten = pd.DataFrame({"reference": references} | two)
ten[ten["greedy"] != ten["beam of 5"]]


# %%
def bleu(outputs: Sequence[str], references: Sequence[str]) -> float:
    """BLEU of texts, from 0 to 100, tokenised by 13a."""
    return bleu_parts([*map(tokens_13a, outputs)], [*map(tokens_13a, references)]).score


# %%
print({name: round(bleu(outputs, references), 2) for name, outputs in two.items()})

# %% [markdown]
# Greedy decoding, by 0.2. The beam's "repair" is right and has no match; without caption 4 the beam would lead by 2.1.
#
# **Pitfall.** Splitting at spaces only, lower case, letters for words: all are called BLEU. **Predict.** Which exceed 50.56?

# %%
for options in ({"tokenize": "none", "force": True}, {"lowercase": True}, {"tokenize": "char"}):
    print(f"{corpus_bleu(beam_outputs, references, **options).score:.2f}", options)

# %% [markdown]
# Lower case a little, letters by 17 points. Without its signature a BLEU can't be compared.
#
# ## chrF: letters instead of words
#
# > **In short.** "working" for "works" is half right. chrF compares runs of letters.
#
# chrF (Popović 2015, 2016) removes the spaces and counts n-grams of *letters*, n from 1 to 6. *Precision* is the share of the outputs' n-grams with a match, *recall* that of the references'. With prec and rec their means over n,
#
# $$\text{chrF}_\beta = 100 \cdot \frac{(1 + \beta^2)\; \text{prec} \cdot \text{rec}}{\beta^2\, \text{prec} + \text{rec}}, \qquad \beta = 2.$$
#
# What is missing weighs more than what is too much, so chrF needs no brevity penalty.
#
# **Your turn.** Write it, with matches clipped in each sentence.


# %% tags=["yours"]
def chrf_by_hand(outputs: Sequence[str], references: Sequence[str]) -> float:
    """chrF2 of a corpus, from 0 to 100, one reference each; 0 without any match.

    Matches and n-grams are summed over the corpus. An n is left out for which a side has no n-gram.
    """
    letters = [["".join(text.split()) for text in side] for side in (outputs, references)]
    precisions, recalls = [], []
    for n in range(1, 7):
        counts = [[ngram_counts(text, n) for text in side] for side in letters]
        matches = sum((ours & theirs).total() for ours, theirs in zip(*counts, strict=True))
        output_total, reference_total = (sum(c.total() for c in side) for side in counts)
        if output_total and reference_total:
            precisions.append(matches / output_total)
            recalls.append(matches / reference_total)
    if not any(precisions):
        return 0.0
    prec, rec = (sum(shares) / len(shares) for shares in (precisions, recalls))
    return 100 * (1 + 2**2) * prec * rec / (2**2 * prec + rec)


# %%
corpora |= {"no match": (["abc"], ["xyz"]), "too short": (["Hi Jo"], ["Hi Joe"])}
for name, (outputs, targets) in corpora.items():
    ours, theirs = chrf_by_hand(outputs, targets), corpus_chrf(outputs, targets).score
    assert math.isclose(ours, theirs, rel_tol=1e-9, abs_tol=1e-9), f"wrong for {name}"
    print(f"{name:12}  chrF2 {ours:5.2f}, sacreBLEU's {theirs:5.2f}")

# %% [markdown]
# ### What no counting sees
#
# **Predict.** Two of these four outputs are bad translations. Has chrF the good two ahead?

# %%
for output, target in (
    ("A guy working on a building.", references[8]),
    ("A guy banana on a building.", references[8]),
    ("Children fight over the ball.", "Kids compete to gain possession of the soccer ball."),
    ("A man in an orange hat throwing something off.", references[0]),
):
    chrf = chrf_by_hand([output], [target])
    print(f"BLEU {bleu([output], [target]):4.1f}  chrF2 {chrf:4.1f} {output}")

# %% [markdown]
# No. To BLEU "banana" is as good as "working". chrF sees other letters, not another meaning: "A guy worms on a building." has 80.1, more than "working". The man, who throws nothing, has the highest BLEU. The children, with whom nothing is wrong, come last: of a thousand captions only one has a lower chrF.
#
# **COMET** ([Rei et al. 2020](https://arxiv.org/abs/2009.09025)) is a model trained on people's verdicts. *Which* people matters: professional translators ranked systems otherwise than crowd workers did ([Freitag et al. 2021](https://aclanthology.org/2021.tacl-1.87)).
#
# ## Swap by a coin
#
# > **In short.** If two systems are *equal*, each could have written the other's output (the *null hypothesis*). Let chance decide anew: how far apart do equals come?
#
# Toss a coin for each caption. Heads: the systems swap outputs. Then score both (*approximate randomisation*: Noreen 1989; Riezler and Maxwell 2005). BLEU is made of ten sums over sentences: 4 matches, 4 totals, 2 lengths. A swap exchanges a sentence's ten numbers.


# %%
def sentence_parts(systems: Sequence[Sequence[str]], references: Sequence[str]) -> np.ndarray:
    """What each sentence of each of K systems adds to BLEU's ten sums: (K, N, 10)."""
    counts = []
    for outputs in systems:
        pairs = zip(outputs, references, strict=True)
        parts = [bleu_parts([tokens_13a(output)], [tokens_13a(target)]) for output, target in pairs]
        counts.append([(*m, *t, *lengths) for m, t, *lengths in map(astuple, parts)])
    return np.array(counts)


def bleu_of_sums(sums: np.ndarray) -> np.ndarray:
    """BLEU of each row of sums: (R, 10) to (R,)."""
    return np.array([BleuParts(s[:4], s[4:8], s[8], s[9]).score for s in sums.tolist()])


# %% [markdown]
# **Your turn.** Write `swapped_differences`. (One product of matrices moves the numbers of all R tosses.)


# %% tags=["yours"]
def swapped_differences(counts: np.ndarray, coins: np.ndarray) -> np.ndarray:
    """BLEU of the second system minus the first's, after swaps: (R,).

    counts (2, N, 10): both systems' `sentence_parts`. coins (R, N): where there is a 1, the two
    systems swap that sentence's parts.
    """
    first, second = counts
    moved = coins @ (second - first)  # (R, 10)
    return bleu_of_sums(second.sum(0) - moved) - bleu_of_sums(first.sum(0) + moved)


# %%
counts = sentence_parts([greedy_outputs, beam_outputs], references)  # (2, N, 10)
coins = np.random.default_rng(1).integers(2, size=(1000, 10))  # (R, N)
swaps = swapped_differences(counts, coins)  # (R,)
measured = bleu(beam_outputs, references) - bleu(greedy_outputs, references)
texts = np.array([greedy_outputs, beam_outputs])
for toss, difference in zip(coins[:3], swaps, strict=False):  # the texts themselves, swapped
    first, second = texts[toss, range(10)], texts[1 - toss, range(10)]
    assert math.isclose(bleu(second, references) - bleu(first, references), difference)
    print(f"{toss}: the beam {difference:+.2f}")

# %% [markdown]
# **Predict.** As they were, the beam has 0.22 less. How many of a thousand tosses bring the two at least as far apart?

# %%
assert ((swaps > 0) == coins[:, 4]).all()  # caption 4
assert min(abs(swaps)) >= abs(measured) - 1e-9
titled(
    figures.difference_chart(swaps, measured, "tosses"),
    "Ten captions: no toss brings equals closer than 0.22",
    "1000 tosses, a coin for each caption. Right of 0: the outputs for caption 4 are swapped.",
)

# %% [markdown]
# All of them do: whoever has caption 4's "are fixing" leads. So this difference says nothing. With $d$ the measured difference and $d^*_t$ that of toss t, the share of such tosses is
#
# $$p = \frac{1 + \#\{t : |d^*_t| \ge |d|\}}{1 + R}.$$
#
# Both signs count (the test is *two-sided*): we didn't know who would lead. The 1 is for the outputs as they were. We call systems different if p is at most 5%, the *level*. (p isn't the chance that they are equal.)
#
# **Your turn.** Write it.


# %% tags=["yours"]
def randomisation_p(swapped: np.ndarray, difference: float) -> float:
    """The share of swaps (R,) at least as far from 0 as `difference`, which itself counts as one.

    What differs by less than 1e-9, which is rounding, is as far.
    """
    as_far = np.abs(swapped) >= abs(difference) - 1e-9
    return float((1 + as_far.sum()) / (1 + len(swapped)))


# %%
assert randomisation_p(np.array([0.3, -0.3, 0.1]), 0.1 + 0.2) == 3 / 4  # 0.1 + 0.2 > 0.3, a little
assert randomisation_p(np.array([0.1, -0.2]), -5.0) == 1 / 3
print(f"p = {randomisation_p(swaps, measured):.2f}")

# %% [markdown]
# ## Milestone · Your test judges a thousand captions
#
# > **In short.** Your functions judge the shipped translator on a whole test set.
#
# The [record](../results/decoding-multi30k.json) of both searches keeps each caption's `sentence_parts`. Your test needs nothing else. **Predict.** The beam is ahead by 1.4 here. In how many of 10,000 tosses do equals come so far apart?

# %%
searches = load_record("decoding-multi30k")["beam_against_greedy"]["sentence_parts"]
thousand = np.array([np.loadtxt(lines, dtype=int) for lines in searches.values()])  # (2, 1000, 10)
assert (thousand[:, :10] == counts).all(), "they begin with the ten captions above"
coins = np.random.default_rng(2).integers(2, size=(10_000, 1000))  # (R, N)
swaps = swapped_differences(thousand, coins)
measured = np.diff(bleu_of_sums(thousand.sum(axis=1)))[0]
print(f"BLEU {measured:+.2f}, p = {randomisation_p(swaps, measured):.4f}")
assert max(abs(swaps)) < measured
titled(
    figures.difference_chart(swaps, measured, "tosses"),
    "A thousand captions: no toss of 10,000 brings equals so far apart",
    f"A coin for each caption. By chance alone equals come up to {max(abs(swaps)):.1f} apart.",
)

# %% [markdown]
# In none, so p is 1/10,001. Coins don't explain this lead.
#
# ## How large is the difference?
#
# > **In short.** How far apart are the systems over *all* such captions? Draw new test sets from ours.
#
# The *paired bootstrap* (Koehn 2004): draw N of the N sentences, with repetition, and score *both* systems on them, since a hard sentence is hard for both. Their differences scatter about as those of many test sets would. The interval omits 2.5% at each end.


# %%
@dataclass(frozen=True)
class PairedDifference:
    """How far two systems' BLEU differ, and how much of that chance in the sentences explains."""

    difference: float  # BLEU of the second minus BLEU of the first
    low: float  # 2.5% of the draws are below
    high: float  # 2.5% of the draws are above
    p: float  # how often equals differ so far or further, in either direction
    draws: np.ndarray  # the difference in each draw of the sentences


def paired_difference(
    counts: np.ndarray,
    tosses: int = 10_000,
    draws: int = 1000,
    seed: int | np.random.Generator = 12345,
) -> PairedDifference:
    """Compare two systems by their `sentence_parts` (2, N, 10), by draws and tosses."""
    rng, size = np.random.default_rng(seed), counts.shape[1]
    drawn = rng.choice(size, size=(draws, size))  # (R, N), with repetition
    times = np.stack([np.bincount(draw, minlength=size) for draw in drawn])  # each is drawn
    before, after = (bleu_of_sums(times @ parts) for parts in counts)  # (R,) each
    swaps = swapped_differences(counts, rng.integers(2, size=(tosses, size)))  # (R,)
    difference = float(np.diff(bleu_of_sums(counts.sum(axis=1)))[0])
    ends = np.percentile(after - before, [2.5, 97.5]).tolist()
    return PairedDifference(difference, *ends, randomisation_p(swaps, difference), after - before)


# %% [markdown]
# **Predict.** How wide is the interval for ten captions? For a thousand?

# %%
few, many = paired_difference(counts), paired_difference(thousand)
print(f"ten captions: 95% of the draws lie between {few.low:+.1f} and {few.high:+.1f}")
titled(
    figures.difference_chart(many.draws, measured, "draws", (many.low, many.high)),
    f"Over all such captions the beam leads by {many.low:.1f} to {many.high:.1f}",
    "1000 draws of a thousand captions. 95% of them lie between the dashed lines.",
)

# %% [markdown]
# For ten captions it is ten points wide, for a thousand 1.2.
#
# **Predict.** Split the thousand by chance. How often is one half's lead in the other's interval?

# %%
rng, inside = np.random.default_rng(3), []
for _ in range(200):
    halves = np.split(thousand[:, rng.permutation(1000)], 2, axis=1)  # (2, 500, 10) each
    a, b = (paired_difference(half, tosses=0, draws=500, seed=rng) for half in halves)
    inside += [a.low <= b.difference <= a.high, b.low <= a.difference <= b.high]
print(f"{np.mean(inside):.0%} of {len(inside)} leads are in the other half's interval")

# %% [markdown]
# In 83%, not 95%: the interval is for the lead over *all* such captions. The other half adds its own chance, so two leads differ $\sqrt2$ times as much. (In theory 83%, too.)
#
# ## Case · Twice too many alarms
#
# **Symptom.** The paired bootstrap of sacreBLEU 2.6 (`--paired-bs`) prints a p, too. We give it *equals*: the same 50 references twice, in both a fifth of the words deleted by chance. Of such pairs 5% should get a false alarm (*type I error*). Over twice as many do.
#
# **Suspects.** The draws scatter around $d$, those of equals would scatter around 0; so their mean is subtracted. sacreBLEU drops their signs, then subtracts the mean, and counts how many exceed $|d|$. Is this *order* wrong? Or that only one *tail* counts?
#
# **Instrument.** 400 pairs of equals, one change at a time: the mean first, or p doubled. **Predict.** Which brings it near 5%?


# %%
def bootstrap_p(result: PairedDifference, signs_first: bool = True) -> float:
    """The p of a paired bootstrap, of one tail; as sacreBLEU's, or the mean is subtracted first."""
    sizes = np.abs(result.draws) if signs_first else result.draws * np.sign(result.difference)
    as_far = sizes - sizes.mean() > abs(result.difference)
    return float((1 + as_far.sum()) / (1 + len(sizes)))


def lossy(texts: Sequence[str], share: float, rng: np.random.Generator) -> list[str]:
    """The texts without a `share` of their words, chosen at random."""
    return [" ".join(w for w in text.split() if rng.random() >= share) for text in texts]


def p_of_equals(pairs: int, seed: int, captions: int = 50) -> pd.DataFrame:
    """The p of each test, a column, for each of `pairs` pairs of equals, of `captions` each."""
    english = [target for _, target in load_corpus("sample")["test"]]
    rng, rows = np.random.default_rng(seed), []
    for _ in range(pairs):
        texts = [english[i] for i in rng.choice(len(english), captions, replace=False)]
        equals = [lossy(texts, 0.2, rng) for _ in range(2)]
        result = paired_difference(sentence_parts(equals, texts), tosses=199, seed=rng)
        rows.append([result.p, bootstrap_p(result), bootstrap_p(result, signs_first=False)])
    return pd.DataFrame(rows, columns=["swaps", "sacreBLEU's bootstrap", "the mean first"])


# %%
from sacrebleu import BLEU, significance

test = significance.PairedTest([*two.items()], {"BLEU": BLEU()}, [references], "bs", 1000)
assert test()[1]["BLEU"][1].p_value == bootstrap_p(few)

equals = p_of_equals(400, seed=1)
equals["sacreBLEU's p doubled"] = (2 * equals["sacreBLEU's bootstrap"]).clip(upper=1)
sound, theirs, mean_first, doubled = (equals <= 0.05).mean()
assert min(theirs, mean_first) > 1.25 * max(sound, doubled)
titled(
    figures.p_chart(equals),
    f"Another order hardly helps; doubled, sacreBLEU's p alarms in {doubled:.0%}, not {theirs:.0%}",
    "50 captions a pair. Dashed: a sound test. Orange: alarms.",
)

# %% [markdown]
# **Culprit.** The lost tail: this p is *one-sided*, its side chosen after looking. Double it. The order hardly matters: when $d$ is large, nearly all draws have its sign. (Alarms of sacreBLEU's p, doubled, and by swaps: 11.9, 5.8, 4.5% in `p_of_equals(3600, seed)`, seeds 2 and 3; 11.9, 6.2, 5.8% in `p_of_equals(1200, 3, captions=200)`.)
#
# sacreBLEU's `--paired-ar` swaps and counts both tails, but no ties: if one output differs, its p is 0.0001, and ours 1.
#
# ## Eight chances of a false alarm
#
# > **In short.** At 5%, one test of equals in twenty gives a false alarm. Eight tests are eight chances.
#
# Somebody changes a recipe in eight ways, trains each twice, and reports what has p ≤ 0.05. Chance is in the *seeds* now: equal trainings of a small recipe differ in BLEU, with a standard deviation of about 0.5. (p is from Student's t test with one spread for all rows, [`verdict.py`](../scripts/book/verdict.py).) **Predict.** If the changes change nothing, how many of a thousand studies report something?


# %%
def study_of_equals(rng: np.random.Generator) -> dict[str, Verdict]:
    """Eight changes, two trainings each, against a recipe of three; none makes a difference."""
    changes = {f"change {i}": rng.normal(31.6, 0.5, 2).tolist() for i in range(1, 9)}
    recipe = {"the recipe": rng.normal(31.6, 0.5, 3).tolist()}
    return verdicts(changes | recipe, dict.fromkeys(changes, "the recipe"))


# %%
studies = [study_of_equals(np.random.default_rng(seed)).values() for seed in range(1000)]
alone = sum(any(verdict.p <= 0.05 for verdict in study) for study in studies) / 1000
holm = sum(any(verdict.told for verdict in study) for study in studies) / 1000
print(f"a false alarm in {alone:.0%} of the studies, with Holm's steps in {holm:.0%}")

# %% [markdown]
# A quarter of the studies of nothing report something (not $1 - 0.95^8 = 34\%$: all share runs and a spread). *Holm* (1979) asks more: the smallest p must be at most 0.05/8, the next 0.05/7, and so on, until one fails. Then a study gives any false alarm with a chance of at most 5%.
#
# Now eight real changes ([`ingredients.py`](../scripts/studies/ingredients.py)), six of them trained twice: a narrow model, five epochs, the best epoch's BLEU on validation. (*BPE-dropout*: Provilkov et al. 2020; *R-Drop*: Liang, Wu et al. 2021; *Muon*, an optimiser: Jordan et al. 2024; *Xavier's tables*: embeddings of a quarter of the spread.) **Predict.** Does one *gain*?

# %%
recipe, passing = load_record("recipe-multi30k"), {}
for search, score in (("a beam of 5", "beam"), ("greedy decoding", "best")):
    runs = {name: [run[score] for run in row["runs"]] for name, row in recipe["rows"].items()}
    judged = verdicts(runs, {name: "the recipe" for name in runs if name != "the recipe"})
    print(f"{search}:")
    passing[search] = []
    for name in sorted(judged, key=lambda name: judged[name].p):
        gain, p, level = judged[name].difference, judged[name].p, 0.05 / (8 - len(passing[search]))
        print(f"  {name:18}{gain:+6.1f} BLEU, p = {p:.5f}, must be at most {level:.5f}")
        if p > level:  # it fails, and so do all that follow
            break
        passing[search].append(name)
assert ["Muon" in names for names in passing.values()] == [True, False]
figures.ingredient_chart(recipe, "Muon's gain passes by beam search, not by greedy", passing)

# %% [markdown]
# The gains are alike, 1.6 and 1.4, but equal trainings differ less by beam, 0.37 for 0.49, perhaps by chance. "Passes here, fails there" isn't yet a difference. So choose the score before the runs, or test all sixteen together. (Muon by beam passes.)
#
# **Pitfall.** Choosing is testing, too. Choose on validation, as the paper did; read the test once. (Of eleven α 1.4 is best there, with 41.90 BLEU on the test. Chosen on the test it would be the last, 2.0, with 42.06: too good.)
#
# ## Summary
#
# - BLEU is four clipped n-gram precisions and a brevity penalty, over a whole corpus. Report its signature.
# - Do two systems differ? Swap. By how much? Draw.
# - Test a test on equals. With eight tests, ask more of each.
# - A mismatch isn't yet a mistake: somebody has to read.
#
# ## What the paper did that we don't
#
# It gives each BLEU with no interval, test or signature. The script published with its code splits hyphenated words, so the big model's 28.4 for English to German need not be sacreBLEU's for the same texts.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · The simplest test
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# A *sign test* asks only in how many sentences each system is better. Ties are left out; between equals, each of the n other sentences is a fair coin. For two lists of scores, one per sentence, give the chance that n fair coins fall at least as unevenly as here, in either direction; 1 if n is 0. (`solution("sign_test")` shows ours.)


# %%
def sign_test(first: list[float], second: list[float]) -> float:
    """How likely n fair coins fall at least as unevenly as the sentences that differ."""
    ...


check(sign_test)

# %% [markdown]
# ### Exercise 2 · BLEU with several references
#
# *code · difficulty ●●○ · worth ●●● · 25 minutes*
#
# BLEU was made for several references. Write it for texts: `references[i]` lists those of `outputs[i]`. In each sentence an n-gram may match as often as in the reference that has it *most* often; the reference length is that of the one *closest* in length to the output, at a tie the shorter. All else is as in this chapter. (`solution("many_references")` shows ours.)


# %%
def many_references(outputs: list[str], references: list[list[str]]) -> float:
    """BLEU of a corpus, 0 to 100, with several references for each output."""
    ...


check(many_references)

# %% [markdown]
# ### Exercise 3 · On paper
#
# *think · difficulty ●●○ · worth ●●● · 10 minutes*
#
# Two references have ten tokens each. One output has five tokens, the other fifteen. What is the corpus's brevity penalty? What is the mean of the two sentences' own? And a colleague trains one model by each of two recipes, and finds $p = 0.001$ between their outputs. What has been shown?
#
# <details><summary>An answer</summary>
#
# The corpus has c = r = 20, so BP = 1: one output's surplus pays for what the other lacks. The sentences' own are $e^{1-2} = 0.37$ and 1, with a mean of 0.68.
#
# These two *models* differ by more than coins explain. Whether the *recipes* differ is open: the same recipe with another seed might differ as much.
#
# </details>
#
# Next: [Chapter 11 · Where the time goes](ch11_where_the_time_goes.ipynb)
