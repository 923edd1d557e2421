"""Chapter 4's exercises: our solutions, and checkers that say what is wrong."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from scripts.book.exercises import compare
from scripts.book.instruments import scramble
from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch04_encoder_decoder import Encoder, EncoderLayer, PositionwiseFeedForward


def encoder_parameters(N: int, d_model: int, d_ff: int) -> int:
    """Attention, feed-forward and two LayerNorms, N times.

    With F = 4D the matrices have 4D² + 2·4D² = 12D² numbers per layer; all else has 13D.
    """
    attention = 4 * (d_model * d_model + d_model)
    feed_forward = d_model * d_ff + d_ff + d_ff * d_model + d_model
    return N * (attention + feed_forward + 2 * 2 * d_model)


def check_encoder_parameters(candidate: Callable[[int, int, int], int]) -> None:
    """Compares candidate(N, d_model, d_ff) with encoders that are built and counted."""
    for N, D, F in ((1, 4, 6), (3, 8, 20)):
        layer = EncoderLayer(D, MultiHeadedAttention(2, D), PositionwiseFeedForward(D, F), 0.1)
        whole = sum(p.numel() for p in Encoder(layer, N).parameters())
        lacks = (whole - float(candidate(N, D, F))) / N
        why = {
            4 * D: "a layer lacks 4D numbers: a LayerNorm learns a scale and a shift, and "
            "attention's matrices have biases",
            2 * D: "a LayerNorm is missing in each layer, or the shifts of both are",
            5 * D + F: "each matrix has a bias too: one number for each of its outputs",
            9 * D + F: "only matrices are counted: biases and LayerNorms are missing",
            D + F: "the feed-forward's two matrices have biases too",
            D * D + D: "attention's fourth matrix is missing: where do the joined heads go?",
            D * F + D: "half of the feed-forward is missing: it widens and narrows again",
            -2 * D / N: "post-norm has no LayerNorm after the last layer",
            whole * (N - 1) / N**2: "that is one layer; there are N",
        }
        number = f"{abs(lacks):g} numbers too {'few' if lacks > 0 else 'many'} in each layer"
        assert lacks == 0, why.get(lacks, f"for N={N}, D={D} and F={F} there are {number}")


def layer_from_parts(
    x: Tensor, attend: Callable, think: Callable, norms: list[Callable], norm_first: bool
) -> Tensor:
    """An encoder layer (B, S, D) to (B, S, D): post-norm, or pre-norm with `norm_first`."""
    for sublayer, norm in zip((attend, think), norms, strict=True):
        x = x + sublayer(norm(x)) if norm_first else norm(x + sublayer(x))
    return x


def layer_mistakes(layer: EncoderLayer, x: Tensor) -> dict[str, Tensor]:
    """What wrong wirings of `layer`'s parts make of x (B, S, D); the keys are the messages."""
    attend, think = lambda x: layer.self_attn(x, x, x), layer.feed_forward
    one, two = norms = [connection.norm for connection in layer.sublayer]
    norm_first = layer.sublayer[0].norm_first
    other = layer_from_parts(x, attend, think, norms, not norm_first)
    no_road = "x isn't added back: the gradient has no direct path"
    side_by_side = "both sublayers read x: the second must read the output of the first"
    mistakes = {
        "the LayerNorms are swapped: that of the second sublayer is used first": norms[::-1],
        "one LayerNorm serves both sublayers, but each has its own": [one, one],
    }
    shared = {
        said: layer_from_parts(x, attend, think, used, norm_first)
        for said, used in mistakes.items()
    }
    if not norm_first:
        return shared | {
            "that is pre-norm: in post-norm the sum is normalised": other,
            no_road: two(think(one(attend(x)))),
            side_by_side: two(one(x + attend(x)) + think(x)),
        }
    first = one(x) + attend(one(x))
    return shared | {
        "that is post-norm: in pre-norm a sublayer's input is normalised": other,
        no_road: think(two(attend(one(x)))),
        side_by_side: x + attend(one(x)) + think(two(x)),
        "the normalised x is added back: then a LayerNorm is on the direct path": two(first)
        + think(two(first)),
    }


def check_layer_from_parts(candidate: Callable[..., Tensor]) -> None:
    """Compares with `EncoderLayer`, post-norm and then pre-norm, made of the same parts."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8, dtype=torch.float64)  # (B, S, D)
    for norm_first in (False, True):
        parts = (MultiHeadedAttention(2, 8, 0.0), PositionwiseFeedForward(8, 16, 0.0))
        layer = EncoderLayer(8, *parts, 0.0, norm_first).double()
        scramble(layer, size=0.3)
        attend = lambda x, layer=layer: layer.self_attn(x, x, x)  # noqa: E731
        norms = [connection.norm for connection in layer.sublayer]
        got = candidate(x, attend, layer.feed_forward, norms, norm_first)
        mistakes = layer_mistakes(layer, x)
        compare(got, layer(x), mistakes, "not the layer that the formula gives")


def fresh_stack(make: Callable[[], nn.Module], N: int) -> nn.ModuleList:
    """N layers, each built from scratch."""
    return nn.ModuleList(make() for _ in range(N))


def check_fresh_stack(candidate: Callable[[Callable[[], nn.Module], int], nn.Module]) -> None:
    """Checks that the candidate's three layers are separate and start with different numbers."""
    torch.manual_seed(0)
    stack = candidate(lambda: PositionwiseFeedForward(4, 6), 3)
    assert isinstance(stack, nn.Module), (
        "a plain list hides its layers: parameters(), .to() and state_dict() don't look inside"
    )
    layers = list(stack)
    assert len(layers) == 3, "there must be N layers"
    assert len({id(layer) for layer in layers}) == 3, (
        "that is one layer, N times: all N share the same parameters"
    )
    for name, message in (
        ("weight", "two layers start with the same numbers: a deep copy copies them too"),
        ("bias", "the weights differ, but the biases don't: two layers start with the same ones"),
    ):
        rows = torch.stack([getattr(layer.expand, name).flatten() for layer in layers])
        assert len(rows.unique(dim=0)) == 3, message
