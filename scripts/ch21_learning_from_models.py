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
# # Chapter 21 · Learning from models
#
# After this chapter you can write training text with a model, and test what another model learned from it: to translate, or only to write.
#
# | | |
# |---|---|
# | In the paper | nothing: [Attention Is All You Need](https://arxiv.org/abs/1706.03762) learns from people's pairs alone |
# | Time | 20 minutes to read, 45 with the code; half a minute to run on a CPU |
# | Before, after | [Chapter 20 · Scaling](ch20_scaling.ipynb) · [Chapter 22 · Today's block](ch22_todays_block.ipynb) |
#
# *If you read only three cells:* the first chart, the chart of *A puzzle*, the chart of *The ladder*.
#
# Shapes: **B** sources, **S** source length, **T** target length, **V** vocabulary; **N** rows: predicted tokens, or the candidates of all sources.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import pandas as pd
import torch
from torch import Tensor, nn

from scripts import ROOT
from scripts.book.charts import bars, titled
from scripts.book.domains import list_of_texts
from scripts.book.exercises import check
from scripts.book.figures.understanding import falls_chart, two_tests_chart, who_writes
from scripts.book.records import load_record
from scripts.book.verdict import verdict_line, verdicts
from scripts.ch01_attention import subsequent_mask
from scripts.ch06_training import BOS, LabelSmoothing
from scripts.ch07_multi30k import Example, encode_pairs, source_ids
from scripts.core.data import TrainingData, with_pairs
from scripts.core.models import load_model
from scripts.fast.translating import DecodeOptions, translate

# %%
torch.set_default_dtype(torch.float64)
pd.set_option("display.max_colwidth", None)  # whole sentences

# %% [markdown]
# ## Who writes, and who learns
#
# > **In short.** Models can learn from text that models wrote. Ask of each text: who wrote it, and who learns from it?

# %%
who_writes()

# %% [markdown]
# The four recipes are by Hinton et al. (2015), Kim and Rush (2016: both kinds of distillation), Sennrich et al. (2016) and Shen et al. (2016). A model's text has faults. Ask where they do harm: in what a model reads, or in what it learns to write.
#
# ## Distillation by words
#
# > **In short.** At each place the teacher knows several good words. Let the student learn them all.
#
# "Ein kleiner Junge rennt über die Straße." The translation has begun with *A*. What comes next? Chapter 9's model answers.

# %%
trained = load_model(ROOT / "models" / "multi30k-de-en")
trained.model.double().eval()
source = torch.tensor([source_ids("Ein kleiner Junge rennt über die Straße.", trained.tokenizer)])
begun = torch.tensor([[BOS, *trained.tokenizer.encode("A")]])  # (1, T)
with torch.no_grad():
    x = trained.model(source, begun, None, subsequent_mask(begun.size(1)))
    q = trained.model.generator(x[:, -1]).softmax(dim=-1)[0]  # (V,)
likely = q.topk(4)
words = [trained.tokenizer.decode([i]) for i in likely.indices.tolist()]
frame = pd.DataFrame({"next word": words, "probability": likely.values.tolist()})
titled(
    bars(frame, "next word", "probability", number_format=".2f"),
    "Two words are likely, a third is possible",
    "The teacher's four likeliest words after “A …”. A person writes one; label smoothing would "
    f"give each of the other {len(q) - 1:,} pieces the same share.",
    wrap=76,
)

# %% [markdown]
# A *teacher* and a *student* guess the same word: at place $n$ both have read the source and the person's words before it. The teacher's logits are $t_n$ (V,), the student's $s_n$ (V,). Both are divided by a temperature $\tau$; a larger one gives unlikely words more weight. The student's loss over N places is
#
# $$ \mathcal{L} = -\tau^2 \sum_{n=1}^{N} \sum_{v=1}^{V} q_{nv} \log p_{nv}, \qquad q_n = \mathrm{softmax}(t_n / \tau), \quad p_n = \mathrm{softmax}(s_n / \tau). $$
#
# Its gradient with respect to $s_n$ is $\tau\,(p_n - q_n)$. With a large $\tau$, the difference of $p$ and $q$ shrinks like $1/\tau$. The factor $\tau^2$ makes up for it.
#
# With $\tau = 1$ this loss has two known cases. With all of $q_n$ on the person's word it is cross-entropy. With a part $\varepsilon$ of $q_n$ spread evenly it is label smoothing: a teacher that thinks all other words equally likely. (This series trains no student by words.)


# %% tags=["yours"]
def taught_by_words(logits: Tensor, q: Tensor, temperature: float = 1.0) -> Tensor:
    """−τ² Σ q log p over rows and words, p = softmax(logits / τ); logits, q (N, V), to a scalar."""
    log_p = (logits / temperature).log_softmax(dim=-1)  # (N, V)
    return -(temperature**2) * (q * log_p).sum()


# %%
torch.manual_seed(0)
logits, labels = torch.randn(4, 9, requires_grad=True), torch.tensor([4, 8, 5, 4])
q = torch.randn(4, 9).softmax(dim=-1)  # (N, V)
(slope,) = torch.autograd.grad(taught_by_words(logits, q, 3.0), logits)
torch.testing.assert_close(slope, 3 * ((logits / 3).softmax(dim=-1) - q))
smooth = 0.9 * nn.functional.one_hot(labels, 9) + 0.1 / 9
torch.testing.assert_close(taught_by_words(logits, smooth), LabelSmoothing(0.1)(logits, labels)[0])


# %% [markdown]
# ## Distillation by sequences
#
# > **In short.** People translate the same sentence in many ways. A teacher has chosen one for each source, and that is easier to predict.
#
# The student's loss against *all* texts that the teacher $q$ might write is a sum over all sentences. It can't be computed, so put all of $q$'s probability on the likeliest text:
#
# $$ -\sum_{y} q(y \mid x) \log p(y \mid x) \;\approx\; -\log p(\hat y \mid x), \qquad \hat y = \arg\max_y q(y \mid x) $$
#
# Here $x$ is a source, $y$ a target, and $p$ the student. A search finds $\hat y$, or nearly. So the loss is cross-entropy, as before; only the targets are new.


# %%
def distilled(
    data: TrainingData, teacher: Callable[[Sequence[str]], Sequence[str]]
) -> TrainingData:
    """The same training sources with `teacher`'s translations (Kim and Rush 2016, §3.2).

    Validation stays as people wrote it: it is there to judge.
    """
    sources = [source for source, _ in data.corpus["train"]]
    return with_pairs(data, list(zip(sources, teacher(sources), strict=True)))


# %% [markdown]
# Six of twenty training captions of Multi30k, chosen by hand:

# %%
captions = [(german, english) for _, german, english in load_record("multi30k-corpus")["captions"]]
encoded = encode_pairs(captions, trained.tokenizer)
few = TrainingData({"train": captions}, trained.tokenizer, encoded, [])
taught_pairs = distilled(few, partial(translate, trained, options=DecodeOptions(beam=1)))
shown = [(*captions[i], taught_pairs.corpus["train"][i][1]) for i in (0, 4, 8, 9, 17, 18)]
pd.DataFrame(shown, columns=["source", "a person", "the teacher"])

# %% [markdown]
# The last two are nonsense, and a student would learn them.
#
# ### On record
#
# The trainings of this section and of the next two are in [`recipes-multi30k.json`](../results/recipes-multi30k.json) (`python -m scripts.studies.recipes --save`): the narrow base of [chapter 19](ch19_ablations.ipynb), without dropout. A training is five passes over its pairs, or up to 32 over a sixteenth of Multi30k. Each row has three seeds. All scores are of the validation split, which also chose the learning rates and each run's best pass; BLEU is by greedy decoding.
#
# The teacher's English has fewer different words, and the next word is easier to guess from the last (its entropy, in nats):

# %%
runs = pd.DataFrame(load_record("recipes-multi30k")["runs"])
runs = runs[runs["seed"] > 0]  # seed 0 chose the rates
of_teacher = runs[runs["row"] == "teacher's translations"].iloc[0]
word_counts = {"people": of_teacher["people"], "the teacher": of_teacher["facts"]}
table = pd.DataFrame(word_counts).T.astype({"words": int, "types": int}).round(2)
table.rename(columns={"types": "different words", "entropy": "next word's entropy"})

# %% [markdown]
# **Predict.** One student learns from the teacher's text, another from people's. Which has the lower loss on the validation captions as people wrote them? Which has the higher BLEU?

# %%
means = runs.groupby("row")[["bleu", "chrf", "loss", "loss_teacher", "words"]].mean()
for row in ("all pairs", "teacher's translations"):
    nats = "{loss:.2f} nats a token on people's captions, {loss_teacher:.2f} on the teacher's"
    print(f"{row}:", nats.format(**means.loc[row]))

# %% [markdown]
# A verdict compares a row's three seeds with those of the row that it has to beat.


# %%
def verdict_on(row: str, rival: str, score: str = "BLEU") -> str:
    """A line that says whether a row's three seeds beat its rival's."""
    scores = runs.groupby("row")[score.lower()].agg(list)
    verdict = verdicts({name: scores[name] for name in (row, rival)}, {row: rival})[row]
    return verdict_line(row, verdict, rival, score)


print(verdict_on("teacher's translations", "all pairs"))

# %% [markdown]
# The teacher's student predicts people's words *worse*, yet what it writes is closer to people's text. BLEU looks only at the text.
#
# The teacher had learned the training captions: its BLEU is 51.7 on them, 41.3 on validation. So its text is closer to people's than it would be for new sources.


# %% [markdown]
# ## Back-translation
#
# > **In short.** English without a translation is plentiful. Let a model translate it *into German*, and train on those pairs. The German is bad, but the forward model only reads it. What it learns to write is people's English.
#
# Of the pairs $\mathcal{P}$ both sides are known, of the others only the English, $\mathcal{M}$. A reverse model $r(x \mid y)$ learns from $\mathcal{P}$, turned around. Then the forward model learns from both sets:
#
# $$ \mathcal{L} = -\sum_{(x, y) \in \mathcal{P}} \log p(y \mid x) - \sum_{y \in \mathcal{M}} \log p(y \mid \hat x), \qquad \hat x = \arg\max_x r(x \mid y) \;\text{ or }\; \hat x \sim r(\cdot \mid y) $$
#
# Sennrich et al. make the first choice. Edunov et al. (2018) *draw* $\hat x$: such text is worse, but more varied. Their models learned more from it, except when pairs were few.


# %%
def turned_around(data: TrainingData) -> TrainingData:
    """The same pairs in the other direction: the target becomes the source."""
    corpus = {
        split: [(target, source) for source, target in pairs]
        for split, pairs in data.corpus.items()
    }
    train, val = (  # bos stands before a target only
        [Example(e.tgt[1:], [BOS, *e.src]) for e in examples] for examples in (data.train, data.val)
    )
    return replace(data, corpus=corpus, train=train, val=val)


# %% [markdown]
# **Your turn.** Write `back_translated`; `reverse` writes German for English that has none. The model's text must land on the side that is *read*. If it replaced the person's target, the training loss would be low: a model's text is easy to predict.


# %% tags=["yours"]
def back_translated(
    data: TrainingData, known: Collection[int], reverse: Callable[[Sequence[str]], Sequence[str]]
) -> TrainingData:
    """The pairs numbered `known` as they are; the others' targets with sources that `reverse` writes.

    Every target stays in its place (Sennrich et al. 2016, §3.2).
    """
    pairs = data.corpus["train"]
    alone = [i for i in range(len(pairs)) if i not in known]
    new_sources = dict(zip(alone, reverse([pairs[i][1] for i in alone]), strict=True))
    written = [(new_sources.get(i, pair[0]), pair[1]) for i, pair in enumerate(pairs)]
    return with_pairs(data, written)


# %%
capitals = back_translated(few, range(0, 20, 4), lambda texts: [text.upper() for text in texts])
for i, (pair, person) in enumerate(zip(capitals.corpus["train"], captions, strict=True)):
    assert pair == (person if i % 4 == 0 else (person[1].upper(), person[1]))
print(" | ".join(capitals.corpus["train"][9]))  # by a "reverse model" that only writes capitals

# %% [markdown]
# ### A puzzle
#
# One pair in sixteen is known: 1,812, the same for all seeds. A reverse model, trained on these pairs, writes German for the other 27,188 captions: greedily, or drawn.

# %%
german_of = {"a part, back-translated by sampling": "drawn", "a part, back-translated": "greedy"}
german_bleu = runs.groupby(runs["row"].map(german_of))["back_bleu"].mean()
print("BLEU of the German:", german_bleu.round(1).to_dict())
drawn, greedy = german_of
for row, rival in ((drawn, "a part"), (greedy, drawn)):
    print(verdict_on(row, rival))
means.loc[["a part", *german_of, "all pairs"], ["loss", "bleu"]].round(2)

# %% [markdown]
# Both kinds of German lower the loss by 0.9 nats or more. Drawn German shows no gain in BLEU; greedy German has 2.8 more than drawn at nearly the same loss. What did drawn German teach?
#
# Perhaps English. A model can guess the next word from the source, or from the English before it. More captions teach more English, whatever stands beside them.
#
# So put people's German of *another* caption beside each of the 27,188. Such a source says nothing about its target. All else, the learning rate too, is as with drawn German. **Predict.** How far does the loss fall? And BLEU?

# %%
shuffled = "a part, with shuffled German"
german_of = {shuffled: "shuffled"} | german_of | {"all pairs": "people's"}
falls = pd.DataFrame(
    {
        "row": f"{german} German",
        "part": means.loc["a part", "loss"],
        "whole": means.loc[row, "loss"],
        "note": f"BLEU {means.loc[row, 'bleu']:.1f}",
    }
    for row, german in german_of.items()
)
falls_chart(
    falls,
    "part",
    "whole",
    "With shuffled German the loss falls, and BLEU falls, too",
    "Open: the part's 1,812 pairs alone, the same translators in all rows (BLEU 9.9). Filled: with "
    "the other 27,188 captions, too, and this German beside them.",
)

# %% [markdown]
# With shuffled German the loss falls by 0.7 nats, three quarters as far as with drawn German, and the translations get far worse. Where a model can gain by writing alone, its loss says little about translation.
#
# (The other quarter needn't be translation: shuffled German does harm.)


# %% [markdown]
# ## Minimum risk
#
# > **In short.** A reader judges the whole text. So let a model write several texts, mark each, and shift probability from the bad ones to the good.
#
# With $y^\star$ the person's translation, a mark $\Delta$ says how bad a text is: 0 is perfect. The *risk* is the mean mark of the texts that the model draws:
#
# $$ R(\theta) = \sum_{y} P(y \mid x; \theta)\, \Delta(y, y^\star), \qquad \Delta(y, y^\star) = 1 - \tfrac{1}{100}\,\text{chrF}(y, y^\star). $$
#
# A mark is a number; the gradient goes through $P$. But the sum is over all sentences. So Shen et al. (2016, §3) draw a set $\mathcal{S}$ of candidates, and take a distribution over *that set*:
#
# $$ \tilde R(\theta) = \sum_{y \in \mathcal{S}} Q(y)\, \Delta(y, y^\star), \qquad Q(y) = \frac{P(y \mid x; \theta)^{\alpha}}{\sum_{y' \in \mathcal{S}} P(y' \mid x; \theta)^{\alpha}} $$
#
# Log-probabilities $\ell_y = \log P(y \mid x)$ of whole sentences can lie tens of nats apart: with $\alpha = 1$ one candidate would have nearly all of $Q$. Shen et al. take 0.005, our record 0.05.


# %% tags=["yours"]
def risk_of_candidates(
    log_probs: Tensor, risks: Tensor, counts: Sequence[int], alpha: float
) -> Tensor:
    """Σ Q(y)·Δ(y) over each source's candidates, Q ∝ P^α: (N,) and (N,) to (B,) (Shen et al. 2016, eq. 10)."""
    of_each = zip(log_probs.split(list(counts)), risks.split(list(counts)), strict=True)
    return torch.stack([(alpha * logs).softmax(dim=0) @ marks for logs, marks in of_each])


# %%
log_probs, marks = torch.tensor([0.25, 0.75, 0.1, 0.4]).log(), torch.tensor([1.0, 0.0, 0.5, 0.0])
risks = risk_of_candidates(log_probs, marks, [2, 2], alpha=1.0)
torch.testing.assert_close(risks, torch.tensor([0.25, 0.1]))  # 0.1 of 0.5 drawn: Q is 0.2
risks = risk_of_candidates(log_probs, marks, [2, 2], alpha=0.5)
torch.testing.assert_close(risks, torch.tensor([1 / (1 + 3**0.5), 0.5 / 3]))

# %% [markdown]
# ### Who is pushed up, who down
#
# The derivative is $\partial \tilde R / \partial \ell_y = \alpha\, Q(y)\, (\Delta(y, y^\star) - \tilde R)$. Descent pushes up the candidates that are better than their set's mean under $Q$, and the others down.
#
# **What the denominator does.** Leave it out, and each text that wasn't drawn counts as perfect, with a mark of 0. So all of them go up, good or bad.
#
# A toy knows six captions, each with a score; P is the scores' softmax. Four captions are drawn, α is 1. A person wrote "A dog is sleeping." **Predict.** Which of the six scores does each loss push up? (Up is positive.)


# %%
def chrf_risks(texts: Sequence[str], reference: str) -> list[float]:
    """1 − chrF/100 of each text against one reference: 0 for the reference itself."""
    from sacrebleu.metrics import CHRF

    metric, texts = CHRF(), list_of_texts("texts", texts)
    return [1 - metric.sentence_score(text, [reference]).score / 100 for text in texts]


# %%
toy = {"A man is sleeping.": 0.4, "A dog sleeps.": 0.2, "A dog is asleep.": 0.1}  # with P
toy |= {"Two men play chess.": 0.2, "A dog is sleeping.": 0.05, "A dog is running.": 0.05}
marks = torch.tensor(chrf_risks([*toy], "A dog is sleeping."))  # (6,)
toy_scores = torch.tensor([*toy.values()]).log().requires_grad_()  # (6,)
log_p = toy_scores.log_softmax(dim=0)
log_p_drawn, marks_of_drawn = log_p[:4], marks[:4]
risk = risk_of_candidates(log_p_drawn, marks_of_drawn, [4], alpha=1.0)[0]
(push,) = torch.autograd.grad(-risk, toy_scores, retain_graph=True)
(raw_push,) = torch.autograd.grad(-(log_p_drawn.exp() @ marks_of_drawn), toy_scores)
by_formula = log_p_drawn.softmax(dim=0) * (risk - marks_of_drawn)
torch.testing.assert_close(push[:4], by_formula)
columns = {"P": log_p.exp(), "Δ": marks, "push by Q": push, "push by raw P": raw_push}
table = pd.DataFrame({name: values.tolist() for name, values in columns.items()}, index=[*toy])
table.round(3) + 0.0  # no -0.0

# %% [markdown]
# Of the drawn four, Q pushes up the two better than the mean; it leaves the undrawn two alone. Raw P pushes both of these up by 0.024, the right text and *A dog is running.* alike.
#
# Each step sees only what was drawn. **Predict.** Does the *true* risk fall, the mean over all six? What if the reference always joins the candidates?

# %%
print(f"true risk before: {toy_scores.softmax(dim=0) @ marks:.2f}")
for name, joining in {"drawn": [], "drawn, and the reference": [4]}.items():
    generator, scores = torch.Generator().manual_seed(0), toy_scores.detach().requires_grad_()
    for step in range(1, 1001):
        log_p = scores.log_softmax(dim=0)
        eight = log_p.exp().multinomial(8, replacement=True, generator=generator).tolist()
        chosen = sorted({*eight, *joining})  # each once
        risk = risk_of_candidates(log_p[chosen], marks[chosen], [len(chosen)], alpha=0.5)
        (slope,) = torch.autograd.grad(risk.sum(), scores)
        scores = (scores - slope).detach().requires_grad_()
        if step in (100, 1000):
            true_risk, likeliest = scores.softmax(dim=0) @ marks, [*toy][scores.argmax()]
            print(f"{name}, {step:,} steps: {true_risk:.2f}; the likeliest: {likeliest}")

# %% [markdown]
# The true risk falls, but slowly from draws alone: after 100 steps a wrong text leads. What isn't drawn isn't pushed up. With the reference in every set the right text leads soon, so the record's sets have it, too.
#
# ### On record
#
# The models of *all pairs* trained for another 200 steps of 16 captions, with eight draws for each and the reference. They have to beat the same models after 200 more steps of cross-entropy on these captions. Cross-entropy takes less than a tenth of the time. Each loss has the rate with the best chrF on validation. **Predict.** Which of chrF and BLEU goes up?

# %%
for score in ("chrF", "BLEU"):
    print(verdict_on("minimum risk", "more cross-entropy", score))
print(f"words a caption, people's: {of_teacher['val_words']:.1f}; by these models:")
means.loc[["all pairs", "more cross-entropy", "minimum risk"], ["words"]].round(1)

# %% [markdown]
# chrF, the goal, went up, and BLEU went down. The captions, too short before, are now too long by half a word. chrF forgives that, since it counts recall twice as much as precision. Judge such a training by another score than its own.


# %% [markdown]
# ## The ladder
#
# > **In short.** We train chapter 9's model further, by several recipes. Two tests disagree.
#
# The record's models are small. Each recipe below goes on from the weights of chapter 9's model ([all runs](../docs/ladder.md)).
#
# | name | what it does |
# |---|---|
# | *onward* | a control, though stopped early: people's pairs alone, six passes, of which validation kept the fourth or the second |
# | *widened* | trains on people's pairs, on chapter 9's English for their German, and on two reverse models' German for their English (*data diversification*, Nguyen et al. 2020) |
# | *risk* | trains by minimum risk, one pass over all pairs. Candidates are the eight best texts of a beam, a mark is 1 − BLEU/100, cross-entropy stays in the loss ([`risk.py`](../scripts/studies/risk.py)) |
# | *risk-mean* | the mean of the weights of two risk runs, and of one of these two after a second pass |
# | *all-mean* | the mean of three such weights and those of two widened runs |
#
# Short runs from the same weights stay so near to each other that their weights can be averaged (Wortsman et al. 2022).
#
# test_2016_flickr comes from the same collection as training and validation; the photographs of test_2017_flickr were collected later (Elliott et al. 2017). **Predict.** Which recipes gain on both tests?

# %%
TESTS = {"test_2016_flickr": "test of 2016", "test_2017_flickr": "test of 2017"}
NAMES = {
    "chapter 9": ["multi30k-de-en"],
    "onward": ["ladder-onward-1", "ladder-onward-2"],
    "widened": [f"ladder-widened-{seed}" for seed in (1, 2, 3, 4)],
    "risk": [f"ladder-risk-long-{seed}" for seed in (1, 2, 3, 4)],
    "risk-mean": ["ladder-risk-mean-1"],
    "all-mean": ["ladder-all-mean-1", "ladder-all-mean-3"],
}


def scores_on_tests(run: str) -> dict[str, float]:
    """A run's BLEU on either test, with a beam of 5 and greedily."""
    by_test = load_record(run)["test"]
    return {
        f"{label}, {search}": by_test[test][score]
        for search, score in (("beam", "bleu"), ("greedy", "bleu_greedy"))
        for test, label in TESTS.items()
    }


ladder = pd.DataFrame(
    {"name": name, **scores_on_tests(run)} for name, runs_of in NAMES.items() for run in runs_of
)
two_tests_chart(
    ladder,
    "test of 2016, greedy",
    "test of 2017, greedy",
    "Minimum risk gains on one test and loses on the other; widened gains on both",
    "BLEU by greedy decoding, a mark for each run. Dashed: chapter 9's model.",
)

# %% [markdown]
# Greedily, every run of *widened* and of *all-mean* gains on both tests. Every run of *risk* gains on the test of 2016, and loses more on that of 2017 than either run of *onward*. (*Risk* trained on BLEU itself; the records have no other score.)
#
# With a beam, validation chose each run's length penalty. Chapter 9's model keeps 0.6, and has 41.6 and 37.4. With 1.4, which validation prefers, it has 41.9 and 37.0 (`python -m scripts.evaluate --model models/multi30k-de-en --beam 5 --alpha 1.4`). On average *risk* has 42.3 and 37.0, *widened* 41.9 and 37.5. So against 1.4 *risk* loses nothing in 2017, and *widened* gains nothing in 2016.
#
# Is a mean better than its runs?

# %%
trials = {}
for run in NAMES["all-mean"]:
    parts = load_record(run)["learned_from"]["mean_of"]
    of_parts = [scores_on_tests(f"ladder-{part}") for part in parts]
    for column, mean in scores_on_tests(run).items():
        five = ", ".join(f"{bleu:.1f}" for bleu in sorted(scores[column] for scores in of_parts))
        trials[run, column] = {"its five runs": five, "their mean": f"{mean:.1f}"}
pd.DataFrame(trials).T

# %% [markdown]
# With a beam the mean beats the best of its five runs, on both tests, for both means. Greedily on the test of 2017 it lies below the best, by 0.7 and 0.8.
#
# ### The tests had a say
#
# *All-mean* ships: `make translate` uses the second mean, which validation picked. But:
#
# - Is the lead luck? `python -m scripts.evaluate --beam 5 --against models/multi30k-de-en` makes the comparison of [chapter 10](ch10_judging.ipynb), each model with its own length penalty: on test_2016_flickr +1.43 (0.75 to 2.09, p = 0.0004), on test_2017_flickr +0.52 (−0.26 to 1.41, p = 0.12). The second may be luck. With 1.4 for both models the leads are about 1.1 and 0.9.
# - Validation alone should choose. It had chosen *risk-mean*, which we didn't ship: on test_2017_flickr it has 37.0, chapter 9's model 37.4. So the tests had a say, and their scores flatter.
#
# ## Summary
#
# - Distillation by words puts the teacher's probabilities in the label's place.
# - Distillation by sequences gained BLEU, though its students predict people's words worse.
# - Greedy back-translation beat drawn by 2.8 BLEU at nearly the same loss. With shuffled sources the loss fell, too, and so did BLEU.
# - Minimum risk contrasts the model's own attempts. With chrF as the mark, chrF rose and BLEU fell.
# - Runs that go on from the same weights can be averaged. The model that ships is such a mean.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong. `solution`, from `scripts.book.exercises`, shows ours.
#
# ### Exercise 1 · Close to the teacher, close to people
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*, `solution("closest_to_people")`
#
# Kim and Rush (§3.3) have a second way to write a corpus. Of a teacher's hypotheses take the one of highest `similarity(hypothesis, reference)`. `candidates[i]` are those of pair i, the likeliest first; in a tie the likelier one wins.


# %%
def closest_to_people(
    candidates: Sequence[Sequence[str]],
    references: Sequence[str],
    similarity: Callable[[str, str], float],
) -> list[str]:
    """For each pair the teacher's hypothesis that is most like what a person wrote."""
    ...


check(closest_to_people)

# %% [markdown]
# ### Exercise 2 · Each against the others
#
# *code · difficulty ●●○ · worth ●●● · 25 minutes*, `solution("policy_loss")`
#
# RLOO is a policy gradient that can tune language models (REINFORCE leave-one-out: Kool et al. 2019, Ahmadian et al. 2024). Each source has two or more drawn candidates; duplicates stay. A candidate's loss is $\log P(y)$ times its excess risk: $\Delta(y)$ minus the mean $\Delta$ of its source's *other* candidates. Return the mean over all N. `log_probs`, `risks` and `counts` are those of `risk_of_candidates`; let no gradient flow into the marks.


# %%
def policy_loss(log_probs: Tensor, risks: Tensor, counts: Sequence[int]) -> Tensor:
    """The mean of log P(y)·(Δ(y) − mean Δ of the source's other candidates): a scalar."""
    ...


check(policy_loss)

# %% [markdown]
# ### Exercise 3 · On paper
#
# *think · difficulty ●●○ · worth ●●● · 10 minutes*
#
# Suppose that a teacher writes the training targets word for word as people did. What does each kind of distillation then give a student? And a colleague reports: "Fine-tuning with minimum risk for a day gave +1 chrF over the model before." What do you ask?
#
# <details><summary>An answer</summary>
#
# By sequences: nothing, the corpus is the same. By words: perhaps something, since the probabilities still say which other words nearly fit.
#
# What did another day of cross-entropy give? Was chrF the mark that it was trained on? What do other scores and the lengths say? How many seeds?
#
# </details>
#
# Next: [Chapter 22 · Today's block](ch22_todays_block.ipynb)
