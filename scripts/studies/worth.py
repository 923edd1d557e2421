"""Each head's worth by likelihood, chapter 16's record: `python -m scripts.studies.worth`.

How much less likely the references become, under teacher forcing, without a head: silenced, and
with its mean in its place. The means are over the same sentences.
"""

if __name__ == "__main__":  # first, so that Ctrl-C while libraries load is answered, too
    from scripts.book.command import launch

    raise SystemExit(launch("scripts.studies.worth"))

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from scipy.stats import ttest_1samp
from torch import Tensor
from tqdm import tqdm

from scripts.book.command import Command, as_typed
from scripts.book.records import provenance, save_record, sha256
from scripts.ch06_training import Batch
from scripts.ch07_multi30k import encode_pairs, make_batch
from scripts.ch15_looking_inside import attention_layers
from scripts.ch16_intervening import every_head, heads_silenced, reference_losses, said_by_heads
from scripts.corpora.load import load_corpus
from scripts.engine.models import Trained, default_model, load_model
from scripts.engine.settings import pick_device


@dataclass
class WorthOptions:
    """What is measured."""

    model: str | None = None
    """A model's folder; by default the best one that ships."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, …"""
    corpus: Literal["sample", "multi30k"] = "multi30k"
    """Whose validation pairs."""
    sentences: int | None = None
    """Only so many of them."""
    save: bool = False
    """Keep the result as results/worth-CORPUS.json, which the chapter shows."""


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


def worth_by_likelihood(trained: Trained, pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """All that the record says, but where it came from."""
    model = trained.model
    examples = sorted(encode_pairs(pairs, trained.tokenizer), key=lambda one: len(one.tgt))
    starts = range(0, len(examples), BATCH)
    batches = [make_batch(examples[i : i + BATCH]).to(trained.device) for i in starts]
    tokens = sum(batch.ntokens for batch in batches)
    means, layers = head_means(model, batches), attention_layers(model)
    with torch.no_grad():
        memories = [model.encode(batch.src, batch.src_mask) for batch in batches]

    def losses(named: Sequence[tuple[str, int, int]], by_mean: bool = False) -> Tensor:
        """Each sentence's loss (n,) without the named heads."""
        known = (
            memories if all(kind != "encoder" for kind, _, _ in named) else [None] * len(batches)
        )
        instead = [means[kind][n, h] for kind, n, h in named] if by_mean else ()
        with heads_silenced([(layers[kind][n], h) for kind, n, h in named], instead):
            both = zip(batches, known, strict=True)
            return torch.cat([reference_losses(model, batch, memory) for batch, memory in both])

    whole = losses([])
    rows = []
    for kind, n, h in tqdm(every_head(model), desc="heads"):
        row = {"kind": kind, "layer": n + 1, "head": h + 1}
        for name, by_mean in (("silent", False), ("mean", True)):
            change, p = paired(losses([(kind, n, h)], by_mean), whole, tokens)
            row |= {name: round(change, 5), f"{name} p": float(f"{p:.3g}")}
        rows.append(row)
    together = []
    for kind, found in layers.items():
        for n, layer in enumerate(found):
            heads = [(kind, n, h) for h in range(layer.h)]
            row = {"kind": kind, "layer": n + 1}
            for name, by_mean in (("silent", False), ("mean", True)):
                row[name] = round(paired(losses(heads, by_mean), whole, tokens)[0], 5)
            together.append(row)
    loss = round(whole.sum().item() / tokens, 5)
    return {"pairs": len(pairs), "tokens": tokens, "loss": loss, "heads": rows, "layers": together}


def run_worth(options: WorthOptions) -> dict[str, Any]:
    """The study as a record, which is saved if the options say so."""
    folder = Path(options.model) if options.model else default_model()
    trained = load_model(folder, pick_device(options.device))
    pairs = load_corpus(options.corpus)["val"][: options.sentences]
    record = {
        **provenance(as_typed(__name__, options), trained.device),
        "model": folder.resolve().name,
        "weights_sha256": sha256(folder / "model.safetensors"),
        "corpus": options.corpus,
        "split": "val",
        **worth_by_likelihood(trained, pairs),
    }
    if options.save:
        save_record(f"worth-{options.corpus}", record)
    for row in sorted(record["heads"], key=lambda row: -row["silent"])[:5]:
        print(f"{row['kind']} {row['layer']}.{row['head']}: {row['silent']:+.3f} nats a token")
    return record


main = Command(
    __name__, WorthOptions, run_worth, "What each head is worth, by likelihood (minutes)."
)
