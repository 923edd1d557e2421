"""Which of 16 draws to keep, chapter 8's record: `python -m scripts.studies.choices`.

Each way chooses among the same draws: what a vote gains can be told from what any choice gains.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from tqdm import tqdm

from scripts.ch08_decoding import Hypothesis, dropout_off, mbr_choice, sentence_chrf
from scripts.core.models import Trained
from scripts.fast.translating import DecodeOptions, decode_hypotheses, on_threads
from scripts.studies.searches import SENTENCES, scores_of
from scripts.studies.subject import Corpus, encoded, subject_command

TEMPERATURE, DRAWS, SEEDS = 0.6, 16, 4

Drawn = tuple[str, Hypothesis]


def by_score(drawn: Sequence[Drawn], alpha: float) -> str:
    """The text of the highest score."""
    return max(drawn, key=lambda pair: pair[1].score(alpha))[0]


def ways_to_choose() -> dict[str, Callable[[Sequence[Drawn]], str]]:
    """Each way's choice among a source's draws."""
    utility = cache(sentence_chrf)  # the same pairs come again
    return {
        "first draw": lambda drawn: drawn[0][0],
        "drawn most often": lambda drawn: Counter(text for text, _ in drawn).most_common(1)[0][0],
        "highest log p": partial(by_score, alpha=0.0),
        "highest log p / T": partial(by_score, alpha=1.0),
        "vote (chrF)": lambda drawn: mbr_choice([text for text, _ in drawn], utility),
    }


def compare_choices(trained: Trained, corpus: Corpus) -> dict[str, Any]:
    """BLEU and chrF2 of each way: means over the seeds, and BLEU's lowest and highest."""
    rows, references = encoded(trained, corpus["val"][:SENTENCES])

    def draw(seed: int) -> list[list[Drawn]]:
        settings = DecodeOptions(beam=1, sample=True, temperature=TEMPERATURE, seed=seed)
        best = [h[0] for h in decode_hypotheses(trained, [*rows] * DRAWS, settings)]
        drawn = [(trained.tokenizer.decode(h.ids), h) for h in best]
        return [drawn[i :: len(rows)] for i in range(len(rows))]

    with dropout_off(trained.model):  # once for all threads
        by_seed = on_threads(draw, range(SEEDS))
    table = []
    for name, choose in tqdm(ways_to_choose().items(), desc="ways"):
        scores = [scores_of([*map(choose, drawn)], references) for drawn in by_seed]
        means = {key: round(sum(s[key] for s in scores) / SEEDS, 2) for key in scores[0]}
        bleu = [s["bleu"] for s in scores]
        table.append({"choice": name} | means | {"lowest": min(bleu), "highest": max(bleu)})
    setting = {"temperature": TEMPERATURE, "draws": DRAWS, "seeds": SEEDS}
    return {"split": "val", "sentences": len(rows), **setting, "choices": table}


main = subject_command("scripts.studies.choices", "choices", compare_choices)

if __name__ == "__main__":
    raise SystemExit(main())
