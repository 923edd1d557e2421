"""Translating a test set against CTranslate2: `python -m scripts.studies.race_decoding`.

Whole files, and one sentence at a time, with the same weights in 32 and in 8 bits. Where 8 bits
are slow our search in 8 bits is left out. It needs the packages of
`pip install -e '.[bench]'`, and a quarter of an hour.
"""

import itertools
import operator
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scripts.book.command import Command
from scripts.book.figures.decoding import speed_frame
from scripts.book.records import provenance, save_record
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch07_multi30k import pad_rows
from scripts.ch08_decoding import best_ids
from scripts.ch14_leaving_home import export_ctranslate2
from scripts.core.models import STUDIED, Trained
from scripts.core.scores import held_out_splits
from scripts.corpora.load import load_corpus
from scripts.fast.decoding import fast_in_8_bits
from scripts.fast.export import need_packages
from scripts.fast.translating import DecodeOptions, ModelOptions, decode_ids, open_model
from scripts.studies.searches import scores_of
from scripts.studies.subject import Corpus, Rows, SaveOptions, encoded
from scripts.studies.turns import in_turns, seconds_of

EXACT = "ours, exact stop"  # differs only for a beam
BEAMS, BATCHES = (1, 4), (16, 32, 64, 128, 256)
Pair = tuple[Sequence[int], str]  # an encoded source, and its reference
Way = Callable[[Rows, int], Rows]  # (encoded sources, beam) to ids


def textbook(trained: Trained, rows: Rows, beam: int) -> Rows:
    """Chapter 8's searches, which recompute the prefix: 64 sentences a batch, with a beam 32."""
    texts: list[Sequence[int]] = []
    size = 64 if beam == 1 else 32
    for start in range(0, len(rows), size):
        src = pad_rows(rows[start : start + size])  # (B, S)
        texts += best_ids(trained.model, src, beam)
    return texts


def ours(trained: Trained, precision: str, rows: Rows, beam: int, exact: bool = False) -> Rows:
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

    def __call__(self, rows: Rows, beam: int) -> Rows:
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

    def tune(self, rows: Rows) -> None:
        """From now on, take the batches that are fastest for `rows`."""
        for beam in BEAMS:
            seconds = {}
            for size in BATCHES:
                self.batch[beam] = size
                seconds[size] = min(seconds_of(partial(self, rows, beam)) for _ in range(2))
            self.batch[beam] = min(seconds, key=seconds.get)


def texts_of(trained: Trained, ids: Rows) -> list[str]:
    """What was written, as texts."""
    return [trained.tokenizer.decode(list(row)) for row in ids]


def race(
    ways: Mapping[str, Way], pairs: Sequence[Pair], trained: Trained, rounds: int, threads: int
) -> list[dict[str, Any]]:
    """Ways and beams in turns: seconds of each round, BLEU, and how many texts equal ours."""
    rows, references = zip(*pairs, strict=True)
    written: dict[tuple[str, int], Rows] = {}

    def lap(name: str, beam: int) -> float:
        torch.set_num_threads(threads)  # CTranslate2 sets it to its own, for the whole process
        start = time.perf_counter()
        written[name, beam] = ways[name](rows, beam)
        return round(time.perf_counter() - start, 4)

    jobs = [(name, beam) for beam in BEAMS for name in ways if (name, beam) != (EXACT, 1)]
    times = in_turns({job: partial(lap, *job) for job in jobs}, rounds)
    texts = {job: texts_of(trained, ids) for job, ids in written.items()}
    return [
        {
            "program": name,
            "beam": beam,
            "sentences": len(rows),
            "sentences_per_second": round(len(rows) / statistics.median(seconds), 2),
            "seconds": seconds,
            "bleu": scores_of(texts[name, beam], references)["bleu"],
            "same_as_ours": sum(map(operator.eq, texts[name, beam], texts["ours, float32", beam])),
        }
        for (name, beam), seconds in times.items()
    ]


def one_at_a_time(ways: Mapping[str, Way], rows: Rows) -> list[dict[str, Any]]:
    """Milliseconds for a sentence alone, on one thread: median and 99th percentile.

    The programs take turns, sentence by sentence.
    """
    reports = []
    for beam in BEAMS:
        times: dict[str, list[float]] = {name: [] for name in ways}
        for row, (name, way) in itertools.product(rows, ways.items()):
            torch.set_num_threads(1)
            times[name].append(1000 * seconds_of(partial(way, [row], beam)))
        for name, (_, *others) in times.items():  # the first warms up
            cuts = statistics.quantiles(others, n=100)
            p50, p99 = round(cuts[49], 2), round(cuts[98], 2)
            reports.append({"program": name, "beam": beam, "p50": p50, "p99": p99})
    return reports


def race_decoding(
    trained: Trained, corpus: Corpus, sentences: int = 1000, rounds: int = 5
) -> dict[str, Any]:
    """The record: whole files, and one sentence at a time."""
    split, threads = held_out_splits(corpus)[0], torch.get_num_threads()
    pairs = list(zip(*encoded(trained, corpus[split][:sentences]), strict=True))
    whole, few = (
        sorted(some, key=lambda pair: -len(pair[0]))
        for some in (pairs, pairs[: min(300, len(pairs) // 2)])
    )
    kinds = ("float32", "int8") if fast_in_8_bits() else ("float32",)
    own = {f"ours, {kind}": partial(ours, trained, kind) for kind in kinds}
    exact = {EXACT: partial(ours, trained, "float32", exact=True)}
    plain = {"textbook": partial(textbook, trained)}
    with tempfile.TemporaryDirectory() as folder:
        export_ctranslate2(trained, Path(folder))
        rivals, single = (
            {f"CTranslate2, {k}": CTranslate2(trained, folder, k, n) for k in ("float32", "int8")}
            for n in (threads, 1)
        )
        for rival in rivals.values():
            rival.tune([row for row, _ in few])
        reports = race(own | rivals | exact, whole, trained, rounds, threads)
        reports += race(own | rivals, few, trained, rounds, threads)
        # The textbook takes minutes: one round, on fewer sentences.
        reports += race(own | plain, few[::3], trained, 1, threads)
        latency = one_at_a_time(own | single, [row for row, _ in pairs[::5]])
    torch.set_num_threads(threads)
    return {
        "corpus": trained.config.corpus,
        "split": split,
        "sentences": len(whole),
        "reports": reports,
        "one_at_a_time": latency,
    }


def run_race(options: SaveOptions) -> None:
    """Race translators of a test set, and print the table."""
    need_packages("ctranslate2", extra="bench")
    if not fast_in_8_bits():
        lack = "this machine has no fast 8-bit products (AVX512-VNNI, or AVX2 and a C compiler)"
        if options.save:  # chapters and README read a whole record
            raise ValueError(f"{lack}: the record needs them")
        print(f"left out, as {lack}: ours, int8")
    origin = provenance("python -m scripts.studies.race_decoding --save")
    trained = open_model(ModelOptions(model=str(STUDIED), device="cpu"))
    record = origin | race_decoding(trained, load_corpus("multi30k"))
    if options.save:
        save_record("decoding-speed", record)
    print(speed_frame(record).to_string(index=False))


main = Command("scripts.studies.race_decoding", SaveOptions, run_race)

if __name__ == "__main__":
    raise SystemExit(main())
