"""Everything that decides a training run, and the four presets.

The command line is made from `TrainConfig`, checkpoints carry it, records show it, and a model's
config.json is one. Nothing here trains.
"""

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import nn

from scripts.book.domains import check_settings
from scripts.ch04_encoder_decoder import EncoderDecoder, make_model
from scripts.ch06_training import cosine_rate


@dataclass
class TrainConfig:
    """Everything that decides a training run; each field is an option of the command line.

    Raises ValueError for a number outside of its range, and for sizes that don't fit together.
    """

    # The model.
    layers: int = 3
    """Encoder layers, and as many decoder layers."""
    d_model: int = 256
    """Width of the vectors."""
    d_ff: int = 1024
    """Width inside the feed-forward layers."""
    heads: int = 8
    """Attention heads."""
    vocab: int = 8192
    """Pieces of the joint BPE vocabulary."""
    norm_first: bool = True
    """Pre-norm; the paper is post-norm."""
    tie: Literal["none", "decoder", "all"] = "all"
    """Which embedding tables share storage with the generator."""
    embedding_init: Literal["scaled", "xavier"] = "scaled"
    """Spread of the embedding tables at the start: 1/√d_model, or Xavier's."""
    dropout: float = 0.2
    """Dropout everywhere, attention weights included."""

    # The recipe.
    corpus: str = "multi30k"
    """What to learn from: sample, multi30k, or a folder of your own pairs."""
    languages: str = "de-en"
    """The source's code and the target's; en-de turns sample and multi30k round."""
    smoothing: float = 0.1
    """Label smoothing's epsilon."""
    bpe_dropout: float = 0.0
    """Chance that BPE skips a merge in training: words fall into other pieces each epoch."""
    r_drop: float = 0.0
    """Weight of R-Drop: two passes with different dropout have to agree. Twice the work."""
    epochs: int = 18
    """Passes over the training split."""
    max_tokens: int = 2048
    """Tokens in a batch on either side, padding counted."""
    accumulate: int = 1
    """Batches in an optimizer step, for each process."""
    optimizer: Literal["adam", "muon"] = "adam"
    """Adam for all weights, or Muon for the layers' matrices and Adam for the rest."""
    schedule: Literal["cosine", "inverse_sqrt"] = "cosine"
    """How the learning rate falls after its warm-up."""
    lr: float = 2e-3
    """Peak learning rate."""
    muon_lr: float = 0.02
    """Muon's peak learning rate; the same schedule."""
    warmup: int = 400
    """Steps until the peak; 0: none."""
    clip: float = 1.0
    """Largest norm of the gradient; 0: no limit."""
    seed: int = 1
    """Decides the weights' start, dropout and the batches' order."""
    average: int = 5
    """How many of the last epochs' weights to average at the end; kept if validation BLEU gains."""
    beam: int = 5
    """Beam of the final scores; 1 is greedy decoding."""
    alpha: float = 0.6
    """Length penalty of the final scores."""

    # The run: where, and how the same steps are computed.
    name: str = "small"
    """The run's folder: runs/NAME."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, …"""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """Of the products' factors; auto: bf16 if the device has such products, else float32."""
    step: Literal["auto", "textbook", "eager", "static", "graphed"] = "auto"
    """textbook: by chapters 1 to 6; the others by chapter 12's fast path, eager: any shape; static:
    few, cut on the device; graphed: recorded; auto: what suits. The same numbers."""
    deterministic: bool = False
    """On a GPU, only kernels that always give the same bits; else a resumed run is only close."""
    save_every: int = 200
    """Steps between two saved states, on a GPU 50 times as many; 0: only after each epoch, when
    one is saved in any case."""

    def __post_init__(self):
        check_settings(self)
        if not re.fullmatch(r"[^-\s]+-[^-\s]+", self.languages):
            example = "such as sw-en (a script as in zh_Hant-en)"
            raise ValueError(f"languages must be SOURCE-TARGET, {example}, not {self.languages!r}")
        if self.d_model % self.heads or self.d_model % 2:
            heads = "" if self.heads in (1, 2) else f" and of the number of heads, {self.heads}"
            raise ValueError(f"d_model must be a multiple of 2{heads}, not {self.d_model}")
        if self.schedule == "inverse_sqrt" and not self.warmup:  # it divides by these steps
            raise ValueError("warmup must be at least 1 with the schedule inverse_sqrt, not 0")


NARROW = {"layers": 2, "d_model": 128, "d_ff": 256, "heads": 4}
# The same precision on every machine, whether or not it has 16-bit products.
SAMPLE = NARROW | {"corpus": "sample", "vocab": 1000, "dropout": 0.0, "precision": "float32"}
PAPERS = {"layers": 6, "d_model": 512, "d_ff": 2048, "norm_first": False, "dropout": 0.1}
# A warm-up of 800 of 2,500 steps; the paper's is 4,000 of 100,000.
PAPERS |= {"schedule": "inverse_sqrt", "warmup": 800}

PRESETS: dict[str, TrainConfig] = {
    "sample": TrainConfig(
        **SAMPLE, epochs=10, max_tokens=1024, warmup=200, average=0, beam=1, name="sample"
    ),
    "narrow": TrainConfig(
        **NARROW, vocab=4096, dropout=0.1, epochs=5, lr=3e-3, warmup=300, average=3, name="narrow"
    ),
    "small": TrainConfig(),
    "base": TrainConfig(**PAPERS, lr=7e-4, max_tokens=4096, epochs=20, name="base"),
}

# Settings of earlier runs: `path` is now a kind of step, the others no record ever changed.
RETIRED = {"path", "fused", "compile", "tracker", "publish"}
ADDED = {"languages": "de-en"}  # what runs did before there was a choice


def plain_config(config: TrainConfig) -> TrainConfig:
    """The settings that a model is saved with: those of `TrainConfig`, whatever `config` adds."""
    return TrainConfig(**{field.name: getattr(config, field.name) for field in fields(TrainConfig)})


def stored_config(settings: Mapping[str, Any]) -> TrainConfig:
    """The settings of a model, a state or a record, which may be older than `TrainConfig` now is.

    What no longer exists is ignored. Raises TypeError for a name that never existed.
    """
    return TrainConfig(**known_settings(settings))


def known_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` as they are named today: without those that are gone, with those that are new."""
    known = ADDED | {name: value for name, value in settings.items() if name not in RETIRED}
    if settings.get("path") == "textbook":
        known["step"] = "textbook"
    return known


def build_model(config: TrainConfig, vocab: int) -> EncoderDecoder:
    """The model of `config` over `vocab` joint pieces, initialised from the global seed."""
    sizes = (config.layers, config.d_model, config.d_ff, config.heads, config.dropout)
    model = make_model(vocab, vocab, *sizes, norm_first=config.norm_first, tie=config.tie)
    if config.embedding_init == "xavier":
        for embed in (model.src_embed, model.tgt_embed):
            nn.init.xavier_uniform_(embed[0].lut.weight)
    return model


def pick_device(name: str = "auto") -> torch.device:
    """The device called `name`; "auto" takes a GPU if there is one, each process its own.

    Raises ValueError for a device that this machine lacks.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"  # torchrun numbers processes
    known = ["cpu"]
    if torch.cuda.is_available():
        known += ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if name not in known:
        raise ValueError(f"no device {name!r} here: choose auto, {', '.join(known)}")
    return torch.device(name)


def multiplies_bf16(device: torch.device) -> bool:
    """Whether `device` has instructions for bfloat16 products: most GPUs of today, few CPUs."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported()


def require_bf16(device: torch.device) -> None:
    """Raise ValueError if `device` only emulates bfloat16: its times would say nothing of it."""
    if not multiplies_bf16(device):
        lack = f"{device} only emulates the bfloat16 products that are to be measured"
        raise ValueError(f"{lack}: take a CPU with AVX512-BF16, or a GPU that has them")


def inverse_sqrt_rate(step: int, peak: float, warmup: int) -> float:
    """The paper's curve, named by its peak: `peak` at step `warmup`, then falling as 1/√step."""
    return peak * min(step / warmup, math.sqrt(warmup / step))


def learning_rate(config: TrainConfig, total_steps: int) -> Callable[[int], float]:
    """The learning rate at step 1, 2, … as `config` asks for it."""
    if config.schedule == "cosine":
        return lambda step: cosine_rate(step, config.lr, config.warmup, total_steps)
    return lambda step: inverse_sqrt_rate(step, config.lr, config.warmup)
