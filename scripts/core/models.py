"""A trained model with its tokenizer and settings, in memory and in a folder.

Weights are stored in 16 bits, tied tables once, whole or not at all. The state of a run in progress
is something else: `core.checkpoints`.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from scripts import ROOT
from scripts.book.files import write_whole
from scripts.ch04_encoder_decoder import EncoderDecoder
from scripts.ch07_multi30k import BPETokenizer
from scripts.core.checkpoints import load_tensors, load_weights, save_tensors, weights
from scripts.core.settings import TrainConfig, build_model, stored_config

STUDIED = ROOT / "models" / "multi30k-de-en"  # chapter 9's, which chapters and their records use
DEFAULT_MODEL = ROOT / "models" / "ladder-all-mean-3"  # what commands translate with: chapter 21
STORED_DTYPE = torch.float16  # half the size; every score we report is of the weights as stored


@dataclass
class Trained:
    """A model with what it takes to use it."""

    model: EncoderDecoder
    tokenizer: BPETokenizer
    config: TrainConfig
    ready: dict[str, Any] = field(default_factory=dict, repr=False)  # see `translating.prepared`

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle gets: all but what was made ready, which it can make again."""
        return self.__dict__ | {"ready": {}}

    @property
    def device(self) -> torch.device:
        """Where the model's weights are."""
        return next(self.model.parameters()).device


def save_model(folder: Path, trained: Trained) -> None:
    """Write model.safetensors, tokenizer.model and config.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps(asdict(trained.config), indent=1)
    write_whole(folder / "config.json", (config + "\n").encode())
    write_whole(folder / "tokenizer.model", trained.tokenizer.model)
    stored = {name: t.to(STORED_DTYPE) for name, t in weights(trained.model).items()}
    save_tensors(folder / "model.safetensors", stored, {})


def load_model(folder: Path, device: torch.device | str = "cpu") -> Trained:
    """What `save_model` wrote, in float32 and ready to translate.

    Raises FileNotFoundError or ValueError, with the remedy, if a file is missing or unfit.
    """
    folder = Path(folder)
    missing = [n for n in ("config.json", "tokenizer.model") if not (folder / n).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} holds no {missing[0]}: train a model, or name another")
    try:
        config = stored_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        tokenizer = BPETokenizer.load(folder / "tokenizer.model")
    except (RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{folder} can't be loaded ({reason}): train it again") from error
    model, path = build_model(config, len(tokenizer)), folder / "model.safetensors"
    load_weights(model, load_tensors(path)[0], path)
    return Trained(model.to(device).eval(), tokenizer, config)
