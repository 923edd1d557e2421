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
# # Chapter 8 · Decoding
#
# After this chapter you can turn a model's probabilities into a sentence, greedily, with a beam, by sampling or by minimum Bayes risk, and say what each way gains and misses.
#
# | | |
# |---|---|
# | In the paper | §6.1 of [Attention Is All You Need](https://arxiv.org/abs/1706.03762): a beam of 4, α = 0.6 |
# | Time | 20 minutes to read, 45 with the code; half a minute to run on a CPU |
# | Before, after | [Chapter 7 · Multi30k](ch07_multi30k.ipynb) · [Chapter 9 · The training run](ch09_training_run.ipynb) |
#
# *If you read only three cells:* the tree of *Beam search*, the table of *A real sentence*, `decoder_step`.
#
# Shapes: **B** batch, **S** source length, **T** target length, **D** `d_model`, **H** heads, **V** vocabulary. New here: **K**, the width of the beam; **R**, rows in the decoder at once (B·K in a beam); **N**, layers.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from scripts import ROOT
from scripts.book.domains import in_domain, list_of_texts
from scripts.book.exercises import check
from scripts.book.figures.searching import beam_tree, beam_tree_chart, kept_chart, temperature_chart
from scripts.book.instruments import count_calls, count_flops
from scripts.book.phrases import END, START, PhraseBook, every_sentence
from scripts.book.records import load_record
from scripts.ch01_attention import attention, padding_mask, subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention, merge_heads, split_heads
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch04_encoder_decoder import EncoderDecoder
from scripts.ch06_training import BOS, EOS, PAD, greedy_decode
from scripts.ch07_multi30k import pad_rows, source_ids
from scripts.core.models import Trained, load_model
from scripts.core.settings import build_model

# %% [markdown]
# ## A model proposes, a search decides
#
# > **In short.** The trained model never writes a sentence. Asked "what comes next?", it gives every word a probability. A search has to choose, word after word.
#
# The probability of a target sentence $y = (y_1, \dots, y_T)$, where $y_T$ is `</s>`, is a product, and its logarithm is a sum:
#
# $$\log p(y \mid x) = \sum_{t=1}^{T} \log p(y_t \mid y_1, \dots, y_{t-1}, x)$$
#
# Products of many small numbers underflow, so searches add logarithms.


# %%
@torch.no_grad()
def next_log_probs(
    model: EncoderDecoder, memory: Tensor, src_mask: Tensor | None, ids: Tensor
) -> Tensor:
    """log p(next token | prefix): memory (B, S, D), ids (B, T) from bos on, to (B, V)."""
    mask = subsequent_mask(ids.size(1), ids.device)  # (1, T, T)
    last = model.decode(memory, src_mask, ids, mask)[:, -1]  # (B, D)
    return model.generator(last).log_softmax(dim=-1)  # (B, V)


# %% [markdown]
# We begin with a model that we can check by hand: a phrase book of nine words. The next word depends only on the last. `PhraseBook` has our Transformer's parts (`encode`, `decode`, `generator`), so our searches run on it.

# %%
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
book = PhraseBook(NEXT_WORD)
anything = torch.tensor([[EOS]])  # (1, 1): the phrase book doesn't read its source

# %% [markdown]
# ## Greedy decoding, and where it goes wrong
#
# > **In short.** Take the likeliest word, write it down, ask again. It is fast, but it can't go back.
#
# [Chapter 6](ch06_training.ipynb) wrote `greedy_decode`: $\hat y_t = \arg\max_w\, p(w \mid \hat y_{<t}, x)$.
#
# **Predict.** Which sentence does greedy decoding write from the table? Is there a likelier one?

# %%
probability = {" ".join(words): p for words, p in every_sentence(NEXT_WORD)}
greedy_text = book.text(greedy_decode(book, anything, None, max_len=10)[0].tolist())
print(f"greedy:  p = {probability[greedy_text]:.3f}  {greedy_text}\n")
for text, p in list(probability.items())[:4]:
    print(f"p = {p:.3f}  {text}")

# %% [markdown]
# After "the", the likeliest first word, the model hesitates between three nouns; after "a" it doesn't. Greedy's sentence is a *search error*: the model knew better.
#
# **Pitfall: one sentence, a fixed number of steps.** Many first versions decode each sentence by itself, and go on long after its end, where the model was never trained:


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
sixteen = anything.expand(16, 1)  # (16, 1)
ours = lambda: greedy_decode(book, sixteen, None, 8)  # noqa: E731
wrong = lambda: torch.cat([wrong_greedy(book, row[None], 8) for row in sixteen])  # noqa: E731
for name, way in (("ours", ours), ("wrong", wrong)):
    calls, ids = count_calls(book.generator, way)
    print(f"{name:5} {calls:3} calls: {book.text(ids[0].tolist())}")

# %% [markdown]
# ## Beam search
#
# > **In short.** Keep the K best unfinished sentences, not only one.
#
# At each step, each of the K prefixes is continued by each of the V words. Of the K likeliest candidates, those that end with `</s>` are finished. Of all that don't end, the K likeliest go on. The search stops when K sentences have finished. K = 1 is greedy decoding.


# %%
def beam_by_hand(
    next_words: Mapping[str, Mapping[str, float]], beam: int
) -> tuple[list[tuple[tuple[str, ...], float]], pd.DataFrame]:
    """The best finished sentences of a table, likeliest first, and every candidate weighed."""
    prefixes: list[tuple[tuple[str, ...], float]] = [((), 1.0)]
    finished, weighed = [], []
    while prefixes and len(finished) < beam:
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
    return sorted(finished, key=lambda f: -f[1])[:beam], pd.DataFrame(weighed)


# %% [markdown]
# **Predict.** With K = 2, which two first words survive? Which of the two leads to the winner?

# %%
best_two, weighed = beam_by_hand(NEXT_WORD, beam=2)
for words, p in best_two:
    print(f"p = {p:.4f}  {' '.join(words)}")
beam_tree_chart(beam_tree(weighed))

# %% [markdown]
# A beam is no guarantee: a path that starts too badly is dropped, however well it would end (exercise 1).
#
# ### The same on tensors
#
# First, what a search returns. (α belongs to the next section.)


# %%
@dataclass(frozen=True)
class Hypothesis:
    """One candidate translation, with the sum of its tokens' log-probabilities."""

    ids: tuple[int, ...]  # without bos and eos
    log_prob: float
    length: int  # how many tokens were scored, eos included

    def score(self, alpha: float) -> float:
        """log-probability / length^α: with α = 0 the log-probability, with α = 1 its mean."""
        return self.log_prob / self.length**alpha


def hypothesis(ids: Sequence[int], log_prob: float) -> Hypothesis:
    """A Hypothesis from scored ids, which may end in eos."""
    ended = bool(ids) and ids[-1] == EOS
    return Hypothesis(tuple(ids[:-1] if ended else ids), log_prob, len(ids))


@contextmanager
def dropout_off(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; afterwards every part is as it was, even after an error."""
    was_training = [part for part in model.modules() if part.training]
    for part in was_training:
        part.training = False
    try:
        yield
    finally:
        for part in was_training:
            part.training = True


# %% [markdown]
# Now we translate B sentences at once: `ids` (B·K, T) holds K rows for each, and `scores` (B, K) their log-probabilities. `topk` sorts a sentence's K·V candidates. A candidate's place among them, divided by V, gives the prefix that it continues; the remainder is the token.
#
# **Pitfall: only the best K.** We take the best **2K** candidates. Each prefix has one `</s>`, so at most K candidates end, and K others keep the beam full. With the best K alone, each ending costs a prefix.


# %%
@torch.no_grad()
def beam_search(
    model: EncoderDecoder,
    src: Tensor,
    src_mask: Tensor | None,
    max_len: int,
    beam: int = 4,
    alpha: float = 0.6,
) -> list[list[Hypothesis]]:
    """The best hypotheses of each source, best first: src (B, S) to B lists of up to `beam`."""
    if beam < 1:
        raise ValueError(f"a beam holds at least 1 hypothesis, not {beam}")
    with dropout_off(model):
        B, K = src.size(0), beam
        memory = model.encode(src, src_mask).repeat_interleave(K, dim=0)  # (B·K, S, D)
        if src_mask is not None:
            src_mask = src_mask.repeat_interleave(K, dim=0)  # (B·K, 1, S)
        ids = src.new_full((B * K, 1), BOS)  # (B·K, 1)
        scores = memory.new_full((B, K), -torch.inf)  # (B, K)
        scores[:, 0] = 0.0  # all K prefixes are alike at first: continue one of them
        finished: list[list[Hypothesis]] = [[] for _ in range(B)]
        for step in range(1, max_len + 1):
            log_probs = next_log_probs(model, memory, src_mask, ids)  # (B·K, V)
            V = log_probs.size(-1)
            total = scores.view(-1, 1) + log_probs  # (B·K, V)
            best, place = total.view(B, -1).topk(2 * K, dim=-1)  # (B, 2K) each
            kept = []
            for b, pairs in enumerate(zip(best.tolist(), place.tolist(), strict=True)):
                candidates = [(p, b * K + at // V, at % V) for p, at in zip(*pairs, strict=True)]
                if len(finished[b]) < K:  # else this sentence is done
                    for log_prob, row, token in candidates[:K]:
                        if log_prob > -math.inf and (token == EOS or step == max_len):
                            text = [*ids[row, 1:].tolist(), token]
                            finished[b].append(hypothesis(text, log_prob))
                kept += [candidate for candidate in candidates if candidate[2] != EOS][:K]
            if all(len(found) >= K for found in finished):
                break
            log_prob, rows, tokens = zip(*kept, strict=True)  # B·K each
            ids = torch.cat((ids[list(rows)], ids.new_tensor(tokens).unsqueeze(1)), dim=1)
            scores = scores.new_tensor(log_prob).view(B, K)
    return [sorted(found, key=lambda h: -h.score(alpha))[:K] for found in finished]


# %% [markdown]
# ## Length: why the score is divided
#
# > **In short.** Every further word costs probability, so the likeliest sentence tends to be too short. Dividing by a *length penalty* makes up for that.
#
# The paper (§6.1) takes its penalty from Wu et al. (2016), with α = 0.6. Finished hypotheses are ranked by
#
# $$\text{score}(y) = \frac{\log p(y \mid x)}{\text{lp}(T)}, \qquad \text{lp}(T) = \frac{(5 + T)^\alpha}{(5 + 1)^\alpha} \quad\text{(the paper's)}, \qquad \text{lp}(T) = T^\alpha \quad\text{(ours)}$$
#
# T counts `</s>`, since stopping is a decision too.
#
# **Predict.** "a dog sleeps" has p = 0.16 with 4 tokens, "a dog is sleeping" has p = 0.137 with 5. From which α on does the longer one win, with our penalty and with the paper's?

# %%
short, long = (math.log(probability[f"a dog {end} </s>"]) for end in ("sleeps", "is sleeping"))
for name, ratio in (("the paper's", (5 + 5) / (5 + 4)), ("ours", 5 / 4)):  # of their lengths
    print(f"{name}: from {math.log(long / short) / math.log(ratio):.2f} on")

# %% [markdown]
# At α = 0.6 the two disagree. So always say which penalty an α belongs to.
#
# ## A real sentence
#
# > **In short.** Text becomes pieces (chapter 7), a search writes new ones, and these become text again.
#
# From here on we use the small model that ships with the series.

# %%
trained = load_model(ROOT / "models" / "sample-de-en")
trained.model.double()  # the same digits on every machine
print(" ".join(trained.tokenizer.pieces("A girl is selling a sweater.")))

# %% [markdown]
# You may skip the next three definitions, which decode batches of similar length.


# %%
def decode_rows(
    trained: Trained,
    rows: Sequence[Sequence[int]],
    search: Callable[[EncoderDecoder, Tensor, Tensor, int], Sequence[Sequence[int]]],
    batch_size: int = 64,
) -> list[str]:
    """Encoded sources to texts, in their order, by `search` over batches of similar length.

    `search` takes (model, src (B, S), src_mask (B, 1, S), max_len) and gives each source's ids.
    """
    order = sorted((i for i, row in enumerate(rows) if len(row) > 1), key=lambda i: len(rows[i]))
    out = [""] * len(rows)  # what holds no token but eos stays so
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        src = pad_rows([rows[i] for i in chosen]).to(trained.device)  # (B, S)
        limit = min(MAX_LEN, 2 * src.size(1) + 10)  # a caption grows little in translation
        found = search(trained.model, src, padding_mask(src), limit)
        for i, ids in zip(chosen, found, strict=True):
            out[i] = trained.tokenizer.decode(ids)
    return out


# %%
def best_ids(
    model: EncoderDecoder,
    src: Tensor,
    src_mask: Tensor | None,
    max_len: int,
    beam: int = 1,
    alpha: float = 0.6,
) -> list[Sequence[int]]:
    """The ids of each source's text: greedy, or the best of a beam. src (B, S) to B lists."""
    if beam == 1:
        return greedy_decode(model, src, src_mask, max_len).tolist()
    return [found[0].ids for found in beam_search(model, src, src_mask, max_len, beam, alpha)]


def plain_translate(
    trained: Trained, sentences: Sequence[str], beam: int = 1, alpha: float = 0.6
) -> list[str]:
    """Translations of `sentences`, in their order, greedy or by beam search; long ones are cut."""
    sentences = list_of_texts("sentences", sentences)
    beam, alpha = in_domain("beam", beam), in_domain("alpha", alpha)
    rows = [source_ids(sentence, trained.tokenizer) for sentence in sentences]
    size = 64 if beam == 1 else 32
    if trained.device.type == "cuda":  # only large batches keep it busy
        size = 1024 // beam
    return decode_rows(trained, rows, partial(best_ids, beam=beam, alpha=alpha), size)


# %%
german = "Manchmal verkauft ein Mädchen diesen Pullover."  # verkauft: sells
questions = ["Ein Hund schläft im Garten.", "", german, "Der Pirat kauft einen roten Hut."]
greedy, wide = (plain_translate(trained, questions, beam=K) for K in (1, 4))
pd.DataFrame({"source": questions, "greedy": greedy, "beam of 4": wide})

# %% [markdown]
# The sample corpus has no pirate, and no search can fix what the model doesn't know. *Sweatering*, though, is a search error, and the beam corrects it. At step `max_len` the K best come out unfinished, so `max_len` = t shows the beam after t steps, with log-probabilities (and without *Sometimes, a girl*). At step 10 *swe* leads. **Predict.** At which step does *sell* take the lead?

# %%
src = torch.tensor([source_ids(german, trained.tokenizer)])  # (1, S)
steps = {}
for t in range(9, 15):
    beam = beam_search(trained.model, src, None, max_len=t, beam=4, alpha=0.0)[0]
    texts = [trained.tokenizer.decode(h.ids).removeprefix("Sometimes, a girl ") for h in beam]
    steps[t] = [f"{text} ({h.log_prob:.2f})" for text, h in zip(texts, beam, strict=True)]
pd.DataFrame.from_dict(steps, orient="index", columns=["best", "second", "third", "fourth"])

# %% [markdown]
# After *s* the model prefers *swe*(ater) to *sell*, and greedy decoding follows. But *sweater* must then become a verb, which costs probability.
#
# **Pitfall: dropout.** A model that wasn't switched to `.eval()` drops random parts of its vectors, so sentences come out wrong, and different each time. `greedy_decode` and `beam_search` switch dropout off. This model was trained without dropout, so we give it a rate of 0.3; one trained with dropout may suffer less.

# %%
# NBVAL_IGNORE_OUTPUT
careless = build_model(replace(trained.config, dropout=0.3), len(trained.tokenizer)).double()
careless.load_state_dict(trained.model.state_dict())
careless.train()  # what a model is right after it was built
for seed in range(3):
    torch.manual_seed(seed)
    print(trained.tokenizer.decode(wrong_greedy(careless, src, 20)[0].tolist()))

# %% [markdown]
# ## The beam curse
#
# > **In short.** A wider beam finds likelier outputs. Others found that too wide a beam does harm.
#
# Koehn and Knowles (2017) let the beam grow: quality rose up to a width between 4 and about 30, and then fell. Stahlberg and Byrne (2019) searched *exactly*: for more than half of their sentences the likeliest output was the empty one.
#
# We recorded the searches of our larger model (chapter 9) on 300 validation captions of Multi30k. **Predict.** From K = 1 to K = 100 without a length penalty, what happens to the outputs' mean log-probability, and what to BLEU (a score of translations, chapter 10)? `length_ratio` is their length over the references'.

# %%
record = load_record("searches-multi30k")
beams = pd.DataFrame(record["beams"]).set_index("beam").rename_axis("K")
plain, normed = (beams[beams["alpha"] == a] for a in (0, 0.6))
plain[["log_prob", "length_ratio", "bleu"]].assign(**{"bleu, α = 0.6": normed["bleu"]})

# %% [markdown]
# Wider beams find likelier outputs, and shorter ones. BLEU falls by 0.35 from K = 1 to 100, which on 300 captions may be chance. With α = 0.6 no harm is seen even at K = 100.
#
# Why so little? Probably because captions are short. Label smoothing (chapter 6) asks this model to give each wrong token ε/V = 0.1/8,192. If it does, the empty output has ln(0.1/8,192) = −11.3, however long the source is. Our outputs have about −5; three times as long, they would fall below the empty one. For 3% of the captions the empty output is already likelier than all that a beam of 100 found. (The beam misses it: `</s>` isn't among the 100 likeliest first tokens.) Here is a caption where the curse strikes:
#
# - source: *Ein kleines Mädchen spendet an einer Ladenfront mit weißen Plastikbehältern für die Heilsarmee.*
# - reference: *A little girl donates to the Salvation Army near a storefront with white, plastic containers.*
#
# The last output is two punctuation marks:

# %%
for search in ("greedy", "beam 5, alpha 0.6", "beam 100, alpha 0"):
    print(f"{search:18} {record['example'][search]}")

# %% [markdown]
# ## Compute once: the cache
#
# > **In short.** Our searches run the whole prefix through the decoder at every step. But a causal decoder's earlier positions never change. Keep what later steps need from them.
#
# In each layer, all that a later position needs from an earlier one is its key and its value (chapter 2). So each layer keeps two tensors that grow by one row per step. Cross-attention's keys and values come from the source, and are computed once.
#
# For T tokens the decoder computes T positions instead of $1 + 2 + \dots + T = T(T+1)/2$. The price: each layer keeps $2D$ numbers for each position of source and target.
#
# `decoder_step` is the decoder of chapter 4 for one new token. No causal mask is needed: everything stored is earlier.


# %%
def keys_values_of(layer: MultiHeadedAttention, x: Tensor) -> Tensor:
    """What `layer` looks at in x (R, S, D): its keys and its values, (2, R, H, S, d_k)."""
    both = (layer.project_key(x), layer.project_value(x))  # (R, S, D) each
    return torch.stack([split_heads(part, layer.h) for part in both])


def attend_to_stored(
    layer: MultiHeadedAttention, x: Tensor, stored: Tensor, mask: Tensor | None = None
) -> Tensor:
    """`layer` at x (R, T, D), with keys and values that are at hand, (2, R, H, S, d_k): (R, T, D)."""
    query = split_heads(layer.project_query(x), layer.h)  # (R, H, T, d_k)
    found, _ = attention(query, stored[0], stored[1], mask)  # (R, H, T, d_k)
    return layer.project_output(merge_heads(found))


# %%
def decoder_step(
    model: EncoderDecoder,
    tokens: Tensor,
    position: Tensor,
    past: Tensor,
    cross: Tensor,
    src_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One token further: tokens (R, 1) at position (1,), to the last positions (R, D) and a longer past.

    past (N, 2, R, H, T, d_k) holds keys and values of the T tokens before, cross (N, 2, R, H, S, d_k)
    those of the source; src_mask (R, 1, S).
    """
    embed, positions = model.tgt_embed
    x = embed(tokens) + positions.pe[position]  # (R, 1, D)
    mask = None if src_mask is None else src_mask.unsqueeze(1)  # (R, 1, 1, S)
    longer = []
    for n, layer in enumerate(model.decoder.layers):

        def look_back(x: Tensor, own: MultiHeadedAttention = layer.self_attn) -> Tensor:
            longer.append(torch.cat((past[n], keys_values_of(own, x)), dim=-2))  # noqa: B023
            return attend_to_stored(own, x, longer[-1])

        x = layer.sublayer[0](x, look_back)
        look_over = partial(attend_to_stored, layer.src_attn, stored=cross[n], mask=mask)
        x = layer.sublayer[1](x, look_over)
        x = layer.sublayer[2](x, layer.feed_forward)
    return model.decoder.norm(x)[:, -1], torch.stack(longer)


# %% [markdown]
# `CopiedCache` holds the keys and values between steps. (`follow` and `keep` are for chapter 13.)


# %%
class CopiedCache:
    """A decoding that computes each token once. Each of its B·k prefixes has its own keys and values."""

    def __init__(self, model: EncoderDecoder, src: Tensor, src_mask: Tensor | None):
        self.model, self.src_mask, self.sources = model, src_mask, len(src)
        memory = model.encode(src, src_mask)  # (B, S, D)
        layers = model.decoder.layers
        self.cross = torch.stack([keys_values_of(layer.src_attn, memory) for layer in layers])
        self.past = self.cross[..., :0, :]  # (N, 2, B·k, H, 0, d_k): nothing yet

    def step(self, tokens: Tensor) -> Tensor:
        """Continue each prefix by one of tokens (B, k): the decoder's last positions (B·k, D)."""
        position = torch.tensor([self.past.size(-2)], device=tokens.device)
        given = (position, self.past, self.cross, self.src_mask)
        x, self.past = decoder_step(self.model, tokens.reshape(-1, 1), *given)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Last positions x (R, D) to what may come next, (R, V)."""
        return self.model.generator(x)

    def follow(self, origin: Tensor) -> None:
        """Let the prefixes be those numbered origin (B, k), of each source's own."""
        rows = torch.arange(self.past.size(2), device=origin.device).view(self.sources, -1)
        self.copy_rows(rows.gather(1, origin).flatten())

    def keep(self, sources: Tensor) -> None:
        """Go on with the sources of these numbers alone."""
        rows = torch.arange(self.past.size(2), device=sources.device).view(self.sources, -1)
        self.copy_rows(rows[sources].flatten())
        self.sources = len(sources)

    def copy_rows(self, rows: Tensor) -> None:
        """These rows of everything, in this order."""
        self.past, self.cross = self.past[:, :, rows], self.cross[:, :, rows]
        if self.src_mask is not None:
            self.src_mask = self.src_mask[rows]


# %% [markdown]
# In `write_one_by_one` a rule, `choose`, picks each token: here the likeliest, in the next section a random one. Dropout must be off, as `load_model` leaves it.


# %%
@torch.no_grad()
def write_one_by_one(
    decoding: Any, src: Tensor, max_len: int, choose: Callable[..., tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, Tensor]:
    """One text for each source: ids (B, ≤ max_len), padded after eos, and their log-probabilities (B,).

    `choose` takes the decoding and its last positions x (B, D); it gives tokens (B,), and their
    log-probabilities if it knows them.
    """
    ids = src.new_empty(len(src), 0)  # (B, 0)
    total = torch.zeros(len(src), dtype=torch.float64, device=src.device)  # (B,)
    going = torch.ones(len(src), dtype=torch.bool, device=src.device)  # which texts haven't ended
    tokens = src.new_full((len(src), 1), BOS)  # (B, 1)
    for _ in range(max_len):
        chosen, log_probs = choose(decoding, decoding.step(tokens))  # (B,)
        ids = torch.cat((ids, chosen.masked_fill(~going, PAD).unsqueeze(1)), dim=1)
        if log_probs is not None:
            total += log_probs.masked_fill(~going, 0.0)
        going &= chosen != EOS
        if not going.any():
            break
        tokens = chosen.unsqueeze(1)
    return ids, total


def until_end(ids: Sequence[int]) -> list[int]:
    """The ids of a padded row up to its first eos, which is kept."""
    return list(ids[: ids.index(EOS) + 1]) if EOS in ids else list(ids)


# %% [markdown]
# **Predict.** Greedy decoding writes 18 tokens about the sweater. How many times as many multiplications and additions does it need without the cache (`greedy_decode`)?

# %%
greedily = lambda decoding, x: (decoding.logits(x).argmax(dim=-1), None)  # noqa: E731
by_cache = lambda x: write_one_by_one(CopiedCache(trained.model, x, None), x, 60, greedily)[0]  # noqa: E731
without = lambda x: greedy_decode(trained.model, x, None, 60)  # noqa: E731
assert torch.equal(by_cache(src), without(src))  # the same tokens
times = count_flops(without, src) / count_flops(by_cache, src)
print(f"{by_cache(src).size(1)} tokens, {times:.1f} times the work")

# %% [markdown]
# With the cache, the decoder computes (18 + 1)/2 = 9.5 times fewer positions. The encoder and the generator save nothing.
#
# **Predict.** Our model has 2 layers and D = 128, and in float32 a number takes four bytes. How many bytes are kept for one position?

# %%
hund = torch.tensor([source_ids("Ein Hund schläft im Garten.", trained.tokenizer)])  # (1, S)
read = [BOS, *by_cache(hund)[0, :-1].tolist()]  # what the decoder was given
layers, D = trained.config.layers, trained.config.d_model
a_position = layers * 2 * D * 4
print(f"{a_position} bytes a position: {layers} layers · 2 · {D} numbers · 4 bytes")
piece = trained.tokenizer.processor.id_to_piece
kept_chart(*(list(map(piece, ids)) for ids in (hund[0].tolist(), read)), kib=a_position / 1024)

# %% [markdown]
# ## Sampling
#
# > **In short.** Don't search: draw each word at random, with the model's probabilities.
#
# A *temperature* τ sharpens or flattens the distribution:
#
# $$q(w) \propto p(w)^{1/\tau}$$
#
# τ < 1 favours the likely words (τ → 0 is greedy decoding), τ > 1 gives the unlikely ones a larger share.
#
# Label smoothing (ε = 0.1) teaches our models to leave a tenth of the probability to all other words. So two settings cut unlikely words off. *Top-k* keeps the k likeliest. The *nucleus* (top-p, Holtzman et al. 2020) keeps the fewest words whose probabilities sum to at least p.


# %%
def keep_top(log_probs: Tensor, k: int) -> Tensor:
    """(B, V) with all but each row's k largest entries at −∞; 0 keeps all."""
    if in_domain("top_k", k) == 0:
        return log_probs
    top = log_probs.topk(min(k, log_probs.size(-1)), dim=-1)  # (B, k)
    return torch.full_like(log_probs, -torch.inf).scatter(-1, top.indices, top.values)


def keep_nucleus(log_probs: Tensor, p: float) -> Tensor:
    """(B, V) with all but the fewest likeliest entries that sum to at least p at −∞ (Holtzman et al. 2020)."""
    in_domain("top_p", p)
    ordered, place = log_probs.sort(dim=-1, descending=True)
    before = ordered.exp().cumsum(dim=-1) - ordered.exp()  # what the likelier ones sum to
    return log_probs.scatter(-1, place, ordered.masked_fill(before >= p, -torch.inf))


# %%
def sharpened(
    log_probs: Tensor, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Log-probabilities (B, V) to what is drawn from, (B, V): temperature, then top-k, then top-p."""
    if in_domain("temperature", temperature) == 0:  # its limit: the likeliest token alone
        return keep_top(log_probs, 1).softmax(dim=-1)
    log_probs = log_probs.double()  # so that the smallest temperatures neither overflow nor vanish
    best = log_probs.amax(dim=-1, keepdim=True)  # (B, 1)
    log_probs = ((log_probs - best) / temperature).log_softmax(dim=-1)
    if top_k is not None:
        log_probs = keep_top(log_probs, top_k).log_softmax(dim=-1)
    if top_p is not None:
        log_probs = keep_nucleus(log_probs, top_p)
    return log_probs.softmax(dim=-1)


# %%
first_word = book.log_table[BOS].unsqueeze(0)  # (1, V)
by_temperature = {t: sharpened(first_word, t)[0] for t in (0.25, 0.5, 1.0, 2.0)}
temperature_chart(by_temperature, book.words)


# %%
def drawer(
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The choice that draws: tokens (R,), and their log-probabilities (R,) under the model as it is."""

    def draw(decoding: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = decoding.logits(x).log_softmax(dim=-1)  # (R, V)
        p = sharpened(log_probs, temperature, top_k, top_p)  # (R, V)
        tokens = torch.multinomial(p, 1, generator=generator)  # (R, 1)
        return tokens.squeeze(1), log_probs.gather(1, tokens).squeeze(1)

    return draw


# %% [markdown]
# Three draws for the sweater sentence:

# %%
three, draw = src.expand(3, -1), drawer(generator=torch.Generator().manual_seed(0))
draws, _ = write_one_by_one(CopiedCache(trained.model, three, None), three, 40, draw)
print(*map(trained.tokenizer.decode, draws.tolist()), sep="\n")

# %% [markdown]
# The larger model samples translations of the 300 captions. These are means over four seeds; greedy decoding had 41.2 BLEU. (`top_p` = 1 cuts nothing off; `chrf2` is another score, see below.)

# %%
sampled = pd.DataFrame(record["sampling"]).fillna({"top_p": 1.0})
sampled[["temperature", "top_p", "bleu", "chrf2"]]

# %% [markdown]
# A plain draw costs 14 BLEU. The nucleus brings almost 6 of them back, and a low temperature nearly all.
#
# ## Minimum Bayes risk
#
# > **In short.** Don't ask which text is likeliest. Ask which one agrees best with all that the model might have said.
#
# One odd text may be likelier than each of a hundred good ones that differ only in a word. *Minimum-Bayes-risk* decoding (Kumar and Byrne 2004; with samples, Eikema and Aziz 2020) lets them vote. Let $u(h, y)$ say how good $h$ would be if $y$ were the reference. We choose the text that is best on average:
#
# $$\hat y = \arg\max_h \; \mathbb{E}_{y \sim p(\cdot \mid x)}\, u(h, y) \;\approx\; \arg\max_{h \in C} \frac{1}{|C|} \sum_{y \in C} u(h, y), \qquad C \text{ drawn from the model}$$
#
# As $u$ we take chrF, which compares runs of letters (chapter 10).


# %%
def sentence_chrf(text: str, reference: str) -> float:
    """How well two texts agree, 0 to 100, by the runs of letters that they share (chrF)."""
    from sacrebleu.metrics import CHRF

    return CHRF().sentence_score(text, [reference]).score


def mbr_choice(candidates: Sequence[str], utility: Callable[[str, str], float]) -> str:
    """The highest mean utility, each candidate once the reference; drawn twice, it counts twice."""
    counts = Counter(list_of_texts("candidates", candidates, some=True))
    return max(counts, key=lambda c: sum(n * utility(c, other) for other, n in counts.items()))


# %% [markdown]
# **Predict.** "a dog sleeps" is the phrase book's likeliest text. Which text agrees best with all others, in 2,000 draws?

# %%
many, draw = torch.full((2_000, 1), EOS), drawer(generator=torch.Generator().manual_seed(0))
draws, _ = write_one_by_one(book, many, 10, draw)  # (2000, T)
drawn = [book.text(until_end(row)[:-1]) for row in draws.tolist()]
for text in ("a dog sleeps", mbr_choice(drawn, sentence_chrf)):
    agreement = sum(sentence_chrf(text, other) for other in drawn) / len(drawn)
    print(f"drawn {drawn.count(text)} times, mean chrF {agreement:.1f}: {text}")

# %% [markdown]
# "The dog is sleeping" is longer, and shares more letters with the others.
#
# On real captions, with samples at τ = 0.6:

# %%
pd.DataFrame(record["mbr"])[["samples", "bleu", "chrf2"]]

# %% [markdown]
# One such sample has 38 BLEU; the one that agrees best with all 32 has 42.3. As far as 300 captions can tell, this is the level of a beam of 5 with α = 0.6. The price is 32 texts and up to 32² comparisons per sentence.
#
# ## Summary
#
# - Greedy decoding can't go back. Beam search keeps K prefixes.
# - Likelihood favours short outputs; a length penalty balances that.
# - A wider beam finds likelier texts. Too wide a beam can do harm; on our captions we hardly see it.
# - A cache keeps keys and values, so a step computes only one token.
# - One draw costs BLEU; the draw that agrees best with the others doesn't, from about 16 draws on.
#
# ## What the paper did that we don't
#
# - A beam of 4 with α = 0.6 *of Wu et al.'s penalty*. We divide by $T^\alpha$.
# - It limits an output to its source's length plus 50.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · A phrase book that misleads
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# Write `misleading_table()`: a table like `NEXT_WORD` in which beams of 1 and 2 miss the likeliest sentence, and a beam of 3 finds it. `solution("misleading_table")` shows ours.


# %%
def misleading_table() -> dict[str, dict[str, float]]:
    """A table like NEXT_WORD: beams of 1 and 2 miss its likeliest sentence, 3 finds it."""
    ...


check(misleading_table)

# %% [markdown]
# ### Exercise 2 · The likeliest text, for certain
#
# *code · difficulty ●●○ · worth ●●● · 25 minutes*
#
# A prefix only loses probability as it grows: one less likely than a *finished* text can't win. With this, a search finds the likeliest text exactly. Write `likeliest_text(model, src, max_len)` for one source (1, S), without dropout. A text ends with `</s>`, or is cut at `max_len` tokens. Always continue the likeliest open prefix. `solution("likeliest_text")` shows ours.


# %%
def likeliest_text(model: EncoderDecoder, src: Tensor, max_len: int) -> Hypothesis:
    """The text of the highest log-probability among all of at most `max_len` tokens."""
    ...


check(likeliest_text)

# %% [markdown]
# ### Exercise 3 · Near the best
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# *Min-p* sampling (Nguyen et al. 2024) keeps the tokens with at least a given share of the likeliest one's probability. Write `near_the_best(log_probs, share, temperature)`: log-probabilities (B, V) to the probabilities (B, V) that are drawn from. The temperature comes first. `solution("near_the_best")` shows ours.


# %%
def near_the_best(log_probs: Tensor, share: float, temperature: float = 1.0) -> Tensor:
    """(B, V) to (B, V): what is drawn from, the tokens with enough of the best one's probability."""
    ...


check(near_the_best)

# %% [markdown]
# Next: [Chapter 9 · The training run](ch09_training_run.ipynb)
