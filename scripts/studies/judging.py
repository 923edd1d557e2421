"""Where a translator errs, chapter 10's record: `python -m scripts.studies.judging --save true`."""

if __name__ == "__main__":  # first, so that Ctrl-C while libraries load is answered, too
    from scripts.book.command import launch

    raise SystemExit(launch("scripts.studies.judging"))

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scripts.book.command import as_typed, read, serve
from scripts.book.records import provenance, save_record, sha256
from scripts.ch07_multi30k import source_ids, word_tokenizer
from scripts.ch09_training_run import Trained, corpus_bleu, held_out_splits
from scripts.ch10_decoding_and_bleu import (
    DecodeOptions,
    beam_against_greedy,
    bleu_by_length,
    corpus_chrf,
    decode_hypotheses,
    default_model,
    forced_texts,
    penalty_sweep,
    ranked_texts,
    recall_by_frequency,
)
from scripts.corpora.load import load_corpus
from scripts.translate import open_model


def scores_of(outputs: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """BLEU, lower-cased BLEU, chrF2, and tokens of output for each token of reference."""
    bleu = corpus_bleu(outputs, references)
    return {
        "bleu": round(bleu.score, 2),
        "bleu_lowercased": round(corpus_bleu(outputs, references, lowercase=True).score, 2),
        "chrf2": round(corpus_chrf(outputs, references).score, 2),
        "length_ratio": round(bleu.sys_len / bleu.ref_len, 4),
    }


BEAMS = (1, 2, 3, 4, 5, 8, 12)


def beam_sweep(
    trained: Trained,
    pairs: Sequence[tuple[str, str]],
    beams: Sequence[int] = BEAMS,
    alpha: float = 0.6,
) -> tuple[list[dict[str, float]], dict[int, list[str]]]:
    """Scores and seconds for each width of the beam, and each width's outputs.

    Seconds are the processor's own on a CPU, where others may be at work too, else the clock's.
    """
    clock = time.process_time if trained.device.type == "cpu" else time.perf_counter
    rows = [source_ids(source, trained.tokenizer) for source, _ in pairs]
    references = [reference for _, reference in pairs]
    decode_hypotheses(trained, rows[:32], DecodeOptions(beam=1))  # whatever the first call sets up
    table, outputs = [], {}
    for beam in beams:
        start = clock()
        found = decode_hypotheses(trained, rows, DecodeOptions(beam=beam, alpha=alpha))
        seconds = clock() - start
        outputs[beam] = ranked_texts(trained, found, alpha)
        table.append({"beam": beam} | scores_of(outputs[beam], references) | {"seconds": seconds})
        print(f"beam {beam}: BLEU {table[-1]['bleu']}, {seconds:.1f} s", file=sys.stderr)
    return table, outputs


def worst_and_best(
    outputs: Sequence[str], references: Sequence[str], count: int = 10
) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Numbers and chrF2 of the worst and the best sentences; among equals the longest is best."""
    from sacrebleu.metrics import CHRF

    metric = CHRF()
    scores = [
        round(metric.sentence_score(output, [reference]).score, 1)
        for output, reference in zip(outputs, references, strict=True)
    ]
    order = sorted(range(len(scores)), key=lambda i: (scores[i], len(references[i]), i))
    ranked = [(i, scores[i]) for i in order]
    return ranked[:count], ranked[::-1][:count]


def many_figures(
    trained: Trained, pairs: Sequence[tuple[str, str]], outputs: Sequence[str]
) -> dict[str, float]:
    """What else is called BLEU: the same outputs, and teacher forcing's, scored in other ways."""
    references = [reference for _, reference in pairs]
    spacy_texts = [
        [" ".join(word_tokenizer("en")(text)) for text in side] for side in (outputs, references)
    ]
    pieces = [
        [" ".join(trained.tokenizer.pieces(t)) for t in side] for side in (outputs, references)
    ]
    as_is = {"tokenize": "none", "force": True}
    sentences = [corpus_bleu([o], [r]).score for o, r in zip(outputs, references, strict=True)]
    figures = {
        "BLEU: cased, 13a, whole corpus": corpus_bleu(outputs, references).score,
        "lower-cased": corpus_bleu(outputs, references, lowercase=True).score,
        "spaCy's tokens": corpus_bleu(*spacy_texts, **as_is).score,
        "spaCy's tokens, lower-cased": corpus_bleu(*spacy_texts, lowercase=True, **as_is).score,
        "sub-word pieces": corpus_bleu(*pieces, **as_is).score,
        "letters": corpus_bleu(outputs, references, tokenize="char").score,
        "mean of the sentences' BLEU": sum(sentences) / len(sentences),
        "teacher-forced": corpus_bleu(forced_texts(trained, pairs), references).score,
    }
    return {name: round(score, 2) for name, score in figures.items()}


@dataclass
class AnalyseOptions:
    """What is translated, and by which model."""

    model: str | None = None
    """A model's folder; by default the best one that ships."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, …"""
    corpus: Literal["sample", "multi30k"] = "multi30k"
    """What to translate, and whose training split says which words are rare."""
    split: str | None = None
    """One split of it; by default the first test split."""
    sentences: int | None = None
    """Only the split's first so many."""
    save: bool = False
    """Keep the result as results/decoding-CORPUS.json, which the chapter shows."""


QUOTED = 5  # sentences in full at either end; the corpus is not ours to publish


def listed(
    found: Sequence[tuple[int, float]],
    pairs: Sequence[tuple[str, str]],
    outputs: Sequence[str],
) -> list[dict[str, Any]]:
    """Line numbers (from 1) and scores for the record; the first `QUOTED` with their texts."""
    rows: list[dict[str, Any]] = [{"line": i + 1, "chrf2": score} for i, score in found]
    for row, (i, _) in list(zip(rows, found, strict=True))[:QUOTED]:
        row |= {"source": pairs[i][0], "reference": pairs[i][1], "output": outputs[i]}
    return rows


def analyse_model(
    trained: Trained, corpus: dict[str, list[tuple[str, str]]], options: AnalyseOptions
) -> dict[str, Any]:
    """All that the record says about a model's translations of a split, but where they came from.

    Raises ValueError for an unknown split, or no sentences.
    """
    split = options.split or held_out_splits(corpus)[0]
    if split not in corpus:
        raise ValueError(f"no split {split!r}: choose from {', '.join(corpus)}")
    if options.sentences is not None and options.sentences < 1:
        raise ValueError(f"sentences must be at least 1, not {options.sentences}")
    pairs = corpus[split][: options.sentences]
    sources, references = (list(side) for side in zip(*pairs, strict=True))
    beams, outputs = beam_sweep(trained, pairs)
    greedy_seconds = beams[0]["seconds"]
    for row in beams:
        row["time_to_greedy"] = round(row.pop("seconds") / greedy_seconds, 2)
    chosen = outputs[5]
    rows = [source_ids(source, trained.tokenizer) for source in sources]
    penalties = [
        {"alpha": alpha} | scores_of(texts, references)
        for alpha, texts in penalty_sweep(trained, rows).items()
    ]
    worst, best = worst_and_best(chosen, references)
    return {
        "corpus": options.corpus,
        "split": split,
        "sentences": len(pairs),
        "search": "beam 5, alpha 0.6",
        "signatures": {
            "bleu": corpus_bleu(chosen, references).signature,
            "bleu_lowercased": corpus_bleu(chosen, references, lowercase=True).signature,
            "chrf2": corpus_chrf(chosen, references).signature,
        },
        "beams": beams,
        "penalties": penalties,
        "beam_against_greedy": beam_against_greedy(outputs[1], chosen, references),
        "figures": many_figures(trained, pairs, chosen),
        "lengths": bleu_by_length(sources, chosen, references),
        "frequencies": recall_by_frequency(
            chosen, references, (english for _, english in corpus["train"])
        ),
        "exact": sum(o == r for o, r in zip(chosen, references, strict=True)),
        "worst": listed(worst, pairs, chosen),
        "best": listed(best, pairs, chosen),
    }


def run_analyse(options: AnalyseOptions) -> dict[str, Any]:
    """The analysis as a record, which is saved if the options say so."""
    folder = Path(options.model) if options.model else default_model()
    trained = open_model(options)
    corpus = load_corpus(options.corpus)
    record = {
        **provenance(as_typed(__name__, options), trained.device),
        "model": folder.resolve().name,
        "weights_sha256": sha256(folder / "model.safetensors"),
        **analyse_model(trained, corpus, options),
    }
    if options.save:
        save_record(f"decoding-{options.corpus}", record)
    five = next(row for row in record["beams"] if row["beam"] == 5)
    against = record["beam_against_greedy"]
    print(f"{record['split']}, {record['sentences']:,} sentences, {record['search']}:")
    print(f"BLEU {five['bleu']:.2f} ({record['signatures']['bleu']}), chrF2 {five['chrf2']:.2f}")
    print(f"against greedy decoding {against['difference']:+.2f} BLEU, p = {against['p']:.4f}")
    return record


def parse(argv: Sequence[str]) -> AnalyseOptions:
    """The command line to its options. Raises ValueError for what makes no sense."""
    about = "Translate a test set in many ways and say where the model errs (minutes)."
    return read(__name__, AnalyseOptions, argv, about)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    return serve(parse, run_analyse, argv)
