"""The mini-GPT that ships, and its rivals (chapter 17): `python -m scripts.studies.gpt --save`.

The model trains on one thread, in minutes. Tables and PPM count the same captions. All are asked
about the same ids.
"""

import json
import math
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from scripts import ROOT, runs_folder
from scripts import ch17_small_gpt as ch17
from scripts.book.command import Command
from scripts.book.files import writable, write_whole
from scripts.book.records import recorded, sha256
from scripts.core.cards import CAPTIONS, CORPUS_TERMS
from scripts.core.checkpoints import save_tensors, weights
from scripts.core.models import STORED_DTYPE
from scripts.core.scores import held_out_splits
from scripts.core.settings import TrainConfig
from scripts.corpora.load import load_corpus
from scripts.studies.runner import one_thread
from scripts.studies.stacks import fast_stack_loss
from scripts.studies.subject import SaveOptions

CORPUS, NAME = "multi30k", "gpt-multi30k"
SIZES = {"N": 4, "d_model": 128, "d_ff": 512, "h": 4, "dropout": 0.0}
SIZES |= {"positions": "learned", "max_len": 256}
PASSES, BATCH = 5, 512
RECIPE = TrainConfig(optimizer="muon", lr=0.01, muon_lr=0.01, warmup=200)
PROMPT = "A little girl"
CONTEXTS, K, SHORT = (3, 6, 9, 12, 15), 12, 6  # of tables; of those that are mixed

Rows, Nats = list[list[int]], list[list[float]]


# The model.


def bits_of(nats: Nats) -> float:
    """Bits per character, as a record has them."""
    return round(ch17.bits_per_character(nats), 4)


def trained(
    rows: dict[str, Rows], characters: ch17.Characters
) -> tuple[ch17.OneStack, list[dict[str, Any]]]:
    """The model; and for each pass its bits per character, and how it then continues the prompt."""
    torch.manual_seed(1)
    model, course = ch17.make_stack(len(characters), **SIZES), []
    passes = ch17.passes_over(rows["train"], PASSES, BATCH)
    for losses in ch17.learn(model, passes, RECIPE, fast_stack_loss):
        bits = {
            "trained": bits_of([losses]),
            "val": bits_of(ch17.character_nats(model, rows["val"])),
        }
        course.append(bits | {"text": ch17.continued(model, characters, PROMPT)[0]})
        print(course[-1], flush=True)
    return model, course


def save(folder: Path, model: ch17.OneStack, characters: ch17.Characters) -> None:
    """Write what `ch17.load_gpt` reads."""
    config = {"corpus": CORPUS, "sizes": SIZES, "alphabet": characters.alphabet}
    text = json.dumps(config, indent=1, ensure_ascii=False) + "\n"
    write_whole(folder / "config.json", text.encode())
    stored = {name: t.to(STORED_DTYPE) for name, t in weights(model).items()}
    save_tensors(folder / "model.safetensors", stored, {})


# Its rivals.


def packed(train: Rows, rows: Rows, context: int) -> float:
    """Bits per character of PPM (variant H): what `rows` add to the packed training rows."""
    import pyppmd

    def size(rows: Rows) -> int:
        ids = bytes(chain.from_iterable(row[1:] for row in rows))  # a byte each, ends included
        return len(pyppmd.compress(ids, max_order=context, mem_size=2**28, variant="H"))

    return round(8 * (size(train + rows) - size(train)) / sum(len(row) - 1 for row in rows), 4)


def flat(nats: Nats) -> torch.Tensor:
    """All characters of all texts, (N,)."""
    return torch.tensor([*chain.from_iterable(nats)])


def mixture(one: dict[str, Nats], other: dict[str, Nats]) -> dict[str, float]:
    """The first one's share that validation chose, and the mixture's bits per character."""

    def bits(split: str, share: float) -> float:
        return bits_of([ch17.mixed(flat(one[split]), flat(other[split]), share).tolist()])

    share = min((number / 20 for number in range(1, 20)), key=lambda share: bits("val", share))
    return {"share": share} | {split: bits(split, share) for split in ("val", "test")}


def where(
    texts: Sequence[str], table: ch17.KneserNey, costs: dict[str, Nats]
) -> list[dict[str, Any]]:
    """Bits per character by place in the word, near the start or not, context met or not."""
    frame = pd.DataFrame({name: flat(nats) / math.log(2) for name, nats in costs.items()})
    frame["place"] = [place for text in texts for place in ch17.places_in_words(text)]
    near = [i < K for text in texts for i in range(len(text) + 1)]
    contexts = (gram[:-1] for text in texts for gram in ch17.grams(text, K + 1))
    met = [context in table.levels[0].contexts for context in contexts]
    pairs = zip(near, met, strict=True)
    frame["group"] = [f"{('far', 'near')[n]}, {('new', 'met')[m]}" for n, m in pairs]
    groups = frame.groupby(["place", "group"])
    means = groups.mean().round(4).assign(characters=groups.size())
    return means.reset_index().to_dict("records")


def compared(
    model: ch17.OneStack,
    characters: ch17.Characters,
    texts: dict[str, list[str]],
    rows: dict[str, Rows],
) -> dict[str, Any]:
    """What the record says of the model beside tables and PPM, in bits per character."""
    held_out, counts, record = ("val", "test"), [], {}
    own = {name: ch17.character_nats(model, rows[name]) for name in held_out}
    costs: dict[int, dict[str, Nats]] = {}
    for context in CONTEXTS:
        table = ch17.KneserNey(texts["train"], context, len(characters) - 2)
        costs[context] = {name: [*map(table.nats, texts[name])] for name in held_out}
        bits = {name: bits_of(nats) for name, nats in costs[context].items()}
        sizes = {name: packed(rows["train"], rows[name], context) for name in held_out}
        counts += [{"kind": "table", "K": context} | bits, {"kind": "PPM", "K": context} | sizes]
        if context == K:
            record["table"] = bits | {"n-grams": sum(len(level.counts) for level in table.levels)}
            both = {"table": costs[K]["test"], "model": own["test"]}
            record["where"] = where(texts["test"], table, both)
    record["mixtures"] = {
        "table and model": mixture(costs[K], own),
        "two tables": mixture(costs[K], costs[SHORT]),
    }
    return record | {"bits": {n: bits_of(nats) for n, nats in own.items()}, "counts": counts}


def measure(folder: Path) -> dict[str, Any]:
    """Train the model and save it in `folder`; then ask it, as it is stored, and its rivals."""
    one_thread()
    corpus, start = load_corpus(CORPUS), time.process_time()
    test = held_out_splits(corpus)[0]
    splits = {"train": corpus["train"], "val": corpus["val"], "test": corpus[test]}
    texts = {name: [english for _, english in pairs] for name, pairs in splits.items()}
    characters = ch17.Characters(texts["train"])
    rows = {name: [*map(characters.encode, lines)] for name, lines in texts.items()}
    # With a box for each rare character: the tables count what the model reads.
    texts = {name: [characters.decode(row[1:]) for row in each] for name, each in rows.items()}
    model, passes = trained(rows, characters)
    save(folder, model, characters)
    minutes = round((time.process_time() - start) / 60)
    model, _ = ch17.load_gpt(folder)
    return {
        "weights_sha256": sha256(folder / "model.safetensors"),
        "parameters": sum(p.numel() for p in model.parameters()),
        "test": test,
        "minutes": minutes,
        "passes": passes,
        **compared(model, characters, texts, rows),
    }


# What ships.


def card(record: dict[str, Any]) -> str:
    """README.md of the model."""
    bits, counted = record["bits"], record["table"]
    return f"""# A mini-GPT, trained on {CORPUS}

A decoder alone, of {record["parameters"]:,} parameters, from chapter 17 of *From Attention to
Translation*: it continues English captions, character by character. Weights in float16
(safetensors), tied tables once; `config.json` holds its sizes and its alphabet.

## Scores

{bits["val"]:.3f} bits per character on validation, {bits["test"]:.3f} on {record["test"]}. \
A table of the last {K}
characters has {counted["val"]:.3f} and {counted["test"]:.3f}. Of the weights as they are stored, \
one seed.

## Data

{CORPUS_TERMS[CORPUS]}

## Recipe

{SIZES["N"]} layers, d_model {SIZES["d_model"]}, d_ff {SIZES["d_ff"]}, {SIZES["h"]} heads, \
pre-norm, learned positions, no dropout. {PASSES} passes in
batches of {BATCH:,} characters; Muon, peak rate {RECIPE.lr:g} after {RECIPE.warmup} steps, then \
cosine; seed 1.

Reproduce it with one command, from the repository's root ({record["device"]},
{record["minutes"]} minutes of one thread, commit `{record["commit"][:12]}`, {record["date"][:10]}):

```
{record["repeat"]}
```

## Limits

{CAPTIONS.replace("translates", "writes")}
"""


def run(options: SaveOptions) -> dict[str, Any]:
    """Train the mini-GPT, and compare it with tables of counts and with PPM."""
    folder = writable(ROOT / "models" / NAME if options.save else runs_folder() / NAME)
    command = "python -m scripts.studies.gpt --save"
    record = recorded(NAME, command, lambda: measure(folder), options.save)
    if options.save:
        write_whole(folder / "README.md", card(record).encode())
    return record


main = Command("scripts.studies.gpt", SaveOptions, run)

if __name__ == "__main__":
    raise SystemExit(main())
