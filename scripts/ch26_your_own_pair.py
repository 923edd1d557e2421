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
# After this chapter you can turn a file of sentence pairs into a translator with a score and a page, find out what it can't do, and mend half of one such failure with fifty sentences.
#
# | | |
# |---|---|
# | In the paper | nothing: [Attention Is All You Need](https://arxiv.org/abs/1706.03762) had its pairs ready-made |
# | Time | 20 minutes to read, 45 with the code; a minute or two to run on a CPU |
# | Before | [Chapter 25 · All of it on one page](ch25_one_page.ipynb) |
#
# *If you read only three cells:* the report of *Look before you train*, the chart of *Where it fails*, the first of *Fifty sentences*.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

from scripts.book.charts import titled
from scripts.book.exercises import check
from scripts.book.figures.own_pair import actors_chart, alignment, repeats_chart, tuning_chart
from scripts.book.figures.training import size_choices, size_frame, sizes_chart
from scripts.book.records import load_record
from scripts.ch09_training_run import Run
from scripts.core.data import TrainingData, prepare, with_pairs
from scripts.core.models import Trained
from scripts.core.recipes import reason_for, recipe_for
from scripts.core.scores import corpus_bleu
from scripts.core.settings import TrainConfig
from scripts.corpora.invented import THINGS, nouns_of, ruvel_pairs, usual_order
from scripts.corpora.report import report_text
from scripts.corpora.splits import letters_only, own_pairs
from scripts.fast.translating import fast_translate

PAIRS = list[tuple[str, str]]  # sources and their targets

# %% [markdown]
# ## Three commands
#
# ```bash
# python -m scripts.corpora.inspect --pairs ruvel.tsv                 # what is in the file
# python -m scripts.train --pairs ruvel.tsv --languages qru-en        # runs/ruvel: model, score, card
# make living MODEL=runs/ruvel                                        # a page that translates
# ```
#
# `ruvel.tsv` has a source, a tab and a target on each line. Two files do as well: `--source a.txt --target b.txt`. We walk this road by hand, with a file that `python -m scripts.corpora.invented` makes.
#
# ## A language that nobody speaks
#
# > **In short.** Ruvel puts the verb last, and endings say what English says by word order.
#
# No one's mother tongue helps, and we know every rule. The main ones:
#
# | | |
# |---|---|
# | order | who, where, to whom, what, and last the verb |
# | an adjective | follows its noun: `havo gura`, the big dog |
# | a noun's `-ra`, `-re` | plural: `havora`, the dogs |
# | then `-ta`, `-te` | a definite object: `havota`, the dog; without it, a dog |
# | or `-ka`, `-ke` | the receiver: `havoka`, to the dog |
# | a verb's `-an`, `-en`; `-al`, `-el` | present; past: `makan`, sees; `makal`, saw |
# | a or e | as the word's last vowel: a after a, o, u; e after e, i |
# | `sil`, `mur`, `tena` | in, behind, near, *after* the noun: `hamur sil`, in the house |
#
# **Predict.** `aleni` girl, `goral` horse, `velis` apple, `bir-` bring. What is *Aleni goralka gura velisre birel*?

# %%
pairs = ruvel_pairs()
example = ("aleni goral-ka gura velis-re bir-el", "the girl brought apples to the big horse")
links = [(0, 1), (1, 7), (1, 4), (2, 6), (3, 3), (4, 2)]  # of words, by their places
titled(
    alignment(*map(str.split, example), links),
    "The verb leaves the end, adjective and noun swap, an ending becomes a word",
    "-ka becomes “to”, -re is the plural, -el the past; Ruvel has no word for “the”.",
)

# %% [markdown]
# *The girl brought apples to the big horse.* The apples have no `-te`, so they aren't *the* apples.
#
# ## Look before you train
#
# > **In short.** Files are made by people. A report names each oddity; nothing is dropped in silence.
#
# We spoil the file with eight slips such as real corpora have.
#
# **Predict.** The report leaves four of the eight out, and keeps four. Which?

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
# A pair without a target teaches nothing, a copied source teaches copying, a pair twice counts double, and a translation six times as long is probably none. Lines 200 and 400 go on a guess: a name may equal its translation. The other four stay: a wrong guess would delete your work.
#
# ## What may be held out
#
# > **In short.** A test sentence with a twin in training asks what the model remembers.
#
# Collected pairs come in near-copies: with an exclamation mark, in small letters, in another order, with another number. **Your turn.** Write what they share. `letters_only(text)` helps: it replaces all but letters by spaces. It keeps the vowel signs of Hindi, which `\w` would lose. And it writes é, which may be one sign or two, in one way.


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
def honest_split(pairs: PAIRS, share: float, seed: int) -> tuple[PAIRS, PAIRS]:
    """Training pairs and held-out ones, in their order.

    A `share` of the sources' different fingerprints is drawn by `seed`; all their pairs are held out.
    """
    prints = sorted({fingerprint(source) for source, _ in pairs})
    drawn = set(random.Random(seed).sample(prints, round(share * len(prints))))
    held_out = [pair for pair in pairs if fingerprint(pair[0]) in drawn]
    return [pair for pair in pairs if fingerprint(pair[0]) not in drawn], held_out


# %%
def with_twins(train: PAIRS, held_out: PAIRS) -> float:
    """The share of held-out sources whose fingerprint is in training, too."""
    prints = {fingerprint(source) for source, _ in train}
    return sum(fingerprint(source) in prints for source, _ in held_out) / len(held_out)


# %%
toy = [(f"{word}{mark}", "x") for word in "abcdefghij" for mark in ("", "!", " 2")]
train_part, held_out = honest_split(toy, 0.2, seed=1)
assert len(train_part) == 24 and len(held_out) == 6 and set(train_part + held_out) == set(toy)
assert train_part == [pair for pair in toy if pair not in held_out], "keep the order"
assert not {s[0] for s, _ in train_part} & {s[0] for s, _ in held_out}, "a twin on the other side"
assert honest_split(toy, 0.2, seed=2)[1] != held_out, "the seed draws"

# %% [markdown]
# `scripts.train` keeps twins out of training, too: also sentences that share 80% of their word triples.
#
# ## Choose, train, judge
#
# > **In short.** Few pairs want many passes; then a narrow model is enough.
#
# `scripts.train` takes the settings from the number of pairs; each can be overridden.

# %%
count = len(own.splits["train"])
print(f"for our {count:,} pairs:", reason_for(count))
recipes = {count: asdict(TrainConfig(**recipe_for(count))) for count in (1000, 3000, 10000, 29000)}
pd.DataFrame(recipes).T[["layers", "d_model", "vocab", "dropout", "epochs"]]

# %% [markdown]
# Ruvel is simpler than captions: this smaller model learns it, by the loop of [chapter 9](ch09_training_run.ipynb).

# %%
LEARNER = TrainConfig(
    layers=2, d_model=64, d_ff=128, heads=4, vocab=500, dropout=0.1, epochs=30, max_tokens=512,
    lr=5e-3, warmup=100, languages="qru-en", device="cpu", precision="float32",
)  # fmt: skip


class ShortRun(Run):
    """A training that isn't validated after each epoch."""

    def end_epoch(self) -> None:
        self.epoch, self.done = self.epoch + 1, 0  # the next epoch; none of its steps is done


def fitted(config: TrainConfig, data: TrainingData, start: Trained | None = None) -> Trained:
    """Train on `data` as `config` says, from new weights or from those of `start`."""
    run = ShortRun(config, data)
    if start:
        run.model.load_state_dict(start.model.state_dict())
    run.fit()
    run.model.eval()
    return run.trained


def translations(trained: Trained, pairs: PAIRS) -> list[str]:
    """The greedy translations of the pairs' sources."""
    return fast_translate(trained, [source for source, _ in pairs])


def exact(trained: Trained, pairs: PAIRS) -> float:
    """The share of pairs that are translated exactly as the reference."""
    outputs = translations(trained, pairs)
    return sum(out == ref for out, (_, ref) in zip(outputs, pairs, strict=True)) / len(pairs)


def greedy_bleu(trained: Trained, pairs: PAIRS) -> float:
    """BLEU of the greedy translations."""
    return corpus_bleu(translations(trained, pairs), [ref for _, ref in pairs]).score


# %% [markdown]
# Our grammar writes only one translation, so we can count exact ones. The last 200 pairs are the test set; two of them have a twin in training, worth at most one point. **Predict.** How many of the 200 will be exactly right?


# %%
def ruvel_corpus(construction: str = "plain") -> dict[str, PAIRS]:
    """2,000 pairs: 1,700 to learn from, 100 for validation, 200 for the test."""
    pairs = ruvel_pairs(construction=construction)
    return {"train": pairs[:1700], "val": pairs[1700:1800], "test": pairs[1800:]}


# %%
data = prepare(LEARNER, ruvel_corpus())
model = fitted(LEARNER, data)
old = data.corpus["test"]
assert with_twins(data.corpus["train"], old) == 2 / 200
assert greedy_bleu(model, old) > 96 and exact(model, old) > 0.9

# %% [markdown]
# Nearly all are: with eight seeds 97.0 to 98.5% ([record](../results/ruvel.json)).
#
# ## Where it fails
#
# > **In short.** A test set that looks like the training set asks only what was taught. Ask something else.
#
# Our grammar has two constructions that none of our pairs has.
#
# - **Negation**: `nok` before the verb. *Goral vosta sil nok kelel*: The horse did not sing in the forest.
# - **The object first.** *Tivente havo limen*: the ending says who is heard, so it's the dog who hears the bird.
#
# We ask for the sentence of our first picture, without and with `nok`. **Predict.** What will the model make of a word that it has never seen?

# %%
# NBVAL_IGNORE_OUTPUT
ASKED = ["Aleni goralka gura velisre birel.", "Aleni goralka gura velisre nok birel."]
print(*fast_translate(model, ASKED), sep="\n")

# %% [markdown]
# Ask your own ([the grammar](../scripts/corpora/invented.py) lists all words). Now two hundred negations.


# %%
def says_not(outputs: Sequence[str]) -> float:
    """The share of English outputs with a negation."""
    return sum(" not " in output for output in outputs) / len(outputs)


new = ruvel_pairs(250, construction="negation")
fifty, negated = new[:50], new[50:]
assert says_not(translations(model, negated)) == exact(model, negated) == 0
print(data.tokenizer.pieces("nok"))

# %% [markdown]
# None comes out right; not one output of eight seeds holds a *not*. How could it? No English sentence in training has *not*, *do* or *did*. Nor is there an alarm: `nok` is cut into two known pieces. Does it change anything? **Instrument.** Delete `nok` from the sources, and compare. The shares of outputs that stay the same, for eight seeds:

# %%
record = load_record("ruvel")
print(*sorted(f"{run['same_without_nok']:4.0%}" for run in record["runs"]))

# %% [markdown]
# Mostly `nok` changes nothing. Else it changes other words: seed 1 makes *The horse sleeps in the forest* of *Goral vosta sil nok kelel*, and without `nok` *The horse sang in the forest* ([record](../results/ruvel-causes.json)).
#
# With the object first, two outputs of a hundred are right. **Experiment.** Who acts in them: the object, the true actor, or a stranger, who isn't in the sentence? The control has the same words in the usual order: if it fails, too, the order isn't to blame. **Predict.** Who acts if the object is a being, and who if it is a thing?


# %%
ACTORS = ["the object", "the true actor", "a stranger"]


def who_acts(outputs: Sequence[str], pairs: PAIRS) -> pd.DataFrame:
    """The share of outputs in which each of `ACTORS` acts, for pairs whose object comes first.

    A row is for objects that are beings, and one for things. A pair counts if its nouns differ.
    """
    rows = []
    for output, (_, reference) in zip(outputs, pairs, strict=True):
        actor, object_noun = nouns_of(reference)
        acting = next(iter(nouns_of(output)), "")
        who = ACTORS[0] if acting == object_noun else ACTORS[1] if acting == actor else ACTORS[2]
        if actor != object_noun:
            rows.append(("a thing" if object_noun in nouns_of(THINGS) else "a being", who))
    table = pd.DataFrame(rows, columns=["object", "who"])
    shares = pd.crosstab(table["object"], table["who"], normalize="index")
    return shares.reindex(columns=ACTORS, fill_value=0.0)


# %%
object_first = ruvel_pairs(200, construction="object first")
usual = [(usual_order(source), target) for source, target in object_first]
moved, control = (who_acts(translations(model, pairs), pairs) for pairs in (object_first, usual))
assert moved.loc["a being", "the object"] > 0.6 and moved.loc["a thing", "a stranger"] > 0.6
assert control["the true actor"].min() > 0.9
causes = load_record("ruvel-causes")["runs"]
actors_chart(causes)

# %%
outputs = pd.DataFrame(causes[0]["outputs"])  # of a recorded run
outputs[outputs["source"].str.match(r"\w+te ")]

# %% [markdown]
# Between beings the place decides, not the ending: the object acts in 87 to 94% of the outputs. A thing never acted in training: if one comes first, a stranger acts in 82 to 93% (with seed 1 mostly a dog). In the usual order 97 to 100% are right, so the model knows these words and endings.
#
# Why doesn't it trust the ending? In training the place always told who acts, but half of the objects had no ending. **Experiment.** Give every object in training its ending. **Predict.** Which does the model trust then? The shares of outputs in which the being that comes first still acts, for eight seeds:

# %%
endings = load_record("ruvel-endings")["runs"]
print(*sorted(f"{run['who acts']['a being']['the object']:4.0%}" for run in endings))

# %% [markdown]
# The place still decides, in 87 to 100% of the outputs ([record](../results/ruvel-endings.json)): the missing endings aren't the reason. Place and ending always agreed, so no sentence in training shows that the ending is what counts.
#
# ## Fifty sentences
#
# > **In short.** Training goes on with sentences that show what the model lacks. What does it forget?
#
# *Fine-tuning* begins with a model's weights, at a lower rate. Three runs, each of 260 steps at the same rates:
#
# - *fifty negations* alone,
# - *fifty others*: the control, as new and few, without negations,
# - *mixed*: the same fifty negations ten times each, among the 1,700 pairs that the model knows.
#
# **Predict.** After which does the model say *not*? After which does it still translate the old test set?


# %%
def tunings(data: TrainingData, fifty: PAIRS) -> dict[str, tuple[PAIRS, int]]:
    """The pairs of each fine-tuning, and how often it goes through them in 260 steps."""
    return {
        "fifty negations": (list(fifty), 130),  # of 2 steps each
        "fifty others": (ruvel_pairs(2050)[2000:], 130),
        "mixed": (data.corpus["train"] + 10 * list(fifty), 5),  # of 52
    }


def tuned(model: Trained, data: TrainingData, pairs: PAIRS, epochs: int, lr=2e-3) -> Trained:
    """The model after `epochs` more through `pairs`, at a lower rate."""
    config = replace(model.config, lr=lr, warmup=10, epochs=epochs)
    return fitted(config, with_pairs(data, pairs), model)


def shares(trained: Trained, old: PAIRS, negated: PAIRS) -> dict[str, float]:
    """What of both test sets is exactly right, and what says "not"."""
    row = {"old": exact(trained, old), "negated": exact(trained, negated)}
    row["old_says_not"] = says_not(translations(trained, old))
    row["negated_says_not"] = says_not(translations(trained, negated))
    return {name: round(share, 3) for name, share in row.items()}


# %%
models = {name: tuned(model, data, *plan) for name, plan in tunings(data, fifty).items()}
alone, others, mixed = (shares(trained, old, negated) for trained in models.values())
assert alone["old"] + 0.1 < others["old"] < mixed["old"] - 0.3
assert min(alone["negated"], mixed["negated"]) > 0.3 and others["negated"] == 0
assert alone["old_says_not"] > 0.15 and mixed["old_says_not"] < 0.05

tuning_chart(record["runs"])

# %% [markdown]
# *Fifty negations* teach: nearly all outputs say *not*, and 56% are right. But the model learns to negate where nothing is negated: of its outputs for *old* sentences 35 to 83% say *not*. A girl who carried a ring becomes *The woman did not carry the heavy ring in the market* (seed 1). Only 16% of the old sentences stay right. Any fifty do much of this harm: after *fifty others* 44% stay right. But that model never says *not*.
#
# *Mixed*, the fifty cost hardly anything: 96.5 to 98.5% of the old sentences are right, 97.0 to 98.5 before. Of the negations 48% are right. We ask again.

# %%
# NBVAL_IGNORE_OUTPUT
print(*fast_translate(models["mixed"], ASKED), sep="\n")

# %% [markdown]
# Half of such outputs are still wrong, but not for lack of a *not*: 53 to 67% of those have another verb or another form of it, and 24 to 43% *does* for *did* ([three seeds](../results/ruvel-causes.json)).
#
# How many copies of the fifty must be among the 1,700? **Predict.** Which comes first: a *not*, or a right sentence?

# %%
repeats_chart(load_record("ruvel-controls")["runs"])

# %% [markdown]
# The *not*, from two copies on. To be right takes more; the old sentences lose hardly anything.
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
# `--from` takes the fifty ten times each, and keeps out of training what judged the model. `valid.tsv`, which chooses the epoch, has sentences of both kinds. The last command shows what was forgotten: nothing, in our one run ([record](../results/ruvel-commands.json)). Of the old test set 98% are right before and after; of `asked.tsv` none before, and 53% after.
#
# `--from` takes the rate 4e-3, the highest that we tried. With each of three seeds it gets more of 200 other negations right than 2e-3 and 1e-3 ([record](../results/ruvel-rates.json)). For our 2e-3 above we looked at the test sets, with seed 1; on other negations 4e-3 is better there, too ([record](../results/ruvel-controls.json)).
#
# ## Case · A score above 90
#
# **Symptom.** A corpus of 900 pairs, split at random. The model has over 90 BLEU on its test set; on its users' sentences we measure 65.
#
# **Suspects.** *Another kind* of sentences; *overfitting*, by too long a training; *twins* of the test set in training.
#
# **Instrument.** Fingerprints, and two test sets for one model: its own, and fresh sentences of the same grammar, without twins. Then the same after an honest split.


# %%
def collected(count: int = 300) -> PAIRS:
    """A corpus as collected: `count` sentences, each as it is, with "!", and in small letters."""
    pairs = ruvel_pairs(count, seed=5)
    exclaimed = [(source[:-1] + "!", target[:-1] + "!") for source, target in pairs]
    small = [(source.lower(), target.lower()) for source, target in pairs]
    return pairs + exclaimed + small


def random_split(pairs: PAIRS, share: float, seed: int) -> tuple[PAIRS, PAIRS]:
    """The usual split: training pairs and a `share` of held-out ones, drawn by `seed`."""
    shuffled = random.Random(seed).sample(pairs, len(pairs))
    size = round(share * len(pairs))
    return shuffled[size:], shuffled[:size]


def case_scores(split: Callable, seed: int, epochs: int = 20) -> dict[str, float]:
    """BLEU of a model on its test set and on 200 fresh sentences."""
    pairs = collected()
    train, held_out = split(pairs, 1 / 9, seed=0)
    config = replace(LEARNER, vocab=300, epochs=epochs, seed=seed)
    model = fitted(config, prepare(config, {"train": train, "val": held_out}))
    prints = {fingerprint(source) for source, _ in pairs}
    fresh = [pair for pair in ruvel_pairs(300, seed=6) if fingerprint(pair[0]) not in prints]
    return {"its test set": greedy_bleu(model, held_out), "fresh": greedy_bleu(model, fresh[:200])}


# %%
for split in (random_split, honest_split):
    parts = split(collected(), 1 / 9, seed=0)
    print(f"{split.__name__}: {with_twins(*parts):.0%} of {len(parts[1])} have a twin")
by_chance, by_groups = (case_scores(split, seed=1) for split in (random_split, honest_split))
assert by_chance["its test set"] > 85 > 75 > by_chance["fresh"]
assert by_groups["its test set"] < 70
pd.DataFrame(record["runs"][0]["case"]).T  # BLEU of a recorded run

# %% [markdown]
# **Culprit.** Twins. With eight seeds, the random split's models have 90 to 95 BLEU on their own test set, and 59 to 66 on fresh sentences. After the honest split they have 48 to 58 on their test set, and 57 to 65 on fresh sentences. So the fresh sentences aren't harder. Nor is it overfitting. With 8 epochs in place of 20, fresh sentences have 21 to 30 BLEU; with 40, they have 70 to 74 ([three seeds](../results/ruvel-controls.json)).
#
# ## What more pairs give
#
# > **In short.** In a real language each tripling of the pairs gives points. Few pairs want long training.
#
# We cut Multi30k to fewer pairs. *One for all* is chapter 9's preset `small`; *by size* is the table above; *longer* is `small` with as many passes. **Predict.** All 29,000 pairs give 41 BLEU. What do 1,000 give, and what is the recipe worth?

# %%
sizes = load_record("sizes-multi30k")
frame = size_frame(sizes, [load_record(f"gpu-small-{seed}") for seed in (1, 2, 3)])
sizes_chart(frame)

# %% [markdown]
# With 1,000 pairs *by size* has 17.6 BLEU, and *one for all* 8.0. Most of the gain is due to more passes: *longer* has 16.5. With 3,000 pairs *longer* is even better than *by size*, but takes three times as long.
#
# A warning: with 1,000 pairs *one for all* never leaves its warm-up of 400 steps; it takes at most 198.

# %%
size_choices(frame)

# %% [markdown]
# Minutes are of a CPU thread (26 for all 29,000).
#
# | pairs | |
# |---|---|
# | 1,000 to 3,000 | collect more (Tatoeba, OPUS); fine-tune a pretrained model (OPUS-MT; or NLLB, not for commerce) |
# | 10,000 | test each construction; add sentences for those that fail |
# | 29,000 | train on other models' translations (chapter 21) |
#
# **What not to expect.** 1,700 pairs have nearly every word of Ruvel many times; those of a real language don't.
#
# ## Publish it
#
# ```bash
# python -m scripts.translate --model runs/ruvel "Havora goralka velisre biren."
# make living MODEL=runs/ruvel-2 FOLDER=public                             # for any static host
# ```
#
# The page shows your test sentences as examples. Add to the model's card what it can't do.
#
# ## Summary
#
# - Look at the pairs. Keep near-copies of held-out sentences out of training.
# - A test set like the training set can't show what both lack. Ask for constructions one by one.
# - Fifty sentences halved the failures of one construction; with the object first, 2% became 12 to 27% (exercise 3). Mix them with old ones, and measure what is forgotten.
#
# ## What the paper did that we don't
#
# - It trained on 4.5 million sentence pairs (English-German) and 36 million (English-French), and fine-tuned nothing.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · A warning
#
# *code · difficulty ●○○ · worth ●●● · 10 minutes*
#
# Write `unknown_words(text, sources)`, the words of a text (numbers aren't words) that no training source has. (`solution("unknown_words")` shows ours.) Which of the two constructions would it have caught?


# %%
def unknown_words(text: str, sources: list[str]) -> list[str]:
    """The words of `text`, in small letters, that none of the sources has: in order, each once."""
    ...


check(unknown_words)

# %% [markdown]
# <details><summary>An answer</summary>
#
# The negation, by `nok`. Hardly the object that comes first: only `minerete` is new, in 4 of 200 sentences.
#
# </details>
#
# ### Exercise 2 · Odd lengths
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# Write `odd_lengths(pairs, factor)`: the places of the pairs whose ratio of letters, target over source, is more than `factor` times the median ratio, or less than the median divided by `factor`. (`solution("odd_lengths")` shows ours.)


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
# Can fifty sentences teach the model to believe the endings? Take `ruvel_pairs(50, construction="object first")`, mix them as above, and predict: how many of 200 new ones will be right, and what happens to the old test set?
#
# <details><summary>What happens</summary>
#
# [Three seeds](../results/ruvel-controls.json): mixed, 12 to 27% of the new ones were right, in place of 2, and 93.5 to 95% of the old ones.
#
# </details>
#
# ## Goodbye
#
# You began with a dot product. Now you can build a Transformer from nothing but tensors, train it, say how good it is, with an interval, and find what it lacks. Take a pair of languages that nobody has taken, and say what you found, however small.
#
# Thank you for reading. [Chapter 0](ch00_start_here.ipynb) is a good place to see how far you have come.
