"""The parts since 2017, one exchanged at a time, then all: `python -m scripts.studies.modern`.

The record is written after each run, and the next call goes on with what is missing.
"""

if __name__ == "__main__":  # first, so that Ctrl-C while libraries load is answered, too
    from scripts.book.command import launch

    raise SystemExit(launch("scripts.studies.modern"))

import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from scripts import runs_folder
from scripts.book.command import GOES_ON, Command, as_typed
from scripts.book.instruments import saved_bytes
from scripts.book.records import RESULTS, load_record, provenance, save_record
from scripts.ch01_attention import padding_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention, distance_bias
from scripts.ch04_encoder_decoder import (
    EncoderDecoder,
    LayerNorm,
    PositionwiseFeedForward,
    initialise,
    make_model,
    tie_weights,
)
from scripts.ch06_training import BOS, LabelSmoothing, run_epoch
from scripts.ch07_multi30k import make_batch, source_ids, token_batches
from scripts.ch08_decoding import decode_rows, dropout_off
from scripts.ch12_going_fast import keep_memory
from scripts.ch19_ablations import drop_positions
from scripts.ch22_todays_block import (
    GroupedAttention,
    OpenAttention,
    PartsDecoding,
    RMSNorm,
    RotaryAttention,
    SwiGLU,
    exchange,
    gated_width,
    parts_greedy,
)
from scripts.ch23_long_memory import LatentAttention, LinearAttention, WindowedAttention
from scripts.ch24_experts import MixtureOfExperts, active_parameters
from scripts.engine.data import TrainingData, batches_of, epoch_plan, prepare
from scripts.engine.models import Trained
from scripts.engine.optimizers import make_optimizer
from scripts.engine.scores import corpus_bleu
from scripts.engine.settings import PRESETS, TrainConfig, learning_rate
from scripts.studies.block import parts_loss


def alibi_slopes(h: int) -> list[float]:
    """The slopes of `h` heads: 2^(−8/h), 2^(−16/h), …, 2^(−8) (Press et al. 2022, §3)."""
    return [2.0 ** (-8 * head / h) for head in range(1, h + 1)]


class AlibiAttention(OpenAttention):
    """Self-attention with a penalty for distance, a slope for each head (Press et al. 2022)."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """As in `OpenAttention`; the T queries are the last T of the S positions."""
        T, S = q.size(2), k.size(2)
        bias = distance_bias(S, alibi_slopes(self.h))[:, :, S - T :].to(q)  # (1, H, T, S)
        if mask is not None:
            bias = torch.where(mask, bias, -math.inf)  # (B, H, T, S)
        return super().mix(q, k, v, bias)


@dataclass(frozen=True)
class Parts:
    """What a model is made of, by default as in chapter 4. Sizes count where they are used."""

    norm: Literal["layer", "rms"] = "layer"
    feed_forward: Literal["relu", "swiglu", "experts"] = "relu"
    attention: Literal["full", "grouped", "latent", "window", "linear"] = "full"
    positions: Literal["sinusoidal", "rotary", "alibi"] = "sinusoidal"
    groups: int = 2  # of keys and values
    window: int = 4
    experts: int = 8
    top: int = 2
    shared: int = 1
    wider: float = 1.0  # than an equal number of active parameters asks, the feed-forward layer


# What latent attention saves goes to the experts, so that the active parameters stay as many.
MODERN = Parts("rms", "experts", "latent", "rotary", wider=1.2)


def attention_of(parts: Parts, h: int, d_model: int, dropout: float, itself: bool) -> nn.Module:
    """Self-attention (`itself`) or cross-attention, which knows no distance, as `parts` asks.

    Raises ValueError for a combination that has no class.
    """
    if parts.attention == "latent":
        if parts.positions != "rotary":
            raise ValueError("latent attention brings its own rotary positions: choose rotary")
        half = d_model // h // 2  # 3/2 d_k of latent and 1/2 of rotary key: as much as multi-query
        return LatentAttention(h, d_model, dropout, 3 * half, half if itself else 0)
    if parts.attention != "full" and parts.positions != "sinusoidal":
        raise ValueError(f"{parts.attention} attention is here with sinusoids only")
    if parts.attention == "grouped":
        return GroupedAttention(h, d_model, dropout, parts.groups)
    if itself and parts.attention == "window":
        return WindowedAttention(h, d_model, dropout, parts.window)
    if itself and parts.attention == "linear":
        return LinearAttention(h, d_model, dropout)
    inside = {"rotary": RotaryAttention, "alibi": AlibiAttention, "sinusoidal": OpenAttention}
    return inside[parts.positions if itself else "sinusoidal"](h, d_model, dropout)


def feed_forward_of(parts: Parts, d_model: int, d_ff: int, dropout: float) -> nn.Module:
    """A feed-forward layer with as many active numbers as ReLU's of `parts.wider` times `d_ff`."""
    d_ff = parts.wider * d_ff
    if parts.feed_forward == "swiglu":
        return SwiGLU(d_model, gated_width(d_ff), dropout)
    visited = parts.top + parts.shared
    # The router has its share.
    width = round(2 * d_ff / (3 * visited) - parts.experts / (3 * visited))
    return MixtureOfExperts(d_model, width, dropout, parts.experts, parts.top, parts.shared)


def model_of(parts: Parts, config: TrainConfig, vocab: int) -> EncoderDecoder:
    """`config`'s Transformer over `vocab` joint pieces, with `parts` exchanged; fresh weights."""
    sizes = {"N": config.layers, "d_model": config.d_model, "d_ff": config.d_ff, "h": config.heads}
    model = make_model(vocab, vocab, **sizes, dropout=config.dropout, norm_first=config.norm_first)
    given = (config.heads, config.d_model, config.dropout)
    exchange(
        model,
        MultiHeadedAttention,
        lambda name, _: attention_of(parts, *given, itself=name.endswith("self_attn")),
    )
    if parts.feed_forward != "relu":
        width = (config.d_model, config.d_ff, config.dropout)
        exchange(model, PositionwiseFeedForward, lambda *_: feed_forward_of(parts, *width))
    if parts.norm == "rms":
        exchange(model, LayerNorm, lambda _, norm: RMSNorm(len(norm.weight), norm.eps))
    if parts.positions != "sinusoidal":  # they are inside attention: nothing is added
        drop_positions(model)
    initialise(model)
    tie_weights(model, config.tie)
    return model


VARIANTS: dict[str, Parts] = {
    "2017": Parts(),
    "modern": MODERN,
    "RMSNorm": Parts(norm="rms"),
    "SwiGLU": Parts(feed_forward="swiglu"),
    "rotary": Parts(positions="rotary"),
    "ALiBi": Parts(positions="alibi"),
    "grouped-query, G = 2": Parts(attention="grouped"),
    "multi-query": Parts(attention="grouped", groups=1),
    "latent": Parts(attention="latent", positions="rotary"),
    "window of 4": Parts(attention="window"),
    "linear attention": Parts(attention="linear"),
    "experts": Parts(feed_forward="experts"),
}
ENDS = ("2017", "modern")  # the rows that are compared on the test set


def study_config(corpus: str, seed: int, epochs: int, d_model: int) -> TrainConfig:
    """The setting that all rows share: chapter 9's narrow preset, shorter, of any width."""
    changes = {"corpus": corpus, "seed": seed, "epochs": epochs, "d_model": d_model}
    changes |= {"d_ff": 2 * d_model, "vocab": 2048, "warmup": 150}
    return replace(PRESETS["narrow"], **changes, path="textbook", device="cpu")


def trained_parts(
    parts: Parts, config: TrainConfig, data: TrainingData
) -> tuple[Trained, list[float]]:
    """A model of `parts` trained as `config` says, and its training perplexity epoch by epoch."""
    torch.manual_seed(config.seed)
    model = model_of(parts, config, len(data.tokenizer))
    optimizer = make_optimizer(config, model)
    plans = [epoch_plan(config, data, epoch) for epoch in range(1, config.epochs + 1)]
    lr_at = learning_rate(config, sum(map(len, plans)))
    scheduler = LambdaLR(optimizer, lambda done: lr_at(done + 1))
    criterion, history = LabelSmoothing(config.smoothing), []
    for plan in plans:
        batches = batches_of(data.train, [b for step in plan for b in step], torch.device("cpu"))
        how = {"clip": config.clip, "loss_of": parts_loss}
        history.append(run_epoch(batches, model, criterion, optimizer, scheduler, **how).perplexity)
    return Trained(model.eval(), data.tokenizer, config), history


def greedy_texts(trained: Trained, sources: Sequence[str]) -> list[str]:
    """Greedy translations of `sources`, with the cache of whatever parts the model has."""
    rows = [source_ids(source, trained.tokenizer) for source in sources]
    return decode_rows(trained, rows, lambda *given: parts_greedy(*given).tolist(), 128)


def parts_run(
    parts: Parts, config: TrainConfig, data: TrainingData, tested: bool
) -> dict[str, Any]:
    """Train and score one row with one seed, on validation and if `tested` on the first test."""
    start = time.process_time()
    trained, history = trained_parts(parts, config, data)
    seconds = time.process_time() - start
    batches = batches_of(data.val, token_batches(data.val, config.max_tokens), torch.device("cpu"))
    criterion = LabelSmoothing(config.smoothing)
    report = run_epoch(batches, trained.model, criterion, loss_of=parts_loss)
    test = next(name for name in data.corpus if name.startswith("test"))
    scores = {}
    for split in ("val", test) if tested else ("val",):
        sources, references = zip(*data.corpus[split], strict=True)
        scores[split] = corpus_bleu(greedy_texts(trained, sources), references)
    return {
        "seed": config.seed,
        "parameters": sum(p.numel() for p in trained.model.parameters()),
        "active": active_parameters(trained.model),
        "cpu_seconds": round(seconds),
        "train_ppl": [round(ppl, 3) for ppl in history],
        "val_ppl": round(report.perplexity, 3),
        "bleu": {split: round(found.score, 2) for split, found in scores.items()},
        "signature": scores["val"].signature,
    }


def parts_costs(
    variants: dict[str, Parts], config: TrainConfig, data: TrainingData, rounds: int = 5
) -> dict[str, dict[str, float]]:
    """Each row's milliseconds for a training step and for decoding a sentence, and its memory."""
    plan = [batch for step in epoch_plan(config, data, 1) for batch in step][:rounds]
    batches = list(batches_of(data.train, plan, torch.device("cpu")))
    criterion = LabelSmoothing(config.smoothing)
    models, times = {}, {name: {"step": [], "decode": []} for name in variants}
    src = make_batch(data.val[:64]).src  # (B, S)
    for name, parts in variants.items():
        torch.manual_seed(0)
        models[name] = model_of(parts, config, len(data.tokenizer)).train()
    for batch, (name, model) in itertools.product([batches[0], *batches], models.items()):
        start = time.process_time()
        parts_loss(model, batch, criterion)[0].backward()
        middle = time.process_time()
        parts_greedy(model, src, padding_mask(src), 16)
        end = time.process_time()
        times[name]["step"].append(middle - start)
        times[name]["decode"].append((end - middle) / len(src))
    costs = {}
    for name, model in models.items():
        step, decode = (statistics.median(seconds[1:]) for seconds in times[name].values())
        tokens = statistics.mean(batch.ntokens for batch in batches)
        with torch.no_grad(), dropout_off(model):
            decoding = PartsDecoding(model, src[:1], None)
            decoding.step(src.new_full((1, 1), BOS))
        costs[name] = {
            "tokens_per_second": round(tokens / step),
            "ms_per_sentence": round(1000 * decode, 3),
            "kept_mib": round(
                saved_bytes(lambda m=model: parts_loss(m, batches[0], criterion)) / 2**20, 1
            ),
            "cache_bytes_per_token": decoding.token_bytes(),
        }
    return costs


@dataclass
class ModernOptions:
    """What the study trains."""

    corpus: Literal["sample", "multi30k"] = "multi30k"
    """What to learn from."""
    epochs: int = 3
    """Passes over the training split."""
    d_model: int = 128
    """Width of the vectors; the feed-forward layers are twice as wide."""
    seeds: int = 1
    """Runs of each single part."""
    end_seeds: int = 3
    """Runs of the model of 2017 and of the modern one."""
    save: bool = False
    """Keep the result as results/since-2017-CORPUS.json, which the chapter shows."""


def planned(options: ModernOptions) -> list[tuple[int, str]]:
    """Seeds and rows by importance: both ends with all their seeds, then the parts."""
    inner = [name for name in VARIANTS if name not in ENDS]
    first = itertools.product(range(1, options.end_seeds + 1), ENDS)
    return [*first, *itertools.product(range(1, options.seeds + 1), inner)]


def compare_parts(options: ModernOptions) -> dict[str, Any]:
    """Train what is planned and not yet on record; the record, rewritten after each run."""
    name = f"since-2017-{options.corpus}"
    folder = RESULTS if options.save else runs_folder()
    config = study_config(options.corpus, 1, options.epochs, options.d_model)
    command = as_typed(__name__, options, always=("epochs", "d_model"))
    record = {**provenance(command), "config": asdict(config), "rows": {}}
    try:
        before = load_record(name, folder)
        if before["config"] == record["config"]:  # else it was another study
            record = before
    except (FileNotFoundError, KeyError):
        pass
    keep_memory()
    data = prepare(config)
    if "costs" not in record:
        record["costs"] = parts_costs(VARIANTS, config, data, rounds=3)
    for seed, row in planned(options):
        done = record["rows"].get(row, {"parts": asdict(VARIANTS[row]), "runs": []})
        if any(run["seed"] == seed for run in done["runs"]):
            continue
        setting = replace(config, seed=seed)
        done["runs"].append(parts_run(VARIANTS[row], setting, data, tested=row in ENDS))
        record["rows"][row], runs = done, done["runs"]
        print(
            f"{row}, seed {seed}: {runs[-1]['bleu']['val']:.2f}, {runs[-1]['cpu_seconds']} s",
            flush=True,
        )
        save_record(name, record, folder)
    seeds = [len(row["runs"]) for row in record["rows"].values()]
    print(f"{sum(seeds)} runs of {len(seeds)} rows are on record")
    return record


main = Command(
    __name__,
    ModernOptions,
    compare_parts,
    "Train with the parts since 2017, one at a time and all (75 minutes on one core).",
    interrupted=GOES_ON,
)
