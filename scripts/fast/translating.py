"""From sentences to translations at full speed: batches by cost, on as many threads as there are.

`DecodeOptions` says how to search; the commands are built on it. Chapter 8's `plain_translate`
does the same in a few lines.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from scripts.book.domains import check_settings, list_of_texts
from scripts.ch01_attention import padding_mask
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch04_encoder_decoder import EncoderDecoder
from scripts.ch06_training import EOS
from scripts.ch07_multi30k import pad_rows, source_ids
from scripts.ch08_decoding import Hypothesis, dropout_off, hypothesis, until_end
from scripts.ch12_going_fast import keep_memory
from scripts.core.models import DEFAULT_MODEL, Trained, load_model
from scripts.core.settings import pick_device
from scripts.fast.decoding import fast_in_8_bits, made_ready
from scripts.fast.searching import cached_beam_search, cached_greedy, cached_sample

Rows = Sequence[Sequence[int]]  # encoded sentences, each with its eos


@dataclass
class DecodeOptions:
    """How to search: options of the command. Raises ValueError for what makes no sense."""

    beam: int | None = None
    """Hypotheses kept at each step; 1 is greedy decoding; by default the model's own."""
    alpha: float | None = None
    """Length penalty: a score is divided by length^alpha; by default the model's own."""
    sample: bool = False
    """Draw each token instead of searching for the best text."""
    temperature: float = 1.0
    """With --sample: below 1 likely tokens gain, above 1 unlikely ones; 0: the likeliest alone."""
    top_k: int | None = None
    """With --sample: draw from the k likeliest tokens only; 0: from all."""
    top_p: float | None = None
    """With --sample: draw from the fewest tokens that sum to this much probability; 1: from all."""
    exact: bool = False
    """Stop a beam only when nothing in it can overtake what has ended."""
    seed: int = 0
    """With --sample: decides the draws."""
    precision: Literal["auto", "float32", "int8"] = "float32"
    """Of products; auto: int8 if that is exact and fast, but float32 with --sample."""

    def __post_init__(self):
        check_settings(self)
        if not self.sample and (self.temperature, self.top_k or 0, self.top_p or 1) != (1, 0, 1):
            raise ValueError("temperature, top_k and top_p are for sampling: add --sample")

    def precision_on(self, device: torch.device) -> str:
        """The precision on `device`, decided.

        Raises ValueError for 8 bits where 32 are faster. To measure that, search with
        `prepared(trained, "int8")`.
        """
        suits = device.type == "cpu" and fast_in_8_bits()
        if self.precision == "auto":
            return "int8" if suits and not self.sample else "float32"
        if self.precision == "int8" and not suits:
            need = "it takes AVX512-VNNI, or AVX2 and a C compiler"
            raise ValueError(f"{device} isn't fast in 8 bits, as {need}: use --precision auto")
        return self.precision

    def of(self, trained: Trained) -> "DecodeOptions":
        """These options, with beam and length penalty decided."""
        beam = trained.config.beam if self.beam is None else self.beam
        alpha = trained.config.alpha if self.alpha is None else self.alpha
        return replace(self, beam=beam, alpha=alpha)

    def search(self, device: torch.device) -> Callable[..., list[list[Hypothesis]]]:
        """The search that decided options describe: each source's hypotheses, best first."""
        if not self.sample:
            return partial(cached_beam_search, beam=self.beam, alpha=self.alpha, exact=self.exact)
        generator = torch.Generator(device).manual_seed(self.seed)
        draws = (self.temperature, self.top_k or 0, self.top_p or 1.0, generator)

        def draw(model, src, src_mask, max_len):
            ids, log_probs = cached_sample(model, src, src_mask, max_len, *draws)
            rows = zip(map(until_end, ids.tolist()), log_probs.tolist(), strict=True)
            return [[hypothesis(text, log_prob)] for text, log_prob in rows]

        return draw

    def in_words(self) -> str:
        """The decided search in words, for a line of output."""
        if self.sample:
            top = f", top {self.top_k}" if self.top_k else ""
            top += f", nucleus {self.top_p:g}" if self.top_p else ""
            return f"sampled at temperature {self.temperature:g}{top}, seed {self.seed}"
        if self.beam == 1:
            return "greedy"
        return f"beam {self.beam}, alpha {self.alpha:g}" + ", exact stop" * self.exact


FULL = "lower --beam, or use --device cpu"  # if a GPU's memory is too small


@dataclass
class ModelOptions(DecodeOptions):
    """Which model, and how it searches."""

    model: str | None = None
    """A model's folder; by default the best one that ships."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, …"""


def model_folder(options: ModelOptions) -> Path:
    """The folder of the model that the options name."""
    return Path(options.model) if options.model else DEFAULT_MODEL


def open_model(options: ModelOptions) -> Trained:
    """The model that the options name. Raises ValueError or FileNotFoundError if it is unfit."""
    keep_memory()
    device = pick_device(options.device)
    options.precision_on(device)  # an unfit one is refused now, not after the first line
    return load_model(model_folder(options), device)


CELLS_READ = 2**14  # source positions of a batch, padding included: enough to keep a core busy
PREFIXES = 2048  # that are continued together
CELLS_SEEN = 2**16  # prefixes times source positions: what attention's memory grows with
STEP_COST = 16  # what a step costs besides its prefixes, in prefixes: it reads the weights


def cut_by_cost(lengths: Sequence[int], width: int, most: float) -> list[int]:
    """Where to cut `lengths`, longest first, into the fewest batches that fit and cost ≤ `most`.

    Returns each batch's end. A batch of n sources up to L tokens long, `width` prefixes each, costs
    its tokens times `width`, and `STEP_COST` for each of about L steps.
    """
    ends, start, tokens = [], 0, 0
    for i, length in enumerate(lengths):
        longest, count = lengths[start], i + 1 - start
        cells, prefixes = count * longest, count * width
        fits = cells <= CELLS_READ and prefixes <= PREFIXES and cells * width <= CELLS_SEEN
        cheap = (tokens + length) * width + STEP_COST * longest <= most
        if i > start and not (fits and cheap):
            ends.append(i)
            start, tokens = i, 0
        tokens += length
    return [*ends, len(lengths)]


def length_batches(rows: Rows, width: int, cores: int = 1) -> list[list[int]]:
    """Indices of `rows` in batches of similar length, the longest first; `width` prefixes a row.

    There are as few as memory allows, but equally many for each core, and the dearest is as cheap
    as it can be, so that the cores finish together. A row without any token is in none.
    """
    order = sorted((i for i, row in enumerate(rows) if len(row) > 1), key=lambda i: -len(rows[i]))
    lengths = [len(rows[i]) for i in order]
    batches = cores * math.ceil(len(cut_by_cost(lengths, width, math.inf)) / cores)
    dearest = sum(lengths) * width + STEP_COST * max(lengths, default=0)

    def few_enough(most: int) -> bool:
        return len(cut_by_cost(lengths, width, most)) <= batches

    # The least cost of the dearest batch with which there are no more batches than that.
    ends = cut_by_cost(lengths, width, bisect_left(range(dearest), True, key=few_enough))
    return [order[a:b] for a, b in itertools.pairwise([0, *ends]) if a < b]


def on_threads(work: Callable[[Any], Any], jobs: Sequence[Any]) -> list[Any]:
    """`work(job)` of each job, in order: each on one thread, as many at once as PyTorch may use."""
    threads = torch.get_num_threads()
    if threads == 1 or len(jobs) < 2:
        return [work(job) for job in jobs]
    alone = partial(torch.set_num_threads, 1)
    try:
        with ThreadPoolExecutor(min(threads, len(jobs)), initializer=alone) as pool:
            return list(pool.map(work, jobs))
    finally:
        torch.set_num_threads(threads)


def search_rows(
    model: EncoderDecoder,
    rows: Rows,
    search: Callable[[EncoderDecoder, Tensor, Tensor, int], Sequence[Any]],
    width: int = 1,
    in_order: bool = False,
) -> list[Any]:
    """What `search` finds for each encoded source, in their order; None for one without any token.

    `search` takes (model, src (B, S), src_mask (B, 1, S), max_len), continues `width` prefixes of
    each source at once and gives a result for each. With `in_order` batches come one after the
    other, the same on every machine, as draws from one generator must. A text that doesn't end
    is cut at a length set by its batch's longest source, so its neighbours decide it.
    """
    device = next(model.parameters()).device
    cores = 1 if in_order or device.type != "cpu" else torch.get_num_threads()
    batches = length_batches(rows, width, cores)
    ready = made_ready(model)

    def find(batch: list[int]) -> Sequence[Any]:
        src = pad_rows([rows[i] for i in batch]).to(device)  # (B, S)
        return search(ready, src, padding_mask(src), min(MAX_LEN, 2 * src.size(1) + 10))

    results: list[Any] = [None] * len(rows)
    with dropout_off(model):  # once for all threads: none may switch it back on for the others
        answers = on_threads(find, batches) if cores > 1 else list(map(find, batches))
    for i, result in zip(itertools.chain(*batches), itertools.chain(*answers), strict=True):
        results[i] = result
    return results


def prepared(trained: Trained, precision: str = "float32") -> nn.Module:
    """The model made ready once, and again if weights changed."""
    parts = [*trained.model.parameters()]
    now = [(p.data_ptr(), p._version) for p in parts]
    small = torch.cat([p.detach() for p in parts if p.dim() == 1])  # fused optimizers count nothing
    before, bias, ready = trained.ready.get(precision, (None, small, None))
    if before != now or not bias.equal(small):
        ready = made_ready(trained.model, precision)
        trained.ready[precision] = now, small, ready
    return ready


def decode_hypotheses(
    trained: Trained, rows: Rows, options: DecodeOptions, nbest: int = 1
) -> list[list[Hypothesis]]:
    """Up to `nbest` hypotheses for each encoded source, best first; none if it has no token."""
    options = options.of(trained)
    width, search = 1 if options.sample else options.beam, options.search(trained.device)
    ready = prepared(trained, options.precision_on(trained.device))
    results = search_rows(ready, rows, search, width, in_order=options.sample)
    return [(hypotheses or [])[:nbest] for hypotheses in results]


def decode_ids(trained: Trained, rows: Rows, options: DecodeOptions) -> list[Sequence[int]]:
    """The best text's ids for each encoded source, in order; none for what has no token."""
    options = options.of(trained)
    if options.beam > 1 or options.sample:
        return [best[0].ids if best else [] for best in decode_hypotheses(trained, rows, options)]
    ready = prepared(trained, options.precision_on(trained.device))
    texts = search_rows(ready, rows, cached_greedy)  # its probabilities aren't needed
    return [[] if ids is None else ids.tolist() for ids in texts]


def decode_texts(trained: Trained, rows: Rows, options: DecodeOptions) -> list[str]:
    """The best text for each encoded source, in order; what has no token becomes the empty text."""
    return [trained.tokenizer.decode(ids) for ids in decode_ids(trained, rows, options)]


def translate(
    trained: Trained, sentences: Sequence[str], options: DecodeOptions | None = None
) -> list[str]:
    """Translations of `sentences`, in their order; a text without any token stays empty.

    Raises ValueError for a text of more than `MAX_LEN` tokens, eos included.
    """
    sentences = list_of_texts("sentences", sentences)
    rows = [[*trained.tokenizer.encode(sentence), EOS] for sentence in sentences]
    for number, row in enumerate(rows, start=1):
        if len(row) > MAX_LEN:
            size = f"sentence {number} has {len(row)} tokens, and the model takes {MAX_LEN}"
            raise ValueError(f"{size}: split it")
    return decode_texts(trained, rows, options or DecodeOptions())


def fast_translate(
    trained: Trained, sentences: Sequence[str], beam: int = 1, alpha: float = 0.6
) -> list[str]:
    """What chapter 8's `plain_translate` gives: long sentences are cut, none is refused."""
    sentences = list_of_texts("sentences", sentences)
    rows = [source_ids(sentence, trained.tokenizer) for sentence in sentences]
    return decode_texts(trained, rows, DecodeOptions(beam=beam, alpha=alpha))
