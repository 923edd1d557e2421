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
# After this chapter you can turn a model's probabilities into a sentence: greedily, with a beam, by drawing, or by a vote, and say what each way gains and misses.
#
# | | |
# |---|---|
# | In the paper | §6.1 of [Attention Is All You Need](https://arxiv.org/abs/1706.03762): a beam of 4, α = 0.6 |
# | Time | 20 minutes to read, 75 with the code; half a minute to run on a CPU |
# | Before, after | [Chapter 7 · Multi30k](ch07_multi30k.ipynb) · [Chapter 9 · The training run](ch09_training_run.ipynb) |
#
# *If you read only three cells:* the tree of *Beam search*, the first chart of *The beam curse*, the culprit of the *Case*.
#
# Shapes: **B** batch, **S** source length, **T** target length, **D** `d_model`, **H** heads, **V** vocabulary. New here: **K**, the width of the beam; **R**, rows in the decoder at once; **N**, layers.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd
import sacrebleu
import torch
from torch import Generator, Tensor

from scripts.book.domains import in_domain, list_of_texts
from scripts.book.exercises import check, runs_on
from scripts.book.figures import searching
from scripts.book.instruments import count_flops, dropout_off
from scripts.book.phrases import END, START, PhraseBook, every_sentence
from scripts.book.records import load_record
from scripts.ch01_attention import attention, padding_mask, subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention, merge_heads, split_heads
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch04_encoder_decoder import EncoderDecoder
from scripts.ch06_training import BOS, EOS, PAD, greedy_decode
from scripts.ch07_multi30k import pad_rows, source_ids
from scripts.core.models import STUDIED, Trained, load_model
from scripts.core.scores import corpus_bleu

# %% [markdown]
# ## A model proposes, a search decides
#
# > **In short.** The trained model never writes a sentence. Asked "what comes next?", it gives every word a probability. A search chooses, word after word.
#
# How likely is a whole sentence $y = (y_1, \dots, y_T)$, where $y_T$ is `</s>`? Its probability is a product. Many small factors would underflow, so searches add logarithms:
#
# $$\log p(y \mid x) = \sum_{t=1}^{T} \log p(y_t \mid y_1, \dots, y_{t-1}, x)$$


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
# We begin with a model to check by hand: a phrase book of nine words, where the next word depends only on the last. `PhraseBook` has our Transformer's parts (`encode`, `decode`, `generator`), so our searches run on it.

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
# After "the" the model hesitates between three nouns, after "a" it doesn't. Greedy's sentence is a *search error*: the model knew better.
#
# ## Beam search
#
# > **In short.** Keep the K best unfinished sentences.
#
# At each step, each of K *prefixes* is continued by each possible word: these are the *candidates*. Of the K likeliest candidates, those that end with `</s>` are *finished*. Of all others the K likeliest are the next prefixes. The search stops when K sentences have finished. K = 1 is greedy decoding.
#
# **Your turn.** Write this search for a table of words.


# %% tags=["yours"]
def beam_by_hand(next_words: Mapping[str, Mapping[str, float]], beam: int) -> tuple[list, list]:
    """Up to `beam` finished sentences, likeliest first, and what happened at each step.

    A sentence is a pair: its words, as a tuple with END, and its probability. `next_words[word]` holds
    what may follow `word`; the first word follows START. Each step gives a triple of lists of pairs, best
    first: `candidates`, those of them that `ended`, and the `prefixes` that go on.
    """
    prefixes = [((), 1.0)]
    finished, steps = [], []
    while prefixes and len(finished) < beam:
        candidates = [
            ((*words, word), p * q)
            for words, p in prefixes
            for word, q in next_words[words[-1] if words else START].items()
        ]
        candidates.sort(key=lambda candidate: -candidate[1])
        ended = [c for c in candidates[:beam] if c[0][-1] == END]
        prefixes = [c for c in candidates if c[0][-1] != END][:beam]
        finished += ended
        steps.append((candidates, ended, prefixes))
    return sorted(finished, key=lambda f: -f[1])[:beam], steps


# %% [markdown]
# A wide beam finds every sentence, a beam of 1 greedy's; a finished sentence uses up no place.

# %%
SILENT = {START: {END: 0.5, "a": 0.3, "b": 0.2}, "a": {END: 0.4, "b": 0.6}, "b": {END: 1.0}}
everything = [words for words, _ in every_sentence(NEXT_WORD)]
assert {words for words, _ in beam_by_hand(NEXT_WORD, beam=30)[0]} == {*everything}
assert " ".join(beam_by_hand(NEXT_WORD, beam=1)[0][0][0]) == greedy_text
sentences, steps = beam_by_hand(SILENT, beam=2)
assert [(words, round(p, 9)) for words, p in sentences] == [((END,), 0.5), (("b", END), 0.2)]
assert len(steps) == 2, "stop when K have finished"

# %% [markdown]
# **Predict.** With K = 2, which two first words survive, and which leads to the winner?

# %%
best_two, steps = beam_by_hand(NEXT_WORD, beam=2)
assert [words for words, _ in best_two] == everything[:2]
searching.beam_tree_chart(searching.beam_tree(steps))

# %% [markdown]
# *The* and *a* survive, and *a* leads to the winner. But a path that starts too badly is dropped, however well it would end (exercise 1).
#
# ### The same on tensors
#
# A search returns hypotheses.


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
    return Hypothesis(tuple(i for i in ids if i != EOS), log_prob, len(ids))


def rows_of(x: Tensor, chosen: Tensor) -> Tensor:
    """Of x (B, K, T), each sentence's rows numbered chosen (B, k): (B, k, T)."""
    return x.gather(1, chosen.unsqueeze(-1).expand(-1, -1, x.size(-1)))


# %% [markdown]
# B sentences are searched at once. PyTorch's `topk` sorts a sentence's K·V candidates as one row; a candidate's place in it, divided by V, is the number of its prefix, and the remainder is its token. We need the best **2K**: each prefix has one `</s>`, so at least K of them go on.
#
# **Your turn.** Write one step.


# %% tags=["yours"]
def beam_step(scores: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The 2K best candidates of each sentence, best first.

    scores (B, K) are the prefixes' log-probabilities, log_probs (B, K, V) those of each next token.
    Returns the candidates' log-probabilities, the numbers (0 to K − 1) of the prefixes that they
    continue, and their tokens, (B, 2K) each.
    """
    B, K, V = log_probs.shape
    candidates = (scores.unsqueeze(-1) + log_probs).view(B, K * V)
    best, place = candidates.topk(2 * K, dim=-1)  # (B, 2K) each
    return best, place // V, place % V


# %%
scores = torch.tensor([[0.0, -1.0], [-9.0, 0.0]])
log_probs = torch.tensor([[-1.0, -3.0, -5.0], [-0.5, -4.0, -6.0]]).expand(2, 2, 3)
best, origin, tokens = beam_step(scores, log_probs)
assert best[1].tolist() == [-0.5, -4.0, -6.0, -10.0], "each sentence alone"
assert origin[1].tolist() == [1, 1, 1, 0] and tokens[1].tolist() == [0, 1, 2, 0]


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
    """The best hypotheses of each source, best first: src (B, S) to B lists of up to `beam`.

    After `max_len` tokens the K best candidates count as finished, with or without `</s>`.
    """
    B, K = src.size(0), beam
    finished: list[list[Hypothesis]] = [[] for _ in range(B)]
    with dropout_off(model):
        memory = model.encode(src, src_mask).repeat_interleave(K, dim=0)  # (B·K, S, D)
        mask = None if src_mask is None else src_mask.repeat_interleave(K, dim=0)  # (B·K, 1, S)
        prefixes = src.new_full((B, K, 1), BOS)  # (B, K, T), all alike: we continue one
        scores = memory.new_tensor([[0.0] + [-torch.inf] * (K - 1)] * B)  # (B, K)
        for step in range(1, max_len + 1):
            log_probs = next_log_probs(model, memory, mask, prefixes.flatten(0, 1))  # (B·K, V)
            scores, origin, tokens = beam_step(scores, log_probs.unflatten(0, (B, K)))  # (B, 2K)
            texts = torch.cat((rows_of(prefixes, origin), tokens.unsqueeze(-1)), dim=-1)
            ended = ((tokens == EOS) | (step == max_len)) & scores.isfinite()  # (B, 2K)
            unfinished = [len(hypotheses) < K for hypotheses in finished]
            for b, k in ended[:, :K].nonzero().tolist():  # of the K best
                if unfinished[b]:
                    finished[b].append(hypothesis(texts[b, k, 1:].tolist(), scores[b, k].item()))
            if all(len(hypotheses) >= K for hypotheses in finished):
                break
            going = (tokens == EOS).int().argsort(dim=-1, stable=True)[:, :K]  # the K best others
            prefixes, scores = rows_of(texts, going), scores.gather(1, going)
    return [sorted(hypotheses, key=lambda h: -h.score(alpha))[:K] for hypotheses in finished]


# %% [markdown]
# With the phrase book it finds what `beam_by_hand` finds.

# %%
for table, K in ((NEXT_WORD, 1), (NEXT_WORD, 2), (NEXT_WORD, 3), (SILENT, 2)):
    phrases = PhraseBook(table)
    hypotheses = beam_search(phrases, anything, None, 10, beam=K, alpha=0.0)[0]
    by_hand = [" ".join(words[:-1]) for words, _ in beam_by_hand(table, K)[0]]
    assert [phrases.text(h.ids) for h in hypotheses] == by_hand

# %% [markdown]
# **Milestone.** Chapter 9's trained translator runs on *your* beam step, with K = 4.

# %%
runs_on(beam_step)

# %% [markdown]
# ## Length: why the score is divided
#
# > **In short.** Every further word costs probability, so the likeliest sentence tends to be too short. A *length penalty* (on short texts) makes up for that.
#
# The paper (§6.1) takes Wu et al.'s (2016), with α = 0.6. Finished hypotheses are ranked by
#
# $$\text{score}(y) = \frac{\log p(y \mid x)}{\text{lp}(T)}, \qquad \text{lp}(T) = \frac{(5 + T)^\alpha}{(5 + 1)^\alpha} \quad\text{(the paper's)}, \qquad \text{lp}(T) = T^\alpha \quad\text{(ours)}$$
#
# T counts `</s>`. The same α weighs more in ours: at 0.6 ours prefers *a dog is sleeping* (p = 0.137) to *a dog sleeps* (p = 0.16); the paper's doesn't.
#
# **When may a beam stop?** Probabilities only fall as a text grows, but scores with α > 0 can rise. **Predict.** In the table `SILENT`, does a beam of 2 find the best score for α = 1?

# %%
hypotheses = beam_search(PhraseBook(SILENT), anything, None, 10, beam=2, alpha=1.0)[0]
print("scores found:", [round(h.score(1.0), 2) for h in hypotheses])
for words, p in every_sentence(SILENT):
    print(f"{math.log(p) / len(words):.2f}  {' '.join(words)}")

# %% [markdown]
# It doesn't. *a b* scores best, but is still being written when two texts have finished. Chapter 13 has a safe rule.
#
# ## A real sentence
#
# > **In short.** Text becomes pieces (chapter 7), a search writes others, and these become text.
#
# From here on the model is chapter 9's, trained on Multi30k.


# %%
def best_ids(
    model: EncoderDecoder, src: Tensor, beam: int = 1, alpha: float = 0.6
) -> list[Sequence[int]]:
    """The ids of each source's text, greedy or the best of a beam: src (B, S) to B lists."""
    src_mask, max_len = padding_mask(src), min(MAX_LEN, 2 * src.size(1) + 10)
    if beam == 1:
        return greedy_decode(model, src, src_mask, max_len).tolist()
    return [best[0].ids for best in beam_search(model, src, src_mask, max_len, beam, alpha)]


def plain_translate(
    trained: Trained, sentences: Sequence[str], beam: int = 1, alpha: float = 0.6
) -> list[str]:
    """Translations of `sentences`, in their order, greedy or a beam's; long ones are cut, empty ones stay."""
    sentences = list_of_texts("sentences", sentences)
    rows = [source_ids(sentence, trained.tokenizer) for sentence in sentences]
    order = sorted((i for i, row in enumerate(rows) if len(row) > 1), key=lambda i: len(rows[i]))
    translations, size = [""] * len(rows), 64 if beam == 1 else 32
    for start in range(0, len(order), size):
        batch = order[start : start + size]
        src = pad_rows([rows[i] for i in batch]).to(trained.device)  # (B, S)
        for i, ids in zip(batch, best_ids(trained.model, src, beam, alpha), strict=True):
            translations[i] = trained.tokenizer.decode(ids)
    return translations


# %%
trained = load_model(STUDIED)
trained.model.double()  # the same digits on every machine
questions = [
    "Ein keiner Hund springt ins Wasser.",  # a typo: kleiner is small, keiner is nobody
    "Leute reparieren das Dach.",
    "Ein Mann steht vor einem Iglu.",
]
greedy, wide = (plain_translate(trained, questions, beam=K) for K in (1, 4))
pd.DataFrame({"source": questions, "greedy": greedy, "beam of 4": wide})

# %% [markdown]
# *Tired* and *the roof of the roof* are search errors: the beam's texts are likelier. *Illuminum* isn't one: it has log p −5.80, the right *igloo* −5.87. No search for the likeliest text can mend that.
#
# ## The beam curse
#
# > **In short.** A wider beam finds likelier texts, and the likeliest one may be empty.
#
# Do better searches make better translations? Koehn and Knowles (2017) let the beam grow: quality rose up to a width of 4 to about 30, then fell. Stahlberg and Byrne (2019) searched *exactly*: for more than half of their sentences the likeliest output was the empty one.
#
# The empty text needs one decision: `</s>` as first token. Label smoothing (chapter 6) asks our model to give each wrong token ε/V = 0.1/8,192, that is, $e^{-11.3}$. We measure it for 30 captions: chapter 7's twenty, from this model's training, and ten of a test set.
#
# **Predict.** Is `</s>` likelier at the first step than smoothing asks for? And where is the empty text likelier than what a beam of 5 finds: where captions are long?

# %%
quoted = [caption[1:] for caption in load_record("multi30k-corpus")["captions"]]  # German, English
quoted += [(s["source"], s["reference"]) for s in load_record("multi30k-de-en")["samples"]]
rows = []
for german, _ in quoted:
    src = torch.tensor([source_ids(german, trained.tokenizer)])  # (1, S)
    memory = trained.model.encode(src, None)
    first = next_log_probs(trained.model, memory, None, torch.tensor([[BOS]]))[0]  # (V,)
    best = beam_search(trained.model, src, None, max_len=60, beam=5, alpha=0.0)[0][0]
    rows.append((german, best.length, best.log_prob, first[EOS].item()))
    assert (first > first[EOS]).sum() >= 102  # tokens that are likelier
curse = pd.DataFrame(rows, columns=["caption", "length", "found", "empty"])
assert (curse["empty"] < math.log(0.1 / 8192)).sum() == 23
searching.curse_chart(curse, smoothing=math.log(0.1 / 8192))

# %% [markdown]
# For 23 of the 30 `</s>` is *less* likely than smoothing asks for. Here the empty text beats the beam's at a corrupt line (@@), a piece of advice, and a caption of four sentences. Of the first 300 validation captions it does so for 14: twelve in the longest quarter, none in the shorter half.
#
# At the first step 102 tokens or more are likelier than `</s>`, so here no beam up to K = 100 finds the empty text. BLEU (chapter 10) is multiplied by $e^{1 - 1/r}$ where texts have only $r$ times the references' tokens. **Predict.** From K = 1 to K = 100, on 300 captions: what happens to length, to BLEU, and to BLEU without that penalty?

# %%
record = load_record("searches-multi30k")
beams = pd.DataFrame(record["beams"])
beams["match"] = beams["bleu"] / (1 - 1 / beams["length_ratio"]).map(math.exp)
plain = beams[beams["alpha"] == 0]
assert plain["match"].is_monotonic_increasing and plain["length_ratio"].is_monotonic_decreasing
searching.width_chart(beams)

# %% [markdown]
# For α = 0 more of what is *written* matches at every step, 42.3 to 44.8, but ever less is written. BLEU falls by 0.35, which on 300 captions may be chance; chrF2 (chapter 10), which counts what is missing, ends where it began. With α = 0.6 neither is ever below greedy's. So the curse is weak here, and one of length. It strikes single captions: for *Ein kleines Mädchen spendet an einer Ladenfront mit weißen Plastikbehältern für die Heilsarmee*, K = 100 writes a quotation mark and a full stop; with α = 0.6, a whole sentence.
#
# ## Compute once: the cache
#
# > **In short.** Our searches run the whole prefix through the decoder at every step. But thanks to the causal mask earlier positions never change. Keep what later steps need from them.
#
# What do they need? In each layer, a position's key and its value (chapter 2). So each layer keeps two tensors that grow by one row per step. The keys and values of cross-attention come from the source, and are computed once. For T tokens the decoder computes T positions instead of $1 + 2 + \dots + T = T(T+1)/2$.
#
# **Your turn.** Write attention with stored keys and values. No causal mask is needed: none of them is later.


# %%
def keys_values_of(layer: MultiHeadedAttention, x: Tensor) -> Tensor:
    """What `layer` looks at in x (R, S, D): its keys and its values, (2, R, H, S, d_k)."""
    both = (layer.project_key(x), layer.project_value(x))  # (R, S, D) each
    return torch.stack([split_heads(part, layer.h) for part in both])


# %% tags=["yours"]
def attend_to_stored(
    layer: MultiHeadedAttention, x: Tensor, stored: Tensor, mask: Tensor | None = None
) -> Tensor:
    """`layer` at x (R, T, D), with its keys and values stored, (2, R, H, S, d_k): to (R, T, D).

    Uses `layer.project_query`, `layer.project_output` and `layer.h`; mask fits (R, H, T, S).
    """
    query = split_heads(layer.project_query(x), layer.h)  # (R, H, T, d_k)
    heads, _ = attention(query, stored[0], stored[1], mask)  # (R, H, T, d_k)
    return layer.project_output(merge_heads(heads))


# %%
layer = MultiHeadedAttention(2, 8, dropout=0.0)
x, y = torch.randn(3, 4, 8), torch.randn(3, 5, 8)  # (R, T, D), (R, S, D)
mask = padding_mask(torch.tensor([[4, 5, 6, PAD, PAD]]))  # (1, 1, S)
attended = attend_to_stored(layer, x, keys_values_of(layer, y), mask.unsqueeze(1))
torch.testing.assert_close(attended, layer(x, y, y, mask))

# %% [markdown]
# `decoder_step` is chapter 4's decoder for one new token.


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

        def look_back(x: Tensor, attn=layer.self_attn, before=past[n]) -> Tensor:
            longer.append(torch.cat((before, keys_values_of(attn, x)), -2))  # (2, R, H, T+1, d_k)
            return attend_to_stored(attn, x, longer[-1])

        x = layer.sublayer[0](x, look_back)
        look_over = partial(attend_to_stored, layer.src_attn, stored=cross[n], mask=mask)
        x = layer.sublayer[1](x, look_over)
        x = layer.sublayer[2](x, layer.feed_forward)
    return model.decoder.norm(x)[:, -1], torch.stack(longer)


# %% [markdown]
# `CopiedCache` holds keys and values; each step copies them into a longer tensor. `write_one_by_one` writes with it; `choose` picks each token.


# %%
class CopiedCache:
    """A decoding of sources src (B, S) that computes each token once."""

    def __init__(self, model: EncoderDecoder, src: Tensor, src_mask: Tensor | None):
        self.model, self.src_mask = model, src_mask
        memory = model.encode(src, src_mask)  # (B, S, D)
        layers = model.decoder.layers
        self.cross = torch.stack([keys_values_of(layer.src_attn, memory) for layer in layers])
        self.past = self.cross[..., :0, :]  # (N, 2, B, H, 0, d_k): nothing yet

    def step(self, tokens: Tensor) -> Tensor:
        """Read one token for each source, (B,): the logits of the next one, (B, V)."""
        position = torch.tensor([self.past.size(-2)], device=tokens.device)
        kept = self.past, self.cross, self.src_mask
        x, self.past = decoder_step(self.model, tokens.unsqueeze(1), position, *kept)
        return self.model.generator(x)


Choice = Callable[[Tensor], tuple[Tensor, Tensor]]  # logits (B, V) to tokens and log p, (B,) each


def greedy_choice(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy decoding's choice."""
    log_probs, tokens = logits.log_softmax(dim=-1).max(dim=-1)
    return tokens, log_probs


@torch.no_grad()
def write_one_by_one(
    next_logits: Callable[[Tensor], Tensor], src: Tensor, max_len: int, choose: Choice
) -> tuple[Tensor, Tensor]:
    """One text for each source: ids (B, ≤ max_len), padded after eos, and their log-probabilities (B,).

    `next_logits` reads tokens (B,) and gives the logits of the next ones, (B, V).
    """
    ids = src.new_empty(len(src), 0)  # (B, 0)
    total = torch.zeros(len(src), dtype=torch.float64, device=src.device)  # (B,)
    going = torch.ones(len(src), dtype=torch.bool, device=src.device)  # which texts haven't ended
    tokens = src.new_full((len(src),), BOS)
    for _ in range(max_len):
        tokens, log_probs = choose(next_logits(tokens))  # (B,) each
        ids = torch.cat((ids, tokens.masked_fill(~going, PAD).unsqueeze(1)), dim=1)
        total += log_probs.masked_fill(~going, 0.0)
        going &= tokens != EOS
        if not going.any():
            break
    return ids, total


def until_end(ids: Sequence[int]) -> list[int]:
    """The ids of a padded row up to its first eos, which is kept."""
    return list(ids[: ids.index(EOS) + 1]) if EOS in ids else list(ids)


# %%
@torch.no_grad()
def texts_by_cache(trained: Trained, sentences: Sequence[str], choose: Choice) -> list[str]:
    """A text for each sentence, token by token as `choose` says."""
    src = pad_rows([source_ids(sentence, trained.tokenizer) for sentence in sentences])  # (B, S)
    cache = CopiedCache(trained.model, src, padding_mask(src))
    ids, _ = write_one_by_one(cache.step, src, 60, choose)
    return [trained.tokenizer.decode(row) for row in ids.tolist()]


# %% [markdown]
# **Predict.** Greedy decoding writes 18 tokens about a terrier. How many times the work does it need without the cache?

# %%
terrier = [quoted[21][0]]
assert texts_by_cache(trained, terrier, greedy_choice) == plain_translate(trained, terrier)
without_cache = count_flops(partial(plain_translate, trained, terrier))
with_cache = count_flops(partial(texts_by_cache, trained, terrier, greedy_choice))
print(f"{without_cache / with_cache:.1f} times the work")

# %% [markdown]
# The decoder computes (18 + 1)/2 = 9.5 times fewer positions; with the source's keys and values computed once, 10.7 times less. Encoder and generator, now 60%, save nothing.
#
# ## A case: a translator that changes its mind
#
# > **In short.** The output is fluent, and no error is raised. How would you notice?
#
# **Symptom.** A translator built on `write_one_by_one` and our model often says something else the next time. For *Ein Hund schläft im Garten* three users got *A dog sleeps in the yard*, *A dog sleeping …* and *A dog is sleeping …*
#
# **Suspects.** (a) The tokenizer. (b) Ties between equally likely tokens. (c) A rule that draws. (d) Something random inside the model.
#
# (c) is out: the rule was `greedy_choice`. **Instrument:** compare the first step's logits for the same ids, twice. The tokenizer comes before, the choice after: unequal logits would convict (d). **Predict.** Are they equal?

# %%
src = pad_rows([source_ids("Ein Hund schläft im Garten.", trained.tokenizer)] * 2)  # (2, S)
for training in (True, False):
    trained.model.train(training)
    logits = CopiedCache(trained.model, src, None).step(torch.tensor([BOS, BOS]))  # (2, V)
    print(f"training mode {training}: equal logits {torch.allclose(*logits)}")

# %% [markdown]
# **Culprit:** (d). The model is in training mode, where dropout sets a fifth of the numbers that it acts on to 0 at random. It learned to live with that: hence the fluent text. **Predict.** What does it cost on 30 captions: 1 point of BLEU, 5, or 10?

# %%
# NBVAL_IGNORE_OUTPUT
sources, references = zip(*quoted, strict=True)
scores = []
for training in (False, True, True, True, True):
    trained.model.train(training)
    texts = texts_by_cache(trained, sources, greedy_choice)
    scores.append(round(corpus_bleu(texts, references).score, 1))
trained.model.eval()
print(f"BLEU {scores[0]}; with dropout {scores[1:]}")
assert scores[0] > sum(scores[1:]) / 4

# %% [markdown]
# Over many draws about 5, single ones 1 to 9; on 300 validation captions, 2 to 3. To find it, compare logits twice; to mend it, `.eval()`.
#
# The Annotated Transformer translates Multi30k without `.eval()`. Our `greedy_decode` and `beam_search` switch dropout off; `write_one_by_one` doesn't.
#
# ## Sampling
#
# > **In short.** Don't search: draw each word at random, with the model's probabilities.
#
# A *temperature* τ sharpens or flattens the distribution:
#
# $$q(w) \propto p(w)^{1/\tau}$$
#
# τ < 1 favours the likely words (τ → 0 is greedy decoding), τ > 1 flattens. *Top-k* keeps the k likeliest words. The *nucleus* (top-p, Holtzman et al. 2020) keeps the fewest whose probabilities sum to at least p.


# %%
def keep_top(log_probs: Tensor, k: int) -> Tensor:
    """(B, V) with all but each row's k largest entries at −∞; 0 keeps all."""
    if in_domain("top_k", k) == 0:
        return log_probs
    top = log_probs.topk(min(k, log_probs.size(-1)), dim=-1)  # (B, k)
    return torch.full_like(log_probs, -torch.inf).scatter(-1, top.indices, top.values)


# %% [markdown]
# **Your turn.** Write the nucleus, then all three together.


# %% tags=["yours"]
def keep_nucleus(log_probs: Tensor, p: float) -> Tensor:
    """(B, V) with all but the fewest likeliest entries that sum to at least p at −∞ (Holtzman et al. 2020)."""
    in_domain("top_p", p)
    ordered, place = log_probs.sort(dim=-1, descending=True)
    before = ordered.exp().cumsum(dim=-1) - ordered.exp()  # what the likelier ones sum to
    return log_probs.scatter(-1, place, ordered.masked_fill(before >= p, -torch.inf))


# %%
shares = torch.tensor([[0.05, 0.5, 0.25, 0.2], [0.4, 0.3, 0.2, 0.1]]).double()
kept = torch.tensor([[0.0, 0.5, 0.25, 0.2], [0.4, 0.3, 0.2, 0.0]]).double()
torch.testing.assert_close(keep_nucleus(shares.log(), 0.76).exp(), kept)


# %% tags=["yours"]
def sharpened(log_probs: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Log-probabilities (B, V) to the probabilities that are drawn from, (B, V), in float64.

    First the temperature, then `keep_top`, then `keep_nucleus`; what is left sums to 1 before each
    and in the end. Temperature 0 leaves only the likeliest token.
    """
    if in_domain("temperature", temperature) == 0:
        return keep_top(log_probs, 1).double().softmax(dim=-1)
    log_probs = log_probs.double()
    log_probs = (log_probs / temperature).log_softmax(dim=-1)
    log_probs = keep_top(log_probs, top_k).log_softmax(dim=-1)
    if top_p != 1:
        log_probs = keep_nucleus(log_probs, top_p)
    return log_probs.softmax(dim=-1)


# %%
for settings, share in (  # of the likeliest
    ((0,), 1.0),
    ((0.5, 2), 0.8),  # 0.5² / (0.5² + 0.25²)
    ((1, 2, 0.6), 1.0),  # of the two kept, the first has 2/3, which is enough
    ((0.5, 0, 0.7), 1.0),  # the temperature comes first
):
    assert math.isclose(sharpened(shares.log(), *settings)[0, 1], share), f"wrong for {settings}"

# %% [markdown]
# What comes after *An older man*? **Predict.** How many of the 8,192 pieces are in the real model's nucleus of 0.9?

# %%
src = [source_ids("Ein älterer Mann spielt Gitarre in einer Band.", trained.tokenizer)]
prefix = torch.tensor([[BOS, *trained.tokenizer.encode("An older man")]])  # (1, T)
memory = trained.model.encode(torch.tensor(src), None)  # (1, S, D)
next_piece = next_log_probs(trained.model, memory, None, prefix)  # (1, V)
assert (sharpened(next_piece, 1.0, top_p=0.9) > 0).sum() == 3
top = next_piece[0].topk(6)
pieces = [trained.tokenizer.decode([i]) for i in top.indices.tolist()]
searching.next_word_chart(pieces, top.values.tolist())

# %% [markdown]
# Three. All others share 0.08, so of texts of ten such pieces only $0.923^{10} = 45\%$ stay inside.


# %%
def drawer(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, generator: Generator | None = None
) -> Choice:
    """The choice that draws: tokens, and their log-probabilities under the model as it is."""

    def draw(logits: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = logits.log_softmax(dim=-1)  # (B, V)
        p = sharpened(log_probs, temperature, top_k, top_p)  # (B, V)
        tokens = torch.multinomial(p, 1, generator=generator)  # (B, 1)
        return tokens.squeeze(1), log_probs.gather(1, tokens).squeeze(1)

    return draw


# %% [markdown]
# ## Minimum Bayes risk
#
# > **In short.** Don't ask which text is likeliest. Ask which agrees best with all that the model might say.
#
# *Minimum-Bayes-risk* decoding (Kumar and Byrne 2004; with samples, Eikema and Aziz 2020) lets the possible texts vote. Let $u(h, y)$ say how good $h$ would be if $y$ were the reference. We choose the text that is best on average:
#
# $$\hat y = \arg\max_h \; \mathbb{E}_{y \sim p(\cdot \mid x)}\, u(h, y) \;\approx\; \arg\max_{h \in C} \frac{1}{|C|} \sum_{y \in C} u(h, y), \qquad C \text{ drawn}$$
#
# We draw C at τ = 0.6, which gives likely texts more votes. As $u$ we take chrF, which compares runs of letters (chapter 10). **Your turn.** Write the vote.


# %%
def sentence_chrf(text: str, reference: str) -> float:
    """How well two texts agree, 0 to 100, by the runs of letters that they share (chrF)."""
    return sacrebleu.sentence_chrf(text, [reference]).score


# %% tags=["yours"]
def mbr_choice(candidates: Sequence[str], utility: Callable[[str, str], float]) -> str:
    """The candidate h of the highest mean `utility(h, y)` over all candidates y.

    A text that was drawn twice counts twice as y.
    """
    counts = Counter(candidates)
    return max(counts, key=lambda h: sum(n * utility(h, y) for y, n in counts.items()))


# %%
assert mbr_choice(["y", "h"], lambda h, y: (h, y) == ("h", "y")) == "h", "h is judged by y"
assert mbr_choice(["a", "b", "b"], lambda h, y: h == y) == "b", "what is drawn twice counts twice"

# %% [markdown]
# Ten draws, with log p and log p / T:

# %%
src = pad_rows([source_ids(quoted[24][0], trained.tokenizer)] * 10)  # Leute Reparieren das Dach …
draw = drawer(0.6, generator=Generator().manual_seed(0))
ids, log_probs = write_one_by_one(CopiedCache(trained.model, src, None).step, src, 60, draw)
rows = [until_end(row) for row in ids.tolist()]
drawn = [trained.tokenizer.decode(row) for row in rows]
for text, row, log_prob in zip(drawn, rows, log_probs.tolist(), strict=True):
    print(f"{log_prob:6.1f} {log_prob / len(row):6.2f}  {text}")

# %% [markdown]
# By either number *People repair the roof of a house* is likeliest. **Predict.** Which text wins the vote? Which comes second?

# %%
agreement = torch.tensor([[sentence_chrf(h, y) for y in drawn] for h in drawn])  # (10, 10)
assert drawn.index(mbr_choice(drawn, sentence_chrf)) == agreement.mean(dim=1).argmax()
searching.agreement_chart(agreement, drawn)

# %% [markdown]
# *Are fixing*, the reference, wins, and would if drawn once. *Eating* and *rowing* come next; *People repair*, no less right, is last: chrF counts letters. Does the vote help, or choosing at all? 300 captions, from records, each row the mean of four seeds; the last five choose among the same 16 draws:

# %%
ways = pd.DataFrame([*record["sampling"], *load_record("choices-multi30k")["choices"]])
missing = {"temperature": 0.6, "top_p": 1.0, "choice": "one draw", "length_ratio": ""}
ways = ways.astype({"length_ratio": object}).fillna(missing)
ways[["temperature", "top_p", "choice", "bleu", "length_ratio", "chrf2"]]

# %% [markdown]
# A plain draw costs 14 BLEU against greedy's 41.2; the nucleus brings 6 back, a low temperature nearly all. In BLEU log p / T chooses as well as the vote, and both are level with a beam of 5 at α = 0.6 (42.0). As in the curse, length matters: log p alone is below both with each seed, since its texts are short. The vote leads in chrF2, by which it votes.
#
# ## Summary
#
# - Greedy decoding can't go back. Beam search keeps K prefixes.
# - Likelihood favours short texts; a length penalty balances that.
# - In training mode a model translates fluently, worse, and often differently.
# - A cache keeps keys and values, so a step computes only one token.
# - The best of 16 draws, chosen by log p / T or by vote, has the BLEU of a beam of 5.
#
# What the paper did that we don't: it limits an output to its source's length plus 50.
#
# ## Exercises
#
# ### Exercise 1 · A phrase book that misleads
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# In which table do beams of 1 and 2 miss the likeliest sentence, while a beam of 3 finds it? `solution("misleading_table")` shows ours.


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
# A prefix only loses probability as it grows: one less likely than a *finished* text can't win. Write `likeliest_text(model, src, max_len)` for one source (1, S), without dropout. A text ends with `</s>` or at `max_len` tokens. Always continue the likeliest open prefix. `solution("likeliest_text")` shows ours.


# %%
def likeliest_text(model: EncoderDecoder, src: Tensor, max_len: int) -> Hypothesis:
    """The text of the highest log-probability among all of at most `max_len` tokens."""
    ...


check(likeliest_text)

# %% [markdown]
# Next: [Chapter 9 · The training run](ch09_training_run.ipynb)
