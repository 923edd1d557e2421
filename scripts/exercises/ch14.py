"""Chapter 14's exercises: for each our solution under its name, and `check_NAME`, which judges."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from scripts.book.instruments import scramble
from scripts.ch04_encoder_decoder import make_model
from scripts.ch06_training import BOS, EOS
from scripts.ch08_decoding import beam_search
from scripts.ch14_leaving_home import OnnxDecoderStep, OnnxEncoder


def host_beam(
    step: Callable[..., list[np.ndarray]], past: np.ndarray, beam: int, length: int
) -> list[list[int]]:
    """Weighs all continuations of all rows; tokens, ids and `past` follow the survivors."""
    ids, scores = np.full((1, 1), BOS), np.zeros((1, 1))
    for at in range(length):
        logits, past = step(tokens=ids[:, -1:], position=np.array([at]), past=past)
        shifted = logits - logits.max(axis=-1, keepdims=True)  # (R, V)
        log_probs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        total = (scores + log_probs).ravel()  # (R·V,)
        best = (-total).argsort(kind="stable")[:beam]  # (K,)
        origin, tokens = np.divmod(best, logits.shape[-1])
        ids = np.concatenate((ids[origin], tokens[:, None]), axis=1)
        scores, past = total[best, None], past[:, :, origin]
    return ids[:, 1:].tolist()


def check_host_beam(candidate: Callable[..., list[list[int]]]) -> None:
    """Holds the texts against chapter 8's beam search, which reads every prefix anew."""
    torch.manual_seed(1)
    model = make_model(30, 30, N=2, d_model=16, d_ff=32, h=2, dropout=0.0).double().eval()
    scramble(model, size=0.7)  # far from fresh, so that what was said before matters
    src, length = torch.tensor([[4, 5, 6, 7, 3]]), 8
    with torch.no_grad():
        model.generator.proj.bias[EOS] = -1e9  # no text ends
        cross = OnnxEncoder(model)(src, torch.ones(1, 1, 5, dtype=torch.bool))

    def step(tokens: np.ndarray, position: np.ndarray, past: np.ndarray) -> list[np.ndarray]:
        assert position.tolist() == [past.shape[-2]], (
            "past has one place for each token before position: hand back the last step's present"
        )
        given = map(torch.tensor, (tokens, position, past))
        source = cross.expand(-1, -1, len(tokens), -1, -1, -1)
        with torch.no_grad():
            return [found.numpy() for found in OnnxDecoderStep(model)(*given, source, None)]

    for beam in (1, 2, 4):
        texts = candidate(step, cross[..., :0, :].numpy(), beam, length)
        right = [list(h.ids) for h in beam_search(model, src, None, length, beam, alpha=0.0)[0]]
        assert len({*map(tuple, texts)}) == beam, (
            f"{beam} different texts are wanted: equal rows at the first step make copies"
        )
        assert texts == right or sorted(texts) != sorted(right), "the best text comes first"
        assert texts == right, (
            "other texts: past follows its text, whose score is the sum of its log-probabilities"
        )


def eight_bit_rows(W: Tensor) -> tuple[Tensor, Tensor]:
    """Divides each row by its scale, and rounds to the nearest whole number.

    For the generator of the small model the root mean square error is 0.6 of that with one scale.
    The largest error is about the same: the row of the largest weight has the largest scale.
    """
    scales = W.abs().amax(dim=1, keepdim=True) / 127  # (out, 1)
    scales = scales.where(scales > 0, torch.ones_like(scales))
    return (W / scales).round().to(torch.int8), scales


def check_eight_bit_rows(candidate: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    """The bound on each row's error; a row of zeros; rows of very different size."""
    W = torch.randn(5, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    W *= torch.tensor([[100.0], [1.0], [0.01], [0.0], [1.0]])
    W[4, 0] = -20.0  # the largest of its row is negative
    numbers, scales = candidate(W.clone())
    assert numbers.dtype == torch.int8, f"the whole numbers are {numbers.dtype}, not torch.int8"
    assert scales.shape == (5, 1), f"scales {tuple(scales.shape)}: each row has its own, (out, 1)"
    assert scales.isfinite().all() and (numbers[3] == 0).all(), "a row of zeros must stay zeros"
    back, largest = scales * numbers, W.abs().amax(dim=1, keepdim=True)  # (out, in), (out, 1)
    assert scales[0] != scales[1], "one scale for the whole matrix: small rows are lost"
    assert ((back - W).abs() <= largest / 127 * (0.5 + 1e-6)).all(), (
        "a weight moves by more than half a step: round to the nearest, with max|row| at 127"
    )
