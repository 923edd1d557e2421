"""How a search changes what a model says, chapter 8's record: `python -m scripts.studies.searches`.

Beams of 1 to 100, and sampling, on validation sentences: the test set is left for what was chosen
here.
"""

import math
from collections.abc import Sequence
from operator import methodcaller
from typing import Any

from tqdm import tqdm

from scripts.ch01_attention import padding_mask
from scripts.ch06_training import BOS, EOS
from scripts.ch07_multi30k import pad_rows
from scripts.ch08_decoding import Hypothesis, dropout_off, next_log_probs
from scripts.core.models import Trained
from scripts.core.scores import corpus_bleu, corpus_chrf
from scripts.fast.translating import DecodeOptions, decode_hypotheses, decode_texts, on_threads
from scripts.studies.subject import Corpus, Rows, Texts, encoded, subject_command

SENTENCES = 300  # from the split's start
BEAMS = (1, 2, 5, 10, 20, 50, 100)
ALPHAS = (0.0, 0.6)
SAMPLINGS = (
    {"temperature": 0.3},
    {"temperature": 0.6},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0},
)
DRAWS = 4  # seeds for each way of sampling

Best = dict[tuple[int, float], list[Hypothesis]]  # by beam and α, one for each source


def searched(trained: Trained, rows: Rows, beams: Sequence[int], alphas: Sequence[float]) -> Best:
    """Each source's best hypothesis for each beam and α; an empty one if there is none.

    One search serves every α: when it stops doesn't depend on α, only the ranking does.
    """
    nothing, best = Hypothesis((), 0.0, 1), {}
    for beam in tqdm(beams, desc="beams"):
        options = DecodeOptions(beam=beam, alpha=0.0)
        lists = decode_hypotheses(trained, rows, options, nbest=beam)
        for alpha in alphas:
            score = methodcaller("score", alpha)
            best[beam, alpha] = [max(some, key=score, default=nothing) for some in lists]
    return best


def texts_of(trained: Trained, hypotheses: Sequence[Hypothesis]) -> list[str]:
    """The hypotheses as texts."""
    return [trained.tokenizer.decode(h.ids) for h in hypotheses]


def scores_of(outputs: Texts, references: Texts) -> dict[str, float]:
    """BLEU, chrF2, and tokens of output for each token of reference."""
    bleu = corpus_bleu(outputs, references)
    return {
        "bleu": round(bleu.score, 2),
        "chrf2": round(corpus_chrf(outputs, references).score, 2),
        "length_ratio": round(bleu.sys_len / bleu.ref_len, 4),
    }


def empty_log_probs(trained: Trained, rows: Rows, size: int = 64) -> list[float]:
    """log p of saying nothing, eos at once, for each encoded source."""
    log_probs: list[float] = []
    with dropout_off(trained.model):
        for start in range(0, len(rows), size):
            src = pad_rows(rows[start : start + size])  # (B, S)
            mask = padding_mask(src)  # (B, 1, S)
            memory = trained.model.encode(src, mask).detach()
            begin = src.new_full((len(src), 1), BOS)  # (B, 1)
            log_probs += next_log_probs(trained.model, memory, mask, begin)[:, EOS].tolist()
    return log_probs


def widths(trained: Trained, rows: Rows, references: Texts, best: Best) -> list[dict[str, Any]]:
    """A row of the record for each beam and α.

    `empty_likelier` is the share of sentences whose empty output has a higher probability than the
    chosen one.
    """
    nothing, table = empty_log_probs(trained, rows), []
    for (beam, alpha), some in best.items():
        likelier = [empty > h.log_prob + 1e-4 for empty, h in zip(nothing, some, strict=True)]
        row = {"beam": beam, "alpha": alpha} | scores_of(texts_of(trained, some), references)
        row["log_prob"] = round(sum(h.log_prob for h in some) / len(some), 3)
        row["empty_likelier"] = round(sum(likelier) / len(some), 4)
        table.append(row)
    return table


def drawn_texts(trained: Trained, rows: Rows, seeds: range, **settings: float) -> list[list[str]]:
    """For each seed a text drawn for each source. A seed stays on one thread."""

    def draw(seed: int) -> list[str]:
        options = DecodeOptions(beam=1, sample=True, seed=seed, **settings)
        return decode_texts(trained, rows, options)

    with dropout_off(trained.model):  # once for all threads
        return on_threads(draw, seeds)  # each has its own generator: the same on any machine


def samplings(trained: Trained, rows: Rows, references: Texts) -> list[dict[str, Any]]:
    """BLEU and chrF2 of what is drawn, for each way of drawing: means over `DRAWS` seeds."""
    table = []
    for settings in tqdm(SAMPLINGS, desc="samplings"):
        draws = drawn_texts(trained, rows, range(DRAWS), **settings)
        scores = [scores_of(texts, references) for texts in draws]
        means = {key: round(sum(s[key] for s in scores) / DRAWS, 2) for key in ("bleu", "chrf2")}
        table.append(settings | means)
    return table


def example(outputs: dict[str, list[str]]) -> dict[str, Any]:
    """The sentence that the widest beam shortens most, without emptying it: its outputs."""
    _, narrow, wide = outputs.values()

    def lost(i: int) -> float:
        return len(narrow[i].split()) - len(wide[i].split()) if wide[i] else -math.inf

    line = max(range(len(narrow)), key=lost)
    return {"line": line + 1} | {name: texts[line] for name, texts in outputs.items()}


def compare_searches(trained: Trained, corpus: Corpus) -> dict[str, Any]:
    """All that the record says about the searches."""
    rows, references = encoded(trained, corpus["val"][:SENTENCES])
    best = searched(trained, rows, BEAMS, ALPHAS)
    quoted = {"greedy": (1, 0.0), "beam 5, alpha 0.6": (5, 0.6), "beam 100, alpha 0": (100, 0.0)}
    return {
        "split": "val",
        "sentences": len(rows),
        "signatures": {
            "bleu": corpus_bleu(references, references).signature,
            "chrf2": corpus_chrf(references, references).signature,
        },
        "beams": widths(trained, rows, references, best),
        "sampling": samplings(trained, rows, references),
        "example": example({name: texts_of(trained, best[at]) for name, at in quoted.items()}),
    }


main = subject_command("scripts.studies.searches", "searches", compare_searches)

if __name__ == "__main__":
    raise SystemExit(main())
