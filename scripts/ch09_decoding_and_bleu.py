# %% [markdown]
# # Chapter 9 · Decoding and BLEU
#
# PROSE-HEADER

# %% tags=["bootstrap"]

# %%
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import altair as alt
import pandas as pd
import torch
from torch import Tensor, nn

from scripts import charts
from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch04_encoder_decoder import EncoderDecoder, make_model
from scripts.ch05_training import BOS, EOS, PAD, greedy_decode
from scripts.ch06_multi30k import load_corpus, pad_rows, parallel, read_lines, source_ids
from scripts.ch08_training_run import (
    Trained,
    average_checkpoints,
    build_model,
    corpus_bleu,
    greedy_translate,
    held_out_splits,
    load_model,
    pick_device,
)
from scripts.records import ROOT


# %%
@torch.no_grad()
def next_log_probs(
    model: EncoderDecoder, memory: Tensor, src_mask: Tensor | None, ids: Tensor
) -> Tensor:
    """log p(next token | prefix): memory (B, S, D), ids (B, T) from bos on, to (B, V)."""
    mask = subsequent_mask(ids.size(1), ids.device)  # (1, T, T)
    last = model.decode(memory, src_mask, ids, mask)[:, -1]  # (B, D)
    return model.generator(last).log_softmax(dim=-1)  # (B, V)


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
@contextmanager
def dropout_off(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; afterwards every part is as it was, even after an error."""
    was_training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in was_training:
            part.training = True


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


# %%
@dataclass(frozen=True)
class Hypothesis:
    """One candidate translation: its ids without bos and eos, and its summed log-probability.

    `length` counts the tokens that were scored, eos included.
    """

    ids: tuple[int, ...]
    log_prob: float
    length: int

    def score(self, alpha: float) -> float:
        """log-probability / length^α: with α = 0 short outputs win, with α = 1 it is the mean."""
        return self.log_prob / self.length**alpha


# %%
def hypothesis(ids: Sequence[int], log_prob: float) -> Hypothesis:
    """A Hypothesis from scored ids, which may end in eos."""
    ended = bool(ids) and ids[-1] == EOS
    return Hypothesis(tuple(ids[:-1] if ended else ids), log_prob, len(ids))


# %%
def sift(
    candidates: Iterable[tuple[float, int, int]], beam: int, final: bool
) -> tuple[list[tuple[float, int, int]], list[tuple[float, int, int]]]:
    """Part one sentence's candidates, best first, into those that end and the `beam` that go on.

    A candidate is (log-probability, number of the prefix it continues, token). Only the `beam` best
    may end. At the `final` step all of those do. Where too few go on, impossible ones fill the room.
    """
    ended, going = [], []
    for rank, (log_prob, origin, token) in enumerate(candidates):
        if token == EOS or final:
            if rank < beam and log_prob > -math.inf:
                ended.append((log_prob, origin, token))
        elif len(going) < beam:
            going.append((log_prob, origin, token))
    return ended, going + [(-math.inf, 0, PAD)] * (beam - len(going))


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

    At each step every unfinished prefix is continued by every token, and the `beam` best
    continuations of each sentence are kept. One that ends is set aside with its score. A sentence
    is done when `beam` hypotheses have ended, so that a beam of 1 is greedy decoding. Dropout is off
    while it runs. `alpha` is the length penalty (after Wu et al. 2016; §6.1 uses a beam of 4 and 0.6).
    """
    if beam < 1:
        raise ValueError(f"a beam holds at least 1 hypothesis, not {beam}")
    with dropout_off(model):
        B, K, device = src.size(0), beam, src.device
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
            total = scores.unsqueeze(-1) + log_probs.view(B, K, V)  # (B, K, V)
            # 2K candidates: even if K of them end, K unfinished ones remain.
            best, flat = total.view(B, -1).topk(min(2 * K, K * V), dim=-1)  # (B, 2K) each
            rows = zip(best.tolist(), (flat // V).tolist(), (flat % V).tolist(), strict=True)
            kept = []
            for b, row in enumerate(rows):
                ended, going = sift(zip(*row, strict=True), K, final=step == max_len)
                if len(finished[b]) < K:  # else this sentence is done
                    for log_prob, k, token in ended:
                        prefix = ids[b * K + k, 1:].tolist()
                        finished[b].append(hypothesis([*prefix, token], log_prob))
                kept += [(log_prob, b * K + k, token) for log_prob, k, token in going]
            if all(len(found) >= K for found in finished):
                break
            log_prob, origin, token = zip(*kept, strict=True)  # B·K each
            chosen = torch.tensor(origin, device=device)  # (B·K,)
            ids = torch.cat((ids[chosen], ids.new_tensor(token).unsqueeze(1)), dim=1)
            scores = scores.new_tensor(log_prob).view(B, K)
    return [sorted(found, key=lambda h: -h.score(alpha))[:beam] for found in finished]


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
def decode_rows(
    trained: Trained,
    rows: Sequence[Sequence[int]],
    search: Callable[[EncoderDecoder, Tensor, Tensor, int], list[Sequence[int]]],
    batch_size: int = 64,
) -> list[str]:
    """Encoded sources to texts, in their order, by `search` over batches of similar length.

    `search` takes (model, src (B, S), src_mask (B, 1, S), max_len) and gives each source's ids. What
    holds no token but eos becomes the empty text, without asking the model.
    """
    device = next(trained.model.parameters()).device
    order = sorted((i for i, row in enumerate(rows) if len(row) > 1), key=lambda i: len(rows[i]))
    out = [""] * len(rows)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        src = pad_rows([rows[i] for i in chosen]).to(device)  # (B, S)
        limit = min(MAX_LEN, 2 * src.size(1) + 10)
        found = search(trained.model, src, padding_mask(src), limit)
        for i, ids in zip(chosen, found, strict=True):
            out[i] = trained.tokenizer.decode(ids)
    return out


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
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be from 0 to 2^63 - 1, not {self.seed}")
        if not self.sample and (self.temperature != 1 or self.top_k is not None):
            raise ValueError("temperature and top_k are for sampling: add --sample")

    def searcher(
        self, device: torch.device | str = "cpu"
    ) -> Callable[[EncoderDecoder, Tensor, Tensor, int], list[Sequence[int]]]:
        """The search that these options describe, as `decode_rows` wants it."""
        generator = torch.Generator(device=device).manual_seed(self.seed)

        def search(model, src, src_mask, max_len):
            if self.sample:
                how = (self.temperature, self.top_k, generator)
                return sample_decode(model, src, src_mask, max_len, *how).tolist()
            if self.beam == 1:
                return greedy_decode(model, src, src_mask, max_len).tolist()
            found = beam_search(model, src, src_mask, max_len, self.beam, self.alpha)
            return [hypotheses[0].ids if hypotheses else () for hypotheses in found]

        return search

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
    device = next(trained.model.parameters()).device
    return decode_rows(trained, rows, options.searcher(device), batch_size)


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
@dataclass
class TranslateOptions(DecodeOptions):
    """Options of `translate`."""

    model: str | None = None
    """A model's folder; by default the best one that ships."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, …"""


@dataclass
class EvaluateOptions(TranslateOptions):
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
def parse_command(argv: Sequence[str] | None = None) -> tuple[list[str], TranslateOptions]:
    """The command line to texts (for `translate`) and options, whose class says which command it is.

    Raises ValueError for what it does not understand.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(
        prog="ch09_decoding_and_bleu.py",
        description="Translate from German to English, or measure how well a model does.",
        exit_on_error=False,
    )
    commands = parser.add_subcommands(required=True, metavar="COMMAND")
    kinds = {"translate": TranslateOptions, "evaluate": EvaluateOptions}
    for name, kind in kinds.items():
        part = ArgumentParser(exit_on_error=False, description=f"Options of `{name}`.")
        if name == "translate":
            texts = "Texts, each a line of output; without any, lines of standard input."
            part.add_argument("text", nargs="*", type=str, help=texts)
        part.add_class_arguments(kind, skip={"sample"})
        part.add_argument("--sample", action="store_true", help="Draw each token.")
        helps = {"translate": "translate texts", "evaluate": "sacreBLEU on a corpus, or on files"}
        commands.add_subcommand(name, part, help=helps[name])
    try:
        parsed = parser.parse_args(list(sys.argv[1:] if argv is None else argv)).as_dict()
    except ArgumentError as error:
        raise ValueError(" ".join(str(error).split())) from error
    chosen = parsed[parsed["subcommand"]]
    texts = chosen.pop("text", [])
    return texts, kinds[parsed["subcommand"]](**chosen)


# %%
def open_model(options: TranslateOptions) -> Trained:
    """The model that the options name. Raises ValueError or FileNotFoundError where it is unfit."""
    folder = Path(options.model) if options.model else default_model()
    device = pick_device(options.device)
    try:
        return load_model(folder, device)
    except (
        RuntimeError,
        TypeError,
        ZeroDivisionError,
    ) as error:  # a tokenizer or config that is damaged
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{folder} can't be loaded ({reason}): train it again") from error


# %%
def cut_rows(trained: Trained, lines: Sequence[str], first: int = 1) -> list[list[int]]:
    """Encoded lines, cut to what the model takes, with a note on standard error for each that was.

    `first` is the number of the first line. Raises ValueError for what is no valid text.
    """
    rows = []
    for number, line in enumerate(lines, start=first):
        try:
            tokens = len(trained.tokenizer.encode(line)) + 1  # and eos
        except UnicodeEncodeError as error:
            raise ValueError(f"line {number} is not UTF-8: convert it first") from error
        if tokens > MAX_LEN:
            note = (
                f"note: line {number} has {tokens} tokens; only the first {MAX_LEN} are translated"
            )
            print(note, file=sys.stderr)
        rows.append(source_ids(line, trained.tokenizer))
    return rows


# %%
def standard_input() -> Iterator[str]:
    """The lines of standard input, which only a newline separates. Raises ValueError where not UTF-8."""
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            yield line.removesuffix(b"\n").decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"line {number} is not UTF-8: convert it first") from error


# %%
def run_translate(texts: Sequence[str], options: TranslateOptions) -> None:
    """Print a line for each line of `texts`, or of standard input where there are none."""
    trained = open_model(options)
    search = options.searcher(next(trained.model.parameters()).device)
    if texts:
        lines = (line for text in texts for line in text.split("\n"))
    else:
        lines = standard_input()
    group = 1 if not texts and sys.stdin.isatty() else 512  # a person sees each answer at once
    first = 1
    while some := list(itertools.islice(lines, group)):
        for translation in decode_rows(trained, cut_rows(trained, some, first), search):
            print(translation, flush=group == 1)
        first += len(some)


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
def run_evaluate(options: EvaluateOptions) -> None:
    """Translate, and print sacreBLEU with its signature and the first few translations."""
    trained = open_model(options)
    search = options.searcher(next(trained.model.parameters()).device)
    for name, pairs in pairs_to_score(options, trained).items():
        print(f"translating {len(pairs):,} lines of {name}", file=sys.stderr)
        sources, references = zip(*pairs, strict=True)
        outputs = decode_rows(trained, cut_rows(trained, sources), search)
        bleu = corpus_bleu(outputs, references)
        print(f"{name}: BLEU {bleu.score:.2f}  {options.in_words()}  ({bleu.signature})")
        for source, reference, output in list(zip(sources, references, outputs, strict=True))[:3]:
            print(f"\n  source       {source}\n  reference    {reference}\n  translation  {output}")


# %%
def main(argv: Sequence[str] | None = None) -> int:
    """The command: `translate` or `evaluate`. Returns the exit code, 2 after an error."""
    try:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(encoding="utf-8")  # whatever the terminal's locale says
        texts, options = parse_command(argv)
        if isinstance(options, EvaluateOptions):
            run_evaluate(options)
        else:
            run_translate(texts, options)
    except (ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


# %%
def wrong_translate(trained: Trained, sentences: Sequence[str]) -> list[str]:
    """Greedy decoding that forgets `.eval()`: in train mode dropout strikes at every step."""
    out = []
    with torch.no_grad():
        for sentence in sentences:
            src = torch.tensor([source_ids(sentence, trained.tokenizer)])  # (1, S)
            out.append(trained.tokenizer.decode(wrong_greedy(trained.model, src, 40)[0].tolist()))
    return out


# %%
def wrong_average(tensors: Sequence[Tensor]) -> Tensor:
    """Averages as they come in, two by two: the last one gets half of all the weight."""
    mean = tensors[0]
    for tensor in tensors[1:]:
        mean = (mean + tensor) / 2
    return mean
