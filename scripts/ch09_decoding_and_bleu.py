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
# # Chapter 9 · Decoding and BLEU
#
# After this chapter you can turn a trained model's probabilities into sentences in three ways, measure how good they are, and say exactly what the measured number means.
#
# *Attention Is All You Need*, §6.1 (beam search, length penalty, averaged checkpoints, BLEU). About 40 minutes to read; about half a minute to run on a CPU.
#
# Previous: [Chapter 8 · The training run](ch08_training_run.ipynb)
#
# Shapes in all chapters: **B** batch, **S** source length, **T** target length, **D** `d_model`, **V** vocabulary. In this chapter also **K**, the width of the beam.
#
# This chapter is also a command:
#
# ```
# python scripts/ch09_decoding_and_bleu.py translate "Ein Hund schläft." --beam 4
# python scripts/ch09_decoding_and_bleu.py evaluate --corpus sample --split test --beam 1
# ```

# %% tags=["bootstrap"]
# Make this chapter at home: the series is in a folder above, installed, or gets cloned beside it.
import os
import subprocess
import sys
from pathlib import Path

here = Path(globals().get("__file__", "notebook")).resolve()
beside = Path("from-attention-to-translation").resolve()
finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
specs = [finder.find_spec("scripts", None) for finder in finders]
installed = [Path(spec.origin).resolve().parents[1] for spec in specs if spec and spec.origin]
homes = [*here.parents, *installed, beside]
root = next((home for home in homes if (home / "scripts/ch01_attention.py").exists()), None)
if root is None:
    address = os.environ.get("SERIES_REPOSITORY", "").removeprefix("git+")
    if not address:
        raise SystemExit("Set SERIES_REPOSITORY to the series' address, such as git+https://…")
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", address, beside], check=True)
    root = beside
sys.path.insert(0, str(root))  # first, so that no other package named scripts shadows ours
for name, module in list(sys.modules.items()):
    if name.split(".")[0] == "scripts" and str(root) not in str(getattr(module, "__file__", "")):
        del sys.modules[name]
if root == beside:
    from scripts.first_cell import install_missing

    install_missing()

# In a terminal, with options or under torchrun, this chapter is a command and shows nothing.
if __name__ == "__main__" and "__file__" in globals() and (sys.argv[1:] or "RANK" in os.environ):
    from scripts.ch09_decoding_and_bleu import main

    raise SystemExit(main())

# %%
import codecs
import contextlib
import io
import itertools
import math
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import altair as alt
import pandas as pd
import torch
from torch import Tensor, nn
from tqdm import tqdm

from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch04_encoder_decoder import EncoderDecoder, make_model
from scripts.ch05_training import BOS, EOS, PAD, greedy_decode
from scripts.ch06_multi30k import (
    encode_pairs,
    load_corpus,
    make_batch,
    pad_rows,
    parallel,
    read_lines,
    source_ids,
)
from scripts.ch08_training_run import (
    Hypothesis,
    Trained,
    average_checkpoints,
    beam_search,
    build_model,
    corpus_bleu,
    decode_rows,
    dropout_off,
    held_out_splits,
    hypothesis,
    load_model,
    next_log_probs,
    pick_device,
    searcher,
    sift,
)
from scripts.charts import GREY, PALETTE, bars, lines, rounded, titled
from scripts.checkpoints import save_tensors, weights
from scripts.records import ROOT, load_record

# %% [markdown]
# ## A model proposes, a search decides
#
# > **In short.** The trained model never writes a sentence. Asked "what comes next?", it gives every word a probability. To write, somebody has to choose, word after word. How to choose is this chapter's question.
#
# The probability of a whole target sentence $y = (y_1, \dots, y_T)$, where $y_T$ is `</s>`, is a product, and its logarithm a sum:
#
# $$\log p(y \mid x) = \sum_{t=1}^{T} \log p(y_t \mid y_1, \dots, y_{t-1}, x)$$
#
# Products of many small numbers underflow; sums of logarithms don't. So all that follows adds logarithms. One step asks the decoder for its last position only: that is `next_log_probs` of [chapter 8](ch08_training_run.ipynb), which needed a search to report its scores. This chapter explains what chapter 8 used.
#
# To *see* a search work we want a model so small that we can check it by hand. Here is one: a phrase book. It knows nine words, and the next word depends on the last word alone. It has the same three parts as our Transformer (`encode`, `decode`, `generator`), so every decoder of this chapter runs on it unchanged.

# %%
START, END = "<s>", "</s>"
NEXT_WORD: dict[str, dict[str, float]] = {
    START: {"the": 0.45, "a": 0.40, "one": 0.15},
    "the": {"dog": 0.40, "hound": 0.35, "puppy": 0.25},
    "a": {"dog": 0.80, "hound": 0.20},
    "one": {"dog": 0.90, "hound": 0.10},
    "dog": {"sleeps": 0.50, "is": 0.45, END: 0.05},
    "hound": {"sleeps": 0.70, "is": 0.30},
    "puppy": {"sleeps": 0.70, "is": 0.30},
    "is": {"sleeping": 0.95, END: 0.05},
    "sleeps": {END: 1.0},
    "sleeping": {END: 1.0},
}


# %%
class PhraseBook(nn.Module):
    """A stand-in for a trained model: p(next word | last word) comes from a table.

    It has the three parts that a decoder asks for, `encode`, `decode` and `generator`, and it ignores
    the source. `words` lists the vocabulary by id; a word without a row ends the sentence.
    """

    def __init__(self, next_words: Mapping[str, Mapping[str, float]] = NEXT_WORD):
        super().__init__()
        rest = dict.fromkeys(word for row in next_words.values() for word in row if word != END)
        self.words = ["<pad>", "<unk>", START, END, *rest]
        table = torch.zeros(len(self.words), len(self.words), dtype=torch.float64)  # (V, V)
        for i, word in enumerate(self.words):
            for following, p in next_words.get(word, {END: 1.0}).items():
                table[i, self.words.index(following)] = p
        self.register_buffer("log_table", table.log())
        self.generator = nn.Identity()

    def encode(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """src (B, S) to a memory that nobody reads, (B, S, 1)."""
        return torch.zeros(*src.shape, 1, dtype=torch.float64)

    def decode(
        self, memory: Tensor, src_mask: Tensor | None, tgt: Tensor, tgt_mask: Tensor | None = None
    ) -> Tensor:
        """tgt (B, T) to log-probabilities (B, T, V), of which position t looks at token t alone."""
        return self.log_table[tgt]

    def text(self, ids: Iterable[int]) -> str:
        """Ids as words."""
        return " ".join(self.words[i] for i in ids)


# %%
book = PhraseBook()
anything = torch.tensor([[EOS]])  # (1, 1): the phrase book doesn't read its source
log_probs = next_log_probs(book, book.encode(anything), None, torch.tensor([[BOS]]))  # (1, V)
assert math.isclose(log_probs.exp().sum().item(), 1.0)
for word, p in zip(book.words, log_probs[0].exp().tolist(), strict=True):
    if p > 0:
        print(f"p({word} | <s>) = {p:.2f}")

# %% [markdown]
# ## Greedy decoding, and where it goes wrong
#
# > **In short.** Take the likeliest word, write it down, ask again. Fast, simple, and short-sighted: like a hiker who always takes the steepest path up and ends on the wrong hill.
#
# [Chapter 5](ch05_training.ipynb) wrote `greedy_decode` for the copy task: $\hat y_t = \arg\max_w\, p(w \mid \hat y_{<t}, x)$. It takes a whole batch (B, S) and stops when every row has written `</s>`.
#
# **Predict.** Follow the table above from `<s>`. Which sentence does greedy decoding write? Is there a likelier one?


# %%
def every_sentence(
    next_words: Mapping[str, Mapping[str, float]],
) -> list[tuple[tuple[str, ...], float]]:
    """All sentences of a table of words with their probabilities, likeliest first."""
    finished, unfinished = [], [((), 1.0)]
    while unfinished:
        words, p = unfinished.pop()
        for word, q in next_words[words[-1] if words else START].items():
            (finished if word == END else unfinished).append(((*words, word), p * q))
    return sorted(finished, key=lambda sentence: -sentence[1])


# %%
greedy_ids = greedy_decode(book, anything, None, max_len=10)  # (1, T)
greedy_text = book.text(greedy_ids[0].tolist())
all_sentences = every_sentence(NEXT_WORD)
assert math.isclose(sum(p for _, p in all_sentences), 1.0)

print("greedy: ", greedy_text)
for words, p in all_sentences[:4]:
    print(f"p = {p:.3f}  {' '.join(words)}")

# %% [markdown]
# Greedy decoding writes "the dog sleeps", since "the" is the likeliest first word. But after "the" the model hesitates between three nouns, and after "a" it doesn't. "a dog sleeps" is almost twice as likely. The first choice can't be taken back.

# %%
probability = {" ".join(words): p for words, p in all_sentences}
assert greedy_text == "the dog sleeps </s>"
assert max(probability, key=probability.get) == "a dog sleeps </s>"
assert probability["a dog sleeps </s>"] > 1.7 * probability[greedy_text]

# %% [markdown]
# **Pitfall.** The first version that one writes decodes a *single* sentence for a *fixed* number of steps. Two things go wrong. It asks the model far too often: each sentence alone, and long after its end. And it returns whatever the model says after `</s>`, where it was never trained: trailing garbage. You notice it by sentences that end twice.


# %%
def wrong_greedy(model: EncoderDecoder, src: Tensor, steps: int) -> Tensor:
    """Greedy decoding as it is often written first: always `steps` tokens. src (1, S) to (1, steps)."""
    memory = model.encode(src, None)  # (1, S, D)
    ids = torch.full((1, 1), BOS)  # (1, 1)
    for _ in range(steps):
        token = next_log_probs(model, memory, None, ids).argmax(dim=-1, keepdim=True)  # (1, 1)
        ids = torch.cat((ids, token), dim=1)  # (1, T+1)
    return ids[:, 1:]


# %%
def tokens_after_end(ids: Tensor) -> int:
    """How many tokens of ids (B, T) stand after their row's first eos and are not padding."""
    after = (ids == EOS).long().cumsum(dim=1) - (ids == EOS).long() > 0  # (B, T)
    return int((after & (ids != PAD)).sum())


# %%
def count_calls(module: nn.Module, action: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """How often `module` was called while `action` ran, and what that returned."""
    calls = []
    handle = module.register_forward_hook(lambda *_: calls.append(1))
    try:
        result = action()
    finally:
        handle.remove()
    return len(calls), result


# %%
sixteen = anything.expand(16, 1)  # (16, 1)
our_calls, ours = count_calls(book.generator, lambda: greedy_decode(book, sixteen, None, 30))
wrong_calls, wrong = count_calls(
    book.generator, lambda: torch.cat([wrong_greedy(book, row.unsqueeze(0), 30) for row in sixteen])
)
print(f"ours:  {our_calls:3} calls, {tokens_after_end(ours):3} tokens after the end")
print(f"wrong: {wrong_calls:3} calls, {tokens_after_end(wrong):3} tokens after the end")
assert our_calls == 4 and wrong_calls == 16 * 30
assert torch.equal(ours, wrong[:, :4]) and tokens_after_end(ours) == 0
assert tokens_after_end(wrong) == 16 * 26  # the same check fails on the wrong version

# %% [markdown]
# ## Beam search
#
# > **In short.** Keep not one unfinished sentence but the K best. Like a group that explores a maze together: at each fork all ways are tried, and only the K most promising go on.
#
# At each step every one of the K prefixes is continued by every one of the V words. That makes K·V candidates, and the K likeliest survive. K = 1 is greedy decoding; K = ∞ would be an exhaustive search. Here it is in plain Python, over our table:


# %%
def beam_by_hand(
    next_words: Mapping[str, Mapping[str, float]], beam: int, max_len: int = 10
) -> tuple[list[tuple[tuple[str, ...], float]], pd.DataFrame]:
    """Beam search over a table of words, in plain Python.

    Returns the finished sentences with their probabilities, likeliest first, and every candidate
    that was weighed on the way: its words, its probability, and its fate.
    """
    prefixes: list[tuple[tuple[str, ...], float]] = [((), 1.0)]
    finished, weighed = [], []
    for _ in range(max_len):
        candidates = [
            ((*words, word), p * q)
            for words, p in prefixes
            for word, q in next_words[words[-1] if words else START].items()
        ]
        candidates.sort(key=lambda candidate: -candidate[1])
        ended = [c for c in candidates[:beam] if c[0][-1] == END]
        prefixes = [c for c in candidates if c[0][-1] != END][:beam]
        for c in candidates:
            fate = "ends" if c in ended else "kept" if c in prefixes else "dropped"
            weighed.append({"words": c[0], "p": c[1], "fate": fate})
        finished += ended
        if len(finished) >= beam or not prefixes:
            break
    return sorted(finished, key=lambda f: -f[1])[:beam], pd.DataFrame(weighed)


# %% [markdown]
# **Predict.** With K = 2, which two first words survive? Which of the two leads to the winner?

# %%
best_two, weighed = beam_by_hand(NEXT_WORD, beam=2)
for words, p in best_two:
    print(f"p = {p:.4f}  {' '.join(words)}")
assert [" ".join(words) for words, _ in best_two] == ["a dog sleeps </s>", "a dog is sleeping </s>"]


# %%
def beam_tree(weighed: pd.DataFrame) -> pd.DataFrame:
    """Where to draw each candidate of `beam_by_hand`: its step x and row y, and those of its parent."""
    weighed = weighed.set_index("words")
    children: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for words in weighed.index:
        children.setdefault(words[:-1], []).append(words)
    row, leaves = {}, itertools.count()

    def settle(words: tuple[str, ...]) -> float:
        below = [settle(child) for child in children.get(words, [])]
        row[words] = sum(below) / len(below) if below else float(next(leaves))
        return row[words]

    settle(())
    return pd.DataFrame(
        {
            "word": [words[-1] for words in weighed.index],
            "p": [f"{p:.3f}" for p in weighed["p"]],
            "fate": list(weighed["fate"]),
            "x": [len(words) for words in weighed.index],
            "y": [row[words] for words in weighed.index],
            "from x": [len(words) - 1 for words in weighed.index],
            "from y": [row[words[:-1]] for words in weighed.index],
        }
    )


# %%
def beam_tree_chart(tree: pd.DataFrame) -> alt.TopLevelMixin:
    """The candidates of a beam search as a tree that grows to the right."""
    steps = int(tree["x"].max())
    x = alt.X(
        "x:Q", axis=alt.Axis(title="step", values=list(range(1, steps + 1)), format="d", grid=False)
    )
    x = x.scale(domain=[0, steps + 0.4], nice=False)
    y = alt.Y("y:Q", axis=None).scale(
        domain=[-0.7, tree["y"].max() + 0.7], reverse=True, nice=False
    )
    fates = alt.Scale(domain=["kept", "ends", "dropped"], range=[PALETTE[0], PALETTE[2], "#AAAAAA"])
    color = alt.Color(
        "fate:N", scale=fates, legend=alt.Legend(title="the candidate is", orient="top")
    )
    base = alt.Chart(tree).encode(y=y)
    edges = base.mark_rule(strokeWidth=1.5).encode(
        x=alt.X("from x:Q").scale(domain=[0, steps + 0.4], nice=False),
        x2="x:Q",
        y=alt.Y("from y:Q", axis=None),
        y2="y:Q",
        color=color,
    )
    nodes = base.mark_circle(size=70, opacity=1).encode(x=x, color=color)
    looks = {
        "word": {"dy": -13, "fontSize": 13, "fontWeight": "bold"},
        "p": {"dy": 14, "fontSize": 11, "color": GREY},
    }
    texts = {name: base.encode(x=x, text=f"{name}:N") for name in looks}
    white = {"stroke": "white", "strokeWidth": 4, "color": "white"}  # keeps the lines off the text
    halos = [text.mark_text(**looks[name] | white) for name, text in texts.items()]
    labels = [text.mark_text(**looks[name]) for name, text in texts.items()]
    drawn = alt.layer(edges, *halos, nodes, *labels)
    return titled(
        drawn.properties(width=620, height=38 * int(tree["y"].max() + 2)),
        "A beam of two, step by step",
        "Below each word: the probability of the whole text up to it. Of each column's candidates the two best go on "
        "or end; all others are dropped. The winner begins with the second-best word.",
    )


# %%
beam_tree_chart(beam_tree(weighed))

# %% [markdown]
# The beam kept "a", though "the" was likelier, and that was enough. A beam is no guarantee: a path that starts too badly is dropped however well it would end.
#
# Now the real thing: whole batches, on tensors, with any model. `beam_search` stands in [chapter 8](ch08_training_run.ipynb), in the section "A score to steer by". Have its cell open beside this table. Each line of `beam_by_hand` has its place there:
#
# | by hand, one sentence | on tensors, B sentences |
# |---|---|
# | `prefixes`: up to K tuples of words | `ids` (B·K, T): K rows for each sentence |
# | their probabilities `p` | `scores` (B, K): log-probabilities |
# | `p * q` for every next word | `scores` + `next_log_probs`: (B, K, V), all of them at once |
# | sort the candidates | `topk` over a sentence's K·V candidates, laid out in one row |
# | a candidate's tuple names its prefix | place ÷ V is the prefix, the remainder is the token |
# | `ended` and `prefixes` | `sift` parts one from the other |
# | a finished tuple with its `p` | a `Hypothesis`: ids, summed log-probability, and how many tokens were scored |
#
# Two lines have no partner by hand. At the first step all K rows of a sentence hold the same `<s>`. Were they all continued, the beam would fill with K copies of one text; so one row starts at score 0 and the others at −∞. And `dropout_off` switches the model to evaluation while the search runs. What happens without it is a pitfall further down.
#
# **Pitfall.** Of each sentence's candidates `sift` is given the best **2K**, not the best K. Up to K of them may end with `</s>` and leave the beam; the other K keep it full. With the best K alone, each ending costs the beam a prefix. Nothing crashes: the beam just grows narrower. Here K = 2, and the best candidate ends.

# %%
three_candidates = [(math.log(p), 0, token) for p, token in ((0.5, EOS), (0.3, 4), (0.2, 5))]
ended, going = sift(three_candidates, beam=2, final=False)
assert ended == three_candidates[:1] and going == three_candidates[1:]  # two go on, as they should
_, too_few = sift(three_candidates[:2], beam=2, final=False)
assert [p > -math.inf for p, _, _ in too_few] == [True, False]  # of the best K alone, one goes on

# %% [markdown]
# Three checks of the whole search. First: on the phrase book it finds what the plain Python finds, for several widths. Second: a beam of 1 is greedy decoding, here on an untrained Transformer and a padded batch.

# %%
for beam in (1, 2, 3, 4):
    by_hand, _ = beam_by_hand(NEXT_WORD, beam)
    found = beam_search(book, anything, None, max_len=10, beam=beam, alpha=0.0)[0]
    assert [f"{book.text(h.ids)} </s>" for h in found] == [" ".join(words) for words, _ in by_hand]
    for h, (_, p) in zip(found, by_hand, strict=True):
        assert math.isclose(math.exp(h.log_prob), p, rel_tol=1e-9)

# %%
torch.manual_seed(0)
tiny = make_model(6, 6, N=1, d_model=16, d_ff=32, h=2, dropout=0.0).double().eval()
with torch.no_grad():
    tiny.generator.proj.weight.mul_(6)  # far from uniform, so that there is something to find
src = pad_rows([[4, 5, 4, EOS], [5, EOS], [4, 4, 5, EOS]])  # (3, 4)
greedy_rows = greedy_decode(tiny, src, padding_mask(src), 8).tolist()
beam_rows = beam_search(tiny, src, padding_mask(src), 8, beam=1)
for row, found in zip(greedy_rows, beam_rows, strict=True):
    assert list(found[0].ids) == (row[: row.index(EOS)] if EOS in row else row)

# %% [markdown]
# Third, the strongest: brute force. With 6 tokens and at most 3 steps, all that this model can say fits into a list. We score each text by teacher forcing, in one pass as in training. That is an independent way to the same number. The probabilities must sum to 1, and a beam wide enough to drop nothing must return the same texts in the same order.


# %%
@torch.no_grad()
def forced_log_probs(model: EncoderDecoder, src: Tensor, ids: Tensor) -> Tensor:
    """The summed log-probability of each row of ids (N, T), given one source, src (1, S): (N,).

    By teacher forcing: whole sequences in one pass, as in training and unlike a search. Where a row
    ends, its eos is scored as well; nothing is padded.
    """
    with dropout_off(model):
        memory = model.encode(src, None).expand(len(ids), -1, -1)  # (N, S, D)
        tgt = torch.cat((torch.full_like(ids[:, :1], BOS), ids[:, :-1]), dim=1)  # (N, T)
        x = model.decode(memory, None, tgt, subsequent_mask(tgt.size(1)))  # (N, T, D)
        log_probs = model.generator(x).log_softmax(dim=-1)  # (N, T, V)
    return log_probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1).sum(dim=-1)  # (N,)


# %%
def every_hypothesis(
    model: EncoderDecoder, src: Tensor, vocab: int, max_len: int
) -> list[Hypothesis]:
    """All that can be written in `max_len` tokens, scored by teacher forcing. Tiny models only."""
    found = []
    for length in range(1, max_len + 1):
        written = [
            ids
            for ids in itertools.product(range(vocab), repeat=length)
            if EOS not in ids[:-1] and (ids[-1] == EOS or length == max_len)
        ]
        log_probs = forced_log_probs(model, src, torch.tensor(written)).tolist()
        found += [hypothesis(ids, p) for ids, p in zip(written, log_probs, strict=True)]
    return found


# %%
one = src[:1]  # (1, 4)
everything = every_hypothesis(tiny, one, vocab=6, max_len=3)
assert math.isclose(sum(math.exp(h.log_prob) for h in everything), 1.0)

for alpha in (0.0, 0.6, 1.0):
    ranked = sorted(everything, key=lambda h: -h.score(alpha))
    found = beam_search(tiny, one, None, max_len=3, beam=6**3, alpha=alpha)[0]
    assert [h.ids for h in found] == [h.ids for h in ranked]
    for ours, theirs in zip(found, ranked, strict=True):
        assert math.isclose(ours.log_prob, theirs.log_prob, rel_tol=1e-9)
print(f"{len(everything)} possible texts, and the same ranking from both.")

# %% [markdown]
# ## Length: why the score is divided
#
# > **In short.** Every further word costs probability. So the likeliest sentence tends to be too short. Dividing by a power of the length makes up for it.
#
# A log-probability is a sum of T negative numbers: it falls with every word. We rank finished hypotheses by
#
# $$\text{score}(y) = \frac{\log p(y \mid x)}{T^{\alpha}}$$
#
# With α = 0 the plain log-probability counts, with α = 1 the mean per token. The paper uses α = 0.6.
#
# **Predict.** "a dog sleeps" has p = 0.16 with 4 tokens (`</s>` counts), "a dog is sleeping" has p = 0.137 with 5. From which α on does the longer one win?


# %%
def alpha_frame(probability: Mapping[str, float]) -> pd.DataFrame:
    """Scores of three sentences for many α, each minus the score of "a dog sleeps"."""
    log_prob = {text: math.log(p) for text, p in probability.items()}
    alphas = [i / 20 for i in range(31)]
    rows = []
    for text in ("a dog is sleeping </s>", "a dog sleeps </s>", "the dog sleeps </s>"):
        for alpha in alphas:
            score = log_prob[text] / len(text.split()) ** alpha
            base = log_prob["a dog sleeps </s>"] / 4**alpha
            rows.append({"sentence": text.removesuffix(" </s>"), "α": alpha, "lead": score - base})
    return pd.DataFrame(rows)


# %%
def alpha_chart(frame: pd.DataFrame) -> alt.TopLevelMixin:
    """Who leads at which length penalty."""
    drawn = lines(frame, "α", "lead", "sentence", y_title="score, compared with “a dog sleeps”")
    return titled(
        drawn,
        "The length penalty decides between short and long",
        "Where a line is above zero, its sentence beats “a dog sleeps”. The longer sentence overtakes at α = 0.37; "
        "the one that is only less likely, and no longer, never does.",
    )


# %%
short, long = (
    math.log(probability[f"{text} </s>"]) for text in ("a dog sleeps", "a dog is sleeping")
)
turning_point = math.log(long / short) / math.log(5 / 4)  # where long / 5^α = short / 4^α
print(f"The longer one wins from alpha = {turning_point:.2f} on.")
for alpha in (turning_point - 0.01, turning_point + 0.01):
    best = beam_search(book, anything, None, 10, beam=4, alpha=alpha)[0][0]
    assert book.text(best.ids) == ("a dog sleeps" if alpha < turning_point else "a dog is sleeping")

alpha_chart(alpha_frame(probability))

# %% [markdown]
# ## Sampling
#
# > **In short.** Don't search: throw a die that is loaded as the model says. You get variety instead of the one safest sentence.
#
# A *temperature* τ sharpens or flattens the die, and *top-k* takes the unlikely sides off it:
#
# $$q(w) \propto p(w)^{1/\tau}$$
#
# τ < 1 favours the likely words (τ → 0 is greedy decoding), τ > 1 the unlikely ones. With top-k, only the k likeliest words may be drawn.


# %%
def keep_top(log_probs: Tensor, k: int) -> Tensor:
    """(B, V) with all but each row's k largest entries at −∞."""
    if k < 1:
        raise ValueError(f"top_k must be at least 1, not {k}")
    top = log_probs.topk(min(k, log_probs.size(-1)), dim=-1)  # (B, k)
    return torch.full_like(log_probs, -torch.inf).scatter(-1, top.indices, top.values)


# %%
def sharpened(log_probs: Tensor, temperature: float, top_k: int | None = None) -> Tensor:
    """Log-probabilities (B, V) to the probabilities (B, V) that are drawn from.

    `temperature` divides the log-probabilities; `top_k` keeps the k likeliest tokens.
    Raises ValueError for a temperature that is not positive, or a `top_k` below 1.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    if top_k is not None:
        log_probs = keep_top(log_probs, top_k)
    log_probs = log_probs.double()  # so that the smallest temperatures neither overflow nor vanish
    best = log_probs.max(dim=-1, keepdim=True).values  # (B, 1)
    return ((log_probs - best) / temperature).softmax(dim=-1)


# %%
@torch.no_grad()
def sample_decode(
    model: EncoderDecoder,
    src: Tensor,
    src_mask: Tensor | None,
    max_len: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Tokens drawn from the model's distribution: src (B, S) to ids (B, ≤ max_len), as `greedy_decode`.

    `temperature` divides the log-probabilities: towards 0 it becomes greedy. `top_k` keeps the k
    likeliest tokens. Dropout is off while it runs. Raises ValueError for a temperature that is not
    positive, or a `top_k` below 1.
    """
    with dropout_off(model):
        memory = model.encode(src, src_mask)  # (B, S, D)
        ids = src.new_full((src.size(0), 1), BOS)  # (B, 1)
        ended = torch.zeros(src.size(0), dtype=torch.bool, device=src.device)  # (B,)
        for _ in range(max_len):
            log_probs = next_log_probs(model, memory, src_mask, ids)  # (B, V)
            p = sharpened(log_probs, temperature, top_k)  # (B, V)
            token = torch.multinomial(p, 1, generator=generator)  # (B, 1)
            ids = torch.cat((ids, token.masked_fill(ended.unsqueeze(1), PAD)), dim=1)  # (B, T+1)
            ended |= token.squeeze(1) == EOS
            if ended.all():
                break
    return ids[:, 1:]


# %%
first_word = book.log_table[BOS].unsqueeze(0)  # (1, V)
by_temperature = {t: sharpened(first_word, t)[0] for t in (0.25, 0.5, 1.0, 2.0)}

# 0.45² : 0.40² : 0.15², brought to a sum of 1
by_hand = torch.tensor([0.45, 0.40, 0.15], dtype=torch.float64) ** 2
torch.testing.assert_close(by_temperature[0.5][4:7], by_hand / by_hand.sum())
assert torch.equal(
    sharpened(first_word, 1.0, top_k=2)[0] > 0, keep_top(first_word, 2)[0].isfinite()
)


# %%
def temperature_chart(
    by_temperature: Mapping[float, Tensor], words: Sequence[str]
) -> alt.TopLevelMixin:
    """The first word's probabilities at several temperatures, side by side."""
    frame = pd.DataFrame(
        [
            {"word": word, "temperature": f"τ = {t:g}", "p": value}
            for t, p in by_temperature.items()
            for word, value in zip(words, p.tolist(), strict=True)
            if value > 0
        ]
    )
    order = list(dict.fromkeys(frame["word"]))
    titles = list(dict.fromkeys(frame["temperature"]))
    base = alt.Chart(rounded(frame)).encode(
        x=alt.X("word:N", sort=order, title=None, axis=alt.Axis(labelAngle=0, ticks=False)),
        y=alt.Y("p:Q", title="probability").scale(domain=[0, 0.75]),
    )
    columns = base.mark_bar(color=PALETTE[0]).properties(width=120, height=180)
    numbers = base.mark_text(dy=-8).encode(text=alt.Text("p:Q", format=".2f"))
    drawn = alt.layer(columns, numbers).facet(
        column=alt.Column(
            "temperature:N", sort=titles, title=None, header=alt.Header(labelFontSize=13)
        )
    )
    return titled(
        drawn,
        "Temperature: from sure to undecided",
        "The same three probabilities. A low temperature τ widens their distance, a high one levels them.",
    )


# %%
temperature_chart(by_temperature, book.words)

# %% [markdown]
# Check: draw the first word 20,000 times. The shares must follow the sharpened probabilities. The second line is a control: the same check fails against the probabilities of τ = 1, which is what you get if the temperature is forgotten.

# %%
many = torch.full((20_000, 1), EOS)
draws = sample_decode(
    book, many, None, max_len=1, temperature=0.5, generator=torch.Generator().manual_seed(0)
)
shares = torch.bincount(draws[:, 0], minlength=len(book.words)).double() / len(many)  # (V,)
torch.testing.assert_close(shares, by_temperature[0.5], atol=0.015, rtol=0)
assert (shares - by_temperature[1.0]).abs().max() > 0.05

cold = sample_decode(tiny, src, padding_mask(src), 8, temperature=1e-6)
assert torch.equal(cold, greedy_decode(tiny, src, padding_mask(src), 8))

# %% [markdown]
# Sampling serves where many answers are good: stories, dialogue, training data. For translation, where one faithful sentence is wanted, a search is the better choice.
#
# ## From ids to text: detokenisation
#
# > **In short.** The model writes pieces of words. Readers, and BLEU, want the plain text back, every space and full stop in its place.
#
# Word-level tokenisers lose the spaces: does "dog ." mean "dog." or "dog ."? A detokeniser has to guess. SentencePiece keeps each space as a visible mark `▁` inside its pieces, so undoing it is exact: join, then turn the marks into spaces.
#
# From here on we use the small model that ships with the series. [Chapter 8](ch08_training_run.ipynb) trained it on the generated corpus of [Chapter 6](ch06_multi30k.ipynb).

# %%
trained = load_model(ROOT / "models" / "sample-de-en")
corpus = load_corpus("sample")
test_pairs = corpus["test"][:40]

# %%
english = test_pairs[0][1]
pieces = trained.tokenizer.pieces(english)
print(" ".join(pieces))
print(trained.tokenizer.decode(trained.tokenizer.encode(english)))
assert "".join(pieces).replace("▁", " ").strip() == english

texts = [text for pair in corpus["test"] for text in pair]
assert all(trained.tokenizer.decode(trained.tokenizer.encode(text)) == text for text in texts)

# %% [markdown]
# ## Translating
#
# Now the parts come together. `decode_rows` of chapter 8 sorts the sentences by length, so that a batch holds little padding, and puts the answers back into the order of the questions. The output may be at most twice as long as the source plus 10 tokens: a model that has lost its way stops there.


# %%
MAX_BEAM = 100  # wider costs memory and, as this chapter shows, buys nothing


@dataclass
class DecodeOptions:
    """How to search for a translation; each field is an option of the command line.

    Raises ValueError for a setting that makes no sense.
    """

    beam: int = 4
    """Hypotheses kept at each step; 1 is greedy decoding."""
    alpha: float = 0.6
    """Length penalty: a score is divided by length^alpha."""
    sample: bool = False
    """Draw each token instead of searching for the best text."""
    temperature: float = 1.0
    """With --sample: below 1 likely tokens gain, above 1 unlikely ones."""
    top_k: int | None = None
    """With --sample: draw from the k likeliest tokens only."""
    top_p: float | None = None
    """With --sample: draw from the fewest tokens whose probabilities reach p."""
    seed: int = 0
    """With --sample: decides the draws."""

    def __post_init__(self):
        if not 1 <= self.beam <= MAX_BEAM:
            raise ValueError(f"beam must be from 1 to {MAX_BEAM}, not {self.beam}")
        if not 0 <= self.alpha <= 10:
            raise ValueError(f"alpha must be from 0 to 10, not {self.alpha}")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, not {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, not {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be from 0 to 2^63 - 1, not {self.seed}")
        if not self.sample and (self.temperature, self.top_k, self.top_p) != (1, None, None):
            raise ValueError("temperature, top_k and top_p are for sampling: add --sample")

    def searcher(
        self, device: torch.device | str = "cpu"
    ) -> Callable[[EncoderDecoder, Tensor, Tensor, int], list[Sequence[int]]]:
        """The search that these options describe, as `decode_rows` wants it."""
        if not self.sample:
            return searcher(self.beam, self.alpha)  # chapter 8's
        how = (self.temperature, self.top_k, torch.Generator(device).manual_seed(self.seed))

        def draw(model, src, src_mask, max_len):
            return sample_decode(model, src, src_mask, max_len, *how).tolist()

        return draw

    def in_words(self) -> str:
        """The search in words, for a line of output."""
        if self.sample:
            top = f", top {self.top_k}" if self.top_k else ""
            return f"sampled at temperature {self.temperature:g}{top}, seed {self.seed}"
        return "greedy" if self.beam == 1 else f"beam {self.beam}, alpha {self.alpha:g}"


# %%
def translate(
    trained: Trained,
    sentences: Sequence[str],
    options: DecodeOptions | None = None,
    batch_size: int = 64,
) -> list[str]:
    """Translations of `sentences`, in their order; a text without any token stays empty.

    Raises ValueError for a text of more than `MAX_LEN` tokens, eos included: the model has no
    positions for it.
    """
    options = options or DecodeOptions()
    rows = [[*trained.tokenizer.encode(sentence), EOS] for sentence in sentences]
    for number, row in enumerate(rows, start=1):
        if len(row) > MAX_LEN:
            raise ValueError(
                f"sentence {number} has {len(row)} tokens, and the model takes {MAX_LEN}: split it"
            )
    return decode_rows(trained, rows, options.searcher(trained.device), batch_size)


# %%
def beam_translate(
    trained: Trained,
    sentences: Sequence[str],
    beam: int = 4,
    alpha: float = 0.6,
    batch_size: int = 32,
) -> list[str]:
    """`translate` by beam search: a short name for what is asked most."""
    return translate(trained, sentences, DecodeOptions(beam=beam, alpha=alpha), batch_size)


# %%
def default_model() -> Path:
    """The folder of the best model that ships: Multi30k's if it is there, else the sample corpus's."""
    best, small = (ROOT / "models" / f"{corpus}-de-en" for corpus in ("multi30k", "sample"))
    return best if (best / "model.safetensors").is_file() else small


# %%
questions = ["Ein Hund schläft im Garten.", "", "Der Pirat kauft einen roten Hut."]
for question, answer in zip(questions, translate(trained, questions), strict=True):
    print(f"{question!r} → {answer!r}")
assert translate(trained, questions)[1] == ""

try:
    translate(trained, ["Hund " * 10_000])
except ValueError as error:
    assert "takes 256" in str(error)
else:
    raise AssertionError("10,000 words were taken")

# %% [markdown]
# No pirate occurs in the corpus. His pieces `P`, `ir`, `at` do, in other words, and the model makes the best of them. It never says "I don't know this word".
#
# Here are sentences from the test split, which the model never saw, with their references. Read them before you look at any score.

# %%
sources, references = (list(side) for side in zip(*test_pairs, strict=True))
outputs = translate(trained, sources)
pd.set_option("display.max_colwidth", None)
pd.DataFrame({"source": sources, "reference": references, "output": outputs})[:8]

# %% [markdown]
# **Pitfall.** Dropout belongs to training. A model that nobody switched to `.eval()` drops random parts of its vectors while it translates. Nothing crashes. The sentences just come out different, and worse, each time. Don't rely on the caller's memory: our decoders switch dropout off themselves, and put it back as it was.


# %%
def wrong_translate(trained: Trained, sentences: Sequence[str]) -> list[str]:
    """Greedy decoding that forgets `.eval()`: in train mode dropout strikes at every step."""
    out = []
    with torch.no_grad():
        for sentence in sentences:
            src = torch.tensor([source_ids(sentence, trained.tokenizer)])  # (1, S)
            out.append(trained.tokenizer.decode(wrong_greedy(trained.model, src, 40)[0].tolist()))
    return out


# %% [markdown]
# Our small model was trained without dropout, so we give it some here, as most models have, and leave it in train mode.

# %%
careless = build_model(replace(trained.config, dropout=0.3), len(trained.tokenizer))
careless.load_state_dict(trained.model.state_dict())
careless.train()  # what a model is right after it was built
forgetful = Trained(careless, trained.tokenizer, trained.config)

two = [source for source, _ in test_pairs[:2]]
random_texts, our_texts = set(), set()
for seed in range(2):
    torch.manual_seed(seed)
    random_texts.add(tuple(wrong_translate(forgetful, two)))
    our_texts.add(tuple(translate(forgetful, two, DecodeOptions(beam=1))))

assert len(random_texts) > 1  # the wrong version: another answer each time
assert len(our_texts) == 1  # ours: the same, though nobody called .eval()
assert our_texts == {tuple(translate(trained, two, DecodeOptions(beam=1)))}
assert careless.training  # and the caller's mode is untouched
print("Without .eval(): several different answers. With our decoders: one.")

# %% [markdown]
# ## BLEU, by hand
#
# > **In short.** How many of the output's words, pairs, triples and quadruples of words also stand in a human's translation? And is the output long enough to be allowed to ask?
#
# BLEU (Papineni et al. 2002) compares outputs with references. Its parts, summed over the *whole corpus*:
#
# 1. An **n-gram** is a run of n words. $p_n$ is the share of the output's n-grams that the reference has too. Each counts at most as often as it stands in the reference.
# 2. Short outputs have it easy: a single sure word has precision 100%. The **brevity penalty** makes up for that. With c tokens of output and r tokens of reference, it is $\text{BP} = \min(1, e^{\,1 - r/c})$.
# 3. $\text{BLEU} = 100 \cdot \text{BP} \cdot (p_1\, p_2\, p_3\, p_4)^{1/4}$: a geometric mean, so one zero makes all zero (sacreBLEU smooths that away for short texts, and so do we).


# %%
def tokens_13a(text: str) -> list[str]:
    """The words that sacreBLEU's tokeniser "13a" counts: split at spaces, punctuation split off."""
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    return Tokenizer13a()(text).split()


def ngram_counts(tokens: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    """Each run of n tokens, and how often it occurs."""
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


# %%
@dataclass
class BleuParts:
    """What BLEU is made of, summed over a whole corpus; index n − 1 is about n-grams."""

    matches: list[int]  # n-grams of the output that the reference has as well
    totals: list[int]  # n-grams of the output
    output_length: int  # tokens
    reference_length: int  # tokens

    @property
    def precisions(self) -> list[float]:
        """Share of matches, in percent; the k-th order without any counts as 1/2^k of a match."""
        empty, out = 0, []
        for match, total in zip(self.matches, self.totals, strict=True):
            empty += match == 0
            out.append(100 * (match or 0.5**empty) / total if total else 0.0)
        return out

    @property
    def brevity_penalty(self) -> float:
        """1 for an output at least as long as the reference, else exp(1 − r/c)."""
        if self.output_length == 0:
            return 0.0
        return min(1.0, math.exp(1 - self.reference_length / self.output_length))

    @property
    def score(self) -> float:
        """The geometric mean of the precisions times the brevity penalty, from 0 to 100."""
        if not any(self.matches) or not all(self.totals):
            return 0.0
        mean = sum(math.log(p) for p in self.precisions) / len(self.precisions)
        return self.brevity_penalty * math.exp(mean)


# %%
def bleu_parts(
    outputs: Sequence[Sequence[str]], references: Sequence[Sequence[str]], order: int = 4
) -> BleuParts:
    """BLEU's parts for tokenised outputs with one reference each (Papineni et al. 2002)."""
    matches, totals = [0] * order, [0] * order
    for output, reference in zip(outputs, references, strict=True):
        for n in range(1, order + 1):
            found, wanted = ngram_counts(output, n), ngram_counts(reference, n)
            matches[n - 1] += (
                found & wanted
            ).total()  # a repeated n-gram counts as often as wanted
            totals[n - 1] += found.total()
    lengths = (sum(map(len, texts)) for texts in (outputs, references))
    return BleuParts(matches, totals, *lengths)


# %%
three_references = [
    "A dog is sleeping in the garden.",
    "Two men are playing guitar on a stage.",
    "A child in a red jacket jumps into the water.",
]
three_outputs = [
    "A dog sleeps in the garden.",
    "Two men are playing guitar on the stage.",
    "A child in a red jacket jumps into the pool.",
]
print(tokens_13a(three_outputs[0]))
print(" · ".join(" ".join(pair) for pair in ngram_counts(tokens_13a(three_outputs[0]), 2)))

# %% [markdown]
# **Predict.** The outputs have 7 + 9 + 11 = 27 tokens. How many of them find their match? How many of the 24 pairs? (Only "sleeps", one "the" and "pool" are wrong. Each wrong word spoils up to two pairs.)

# %%
parts = bleu_parts(
    *([tokens_13a(text) for text in side] for side in (three_outputs, three_references))
)
table = pd.DataFrame(
    {
        "n": range(1, 5),
        "matches": parts.matches,
        "n-grams of the output": parts.totals,
        "precision in %": [round(p, 2) for p in parts.precisions],
    }
)
print(table.to_string(index=False))
print(
    f"\nc = {parts.output_length}, r = {parts.reference_length}, BP = {parts.brevity_penalty:.4f}"
)
print(f"BLEU = {parts.score:.2f}")
assert parts.matches[:2] == [24, 18] and parts.totals == [27, 24, 21, 18]

# %% [markdown]
# Check: sacreBLEU (Post 2018), the field's common program, finds the same, part by part. It also gives a *signature*, which names everything that changes the number: case, tokeniser, smoothing, version.

# %%
theirs = corpus_bleu(three_outputs, three_references)
assert (parts.matches, parts.totals) == (theirs.counts, theirs.totals)
assert math.isclose(parts.brevity_penalty, theirs.bp)
assert math.isclose(parts.score, theirs.score, rel_tol=1e-9)
print(theirs.signature.split("|version")[0])


# %%
def brevity_chart() -> alt.TopLevelMixin:
    """The brevity penalty over the ratio of lengths."""
    ratios = [i / 50 for i in range(10, 76)]
    penalties = [BleuParts([1], [1], i, 50).brevity_penalty for i in range(10, 76)]
    drawn = lines(
        pd.DataFrame({"c / r": ratios, "BP": penalties}),
        "c / r",
        "BP",
        x_title="length of the output / length of the reference",
        y_title="brevity penalty",
        zero=True,
    )
    return titled(
        drawn,
        "Too short costs, too long doesn't",
        "At 80% of the reference's length, a fifth of the score is gone. Longer outputs aren't "
        "punished here: their surplus words already lower the precisions.",
    )


# %%
brevity_chart()

# %% [markdown]
# **Pitfall.** Matches must be *clipped*. Without the "at most as often", an output that repeats one sure word is perfect.

# %%
stutter, reference = ["the"] * 7, ["the", "cat", "is", "on", "the", "mat"]
unclipped = sum(word in reference for word in stutter) / len(stutter)
clipped = bleu_parts([stutter], [reference])
assert unclipped == 1.0  # the wrong version gives full marks
assert (clipped.matches[0], clipped.totals[0]) == (2, 7)
print(f"precision of 'the the the the the the the': {clipped.precisions[0]:.1f}%, not 100%")

# %% [markdown]
# ## One output, many numbers
#
# **Pitfall.** A score that was never computed is no score, and one without a signature can't be compared. Many tutorials quote the paper's BLEU beside their own code without measuring it. Others report a figure that looks like BLEU and isn't: the share of right tokens under teacher forcing (the model sees the reference's words all along), BLEU of lower-cased text, of sub-word pieces, or a mean over sentences.
#
# **Predict.** The first four figures below come from the same three outputs, the last two from those outputs in capitals. Which figure is the highest?

# %%
sentence_scores = [
    corpus_bleu([o], [r]).score for o, r in zip(three_outputs, three_references, strict=True)
]
shouted = [output.upper() for output in three_outputs]
as_pieces, reference_pieces = (
    [" ".join(trained.tokenizer.pieces(text)) for text in side]
    for side in (three_outputs, three_references)
)
figures = {
    "BLEU: cased, 13a, whole corpus": theirs.score,
    "BLEU of the pieces": corpus_bleu(
        as_pieces, reference_pieces, tokenize="none", force=True
    ).score,
    "BLEU of the letters": corpus_bleu(three_outputs, three_references, tokenize="char").score,
    "mean of the sentences' BLEU": sum(sentence_scores) / 3,
    "output in capitals, cased": corpus_bleu(shouted, three_references).score,
    "output in capitals, lower-cased": corpus_bleu(shouted, three_references, lowercase=True).score,
}
for name, score in figures.items():
    print(f"{name:33} {score:5.1f}")

ours = figures["BLEU: cased, 13a, whole corpus"]
assert all(abs(score - ours) > 1 for name, score in list(figures.items())[1:5])
assert math.isclose(figures["output in capitals, lower-cased"], ours)  # it can't see the shouting

# %% [markdown]
# Only the first row is what papers of today report, and what this series reports. Teacher-forced accuracy is not even about a translation. Here is the check on our model: the share of reference tokens that it ranks first, *given the reference's own beginning*. A model that guesses every next token well may still drift when it has to live with its own words.


# %%
@torch.no_grad()
def forced_accuracy(trained: Trained, pairs: Sequence[tuple[str, str]]) -> float:
    """Share of the reference's tokens that are ranked first, given the reference's own beginning."""
    batch = make_batch(encode_pairs(list(pairs), trained.tokenizer))
    with dropout_off(trained.model):
        x = trained.model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)  # (B, T, D)
    right = trained.model.generator(x).argmax(dim=-1) == batch.tgt_y  # (B, T)
    return right[batch.tgt_y != PAD].double().mean().item()


# %%
accuracy = forced_accuracy(trained, test_pairs)
bleu = corpus_bleu(outputs, references)
whole = sum(o == r for o, r in zip(outputs, references, strict=True)) / len(outputs)
assert bleu.score > 90 and accuracy > 0.9
assert 100 * accuracy - 100 * whole > 3  # the tokens, yet not the sentences
print(f"{len(outputs)} test sentences: BLEU {bleu.score:.0f}")
print(f"tokens right, given the reference so far: {accuracy:.0%}")
print(f"sentences right from start to end: {whole:.0%}")

# %% [markdown]
# ## Does a wider beam help?
#
# Look into the beam of one test sentence first. Its four hypotheses, best first:

# %%
summer = "Im Sommer spielt ein Nachbar auf einer roten Gitarre."
summer_ids = torch.tensor([source_ids(summer, trained.tokenizer)])  # (1, S)
for h in beam_search(trained.model, summer_ids, None, max_len=60, beam=4)[0]:
    print(f"log p = {h.log_prob:5.1f}, {h.length:2} tokens: {trained.tokenizer.decode(h.ids)}")

# %% [markdown]
# The first is right and far ahead. Among the others stands a stump: its few tokens cost little, although stopping so early is absurd. A wide beam finds such stumps, and the smaller α is, the better are their chances.
#
# **Predict.** What will BLEU do when the beam grows from 1 to 8?


# %%
def beam_scores(
    trained: Trained, pairs: Sequence[tuple[str, str]], alpha: float = 0.6
) -> pd.DataFrame:
    """BLEU on `pairs` for beams of 1, 2, 4 and 8, rounded to one decimal."""
    sources, references = zip(*pairs, strict=True)
    rows = []
    for beam in (1, 2, 4, 8):
        outputs = translate(trained, sources, DecodeOptions(beam=beam, alpha=alpha))
        name = "greedy (K = 1)" if beam == 1 else f"K = {beam}"
        rows.append({"beam": name, "BLEU": round(corpus_bleu(outputs, references).score, 1)})
    return pd.DataFrame(rows)


# %%
def beam_chart(frame: pd.DataFrame) -> alt.TopLevelMixin:
    """BLEU for each width of the beam, as bars from zero, so that small differences look small."""
    return titled(
        bars(frame, "beam", "BLEU", number_format=".1f"),
        "A sure model gains little from a wider beam",
        "BLEU of the shipped sample model on 40 test sentences, α = 0.6. There is no trend: "
        "with so few sentences, one bad one moves BLEU by a point.",
    )


# %%
by_beam = beam_scores(trained, test_pairs)
assert by_beam["BLEU"].max() - by_beam["BLEU"].min() < 5
beam_chart(by_beam)

# %% [markdown]
# The grammar is regular and the model is nearly always sure, so greedy decoding already finds good sentences. What else a beam finds scores higher, but isn't better. On real text a beam of about 4 is a common choice, the paper's too. Beyond a moderate width quality falls (Koehn and Knowles 2017): the search lays bare that the model's favourite isn't the best translation.
#
# ## Recorded scores
#
# These were a few sentences. Here are the records of the two models that ship, each on the whole of its test splits: by the search that the row names, and by greedy decoding. The second was trained on Multi30k, real captions of photographs.

# %%
for name in ("sample-de-en", "multi30k-de-en"):
    for split, score in load_record(name)["test"].items():
        found = f"{score['search']:17} BLEU {score['bleu']:.1f}, greedy {score['bleu_greedy']:.1f}"
        print(f"{name:15} {split:17} {found}  {score['signature']}")

# %% [markdown]
# Real captions are far harder than our grammar. A human would not reach 100 either: there are many good translations, and only one of them is the reference. Some of the recorded translations, the first of the test set, not the best:

# %%
pd.DataFrame(load_record("multi30k-de-en")["samples"])[:7]

# %% [markdown]
# The frame of most sentences is right. What is missing are rare words: a Boston Terrier becomes a boxer, snowmobiles become snow, and an igloo becomes a word that doesn't exist.
#
# To score that model yourself, by the record's search (this needs the corpus, see [Chapter 6](ch06_multi30k.ipynb)):
#
# ```
# python scripts/ch09_decoding_and_bleu.py evaluate --model models/multi30k-de-en --split test_2016_flickr --beam 5
# ```

# %% [markdown]
# ## Averaging checkpoints
#
# > **In short.** The last few checkpoints of a training jitter around a good point. Their mean lies nearer to it than each of them.
#
# The paper averages the last 5 checkpoints of its base models, and 20 of the big ones: $\bar\theta = \frac1n \sum_i \theta_i$, weight by weight. [Chapter 8](ch08_training_run.ipynb) defined `average_checkpoints`. A good test of any mean is that equal things have themselves as their mean.

# %%
folder = Path(tempfile.mkdtemp())
stored = ROOT / "models" / "sample-de-en" / "model.safetensors"
same = average_checkpoints([stored] * 3)
for name, weight in weights(trained.model).items():
    torch.testing.assert_close(same[name], weight.detach(), rtol=0, atol=0)

checkpoints = []
for number, value in enumerate((1.0, 2.0, 6.0)):
    checkpoints.append(folder / f"{number}.safetensors")
    save_tensors(checkpoints[-1], {"w": torch.full((2,), value)}, {})
print(average_checkpoints(checkpoints)["w"])
torch.testing.assert_close(average_checkpoints(checkpoints)["w"], torch.full((2,), 3.0))
shutil.rmtree(folder)

# %% [markdown]
# **Pitfall.** Code for averaging is often written once and never run. A popular version hands several tensors to `torch.sum`, which takes one: it raises a `TypeError` at the first call. Another one averages two by two as the files come in. It passes the test with equal checkpoints, so test with unequal ones as well: the last file gets half of all the weight.


# %%
def wrong_average(tensors: Sequence[Tensor]) -> Tensor:
    """Averages as they come in, two by two: the last one gets half of all the weight."""
    mean = tensors[0]
    for tensor in tensors[1:]:
        mean = (mean + tensor) / 2
    return mean


# %%
values = [torch.full((2,), value) for value in (1.0, 2.0, 6.0)]
try:
    torch.sum(*values)
except TypeError:
    print("torch.sum of several tensors: TypeError")
else:
    raise AssertionError("torch.sum took several tensors")
assert torch.equal(wrong_average(values[:1] * 3), values[0])  # equal ones: looks right
assert not torch.allclose(wrong_average(values), torch.full((2,), 3.0))  # unequal ones: wrong

# %% [markdown]
# ## The command
#
# > **In short.** Others build upon a command. So it keeps three promises: one line out for each line in, whatever the lines hold; each answer as soon as there is one; and one clear line, never a traceback, where something is wrong.
#
# `translate` takes texts as arguments, a file (`--input`), or standard input. `evaluate` measures a model on a corpus, or on two files. Both end in one function, which takes encoded sources and gives their best hypotheses.


# %%
def draw_rows(
    trained: Trained, src: Tensor, limit: int, options: "DecodeOptions"
) -> list[list[Hypothesis]]:
    """One drawn hypothesis for each source: src (B, S) to B lists of one."""
    mask, out = padding_mask(src), []
    draws = torch.Generator(src.device).manual_seed(options.seed)
    with torch.no_grad(), dropout_off(trained.model):
        memory = trained.model.encode(src, mask)  # (B, S, D)
        ids = src.new_full((len(src), 1), BOS)  # (B, 1)
        summed = torch.zeros(len(src), dtype=torch.float64, device=src.device)  # (B,)
        for _ in range(limit):
            log_probs = next_log_probs(trained.model, memory, mask, ids)  # (B, V)
            p = sharpened(log_probs, options.temperature, options.top_k)  # (B, V)
            if options.top_p is not None:
                best, at = p.sort(dim=-1, descending=True)
                best[best.cumsum(-1) - best >= options.top_p] = 0
                p = torch.zeros_like(p).scatter(-1, at, best)
            token = torch.multinomial(p, 1, generator=draws)  # (B, 1)
            ended = (ids == EOS).any(dim=1)  # (B,)
            summed += log_probs.gather(-1, token).squeeze(1).masked_fill(ended, 0)
            ids = torch.cat((ids, token.masked_fill(ended.unsqueeze(1), PAD)), dim=1)
            if (ids == EOS).any(dim=1).all():
                break
    for row, log_prob in zip(ids[:, 1:].tolist(), summed.tolist(), strict=True):
        out.append([hypothesis(row[: row.index(EOS) + 1] if EOS in row else row, log_prob)])
    return out


def decode_hypotheses(
    trained: Trained,
    rows: Sequence[Sequence[int]],
    options: "DecodeOptions",
    nbest: int = 1,
) -> list[list[Hypothesis]]:
    """Up to `nbest` hypotheses for each encoded source, in their order, best first.

    A row holds ids and ends in eos; one with nothing but eos gives no hypothesis. Sampling gives one.
    """
    order = sorted((i for i, row in enumerate(rows) if len(row) > 1), key=lambda i: len(rows[i]))
    out: list[list[Hypothesis]] = [[] for _ in rows]
    for start in range(0, len(order), 32):
        chosen = order[start : start + 32]
        src = pad_rows([rows[i] for i in chosen]).to(trained.device)  # (B, S)
        limit = min(MAX_LEN, 2 * src.size(1) + 10)
        if options.sample:
            found = draw_rows(trained, src, limit, options)
        else:
            how = (limit, options.beam, options.alpha)
            found = beam_search(trained.model, src, padding_mask(src), *how)
        for i, hypotheses in zip(chosen, found, strict=True):
            out[i] = hypotheses[:nbest]
    return out


# %% [markdown]
# ### Lines, as they come
#
# > **In short.** Take what is there, and wait only where nothing is. Then a file comes in large groups, a slow pipe in small ones, and a person gets an answer to each line.
#
# `read1` does just that: it waits until there is something, and hands over what there is, up to a limit. While a group is decoded the next lines pile up in the pipe, so groups grow where that helps. The first groups are small, for an early answer. Memory stays bounded by two limits, one on a group and one on a line. A line's bytes beyond the limit are counted and forgotten, so that a line of five megabytes costs no more than one of 64 kB.
#
# Only `\n` ends a line. Python's `splitlines` knows ten more ends, U+2028 among them; with it a text could become two, and every line after it would stand beside a wrong partner.

# %%
GROUP_LINES = 512  # are decoded together at most
LINE_BYTES = 2**16  # of a line are read: 256 for each token that the model takes


@dataclass(frozen=True)
class InputLine:
    """A line without its newline: its first `LINE_BYTES` bytes, and its whole size in bytes."""

    start: bytes
    size: int


# %%
def line_groups(stream: BinaryIO) -> Iterator[list[InputLine]]:
    """The lines of `stream` in groups: those at hand, at most `GROUP_LINES`, and first fewer.

    A last line without a newline counts; the nothing after a last newline doesn't.
    """
    start, size, most = b"", 0, 16
    while chunk := stream.read1(LINE_BYTES):
        *ends, rest = chunk.split(b"\n")
        lines = []
        for end in ends:
            lines.append(InputLine((start + end)[:LINE_BYTES], size + len(end)))
            start, size = b"", 0
        start, size = (start + rest)[:LINE_BYTES], size + len(rest)
        while lines:
            yield lines[:most]
            lines, most = lines[most:], min(2 * most, GROUP_LINES)
    if size:
        yield [InputLine(start, size)]


def text_stream(texts: Iterable[str]) -> BinaryIO:
    """Texts as a stream of bytes, each ended by a newline; bytes that are no text stay as they were."""
    return io.BytesIO("".join(f"{text}\n" for text in texts).encode("utf-8", "surrogateescape"))


# %%
strange = text_stream(["ein\u2028Hund", "", "x" * 100_000, "läuft\r"])
found = [line for group in line_groups(strange) for line in group]
assert [line.size for line in found] == [10, 0, 100_000, 7]
assert max(len(line.start) for line in found) == LINE_BYTES
assert list(line_groups(io.BytesIO(b"a\nb"))) == [[InputLine(b"a", 1)], [InputLine(b"b", 1)]]
groups = [len(group) for group in line_groups(io.BytesIO(b"\n" * 2000))]
assert groups[:3] == [16, 32, 64] and max(groups) == GROUP_LINES and sum(groups) == 2000

# %% [markdown]
# ### From a line to ids
#
# A line may hold anything. Bytes that are not UTF-8 are read as U+FFFD, and what is too long for the model is cut. Either is said once, on standard error, with the line's number. White space alone is no text; `strip` also takes the rarer kinds of it, which the tokenizer would keep as unknown letters.


# %%
def encode_line(trained: Trained, line: InputLine, number: int) -> list[int]:
    """A line to at most `MAX_LEN` ids, eos included; a note on standard error says what was changed."""
    whole = line.size == len(line.start)
    text, _ = codecs.utf_8_decode(line.start, "replace", whole)  # a cut letter is left out
    tokens = len(trained.tokenizer.encode(text.strip())) + 1  # and eos
    changes = []
    if not line.start.startswith(text.encode()):
        changes.append("is not UTF-8 (bad bytes are read as U+FFFD)")
    if not whole:
        changes.append(f"has {line.size:,} bytes (only the first {LINE_BYTES:,} are read)")
    if tokens > MAX_LEN:
        changes.append(f"has {tokens:,} tokens (only the first {MAX_LEN} are translated)")
    if changes:
        tqdm.write(f"note: line {number} {' and '.join(changes)}", file=sys.stderr)
    return source_ids(text.strip(), trained.tokenizer)


def row_groups(trained: Trained, stream: BinaryIO) -> Iterator[list[list[int]]]:
    """The lines of `stream`, encoded, in the groups in which they come."""
    numbers = itertools.count(1)
    for group in line_groups(stream):
        yield [encode_line(trained, line, next(numbers)) for line in group]


# %%
notes = io.StringIO()
with contextlib.redirect_stderr(notes):
    strange = io.BytesIO(b"Hund\nHund \xff\n \x0b\xc2\x85\n" + b"Hund " * 20_000 + b"\n")
    good, bad, blank, endless = (row for rows in row_groups(trained, strange) for row in rows)
print(notes.getvalue(), end="")
assert good == bad and blank == [EOS] and len(endless) == MAX_LEN and endless[-1] == EOS
assert notes.getvalue().count("\n") == 2

# %% [markdown]
# ### From hypotheses to lines
#
# A translation is printed alone, with its score (`--scores`), or with the runners-up (`--nbest`). A score is $\log p / T^\alpha$: the nearer to 0, the surer. The n-best form is that of Moses and Marian: the line's number *from 0*, the text, the score, between bars. A line with fewer hypotheses gets fewer lines, without padding; the number says where each belongs. An empty line has one translation, the empty text, of score 0.
#
# When it samples, each line has its own seed: `--seed` plus its number from 0. It is decoded alone. Otherwise what is drawn for a line would depend on which lines happened to arrive together.


# %%
@dataclass
class ModelOptions(DecodeOptions):
    """Which model, and how it searches."""

    model: str | None = None
    """A model's folder; by default the best one that ships."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, …"""


@dataclass
class TranslateOptions(ModelOptions):
    """Options of `translate`."""

    text: list[str] = field(default_factory=list)
    """Texts; each line of them gives a line of output."""
    input: str | None = None
    """A file to translate, a sentence a line; by default standard input."""
    nbest: int | None = None
    """Print the N best of each line's beam: NUMBER FROM 0 ||| TEXT ||| SCORE."""
    scores: bool = False
    """Print TEXT, a tab, SCORE: log-probability / length^alpha."""

    def __post_init__(self):
        super().__post_init__()
        if self.text and self.input is not None:
            raise ValueError("either texts or --input, not both")
        most = 1 if self.sample else self.beam
        if self.nbest is not None and not 1 <= self.nbest <= most:
            hint = "sampling draws one" if self.sample else "widen --beam"
            raise ValueError(f"nbest must be from 1 to {most}, not {self.nbest}: {hint}")


# %%
def best_texts(
    trained: Trained, rows: Sequence[Sequence[int]], options: DecodeOptions, nbest: int = 1
) -> list[list[tuple[str, float]]]:
    """Up to `nbest` texts for each row with their scores, best first; for want of any, ("", 0.0).

    No text holds a line end of any kind.
    """
    return [
        [
            (" ".join(trained.tokenizer.decode(h.ids).splitlines()), h.score(options.alpha))
            for h in found
        ]
        or [("", 0.0)]
        for found in decode_hypotheses(trained, rows, options, nbest)
    ]


def best_texts_by_line(
    trained: Trained, rows: Sequence[Sequence[int]], options: TranslateOptions, first: int
) -> list[list[tuple[str, float]]]:
    """`best_texts` of the lines numbered from `first`; what is drawn depends on line and number alone."""
    if not options.sample:
        return best_texts(trained, rows, options, options.nbest or 1)
    seeds = ((options.seed + number) % 2**63 for number in itertools.count(first))
    alone = (([row], replace(options, seed=seed)) for row, seed in zip(rows, seeds, strict=False))
    return [found for row, how in alone for found in best_texts(trained, row, how)]


def in_print(found: Sequence[tuple[str, float]], number: int, options: TranslateOptions) -> str:
    """The output for line `number`, from 0: one line, or with `nbest` one for each text found."""
    if options.nbest is not None:
        return "\n".join(f"{number} ||| {text} ||| {score:.4f}" for text, score in found)
    text, score = found[0]
    return f"{text}\t{score:.4f}" if options.scores else text


# %%
two_best = [("A dog.", -0.25), ("Dog.", -1.5)]
print(in_print(two_best, 0, TranslateOptions(nbest=2)))
assert in_print(two_best, 0, TranslateOptions()) == "A dog."
assert in_print(two_best, 0, TranslateOptions(scores=True)) == "A dog.\t-0.2500"
assert best_texts(trained, [[EOS]], DecodeOptions()) == [[("", 0.0)]]

# %% [markdown]
# ### Translate
#
# A group is printed as soon as it is decoded, so whatever stops the command, what was finished is out. A progress bar appears on standard error where a person waits for a file: not where output goes to the screen, since the answers themselves are the progress there.


# %%
def open_model(options: ModelOptions) -> Trained:
    """The model that the options name. Raises ValueError or FileNotFoundError where it is unfit."""
    folder = Path(options.model) if options.model else default_model()
    return load_model(folder, pick_device(options.device))


def open_input(options: TranslateOptions) -> contextlib.AbstractContextManager[BinaryIO]:
    """What to translate, as bytes. Raises ValueError where there is nothing to read from."""
    if options.text:
        return text_stream(options.text)
    if options.input is not None:
        try:
            return open(options.input, "rb")
        except OSError as error:
            raise ValueError(f"can't read {options.input!r}: {error.strerror}") from error
    if sys.stdin is None:
        raise ValueError("there is no standard input: give texts, or --input FILE")
    return contextlib.nullcontext(sys.stdin.buffer)  # not ours to close


def progress(options: TranslateOptions) -> tqdm:
    """A count of lines on standard error, for who waits at a terminal and sees nothing else."""
    typed = options.input is None and sys.stdin is not None and sys.stdin.isatty()
    seen = sys.stdout is not None and sys.stdout.isatty()
    hidden = bool(options.text) or typed or seen or not sys.stderr.isatty()
    return tqdm(desc="translated", unit=" lines", leave=False, disable=hidden)


# %%
def run_translate(options: TranslateOptions) -> None:
    """Print a line, or with `nbest` several, for each line of the input."""
    done = 0
    with open_input(options) as stream, progress(options) as bar:
        trained = open_model(options)
        for rows in row_groups(trained, stream):
            found = best_texts_by_line(trained, rows, options, first=done)
            printed = [in_print(texts, done + i, options) for i, texts in enumerate(found)]
            # One write, newline and all: Ctrl-C must not come between a line and its end.
            print("\n".join(printed) + "\n", end="", flush=True)
            done += len(rows)
            bar.update(len(rows))


# %% [markdown]
# ### Evaluate
#
# `evaluate` prints cased BLEU first, the figure that we report. Lower-cased BLEU and chrF2, a score of letters instead of words, stand below it, for comparison with papers that give them. Each has its signature.


# %%
@dataclass
class EvaluateOptions(ModelOptions):
    """Options of `evaluate`."""

    corpus: Literal["sample", "multi30k"] | None = None
    """What to translate; by default what the model was trained on."""
    split: str | None = None
    """One split of it; by default each test split."""
    source: str | None = None
    """Instead of a corpus: a German file, a sentence a line."""
    reference: str | None = None
    """With --source: the English of each line."""


# %%
def text_lines(path: str) -> list[str]:
    """The lines of a file that someone named. Raises FileNotFoundError or ValueError."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}: check --source and --reference")
    lines = read_lines(Path(path))
    if lines == [""]:
        raise ValueError(f"{path} is empty: nothing to translate")
    return lines


def pairs_to_score(options: EvaluateOptions, trained: Trained) -> dict[str, list[tuple[str, str]]]:
    """What `evaluate` was asked to translate, by name. Raises ValueError or FileNotFoundError."""
    if options.source or options.reference:
        if not (options.source and options.reference):
            raise ValueError("--source and --reference go together: name both files")
        if options.corpus or options.split:
            raise ValueError("either a --corpus or files, not both")
        name = Path(options.source).name
        files = (text_lines(path) for path in (options.source, options.reference))
        return {name: parallel(*files, name)}
    corpus_name = options.corpus or trained.config.corpus
    corpus = load_corpus(corpus_name)
    if options.split and options.split not in corpus:
        known = ", ".join(corpus)
        raise ValueError(f"{corpus_name} has no split {options.split!r}: choose from {known}")
    return {s: corpus[s] for s in ([options.split] if options.split else held_out_splits(corpus))}


# %%
def score_lines(outputs: Sequence[str], references: Sequence[str], how: str) -> list[str]:
    """Cased BLEU, lower-cased BLEU and chrF2, from 0 to 100, each in a line with its signature."""
    from sacrebleu.metrics import CHRF

    cased = corpus_bleu(outputs, references)
    lower = corpus_bleu(outputs, references, lowercase=True)
    metric = CHRF()
    letters = metric.corpus_score(list(outputs), [list(references)])
    return [
        f"BLEU {cased.score:.2f}  {how}  ({cased.signature})",
        f"lower-cased BLEU {lower.score:.2f}  ({lower.signature})",
        f"{letters.name} {letters.score:.2f}  ({metric.get_signature()})",
    ]


def run_evaluate(options: EvaluateOptions) -> None:
    """Translate, and print sacreBLEU's scores with signatures and the first few translations."""
    trained = open_model(options)
    for name, pairs in pairs_to_score(options, trained).items():
        print(f"translating {len(pairs):,} lines of {name}", file=sys.stderr)
        sources, references = zip(*pairs, strict=True)
        rows = [row for group in row_groups(trained, text_stream(sources)) for row in group]
        outputs = [texts[0][0] for texts in best_texts(trained, rows, options)]
        for line in score_lines(outputs, references, options.in_words()):
            print(f"{name}: {line}")
        for source, reference, output in list(zip(sources, references, outputs, strict=True))[:3]:
            print(f"\n  source       {source}\n  reference    {reference}\n  translation  {output}")


# %%
cased, lower, letters = score_lines(["a dog is running fast"], ["A dog is running fast"], "greedy")
assert "case:mixed" in cased and "BLEU 100.00" in lower and letters.startswith("chrF2 ")
assert float(cased.split()[1]) < 100  # a capital is missing

# %% [markdown]
# ### One table, one way out
#
# The subcommands stand in a table: a word of help, a class whose fields are the options, and the function that they go to. Whatever is wrong becomes one line and exit code 2. Ctrl-C gives 130. A reader that has seen enough, as in `| head -1`, closes the pipe: that is 141, as for `cat`, and not worth a word.


# %%
@dataclass(frozen=True)
class Command:
    """A subcommand: what `--help` says of it, the class of its options, and what runs them."""

    help: str
    options: type
    run: Callable[[Any], None]


COMMANDS: dict[str, Command] = {
    "translate": Command("translate texts", TranslateOptions, run_translate),
    "evaluate": Command("sacreBLEU on a corpus, or on files", EvaluateOptions, run_evaluate),
}
FLAGS: dict[str, str] = {  # options that take no value
    "sample": "Draw each token.",
    "scores": "Print TEXT, a tab, SCORE: log-probability / length^alpha.",
}


# %%
def parse_command(argv: Sequence[str] | None = None) -> tuple[Command, Any]:
    """The command line to a subcommand and its options. Raises ValueError where it makes no sense."""
    from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

    argv = list(sys.argv[1:] if argv is None else argv)
    helps = not {"-h", "--help"}.isdisjoint(argv)  # with the fields' docstrings, slow to collect
    set_parsing_settings(docstring_parse_attribute_docstrings=helps)
    parser = ArgumentParser(
        prog="ch09_decoding_and_bleu.py",
        description="Translate from German to English, or measure how well a model does.",
        exit_on_error=False,
    )
    parts = parser.add_subcommands(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        part = ArgumentParser(exit_on_error=False, description=f"Options of `{name}`.")
        special = {option.name for option in fields(command.options)} & {"text", *FLAGS}
        if "text" in special:
            texts = "Texts, each a line of output; without any, --input or standard input."
            part.add_argument("text", nargs="*", type=str, help=texts)
        part.add_class_arguments(command.options, skip=special)
        for flag in sorted(special - {"text"}):
            part.add_argument(f"--{flag}", action="store_true", help=FLAGS[flag])
        parts.add_subcommand(name, part, help=command.help)
    try:
        parsed = parser.parse_args(argv).as_dict()
    except ArgumentError as error:
        raise ValueError(" ".join(str(error).split())) from error
    command = COMMANDS[parsed["subcommand"]]
    return command, command.options(**parsed[parsed["subcommand"]])


# %%
def release_output() -> None:
    """Flush what is printed. Where that fails, let it go, or Python fails once more at its exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            print(end="", file=stream, flush=True)
        except OSError:
            with contextlib.suppress(OSError):  # a stream without a file has nothing to let go
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code: 2 for a mistake, 130 after Ctrl-C, 141 for a closed pipe."""
    try:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # whatever the locale says
        command, options = parse_command(argv)
        command.run(options)
        print(end="", flush=True)
    except BrokenPipeError:
        return 141
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except torch.OutOfMemoryError:
        print("error: the GPU's memory is full: lower --beam, or use --device cpu", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    finally:
        release_output()
    return 0


# %%
shipped = ["--model", str(stored.parent), "--device", "cpu"]
assert main(["translate", f"Ein Hund schläft im Garten.\n\n{summer}", *shipped]) == 0
with contextlib.redirect_stderr(io.StringIO()) as complaint:
    assert main(["translate", "Ein Hund schläft.", "--beam", "0"]) == 2
print(complaint.getvalue().strip())
assert complaint.getvalue().startswith("error: ") and complaint.getvalue().count("\n") == 1

# %% [markdown]
# ## Summary
#
# - A model gives probabilities; a search makes a sentence of them. Log-probabilities add up.
# - Greedy decoding takes the best word each time and can't go back. It must work in batches and stop at `</s>`.
# - Beam search keeps K prefixes and weighs 2K candidates. K = 1 is greedy; K wide enough is brute force, and ours equals both.
# - Likelihood favours short outputs; dividing by $T^\alpha$ balances that.
# - Sampling draws instead of searching, with a temperature and top-k.
# - Dropout must be off. Our decoders see to it.
# - BLEU is four clipped n-gram precisions and a brevity penalty, over a whole corpus of plain text. Report it with its signature.
#
# ## What the paper did that we don't
#
# - Its length penalty is that of Wu et al. (2016), $((5 + T)/6)^\alpha$; ours is $T^\alpha$. Both are 1 for α = 0 and grow alike.
# - It stops at input length + 50; we stop at twice the input length + 10.
# - It averages checkpoints for its reported scores. Ours are of single checkpoints unless a record says otherwise.
# - Its BLEU (27.3 and 28.4 for English to German) predates sacreBLEU and was computed on tokenised text. It can't be compared with ours: other languages, other data, other tokenisation.
#
# ## Exercises
#
# 1. Change `NEXT_WORD` so that a beam of 2 fails as well and a beam of 3 succeeds.
# 2. Replace $T^\alpha$ by the paper's length penalty. Does any of the translations above change?
# 3. Write *nucleus* sampling: draw from the fewest words whose probabilities sum to at least 0.9. Check it against a hand-made distribution.
# 4. Our decoders run the whole prefix through the decoder at every step. Store keys and values of the earlier positions instead, and show that the log-probabilities stay the same.
# 5. Take the outputs above, replace every "the" by "a", and compute BLEU. Then shuffle the words of each output. Which hurts more, and why?
