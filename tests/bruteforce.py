"""All that a tiny model can write, scored by teacher forcing: a reference for searches."""

import itertools

import torch
from torch import Tensor

from scripts.ch01_attention import subsequent_mask
from scripts.ch04_encoder_decoder import EncoderDecoder
from scripts.ch06_training import BOS, EOS
from scripts.ch08_decoding import Hypothesis, dropout_off, hypothesis


@torch.no_grad()
def forced_log_probs(model: EncoderDecoder, src: Tensor, ids: Tensor) -> Tensor:
    """Each text's log-probability by teacher forcing: ids (R, T) of one source (1, S), to (R,)."""
    with dropout_off(model):
        memory = model.encode(src, None).expand(len(ids), -1, -1)  # (R, S, D)
        tgt = torch.cat((torch.full_like(ids[:, :1], BOS), ids[:, :-1]), dim=1)  # (R, T)
        x = model.decode(memory, None, tgt, subsequent_mask(tgt.size(1)))  # (R, T, D)
        log_probs = model.generator(x).log_softmax(dim=-1)  # (R, T, V)
    return log_probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1).sum(dim=-1)  # (R,)


def every_hypothesis(
    model: EncoderDecoder, src: Tensor, vocab: int, max_len: int
) -> list[Hypothesis]:
    """All that can be written in `max_len` tokens, scored by teacher forcing. Tiny models only."""
    words, hypotheses = [token for token in range(vocab) if token != EOS], []
    for length in range(max_len):
        endings = [EOS] if length + 1 < max_len else range(vocab)
        written = [
            (*ids, end) for ids in itertools.product(words, repeat=length) for end in endings
        ]
        log_probs = forced_log_probs(model, src, torch.tensor(written)).tolist()
        hypotheses += [hypothesis(ids, p) for ids, p in zip(written, log_probs, strict=True)]
    return hypotheses
