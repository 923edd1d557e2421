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
# # Chapter 26 · Your own pair
#
# After this chapter you can turn a file of sentence pairs into a translator with a score and a web page, find out what it can't do, and mend half of one such failure with fifty sentences.
#
# | | |
# |---|---|
# | In the paper | nothing: [Attention Is All You Need](https://arxiv.org/abs/1706.03762) had its pairs ready-made |
# | Time | 20 minutes to read, 45 with the code; a minute or two to run on a CPU |
# | Before | [Chapter 25 · All of it on one page](ch25_one_page.ipynb) |
#
# *If you read only three cells:* the report of *Look before you train*, the chart of *Where it fails*, the chart of *Fifty sentences*.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

from scripts.book.charts import titled
from scripts.book.exercises import check
from scripts.book.figures.own_pair import actor_chart, alignment, by_tense, cause_chart, tuned_chart
from scripts.book.figures.training import size_frame, sizes_chart
from scripts.book.records import load_record
from scripts.ch09_training_run import Run
from scripts.core.data import TrainingData, batches_of, prepare, with_pairs
from scripts.core.models import Trained
from scripts.core.recipes import reason_for, recipe_for
from scripts.core.scores import corpus_bleu
from scripts.core.settings import TrainConfig
from scripts.corpora.invented import actors, base_of, by_object, crossed, negation, ruvel_pairs
from scripts.corpora.report import report_text
from scripts.corpora.splits import letters_only, own_pairs
from scripts.fast.translating import fast_translate

Pairs = list[tuple[str, str]]  # sources and their targets

# %% [markdown]
# ## Three commands
#
# `python -m scripts.corpora.invented` writes `ruvel.tsv`: on each line a source, a tab and a target. Then:
#
# ```bash
# python -m scripts.corpora.inspect --pairs ruvel.tsv                 # what is in the file
# python -m scripts.train --pairs ruvel.tsv --languages qru-en        # runs/ruvel: the model, its score
# make living MODEL=runs/ruvel                                        # a page that translates (needs npm)
# ```
#
# `qru` is a code for private use. The training takes a few minutes on a CPU and reaches 98.8 BLEU ([record](../results/ruvel-commands.json)).
#
# ## A language that nobody speaks
#
# > **In short.** Ruvel puts the verb last, and endings mark the receiver and a definite object.
#
# No one's mother tongue helps, and we know every rule. The main ones:
#
# | | |
# |---|---|
# | order | who, where, to whom, what, and last the verb |
# | an adjective | follows its noun: `havo gura`, the big dog |
# | a noun's `-ra`, `-re` | plural: `havora`, the dogs |
# | after the noun or its plural, `-ta`, `-te` | a definite object: `havota`, the dog; without it, a dog. Who acts is always definite: `havo`, the dog |
# | in its place, `-ka`, `-ke` | the receiver: `havoka`, to the dog |
# | a verb's `-an`, `-en`; `-al`, `-el` | present; past: `makan`, sees; `makal`, saw |
# | which of the two | by the word's last vowel: the one with a after a, o, u; the other after e, i |
# | `sil`, `mur`, `tena` | in, behind, near, *after* the noun: `hamur sil`, in the house |
#
# **Predict.** `aleni` girl, `goral` horse, `velis` apple, `bir-` bring. What is *Aleni goralka gura velisre birel*?

# %%
pairs = ruvel_pairs()
example = ("aleni goral-ka gura velis-re bir-el", "the girl brought apples to the big horse")
links = [(0, 1), (1, 7), (1, 4), (2, 6), (3, 3), (4, 2)]  # of words, by their places
titled(
    alignment(*example, links),
    "The verb leaves the end, adjective and noun swap, an ending becomes a word",
    "-ka becomes “to”, -re is the plural, -el the past; Ruvel has no word for “the”.",
)

# %% [markdown]
# *The girl brought apples to the big horse.* The apples have no `-te`, so they aren't *the* apples.
#
# ## Look before you train
#
# > **In short.** A report names what it leaves out, and what looks odd.
#
# We add eight slips, as in real corpora. Four rules leave a pair out: a side is empty, both sides are equal, the pair came before, or its ratio of lengths is far from the usual one. Other rules only show you a line.
#
# **Predict.** Which four of the eight are left out?

# %%
slips = {
    100: "Havo dalun sil numan.",
    200: "The dog sleeps.\tThe dog sleeps.",
    300: "\t".join(pairs[0]),
    400: "Torak gofan.\tThe man waits. He has waited since noon, he is cold, and there is no bus.",
    500: "Selu ha\u200bvota makan.\tThe woman sees the dog.",  # a space of no width
    600: "The children followed the old horse.\tMinere goralta noma kesel.",
    700: "Lirel kelel.\tThe singer sang â€œlaâ€\u009d.",
    800: "Simek noma numan.\tThe old cat sleeps.\tchecked by K.",
}
lines = ["\t".join(pair) for pair in pairs]
for number, slip in slips.items():
    lines.insert(number - 1, slip)
with TemporaryDirectory() as folder:
    path = Path(folder, "ruvel.tsv")
    path.write_text("\n".join(lines), "utf-8")
    own = own_pairs({"pairs": [path]})
print(report_text(own.report))

# %% [markdown]
# On lines 200 and 400 the report guesses: look at them. Of the four that stay, mend 600 and 700 by hand.
#
# ## What may be held out
#
# > **In short.** A test sentence with a twin in training asks what the model remembers.
#
# Collected pairs have near-copies: with an exclamation mark, in small letters, in another order. **Your turn.** Write the `fingerprint` that such copies share. `letters_only(text)` replaces all but letters by spaces.


# %% tags=["yours"]
def fingerprint(text: str) -> tuple[str, ...]:
    """The words of a text, sorted, in small letters, without punctuation, digits and "_"."""
    return tuple(sorted(letters_only(text.lower()).split()))


# %%
assert fingerprint("Havo 2 simekre makan!") == fingerprint("havo  simekre, makan.")
assert fingerprint("Älä näe: 7") == ("näe", "älä") and fingerprint("x_y") == ("x", "y")
assert fingerprint("a a b") != fingerprint("a b") and fingerprint("लड़का") != fingerprint("लड़की")
assert fingerprint("e\u0301") == fingerprint("é")  # two signs, and one

# %% [markdown]
# The fingerprint is strict: it takes *The small dog was big* for a twin of *The big dog was small*. **Your turn.** Split so that no fingerprint of a source is on both sides.


# %% tags=["yours"]
def honest_split(pairs: Pairs, share: float, seed: int) -> tuple[Pairs, Pairs]:
    """Training pairs and held-out ones, in their order.

    A `share` of the sources' different fingerprints is drawn by `seed`; all their pairs are held out.
    """
    fingerprints = sorted({fingerprint(source) for source, _ in pairs})
    drawn = set(random.Random(seed).sample(fingerprints, round(share * len(fingerprints))))
    held_out = [pair for pair in pairs if fingerprint(pair[0]) in drawn]
    return [pair for pair in pairs if fingerprint(pair[0]) not in drawn], held_out


# %%
def with_twins(train: Pairs, held_out: Pairs) -> float:
    """The share of held-out sources whose fingerprint is in training, too."""
    fingerprints = {fingerprint(source) for source, _ in train}
    return sum(fingerprint(source) in fingerprints for source, _ in held_out) / len(held_out)


# %%
toy = [(f"{word}{mark}", "x") for word in "abcdefghij" for mark in ("", "!", " 2")]
train_part, held_out = honest_split(toy, 0.2, seed=1)
assert len(train_part) == 24 and len(held_out) == 6 and set(train_part + held_out) == set(toy)
assert train_part == [pair for pair in toy if pair not in held_out], "keep the order"
assert not {s[0] for s, _ in train_part} & {s[0] for s, _ in held_out}, "a twin on the other side"
assert honest_split(toy, 0.2, seed=2)[1] != held_out, "the seed draws"

# %% [markdown]
# `scripts.train` compares targets, too, and drops near-copies of held-out pairs.
#
# ## Choose, train, judge
#
# > **In short.** Few pairs want many passes, and a narrow model makes these fast.
#
# `scripts.train` takes the settings from the number of pairs.

# %%
count = len(own.splits["train"])
print(f"for our {count:,} pairs:", reason_for(count))
recipes = {n: asdict(TrainConfig(**recipe_for(n))) for n in (1000, count, 3000, 10000, 29000)}
pd.DataFrame(recipes).T[["layers", "d_model", "vocab", "dropout", "epochs"]]

# %% [markdown]
# Ruvel is simple: a model of half this width learns it, by the loop of [chapter 9](ch09_training_run.ipynb).

# %%
LEARNER = TrainConfig(
    layers=2, d_model=64, d_ff=128, heads=4, vocab=500, dropout=0.1, epochs=30, max_tokens=512,
    lr=5e-3, warmup=100, languages="qru-en", device="cpu", precision="float32",
)  # fmt: skip


def fitted(config: TrainConfig, data: TrainingData, start: Trained | None = None) -> Trained:
    """Train on `data` as `config` says, from new weights or those of `start`; without validation."""
    run = Run(config, data)
    if start:
        run.model.load_state_dict(start.model.state_dict())
    for epoch in range(1, config.epochs + 1):
        for batch in batches_of(data.train, run.plan(epoch), run.device):
            run.step(batch)
    run.model.eval()
    return run.trained


def translations(trained: Trained, pairs: Pairs) -> list[str]:
    """The greedy translations of the pairs' sources."""
    return fast_translate(trained, [source for source, _ in pairs])


def exact(trained: Trained, pairs: Pairs) -> float:
    """The share of pairs that are translated exactly as the reference."""
    outputs = translations(trained, pairs)
    return sum(out == ref for out, (_, ref) in zip(outputs, pairs, strict=True)) / len(pairs)


# %% [markdown]
# We take the 2,000 pairs without slips; the last 200 are our test set. Our grammar writes one translation, so we count exact ones. **Predict.** How many of the 200 will be right?


# %%
def ruvel_corpus(construction: str = "plain") -> dict[str, Pairs]:
    """2,000 pairs: 1,700 to learn from, 100 for validation, 200 for the test."""
    pairs = ruvel_pairs(construction=construction)
    return {"train": pairs[:1700], "val": pairs[1700:1800], "test": pairs[1800:]}


# %%
data = prepare(LEARNER, ruvel_corpus())
model = fitted(LEARNER, data)
test = data.corpus["test"]
assert with_twins(data.corpus["train"], test) == 2 / 200
print("more than 95% are right:", exact(model, test) > 0.95)

# %% [markdown]
# With eight seeds 97.0 to 98.5% are right ([record](../results/ruvel.json)). Two of the 200 have a twin in training, so twins explain 1% at most.
#
# ## Case · A score above 90
#
# **Symptom.** A corpus of 900 pairs, split at random. The model has over 90 BLEU on its test set, and 65 on users' sentences. Three pairs:


# %%
def collected(count: int = 300) -> Pairs:
    """A corpus as collected: `count` sentences, each as it is, with "!", and in small letters."""
    pairs = ruvel_pairs(count, seed=5)
    exclaimed = [(source[:-1] + "!", target[:-1] + "!") for source, target in pairs]
    small = [(source.lower(), target.lower()) for source, target in pairs]
    return pairs + exclaimed + small


print(*sorted(collected(), key=lambda pair: pair[0].lower())[:3], sep="\n")

# %% [markdown]
# **Suspects.** *Another kind* of sentences; *overfitting*; *twins* of the test set in training.
#
# **Instrument.** Fingerprints, and two test sets for one model: its own, and fresh sentences of the same grammar, without twins.


# %%
def random_split(pairs: Pairs, share: float, seed: int) -> tuple[Pairs, Pairs]:
    """The usual split: training pairs and a `share` of held-out ones, drawn by `seed`."""
    shuffled = random.Random(seed).sample(pairs, len(pairs))
    size = round(share * len(pairs))
    return shuffled[size:], shuffled[:size]


def greedy_bleu(trained: Trained, pairs: Pairs) -> float:
    """BLEU of the greedy translations."""
    return corpus_bleu(translations(trained, pairs), [ref for _, ref in pairs]).score


def case_scores(split: Callable, seed: int, epochs: int = 20) -> dict[str, float]:
    """BLEU of a model on its test set and on 200 fresh sentences."""
    pairs = collected()
    train, held_out = split(pairs, 1 / 9, seed=0)
    config = replace(LEARNER, vocab=300, epochs=epochs, seed=seed)
    model = fitted(config, prepare(config, {"train": train, "val": held_out}))
    fingerprints = {fingerprint(source) for source, _ in pairs}
    fresh = [pair for pair in ruvel_pairs(300, seed=6) if fingerprint(pair[0]) not in fingerprints]
    return {"its test set": greedy_bleu(model, held_out), "fresh": greedy_bleu(model, fresh[:200])}


# %%
SPLITS = {"at random": random_split, "honest": honest_split}
for name, split in SPLITS.items():
    parts = split(collected(), 1 / 9, seed=0)
    print(f"{name}: {with_twins(*parts):.0%} of {len(parts[1])} have a twin")

# %%
# NBVAL_IGNORE_OUTPUT
case = pd.DataFrame({name: case_scores(split, seed=1) for name, split in SPLITS.items()}).T
assert case.loc["at random", "its test set"] > 85
assert max(case.loc["at random", "fresh"], case.loc["honest", "its test set"]) < 75
case.round(1)  # BLEU

# %% [markdown]
# **Culprit.** Twins. The random split promises over 90 BLEU, and users get 59 to 66 ([eight seeds](../results/ruvel.json)). The honest split promises 48 to 58: no false hope, but a rough guess, for its test set has 33 sentences, three times each. Another draw promises 58 to 63 ([three seeds](../results/ruvel-controls.json)).
#
# It isn't another kind of sentences: without twins, held-out sentences are at most 2 BLEU easier than fresh ones. Nor is it overfitting: then fewer passes would help on fresh sentences. But with 8 passes their score falls to 21 to 30 BLEU, and with 40 it rises to at least 70 (three seeds).
#
# ## Where it fails
#
# > **In short.** Ask of a new construction: does training know its pieces, and in which role?
#
# Ruvel has two constructions that none of our pairs has, so our test set doesn't ask for them.
#
# - **Negation**: `nok` before the verb.
# - **The object first.** *Tivente havo limen*: the ending `-te` is on *tiven*, bird, so the dog hears the bird.
#
# **Negation.** We ask for the sentence of our first picture, without and with `nok`. **Predict.** What does the model make of a word that it has never seen?

# %%
# NBVAL_IGNORE_OUTPUT
ASKED = ["Aleni goralka gura velisre birel.", "Aleni goralka gura velisre nok birel."]
print(*fast_translate(model, ASKED), sep="\n")

# %% [markdown]
# The model says the opposite of what we asked, in good English. (It passes over `nok` in 12 to 96% of such sentences, by seed: [record](../results/ruvel.json).) Next, 200 negations:


# %%
def says_not(outputs: Sequence[str]) -> float:
    """The share of English outputs with a negation."""
    return sum(" not " in output for output in outputs) / len(outputs)


new = ruvel_pairs(250, construction="negation")
fifty, negated = new[:50], new[50:]
assert says_not(translations(model, negated)) == exact(model, negated) == 0

# %% [markdown]
# None of the 200 is right, and no output has a *not*: no training sentence has one. Could we have known? We count the pieces of `nok` in the training sources:

# %%
seen = Counter(p for source, _ in data.corpus["train"] for p in data.tokenizer.pieces(source))


def piece_counts(text: str) -> dict[str, int]:
    """A text's pieces, and how often the training sources have each."""
    return {piece: seen[piece] for piece in data.tokenizer.pieces(text)}


print(piece_counts("nok"))

# %% [markdown]
# The count warns us: no training text, Ruvel or English, has the piece `ok`. BPE made it only on the way to longer pieces, such as `▁book`.
#
# **The object first.** **Predict.** What does the model say for *Tivente havo limen*?

# %%
bird = ("Tivente havo limen.", "The dog hears the bird.")
object_first = ruvel_pairs(200, construction="object first")
assert exact(model, object_first) < 0.05
print(*translations(model, [bird]), piece_counts("Tivente"))

# %% [markdown]
# Again the opposite, but training knows both pieces. At most 5 of 200 such sentences are right ([eight seeds](../results/ruvel.json)), and 3 of the 200 mean the same in either order. In which *role* does training know the bird? It has two signs of an actor:
#
# 1. It comes **first**, where in training only the actor stands.
# 2. It has a **capital letter**: in training `▁Tiven` always acts, and `▁tiven` never does.
#
# **Experiment.** Which sign makes a noun the actor? We give the letter to the actor, the object, both or neither, in either order. If one sign alone decides, in how many outputs (%) does the true actor, the dog, act?

# %%
dog_acts = {"the actor": 100, "the object": 0, "both": "open", "neither": "open"}
expected = []
for (capital, first), form_pairs in crossed([bird]).items():
    source, _ = form_pairs[0]
    expected.append((source, capital, dog_acts[capital], dog_acts[first]))
columns = ["sentence", "who has the capital letter", "if the letter decides", "if the order does"]
pd.DataFrame(expected, columns=columns)

# %% [markdown]
# We take each sentence between two beings. Our English names first who acts, so we look at each output's first noun. (In Ruvel the first noun is also farther from the verb: we don't separate the two.) **Predict.** Which column will the picture show?

# %%
# NBVAL_IGNORE_OUTPUT
who_acts = {}
for form, form_pairs in crossed(by_object(object_first)["a being"]).items():
    who_acts[form] = actors(translations(model, form_pairs), form_pairs)
actor_chart(who_acts, [run["who acts"] for run in load_record("ruvel-actors")["runs"]])

# %% [markdown]
# Of two beings, the one that alone has the capital letter acts, in either order: with each of eight seeds in at least 82% of the outputs ([record](../results/ruvel-actors.json), other sentences). If both or neither have it, mostly the first one acts.
#
# A model sees pieces, not letters. What does it make of an unknown piece? *Things* have them: none begins a training sentence, so training has no piece of theirs with a capital letter. Put a thing first. If the actor alone has the letter, it acts in 98% of the outputs. If the thing has one, too, the actor acts in 28% (6 to 70% by seed), and the thing never. Mostly the sentence then has another noun in the actor's place, or none. So an unknown piece in first place takes the actor's place, but the model can't read its name. Whether any unknown piece does so, we didn't try.
#
# Why doesn't the model go by the ending, the true rule? In training the two signs suffice. Even models that saw the ending on each object let a being with both signs act, in at least 86% of the outputs ([record](../results/ruvel-endings.json)).
#
# ## Fifty sentences
#
# > **In short.** Training goes on with sentences that show what the model lacks. What does it forget?
#
# *Fine-tuning* begins with a model's weights and needs its own learning rate (ours: 2e-3). Three runs of 260 steps each:
#
# - *fifty negations* alone,
# - *fifty others*: the control, as new and as few, without negations,
# - *mixed*: the same fifty negations ten times each, among the 1,700 known pairs.
#
# **Predict.** After which does the model say *not*? After which does it still translate the old test set?


# %%
def tunings(data: TrainingData, fifty: Pairs) -> dict[str, tuple[Pairs, int]]:
    """The pairs of each fine-tuning, and how often it goes through them in 260 steps."""
    return {
        "fifty negations": (fifty, 260 // 2),  # one pass has 2 steps
        "fifty others": (ruvel_pairs(2050)[2000:], 260 // 2),
        "mixed": (data.corpus["train"] + 10 * fifty, 260 // 52),  # one has 52
    }


def tuned(model: Trained, data: TrainingData, pairs: Pairs, epochs: int, lr=2e-3) -> Trained:
    """The model after `epochs` more through `pairs`, at the rate `lr`."""
    config = replace(model.config, lr=lr, warmup=10, epochs=epochs)
    return fitted(config, with_pairs(data, pairs), model)


def shares(trained: Trained, old: Pairs, negated: Pairs) -> dict[str, float]:
    """What of both test sets is exactly right, and what says "not"."""
    row = {"old": exact(trained, old), "negated": exact(trained, negated)}
    row["old_says_not"] = says_not(translations(trained, old))
    row["negated_says_not"] = says_not(translations(trained, negated))
    return row


# %%
# NBVAL_IGNORE_OUTPUT
models = {"before fine-tuning": model}
for name, (shown, passes) in tunings(data, fifty).items():
    models[name] = tuned(model, data, shown, passes)
scores = {name: shares(trained, test, negated) for name, trained in models.items()}
print(pd.DataFrame(scores).T)
assert scores["fifty negations"]["old"] + 0.1 < scores["fifty others"]["old"] < 0.6
assert scores["mixed"]["old"] > 0.9 and scores["mixed"]["negated"] > 0.3
tuned_chart(scores, load_record("ruvel")["runs"])

# %% [markdown]
# - *Fifty negations* alone teach: 56% of the negations are right (means of eight seeds). But only 16% of the old sentences are, and many get a *not*.
# - *Fifty others* leave 44% of the old sentences right: more than half of the loss needs no negation.
# - *Mixed* teaches 48% (our ring is the best of eight), and keeps 97% of the old sentences.
#
# *Mixed* shows each of the fifty 50 times, not 130. With 50 passes alone they teach 48%, too, and keep 53% of the old sentences ([record](../results/ruvel-causes.json); one of eight seeds learned far less). So with as many showings we see no clear cost of mixing.
#
# ## What stays wrong
#
# > **In short.** Read the wrong outputs, count them, then ask what the fifty showed.
#
# Here are six wrong outputs of our *mixed* model, drawn at random, each above its reference. **Predict.** Two mistakes come back. Which?

# %%
# NBVAL_IGNORE_OUTPUT
outputs = translations(models["mixed"], negated)
wrong = [(out, ref) for out, (_, ref) in zip(outputs, negated, strict=True) if out != ref]
for output, reference in random.Random(1).sample(wrong, 6):
    print(output, reference, sep="\n", end="\n\n")

# %% [markdown]
# The **helper** is wrong, mostly *does* for *did*. Or the **verb's form** is: *not brought* for *not bring*. How many wrong outputs do these two explain? We mend both: an output that is still wrong isn't explained.


# %%
def cause(output: str, reference: str) -> str:
    """What alone is wrong in a negation: its helper, its verb's form or both; else not explained."""
    (helper, form), (right_helper, base) = negation(output), negation(reference)
    mended = output.replace(f"{helper} not {form}", f"{right_helper} not {base}")
    if mended != reference or base_of(form) != base:
        return "not explained"
    if helper != right_helper and form != base:
        return "helper and verb form"
    return "verb form" if form != base else "helper"


# %%
# NBVAL_IGNORE_OUTPUT
causes = [cause(output, reference) for output, reference in wrong]
cause_chart(causes, [negation(reference)[0] for _, reference in wrong])

# %% [markdown]
# Half of the negations need *did*, but nearly three quarters of the wrong ones do (eight seeds, 1,000 other sentences: [record](../results/ruvel-actors.json)). Why? The fifty show some verbs in the past (*did not*), some in the present (*does not*, *do not*), some in both.
#
# **Predict.** If the model joins any known helper to any known verb, both columns are alike. Are they?

# %%
by_tense(load_record("ruvel-actors")["runs"])  # exactly right (%), means of eight seeds

# %% [markdown]
# - **In the past they aren't:** 45% against 1%.
# - **In the present they are closer** with these fifty: 80% against 66%.
#
# Training offers a reason for the verb's form; why so many helpers are wrong we don't know. For the present it has *brings* and *bring*, the form after *not*; for the past only *brought*. So *not brought* should be common and *not brings* rare. They are: where the fifty show only the other tense, each seed keeps *brought* in at least 71% of the outputs, and *brings* in at most 26%. The next fifty should show each verb in the past: we haven't tried it.
#
# <details><summary>Details: other fifties, rates</summary>
#
# - **Other fifties.** We tried three more, with three seeds each. If they show a verb only in the other tense, the past has 0 to 2%. The present has 13% with one and 58% with another.
# - **Not shown at all** is *draw*, which the table leaves out. With ours it is never right.
# - **Rates.** Ours, 2e-3, was chosen on the test sets. On other sentences 4e-3 is better ([record](../results/ruvel-controls.json)), so `--from` takes it.
#
# </details>
#
# ## What more pairs give
#
# > **In short.** In Multi30k each tripling of the pairs gave about 8 BLEU, with the best recipe that we tried.
#
# We cut Multi30k to fewer pairs, and train three recipes:
#
# - *one for all*: the preset `small` of chapter 9, with its 18 passes;
# - *by size*: the recipe that `scripts.train` takes for so many pairs;
# - *longer*: `small` with as many passes as *by size*.
#
# **Predict.** What do 1,000 pairs give?

# %%
wholes = [load_record(f"gpu-small-{seed}") for seed in (1, 2, 3)]
sizes_chart(size_frame(load_record("sizes-multi30k"), wholes))

# %% [markdown]
# With 1,000 pairs *one for all* has 8.0 BLEU: it ends after fewer than 200 steps, within its warm-up of 400. *By size* has 17.6, *longer* 16.5: most of the gain needs no narrow model. It comes from more passes or from the warm-up's end: we didn't separate them.
#
# With 1,000 pairs, collect more ([Tatoeba](https://tatoeba.org), [OPUS](https://opus.nlpl.eu)), or fine-tune a pretrained model ([OPUS-MT](https://github.com/Helsinki-NLP/Opus-MT)). Don't expect 98% with 1,700 real pairs: in Ruvel even the rarest stem occurs 23 times.
#
# ## Publish it
#
# On the command line:
#
# ```bash
# python -m scripts.corpora.invented --construction negation --sentences 250 --save new.tsv
# head -50 new.tsv | cat ruvel.tsv - > both.tsv
# sed -n 51,100p new.tsv | cat runs/ruvel/pairs/val.tsv - > valid.tsv
# tail -150 new.tsv > asked.tsv
# python -m scripts.train --pairs both.tsv --valid valid.tsv --test asked.tsv --from runs/ruvel --name ruvel-2
# python -m scripts.evaluate --model runs/ruvel-2 --corpus runs/ruvel/pairs --against runs/ruvel
# ```
#
# `--from` takes so few new pairs ten times each, and keeps the first run's validation and test pairs out of training. In one run ([record](../results/ruvel-commands.json)) 98 of the 100 old test sentences are right, before and after. Of the new ones none is right before, and 53% after. Then:
#
# ```bash
# python -m scripts.translate --model runs/ruvel-2 "Havora goralka velisre biren."
# make living MODEL=runs/ruvel-2 FOLDER=public                             # for any static host
# ```
#
# Say in its `README.md` what it can't do.
#
# ## Summary
#
# - Look at the pairs. Keep near-copies of held-out sentences out of training.
# - A test set like the training set can't show what both lack. Ask for constructions one by one: does training know the pieces, and in which role?
# - Fifty sentences halved the failures of one construction. Mix them with old ones, and measure what is forgotten.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · A warning
#
# *code · difficulty ●○○ · worth ●●● · 10 minutes*
#
# Write `unseen_pieces(text, sources)`, for texts cut into pieces: those of `text` that no training source has (`solution("unseen_pieces")` shows ours). Which of the two constructions does it catch? How many of its alarms are false, there and on `test`?


# %%
def unseen_pieces(text: list[str], sources: list[list[str]]) -> list[str]:
    """The pieces of `text` that none of the sources has: in order, each once."""
    ...


check(unseen_pieces)

# %% [markdown]
# <details><summary>An answer</summary>
#
# It catches all negations, by `ok`. Of the 200 sentences with the object first it catches 113: all whose object is a thing, and few between beings, as training knows their pieces, in another role. At most 5 of the 113 alarms are false, and `test` gives none. But at least 82 wrong translations pass.
#
# </details>
#
# ### Exercise 2 · Odd lengths
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# Write `odd_lengths(pairs, factor)`: the places of the pairs whose ratio of letters, target over source, is over or under the median ratio by more than `factor` times (`solution("odd_lengths")`).


# %%
def odd_lengths(pairs: list[tuple[str, str]], factor: float) -> list[int]:
    """The places of pairs whose ratio of lengths is far from the median ratio."""
    ...


check(odd_lengths)

# %% [markdown]
# ### Exercise 3 · Endings or word order
#
# *project · difficulty ●●○ · worth ●●● · 30 minutes*
#
# Can fifty sentences teach the model to believe the endings? Take `ruvel_pairs(50, construction="object first")`, mix them as above, and predict: how many of 200 new ones will be right, and who acts in them?
#
# <details><summary>What happens</summary>
#
# [Three seeds](../results/ruvel-controls.json): 12 to 27% of the new ones are right. If the object is a thing, the true actor acts in 98 to 100%; between beings only in 23 to 37% (before: 0 to 2%). Both have the ending, so the model doesn't simply go by it. Before, a thing with both signs never acted, either. But mostly the actor was a noun that the sentence doesn't have. Now it is the being that is there.
#
# </details>
#
# ## Goodbye
#
# You began with a dot product. Now you can build a Transformer from nothing but tensors, train it, say how good it is, with an interval, and find what it lacks. Take a pair of languages that nobody has taken, and say what you found, however small.
#
# Thank you for reading. [Chapter 0](ch00_start_here.ipynb) shows how far you have come.
