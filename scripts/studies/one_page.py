"""Chapter 25's page on Multi30k: `python -m scripts.studies.one_page` (an hour or more of a CPU).

Pieces, training, searches and BLEU are the page's own, with its settings `FULL` and one seed.
"""

import time
from typing import Any

import torch
from tqdm import tqdm

from scripts import ch25_one_page as page
from scripts.core.scores import corpus_bleu, held_out_splits
from scripts.corpora.load import load_corpus
from scripts.studies.subject import record_command

BEAMS = (1, 5)


def page_on_multi30k(seed: int = 1) -> dict[str, Any]:
    """The losses of a training with `FULL`, and BLEU of both test splits, greedily and by beams."""
    start, settings, corpus = time.perf_counter(), page.FULL, load_corpus(page.FULL.corpus)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pieces = page.learn_pieces([text for pair in corpus["train"] for text in pair], settings.vocab)
    torch.manual_seed(seed)
    model = page.Transformer(settings, len(pieces)).to(device)
    pairs = page.encode_pairs(corpus["train"], pieces)
    losses = [
        {"step": step, "loss": round(loss, 4)}
        for step, loss in tqdm(page.train(model, pairs, settings), desc="sixteenths")
    ]
    train_seconds, scores = time.perf_counter() - start, []
    for split in held_out_splits(corpus):
        sources, references = zip(*corpus[split], strict=True)
        for beam in BEAMS:
            bleu = corpus_bleu(page.translate(model, pieces, sources, beam), references)
            scores.append({"split": split, "beam": beam, "bleu": round(bleu.score, 2)})
    return {
        "settings": settings._asdict(),
        "seed": seed,
        "parameters": sum(part.numel() for part in model.parameters()),
        "16-bit products": page.has_16_bits(device),
        "losses": losses,
        "train_seconds": round(train_seconds),
        "seconds": round(time.perf_counter() - start),
        "scores": scores,
        "signature": bleu.signature,
    }


main = record_command("scripts.studies.one_page", "one-page", lambda _: page_on_multi30k())

if __name__ == "__main__":
    raise SystemExit(main())
