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
# After this chapter you can let one model teach another, and tell whether it learned to translate or only to write.
#
# | | |
# |---|---|
# | In the paper | nothing: [Attention Is All You Need](https://arxiv.org/abs/1706.03762) learns from people's pairs alone |
# | Time | 20 minutes to read, 45 with the code; about two minutes to run on a CPU |
# | Before, after | [Chapter 20 · Scaling](ch20_scaling.ipynb) · [Chapter 22 · Today's block](ch22_todays_block.ipynb) |
#
# *If you read only three cells:* the table of six students, the chart of *A puzzle*, the table of *What does it read?*
#
# Shapes: **B** sources, **T** target length, **V** vocabulary; **N** rows: predicted tokens, or the candidates of all sources.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn

from scripts import ROOT
from scripts.book.exercises import check
from scripts.book.figures import understanding as figures
from scripts.book.records import load_record
from scripts.book.verdict import verdicts_on
from scripts.ch01_attention import subsequent_mask
from scripts.ch04_encoder_decoder import EncoderDecoder, make_model
from scripts.ch06_training import BOS, PAD, Batch, LabelSmoothing, logits_of
from scripts.ch07_multi30k import Example, encode_pairs, make_batch, source_ids, token_batches
from scripts.core.data import TrainingData, with_pairs
from scripts.core.models import Trained, load_model
from scripts.core.scores import corpus_bleu, corpus_chrf
from scripts.corpora.load import load_corpus
from scripts.fast.translating import DecodeOptions, translate

# %%
torch.set_default_dtype(torch.float64)
pd.set_option("display.max_colwidth", None)  # whole sentences

# %% [markdown]
# ## Who writes, and who learns
#
# > **In short.** A model can learn from what another model wrote. Ask who wrote which side, and who learns from it.

# %%
figures.who_writes()

# %% [markdown]
# In *distillation* a *student* learns what a *teacher* would say (Hinton et al. 2015; Kim and Rush 2016). In *back-translation* a model writes the sources (Sennrich et al. 2016). In *minimum risk* a model learns from its own attempts (Shen et al. 2016).
#
# ## Distillation by words
#
# > **In short.** At one place several words may be good, and the teacher knows them. Let the student learn them all.
#
# "Ein kleiner Junge rennt über die Straße." The translation has begun with *A*. What comes next? Chapter 9's model answers.

# %%
trained = load_model(ROOT / "models" / "multi30k-de-en")
trained.model.double().eval()
source = torch.tensor([source_ids("Ein kleiner Junge rennt über die Straße.", trained.tokenizer)])
begun = torch.tensor([[BOS, *trained.tokenizer.encode("A")]])  # (1, T)
with torch.no_grad():
    x = trained.model(source, begun, None, subsequent_mask(begun.size(1)))
    logits = trained.model.generator(x[:, -1])[0]  # (V,)
likely = logits.topk(3).indices
figures.next_words_chart(
    [trained.tokenizer.decode([i]) for i in likely.tolist()],
    {f"τ = {tau}": (logits / tau).softmax(dim=-1)[likely].tolist() for tau in (1, 2)},
    "At τ = 2 the three likeliest words lie closer together",
    "The next word after “A …”, by chapter 9's model. Each panel has its own axis: at τ = 2 most "
    "of the probability lies on the other 8,189 words.",
)

# %% [markdown]
# An ordinary training teaches the one word that a person wrote. Here the student learns the teacher's probabilities of *all* words, given the source and the person's words so far.
#
# At place $n$ the teacher's logits are $t_n$ (V,), the student's are $s_n$ (V,). Both are divided by a *temperature* $\tau$; a larger one gives unlikely words more probability. Over N places the student's loss is
#
# $$ \mathcal{L} = -\tau^2 \sum_{n=1}^{N} \sum_{v=1}^{V} q_{nv} \log p_{nv}, \qquad q_n = \mathrm{softmax}(t_n / \tau), \quad p_n = \mathrm{softmax}(s_n / \tau). $$
#
# Its gradient with respect to $s_n$ is $\tau\,(p_n - q_n)$. As $p_n - q_n$ shrinks like $1/\tau$, the product keeps its size; without the factor $\tau^2$ it would fall like $1/\tau^2$.
#
# With $\tau = 1$ and all of $q_n$ on the person's word the loss is cross-entropy. With a part of $q_n$ spread evenly it is label smoothing: a teacher that thinks all other words equally likely. **Your turn.**


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
# ### Do the other words teach?
#
# A small student learns from 500 pairs of the sample corpus. Its teacher, chapter 9's model of that corpus, has learned these pairs, and is far surer than the model of the chart. We train the student six times, and only its targets $q$ and their $\tau$ differ (compare rows of one $\tau$):
#
# - *one word*: plain cross-entropy, without smoothing;
# - *all words*: the teacher's probabilities, with $\tau = 1$ and 2;
# - *even words*, with both $\tau$: the person's word keeps its probability, the rest is spread evenly;
# - *shuffled words*, $\tau = 2$: as *all words*, but the other words exchange their shares at random.


# %%
def labels_and_logits(model: EncoderDecoder, batch: Batch) -> tuple[Tensor, Tensor]:
    """The words to predict at the N real places of a batch (N,), and the logits there (N, V)."""
    real = batch.tgt_y != PAD
    return batch.tgt_y[real], logits_of(model, batch)[real]


def even_words(q: Tensor, labels: Tensor) -> Tensor:
    """q (N, V) as it is at the labels (N,); the rest of each row spread evenly."""
    on_label = q.gather(1, labels.unsqueeze(1))  # (N, 1)
    on_other = (1 - on_label) / (q.size(1) - 1)
    return on_other.expand_as(q).scatter(1, labels.unsqueeze(1), on_label)


def shuffled_words(q: Tensor, labels: Tensor) -> Tensor:
    """q (N, V) as it is at the labels (N,); the rest of each row dealt at random."""
    dealt = q.clone()
    for row, label in zip(dealt, labels, strict=True):
        others = torch.arange(len(row)) != label
        shares = row[others]
        row[others] = shares[torch.randperm(len(shares))]
    return dealt


# %%
TARGETS = {
    "one word": lambda q, labels: nn.functional.one_hot(labels, q.size(1)).to(q),
    "all words": lambda q, labels: q,
    "even words": even_words,
    "shuffled words": shuffled_words,
}


class Lesson(NamedTuple):
    """A batch, and what a student learns at its N real places."""

    batch: Batch
    labels: Tensor  # (N,), the person's words
    q: Tensor  # (N, V)
    tau: float


def lessons_of(
    teacher: Trained, pairs: Sequence[tuple[str, str]], targets: str, tau: float
) -> list[Lesson]:
    """The pairs in batches, each with the q of these `targets`."""
    examples, lessons = encode_pairs(pairs, teacher.tokenizer), []
    torch.manual_seed(0)  # for the shuffled words
    for places in token_batches(examples, 512):
        batch = make_batch([examples[i] for i in places])
        with torch.no_grad():
            labels, logits = labels_and_logits(teacher.model, batch)
        q = TARGETS[targets]((logits / tau).softmax(dim=-1), labels)
        lessons.append(Lesson(batch, labels, q, tau))
    return lessons


# %%
teacher, sample = load_model(ROOT / "models" / "sample-de-en"), load_corpus("sample")
teacher.model.double()
students = [("one word", 1), ("even words", 1), ("all words", 1)]
students += [("even words", 2), ("shuffled words", 2), ("all words", 2)]
lessons = {student: lessons_of(teacher, sample["train"][:500], *student) for student in students}
figures.shares_table(lessons)

# %% [markdown]
# At $\tau = 2$ each probability becomes its square root, divided by the sum of all these roots. A thousand unlikely words together gain most; the person's word falls from 0.89 to 0.09. But compared with *it* the likeliest others gain, too: from a hundredth to almost a fifth.
#
# *Even* and *shuffled words* are controls. If it doesn't matter *which* other words the teacher finds likely, their students translate as well as those of *all words*. **Predict.** Who translates best?


# %%
def student_of(lessons: Sequence[Lesson], seed: int, lr: float = 0.006) -> EncoderDecoder:
    """A small translator after 20 passes over the lessons."""
    torch.manual_seed(seed)
    V = lessons[0].q.size(1)
    sizes = {"N": 1, "d_model": 64, "d_ff": 128, "h": 4, "dropout": 0.0}
    student = make_model(V, V, **sizes, norm_first=True, tie="all")
    optimizer, order = torch.optim.Adam(student.parameters(), lr=lr), random.Random(seed)
    for _ in range(20):
        for lesson in order.sample(lessons, len(lessons)):
            _, logits = labels_and_logits(student, lesson.batch)
            loss = taught_by_words(logits, lesson.q, lesson.tau) / lesson.batch.ntokens
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
    return student.eval()


# %%
sources, references = zip(*sample["val"][:200], strict=True)
learners = {("the teacher", ""): teacher.model}
learners |= {student: student_of(lessons[student], seed=1) for student in students}
rows = []
for name, model in learners.items():
    learner = Trained(model, teacher.tokenizer, teacher.config)
    texts = translate(learner, sources, DecodeOptions(beam=1))
    rows.append([*name, round(corpus_bleu(texts, references).score), texts[0]])
print(sources[0], "A person:", references[0])
pd.DataFrame(rows, columns=["learned", "τ", "BLEU", "its first caption"])

# %% [markdown]
# (The teacher reaches 98 BLEU because a few rules make the [sample corpus](ch07_multi30k.ipynb).)
#
# *All words* at $\tau = 2$ translates better than *even words* and *shuffled words*, though all three give the person's word the same share of $q$. So the student learned from *which* other words the teacher finds likely. Whether they are likely *here* or everywhere isn't told: *shuffled words* destroys both.
#
# At $\tau = 1$ *all words* is little better than *even words*. This teacher learned with label smoothing of 0.1, and mostly passes that on.
#
# All this is after 20 passes. At half and at twice the rate (one seed) $\tau = 2$ still leads both controls, but not *one word*.
#
# <details><summary>Details: seeds and rates</summary>
#
# The table is of one seed. In [eight runs in 32 bits](../results/word-targets-sample.json) (`python -m scripts.studies.word_targets --save`) *all words* at $\tau = 2$ led *even words* by 12 to 26 BLEU, *shuffled words* by 15 to 24, *one word* by 5 to 24. At $\tau = 1$ it led *one word* by 2 to 11, and *even words* by −0.4 to 3.7; on average *even words* has 4.9 of its lead of 6.4.
#
# With the best of three rates (one seed) *all words* has 34.8 BLEU at $\tau = 2$ and 28.4 at 1, *even words* 29.1 at 1, *one word* 25.3.
#
# </details>

# %% [markdown]
# ## Distillation by sequences
#
# > **In short.** Let the teacher translate the training sources, and train the student on these translations. They are easier to predict than people's.
#
# A loss against *all* texts that the teacher might write is a sum that nobody can compute. So Kim and Rush (2016, §3.2) put all of the teacher's probability $q$ on its likeliest text $\hat y$:
#
# $$ -\sum_{y} q(y \mid x) \log p(y \mid x) \;\approx\; -\log p(\hat y \mid x), \qquad \hat y = \arg\max_y q(y \mid x) $$
#
# Here $x$ is a source and $y$ a target. A search finds $\hat y$, or nearly; ours is greedy.
#
# Chapter 9's model as a teacher, for six training captions chosen by hand:

# %%
captions = [(german, english) for _, german, english in load_record("multi30k-corpus")["captions"]]
german, english = zip(*captions, strict=True)
by_teacher = translate(trained, german, DecodeOptions(beam=1))
texts = pd.DataFrame({"source": german, "a person": english, "the teacher": by_teacher})
texts.iloc[[0, 4, 8, 9, 17, 18]]

# %% [markdown]
# The last two are nonsense. A student would learn them.
#
# ### Which student translates better?
#
# Small models learned from Multi30k's 29,000 sources, some with people's translations (*all pairs*), some with those of chapter 9's model (*teacher's translations*). Each row is the mean of three seeds. **Predict.** Which students have the lower loss on people's validation captions? Which have the higher BLEU?

# %%
runs = pd.DataFrame(load_record("recipes-multi30k")["runs"])
runs = runs[runs["seed"] > 0]  # seed 0 chose the rates
means = runs.groupby("row").mean(numeric_only=True)
all_pairs, distilled = "all pairs", "teacher's translations"
figures.scores_table(means, (all_pairs, distilled), "loss", "loss_teacher", "bleu", "words")

# %%
print(verdicts_on(runs, {distilled: all_pairs}))

# %% [markdown]
# (Losses are in nats a token; the range is a 95% confidence interval.)
#
# The teacher's texts are easier to predict than people's, even for the students of *all pairs* (1.59 and 2.12). The teacher's students predict people's words *worse*, and yet have the higher BLEU. It isn't length. The loss asks how likely a person's text is; BLEU looks only at the one text that a student writes.
#
# (Greedily, that is. Kim and Rush's best student gained 4.2 BLEU greedily, 1.7 with a beam.)
#
# <details><summary>Details: the trainings on record</summary>
#
# This section and the next two use [`recipes-multi30k.json`](../results/recipes-multi30k.json) (`python -m scripts.studies.recipes --save`): chapter 19's narrow base, without dropout. A training is five passes over its pairs. *A part* is planned for 32, and ends three passes after its lowest loss, with a rate still high. Validation chose rates and passes; *shuffled German* has *drawn German*'s rate.
#
# </details>
#
# ## Back-translation
#
# > **In short.** English without a translation is plentiful. Let a model translate it *into German*, and train on those pairs. The German is bad, but only read; the model learns to write people's English.
#
# We have pairs $\mathcal{P}$, and English texts $\mathcal{M}$ without German. A reverse model $r(x \mid y)$ learns from $\mathcal{P}$, turned around, and writes German sources $\hat x$ for $\mathcal{M}$. Then the forward model learns from both:
#
# $$ \mathcal{L} = -\sum_{(x, y) \in \mathcal{P}} \log p(y \mid x) - \sum_{y \in \mathcal{M}} \log p(y \mid \hat x), \qquad \hat x = \arg\max_x r(x \mid y) \;\text{ or }\; \hat x \sim r(\cdot \mid y) $$
#
# Sennrich et al. take the likeliest $\hat x$; Edunov et al. (2018) *draw* it, which makes worse but more varied text, and won except where pairs were few.
#
# **Your turn.** `reverse` writes German for English that has none. Its text must land on the side that is *read*.


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
few = TrainingData({"train": captions}, trained.tokenizer, [], [])
capitals = back_translated(few, range(0, 20, 4), lambda texts: [text.upper() for text in texts])
for i, (pair, person) in enumerate(zip(capitals.corpus["train"], captions, strict=True)):
    assert pair == (person if i % 4 == 0 else (person[1].upper(), person[1]))
print(" | ".join(capitals.corpus["train"][9]))  # by a "reverse model" that only writes capitals

# %% [markdown]
# ### A puzzle
#
# Suppose that only *a part* of Multi30k's pairs is known, 1,812. A reverse model learned from them, and wrote German for the other 27,188 English captions, greedily or drawn (*by sampling*). The control *a part, in 8 passes* has no written German, but its learning rate falls to zero, as with written German. Three seeds each.

# %%
part, drawn, greedy = "a part", "a part, back-translated by sampling", "a part, back-translated"
short = "a part, in 8 passes"
print(verdicts_on(runs, dict.fromkeys((short, greedy, drawn), part), "chrF"))
print(verdicts_on(runs, {greedy: drawn}, "chrF"))
rows = (part, short, greedy, drawn)
figures.scores_table(means, rows, "loss", "chrf", "bleu", "words", "back_bleu")

# %% [markdown]
# Greedy German gains chrF; eight passes don't. Now compare drawn German with greedy German. Their captions are about equally short, and their losses fall about equally, by 0.9 and 1.0 nats. But drawn German has about a quarter of greedy German's gain in chrF, and even that may be noise. How can nearly the same fall of the loss bring so much less translation?
#
# A suspicion: a model guesses the next word from the English before it. Then 27,188 more captions teach it English, whatever stands beside them.
#
# The test is *shuffled German*: beside each of the 27,188 captions stands people's German for *another* caption. If the loss falls only when a model translates better, it won't fall now. **Predict.** How far does it fall? And chrF?

# %%
shuffled = "a part, with shuffled German"
german_of = {short: "the part, 8 passes", shuffled: "shuffled German", drawn: "drawn German"}
german_of |= {greedy: "greedy German", all_pairs: "people's German"}
figures.falls_chart(
    runs,
    part,
    german_of,
    "With shuffled German the loss improves; the translations don't",
    "Open: the mean of “a part”. Filled: the mean of the row. Pale: its three seeds.",
)

# %% [markdown]
# With shuffled German the loss falls by 0.7 nats, though these sources say nothing, and chrF falls by 7.
#
# ### What does it read?
#
# We give a model each validation caption beside *another* caption's German. If it reads, the wrong German misleads it, and the loss rises. If it only writes, the loss stays. Chapter 9's model on the twenty captions, which it learned from, first beside their own German:


# %%
def beside_others(examples: Sequence[Example]) -> list[Example]:
    """Each target beside the source of another pair: the one half the list away."""
    half = len(examples) // 2
    others = [*examples[half:], *examples[:half]]
    return [replace(pair, src=other.src) for pair, other in zip(examples, others, strict=True)]


# %%
examples = encode_pairs(captions, trained.tokenizer)
for pairs in (examples, beside_others(examples)):
    labels, logits = labels_and_logits(trained.model, make_batch(pairs))
    print(f"{nn.functional.cross_entropy(logits, labels):.2f} nats a token")

# %% [markdown]
# Chapter 9's model reads. If the models of *shuffled German* read anything, their loss rises, too. **Predict.** How far does it rise for each model of the chart?

# %%
means["rises by"] = means["other_loss"] - means["loss"]
rows = (part, *german_of)
figures.scores_table(means, rows, "loss", "other_loss", "rises by", "distinct", "chrf")

# %%
for text in runs.loc[runs["row"] == shuffled, "commonest"]:
    print(text["times"], "of 1,014:", text["text"])

# %% [markdown]
# *Shuffled German* reads nothing: its loss stays, and each of its models writes one caption for all 1,014 sources. They learned only English, though they saw the part's pairs, too.
#
# This can explain the puzzle. With greedy German a model relies on its source as much as *a part* does: the loss rises by 0.9 nats. With drawn German it relies less on its source: the loss rises by 0.5, after the eight passes by 0.75. So more of what it learned may be English alone.
#
# (A rise says that a model reads, not that it reads well.)


# %% [markdown]
# ## Minimum risk
#
# > **In short.** A reader judges the whole text. So let a model write several texts, mark each, and make the good ones more probable.
#
# With $y^\star$ the person's translation, a *mark* $\Delta$ says how bad a text is; 0 is perfect. Ours is 1 − chrF/100 ([chapter 10](ch10_judging.ipynb)). With $P$ the model's probability of a whole text, the *risk* is the mean mark of the texts that the model might draw:
#
# $$ R(\theta) = \sum_{y} P(y \mid x; \theta)\, \Delta(y, y^\star) $$
#
# This, too, is a sum over all sentences. So Shen et al. (2016, §3) draw a small set $\mathcal{S}$ of candidates, with weights $Q$:
#
# $$ \tilde R(\theta) = \sum_{y \in \mathcal{S}} Q(y)\, \Delta(y, y^\star), \qquad Q(y) = \frac{P(y \mid x; \theta)^{\alpha}}{\sum_{y' \in \mathcal{S}} P(y' \mid x; \theta)^{\alpha}} $$
#
# The log-probabilities $\ell_y = \log P(y \mid x)$ of whole sentences can lie tens of nats apart: with $\alpha = 1$ one candidate would have nearly all the weight. A smaller $\alpha$ evens them. Shen et al. take 0.005, our record 0.05. **Your turn.**


# %% tags=["yours"]
def risk_of_candidates(
    log_probs: Tensor, risks: Tensor, counts: Sequence[int], alpha: float
) -> Tensor:
    """Σ Q(y)·Δ(y) over each source's candidates, Q ∝ P^α: (N,) and (N,) to (B,)."""
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
# The derivative is $\partial \tilde R / \partial \ell_y = \alpha\, Q(y)\, (\Delta(y, y^\star) - \tilde R)$. So descent pushes up the candidates with a mark better than $\tilde R$, and the others down.
#
# In a toy, a model knows six captions, and $P$ is the softmax of six scores. The first four captions are drawn; α is 1. A person wrote "A dog is sleeping." **Predict.** Which scores go up?


# %%
def chrf_risks(texts: Sequence[str], reference: str) -> list[float]:
    """1 − chrF/100 of each text against one reference: 0 for the reference itself."""
    return [1 - corpus_chrf([text], [reference]).score / 100 for text in texts]


# %%
toy = {"A man is sleeping.": 0.4, "A dog sleeps.": 0.2, "A dog is asleep.": 0.1}  # with P
toy |= {"Two men play chess.": 0.2, "A dog is sleeping.": 0.05, "A dog is running.": 0.05}
marks = torch.tensor(chrf_risks([*toy], "A dog is sleeping."))  # (6,)
toy_scores = torch.tensor([*toy.values()]).log().requires_grad_()  # (6,)
log_p = toy_scores.log_softmax(dim=0)
risk = risk_of_candidates(log_p[:4], marks[:4], [4], alpha=1.0)  # of the drawn: (1,)
(push,) = torch.autograd.grad(-risk, toy_scores)
torch.testing.assert_close(push[:4], log_p[:4].softmax(dim=0) * (risk - marks[:4]))
columns = {"P": log_p.exp(), "Δ": marks, "push": push}
pd.DataFrame({name: values.tolist() for name, values in columns.items()}, index=[*toy]).round(3)

# %% [markdown]
# A positive push is up. Of the drawn captions the two that are better than the risk go up, even one about a man. The right text wasn't drawn. Its score isn't pushed, and the others rise on balance, so its probability even falls. So the next trainings add it to each set.
#
# ### Which score goes up?
#
# The models of *all pairs* trained for 200 more steps of 16 captions, with eight draws for each. The control has as many steps of cross-entropy on these captions. Each loss has the rate with the best chrF on validation; three seeds. **Predict.** Which of chrF and BLEU goes up?

# %%
for score in ("chrF", "BLEU"):
    print(verdicts_on(runs, {"minimum risk": "more cross-entropy"}, score))
print(f"people's captions have {runs['val_words'].max():.1f} words")
rows = (all_pairs, "more cross-entropy", "minimum risk")
figures.scores_table(means, rows, "chrf", "bleu", "loss", "words")

# %% [markdown]
# chrF, the score that it trains on, went up; BLEU didn't. Before, the captions were too short; now they are too long. That may be why: chrF punishes words too many less than missing ones. Judge such a training by another score than its own.
#
# The same number of steps took more than ten times as long, for all the draws.


# %% [markdown]
# ## The ladder
#
# > **In short.** We train chapter 9's model further, by several recipes. A mean of five runs gains on one test, perhaps on both, and ships.
#
# | name | what it does |
# |---|---|
# | *onward* | trains on people's pairs alone |
# | *widened* | adds chapter 9's English for people's German, and reverse models' German for people's English (*data diversification*, Nguyen et al. 2020) |
# | *risk* | cross-entropy plus minimum risk, with 1 − BLEU/100 as the mark |
# | *…-mean* | the mean of the weights of several runs; *all-mean*: two of *widened*, three of *risk* (one trained longer) |
#
# Short runs from the same weights stay so near each other that their weights can be averaged (Wortsman et al. 2022). The control is chapter 9's model, with a length penalty of 1.4, the best on validation, in place of 0.6. **Predict.** Which recipes gain on both tests?

# %%
ladder = figures.ladder_runs(figures.RUNGS)
# by `python -m scripts.evaluate --model models/multi30k-de-en --beam 5 --alpha 1.4`
control = ("chapter 9, penalty 1.4", 41.9, 37.0)
figures.two_tests_chart(
    ladder,
    control,
    0.8,
    "With a beam, only all-mean gains clearly on both tests",
    "Grey: within 0.8 of chapter 9's model with the best penalty, 1.4. On 1,000 captions about "
    "so much can be luck.",
)

# %%
figures.gains_table(ladder, control)

# %% [markdown]
# (Means over a row's runs.) With a beam *all-mean* gains 1.0 on both tests, and no other row gains much on both. Greedily it gains 1.2 on the test of 2016, and only 0.2 on that of 2017.
#
# One of the two ships: it is the model of `make translate`. There are two reasons for doubt. Against chapter 9's model with a penalty of 0.6 the lead on the test of 2017 may be luck. And the tests had a say: *risk-mean* is as good as the other *all-mean* on validation, but didn't ship, because of the test of 2017.
#
# [The ladder](../docs/ladder.md) has all runs.
#
# ## Summary
#
# - Distillation by words puts the teacher's probabilities in the label's place. At a temperature of 1 most of the gain was label smoothing; at 2 the student learned from the other words.
# - Distillation by sequences gained BLEU, though its students predict people's words worse.
# - With shuffled German the loss fell, though the models read nothing: they only learned to write.
# - Minimum risk with chrF as the mark raised chrF, and not BLEU.
# - The model that ships is a mean of several runs.
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
# RLOO is a policy gradient (Kool et al. 2019; for language models Ahmadian et al. 2024). Each source has two or more candidates. The *baseline* $b_i$ of candidate $i$ is the mean mark of its source's *other* candidates. Return the mean of $\ell_i\,(\Delta_i - b_i)$ over all candidates of all sources.
#
# `log_probs` ($\ell$), `risks` ($\Delta$) and `counts` are those of `risk_of_candidates`. No gradient may flow into the marks.


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
# A colleague reports: "Minimum risk for a day gave +1 chrF over the model before." What do you ask?
#
# <details><summary>An answer</summary>
#
# What did another day of cross-entropy give? Was chrF the mark in training? What do other scores and the lengths say? How many seeds?
#
# </details>
#
# Next: [Chapter 22 · Today's block](ch22_todays_block.ipynb)
