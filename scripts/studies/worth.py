"""Each head's worth by likelihood, chapter 16's record: `python -m scripts.studies.worth`.

How much less likely the references become, under teacher forcing, without a head: silenced, and
with its mean in its place. The means are over the same sentences.
"""

if __name__ == "__main__":  # first, so that Ctrl-C while libraries load is answered, too
    from scripts.book.command import launch

    raise SystemExit(launch("scripts.studies.worth"))

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from scipy.stats import ttest_1samp
from torch import Tensor
from tqdm import tqdm

from scripts.book.command import Command
from scripts.ch06_training import Batch
from scripts.ch07_multi30k import encode_pairs, make_batch
from scripts.ch15_looking_inside import attention_layers
from scripts.ch16_intervening import every_head, heads_silenced, reference_losses, said_by_heads
from scripts.engine.models import Trained
from scripts.studies.subject import Corpus, Pairs, StudyOptions, recorded

BATCH = 100  # sentences of similar length


def head_means(model: Any, batches: Sequence[Batch]) -> dict[str, Tensor]:
    """What each head says on average over all real positions: kind to (N, H, d_k)."""
    said = [said_by_heads(model, batch) for batch in batches]
    return {kind: torch.cat([one[kind] for one in said], dim=1).mean(1) for kind in said[0]}


def paired(changed: Tensor, whole: Tensor, tokens: int) -> tuple[float, float]:
    """The mean change in nats a token, and Student's p over the sentences' changes (n,)."""
    change = (changed - whole).double()
    p = ttest_1samp(change, 0).pvalue if change.any() else 1.0
    return change.sum().item() / tokens, float(p)


def worth_by_likelihood(trained: Trained, pairs: Pairs) -> dict[str, Any]:
    """All that the record says of the pairs, the heads and the layers."""
    model = trained.model
    examples = sorted(encode_pairs(pairs, trained.tokenizer), key=lambda one: len(one.tgt))
    starts = range(0, len(examples), BATCH)
    batches = [make_batch(examples[i : i + BATCH]).to(trained.device) for i in starts]
    tokens = sum(batch.ntokens for batch in batches)
    means, layers = head_means(model, batches), attention_layers(model)
    with torch.no_grad():
        memories = [model.encode(batch.src, batch.src_mask) for batch in batches]

    def losses(named: Sequence[tuple[str, int, int]], instead: Sequence[Tensor] = ()) -> Tensor:
        """Each sentence's loss (n,) without the named heads."""
        changed = any(kind == "encoder" for kind, _, _ in named)
        known = [None] * len(batches) if changed else memories
        with heads_silenced([(layers[kind][n], h) for kind, n, h in named], instead):
            both = zip(batches, known, strict=True)
            return torch.cat([reference_losses(model, batch, memory) for batch, memory in both])

    whole = losses([])

    def changes(named: Sequence[tuple[str, int, int]]) -> dict[str, float]:
        """Nats a token, and p, with the named heads silent, and with their means instead."""
        row = {}
        instead = [means[kind][n, h] for kind, n, h in named]
        for name, vectors in (("silent", ()), ("mean", instead)):
            change, p = paired(losses(named, vectors), whole, tokens)
            row |= {name: round(change, 5), f"{name} p": float(f"{p:.3g}")}
        return row

    heads = [
        {"kind": kind, "layer": n + 1, "head": h + 1} | changes([(kind, n, h)])
        for kind, n, h in tqdm(every_head(model), desc="heads")
    ]
    together = []
    for (kind, n), named in groupby(every_head(model), itemgetter(0, 1)):
        row = changes(list(named))
        together.append({"kind": kind, "layer": n + 1} | {k: row[k] for k in ("silent", "mean")})
    loss = round(whole.sum().item() / tokens, 5)
    return {"pairs": len(pairs), "tokens": tokens, "loss": loss, "heads": heads, "layers": together}


def validation_worth(trained: Trained, corpus: Corpus, options: StudyOptions) -> dict[str, Any]:
    """All that the record says but where it came from: of the validation split."""
    pairs = corpus["val"][: options.sentences]
    return {"split": "val", **worth_by_likelihood(trained, pairs)}


def run_worth(options: StudyOptions) -> None:
    """Make the record, save it if the options say so, and print the five dearest heads."""
    record = recorded(__name__, "worth", options, validation_worth)
    for row in sorted(record["heads"], key=lambda row: -row["silent"])[:5]:
        print(f"{row['kind']} {row['layer']}.{row['head']}: {row['silent']:+.3f} nats a token")


main = Command(__name__, StudyOptions, run_worth, "What a head is worth by likelihood (minutes).")
