"""A random history of a search, along which a cache is compared with the formula."""

import torch
from torch import Tensor, nn

from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch04_encoder_decoder import EncoderDecoder
from scripts.ch06_training import BOS, EOS
from scripts.ch07_multi30k import pad_rows


class PrefixDecoding:
    """Decoding by the formula: it runs whole prefixes, through any model."""

    def __init__(self, model: nn.Module, src: Tensor, src_mask: Tensor | None):
        self.model, self.src_mask, self.logits = model, src_mask, model.generator
        self.memory = model.encode(src, src_mask)  # (B, S, D)
        self.ids = src.new_empty(len(src), 1, 0)  # (B, k, T)

    def step(self, tokens: Tensor) -> Tensor:
        """Continue each prefix by one of tokens (B, k): the decoder's last positions (B·k, D)."""
        self.ids = torch.cat((self.ids, tokens.unsqueeze(-1)), dim=-1)  # (B, k, T)
        k, mask = tokens.size(1), self.src_mask
        memory = self.memory.repeat_interleave(k, dim=0)  # (B·k, S, D)
        mask = None if mask is None else mask.repeat_interleave(k, dim=0)  # (B·k, 1, S)
        causal = subsequent_mask(self.ids.size(-1), self.ids.device)  # (1, T, T)
        return self.model.decode(memory, mask, self.ids.flatten(0, 1), causal)[:, -1]

    def follow(self, origin: Tensor) -> None:
        """Let the prefixes be those numbered origin (B, k), among each source's own."""
        self.ids = self.ids.gather(1, origin.unsqueeze(-1).expand(-1, -1, self.ids.size(-1)))

    def keep(self, rows: Tensor) -> None:
        """Go on with only the sources numbered rows (N,)."""
        self.memory, self.ids = self.memory[rows], self.ids[rows]
        self.src_mask = None if self.src_mask is None else self.src_mask[rows]


@torch.no_grad()
def history_gap(model: EncoderDecoder, kind: type, steps: int = 6) -> float:
    """The largest difference between log-probabilities with and without a cache.

    Prefixes change places after every step, and after the third one a sentence is dropped.
    """
    src = pad_rows([[4, 5, 4, EOS], [5, EOS], [4, 4, 5, EOS]])  # (3, 4)
    ways = [way(model, src, padding_mask(src)) for way in (kind, PrefixDecoding)]
    tokens, gap = torch.full((3, 1), BOS), 0.0
    for step in range(steps):
        mine, theirs = (way.logits(way.step(tokens)).log_softmax(dim=-1) for way in ways)
        gap = max(gap, (mine - theirs).abs().max().item())
        origin = torch.randint(tokens.size(1), (len(tokens), 3))  # (B, 3)
        for way in ways:
            way.follow(origin)
            if step == 2:
                way.keep(torch.tensor([2, 0]))
        tokens = torch.randint(4, 6, (2 if step >= 2 else 3, 3))
    return gap
