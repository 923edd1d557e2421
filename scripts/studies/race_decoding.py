"""Translating a test set against CTranslate2: `python -m scripts.studies.race_decoding`.

Whole files, and one sentence at a time, with the same weights in 32 and in 8 bits. All programs
take turns, round after round, so that a slow minute hits all; what counts is their ratio in a
round. On a processor without AVX512-VNNI our search in 8 bits is left out, and named. It needs the
packages of `pip install -e '.[bench]'`, and a quarter of an hour.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from scripts.book.command import Command, as_typed
from scripts.book.figures.speed import speed_frame
from scripts.book.records import provenance, save_record
from scripts.ch01_attention import padding_mask
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch06_training import EOS, PAD
from scripts.ch07_multi30k import pad_rows, source_ids
from scripts.ch08_decoding import best_ids
from scripts.ch14_leaving_home import export_ctranslate2
from scripts.core.models import STUDIED, Trained
from scripts.core.scores import corpus_bleu, held_out_splits
from scripts.corpora.load import load_corpus
from scripts.fast.decoding import fast_in_8_bits
from scripts.fast.export import need_packages
from scripts.fast.translating import DecodeOptions, ModelOptions, decode_ids, open_model
from scripts.studies.race_training import account

REST = "Python and the rest"
EXACT = "ours, exact stop"  # differs only for a beam
BEAMS, BATCHES = (1, 4), (16, 32, 64, 128, 256)
Way = Callable[[Sequence[Sequence[int]], int], list]  # (encoded sources, beam) to ids


def textbook(trained: Trained, rows: Sequence[Sequence[int]], beam: int) -> list[Sequence[int]]:
    """Chapter 8's searches, which recompute the prefix: 64 sentences a batch, with a beam 32."""
    texts: list[Sequence[int]] = []
    size = 64 if beam == 1 else 32
    for start in range(0, len(rows), size):
        src = pad_rows(rows[start : start + size])  # (B, S)
        limit = min(MAX_LEN, 2 * src.size(1) + 10)
        texts += best_ids(trained.model, src, padding_mask(src), limit, beam)
    return texts


def ours(
    trained: Trained, precision: str, rows: Sequence[Sequence[int]], beam: int, exact: bool = False
) -> list[Sequence[int]]:
    """The engine's searches; the model is made ready in the first call."""
    return decode_ids(trained, rows, DecodeOptions(beam=beam, exact=exact, precision=precision))


class CTranslate2:
    """CTranslate2 on the same weights: each of `threads` workers computes batches alone."""

    def __init__(self, trained: Trained, folder: str | Path, compute_type: str, threads: int):
        from ctranslate2 import Translator

        settings = {"inter_threads": threads, "intra_threads": 1, "compute_type": compute_type}
        self.translator = Translator(str(folder), **settings)
        self.processor = trained.tokenizer.processor
        self.batch = dict.fromkeys(BEAMS, BATCHES[0])  # sentences, for each beam

    def __call__(self, rows: Sequence[Sequence[int]], beam: int) -> list[Sequence[int]]:
        """Its translations, from ids to ids."""
        pieces = [[self.processor.id_to_piece(i) for i in row[:-1]] for row in rows]  # it adds </s>
        results = self.translator.translate_batch(
            pieces,
            beam_size=beam,
            length_penalty=0.6,
            max_batch_size=self.batch[beam],
            min_decoding_length=0,
            max_decoding_length=MAX_LEN,
            max_input_length=MAX_LEN,  # its own, 1,024, is more than the model takes
        )
        return [[self.processor.piece_to_id(p) for p in r.hypotheses[0]] for r in results]

    def tune(self, rows: Sequence[Sequence[int]]) -> None:
        """From now on, take the batches that are fastest for `rows`."""
        for beam in BEAMS:
            seconds = {}
            for size in BATCHES:
                self.batch[beam] = size
                seconds[size] = min(taken(partial(self, rows, beam)) for _ in range(2))
            self.batch[beam] = min(seconds, key=seconds.get)


def taken(work: Callable[[], Any]) -> float:
    """Seconds of `work()`."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def race(
    ways: Mapping[str, Way], pairs: Sequence[tuple], trained: Trained, rounds: int, threads: int
) -> list[dict[str, Any]]:
    """Ways and beams in turns on (ids, reference): seconds a round, BLEU, texts that equal ours."""
    rows, references = zip(*pairs, strict=True)
    jobs = [(name, beam) for beam in BEAMS for name in ways if (name, beam) != (EXACT, 1)]
    seconds: dict[tuple[str, int], list[float]] = {job: [] for job in jobs}
    written: dict[tuple[str, int], list] = {}
    for name, beam in tqdm(jobs * (rounds + 1), desc=f"{len(rows)} sentences"):  # one to warm up
        torch.set_num_threads(threads)  # CTranslate2 sets it to its own, for the whole process
        start = time.perf_counter()
        written[name, beam] = ways[name](rows, beam)
        seconds[name, beam].append(round(time.perf_counter() - start, 4))
    return [
        {
            "program": name,
            "beam": beam,
            "sentences": len(rows),
            "sentences_per_second": round(len(rows) / statistics.median(times[1:]), 2),
            "seconds": times[1:],
            "bleu": bleu_of(trained, written[name, beam], references),
            "same_as_ours": equal_texts(written[name, beam], written["ours, float32", beam]),
        }
        for (name, beam), times in seconds.items()
    ]


def bleu_of(trained: Trained, ids: Sequence[Sequence[int]], references: Sequence[str]) -> float:
    """Corpus BLEU of what was written, for the record."""
    texts = [trained.tokenizer.decode(list(row)) for row in ids]
    return round(corpus_bleu(texts, references).score, 2)


def equal_texts(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> int:
    """How many of the rows hold the same tokens, however their end is marked."""
    bare = [[[t for t in row if t not in (EOS, PAD)] for row in rows] for rows in (one, other)]
    return sum(a == b for a, b in zip(*bare, strict=True))


def one_at_a_time(ways: Mapping[str, Way], rows: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Milliseconds for a sentence alone, on one thread: first, median, 99th percentile."""
    reports = []
    for beam in BEAMS:
        times = {name: [] for name in ways}
        for row in rows:
            for name, way in ways.items():
                torch.set_num_threads(1)
                times[name].append(round(1000 * taken(partial(way, [row], beam)), 2))
        for name, (first, *others) in times.items():
            cuts = statistics.quantiles(others, n=100)
            middle, slow = round(cuts[49], 2), round(cuts[98], 2)
            report = {"program": name, "beam": beam, "first": first, "p50": middle, "p99": slow}
            reports.append(report)
    return reports


def scores(trained: Trained, ways: Mapping[str, Way], corpus: Mapping[str, list]) -> list[dict]:
    """BLEU of each way and beam on the validation split and each test set."""
    reports = []
    for split in ("val", *held_out_splits(corpus)):
        rows = [source_ids(german, trained.tokenizer) for german, _ in corpus[split]]
        references = [english for _, english in corpus[split]]
        for (name, way), beam in itertools.product(ways.items(), BEAMS):
            bleu = bleu_of(trained, way(rows, beam), references)
            reports.append({"split": split, "program": name, "beam": beam, "bleu": bleu})
    return reports


KINDS = {
    "products": "*_linear_pointwise* *addmm* aten::mm* aten::linear*",
    "layers of few rows": "kernels::decode_layers kernels::apply",
    "8-bit products": "*_int_mm*",
    "rounding and scaling": "kernels::round_rows kernels::scale_sums",
    "attention": "kernels::attend *bmm* *softmax* *scaled_dot_product*",
    "best tokens": "kernels::best_of_rows *topk* *amax* aten::max* *nonzero* *vecdot* "
    "*scatter_reduce*",
    "copies": "*copy_* *index* *cat* *gather* *clone* *embedding* *fill_*",
    "LayerNorm": "*layer_norm*",
}


@dataclass
class SpeedTestOptions:
    """What races, and how often."""

    model: str | None = None
    """A model's folder; by default chapter 9's."""
    rounds: int = 5
    """Passes of each program, in turns; the median counts."""
    sentences: int = 1000
    """Of the test set. A second race takes 300 of them; a third, with the textbook, 100."""
    save: bool = False
    """Write results/decoding-speed.json; without our 8 bits, decoding-speed-float32.json."""


def race_decoding(options: SpeedTestOptions) -> dict[str, Any]:
    """The record: whole files, one sentence at a time, and where the time of ours goes."""
    need_packages("ctranslate2", extra="bench")
    trained = open_model(ModelOptions(model=options.model or str(STUDIED), device="cpu"))
    corpus = load_corpus(trained.config.corpus)
    split = held_out_splits(corpus)[0]
    pairs = [(source_ids(g, trained.tokenizer), e) for g, e in corpus[split][: options.sentences]]
    few = sorted(pairs[: min(300, len(pairs) // 2)], key=lambda pair: -len(pair[0]))
    whole = sorted(pairs, key=lambda pair: -len(pair[0]))
    kinds = ("float32", "int8") if fast_in_8_bits() else ("float32",)
    own = {f"ours, {kind}": partial(ours, trained, kind) for kind in kinds}
    threads = torch.get_num_threads()
    exact = {EXACT: partial(ours, trained, "float32", exact=True)}
    plain = {"textbook": partial(textbook, trained)}
    terms = (trained, options.rounds, threads)
    with tempfile.TemporaryDirectory() as folder:
        export_ctranslate2(trained, Path(folder))
        rivals, single = (
            {f"CTranslate2, {k}": CTranslate2(trained, folder, k, n) for k in ("float32", "int8")}
            for n in (threads, 1)
        )
        for rival in rivals.values():
            rival.tune([row for row, _ in few])
        reports = race(own | rivals | exact, whole, *terms)
        reports += race(own | rivals, few, *terms)
        # The textbook takes minutes: one round, on fewer sentences.
        reports += race(own | plain, few[::3], trained, 1, threads)
        latency = one_at_a_time(own | single, [row for row, _ in pairs[::5]])
    rows = [row for row, _ in whole]
    torch.set_num_threads(threads)
    bleu = scores(trained, own, corpus)
    torch.set_num_threads(1)  # where the time goes is asked of one thread
    return {
        "corpus": trained.config.corpus,
        "split": split,
        "sentences": len(rows),
        "left_out": [] if "int8" in kinds else ["ours, int8"],
        "batches": {name: rival.batch for name, rival in rivals.items()},
        "reports": reports,
        "one_at_a_time": latency,
        "scores": bleu,
        "accounts": {
            name: {str(beam): account(partial(way, rows, beam), KINDS, REST) for beam in BEAMS}
            for name, way in own.items()
        },
    }


def run_race(options: SpeedTestOptions) -> None:
    """Race translators of a test set, and print the table."""
    record = provenance(as_typed("scripts.studies.race_decoding", options)) | race_decoding(options)
    left_out = record["left_out"]
    if options.save:  # chapters and README read the name of a whole record
        save_record("decoding-speed" + "-float32" * bool(left_out), record)
    print(speed_frame(record).to_string(index=False))
    for name in left_out:
        print(f"left out, as this processor has no fast 8-bit products (AVX512-VNNI): {name}")


main = Command("scripts.studies.race_decoding", SpeedTestOptions, run_race)

if __name__ == "__main__":
    raise SystemExit(main())
