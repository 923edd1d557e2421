"""Chapter 2's exercises: our solutions, and checkers that say what is wrong."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from scripts.book.exercises import compare, same_numbers
from scripts.book.instruments import scramble
from scripts.ch02_multi_head_attention import MultiHeadedAttention, split_heads


def slice_heads(x: Tensor, h: int) -> Tensor:
    """(B, T, D) to (B, H, T, D/H), head by head. `stack` copies; `split_heads` shares memory."""
    d_k = x.size(-1) // h
    return torch.stack([x[..., i * d_k : (i + 1) * d_k] for i in range(h)], dim=1)


def check_slice_heads(candidate: Callable[[Tensor, int], Tensor]) -> None:
    """Gives candidate(x, h) numbered entries, which show where each one ends up."""
    for tokens, h, d_k in ((4, 2, 3), (4, 4, 4), (3, 1, 5)):
        x = torch.arange(2 * tokens * h * d_k).view(2, tokens, h * d_k)  # (B, T, D)
        right = split_heads(x, h)  # (B, H, T, d_k)
        strided, tokens_first = x.unflatten(-1, (-1, h)).movedim(-1, 1), x.unflatten(-1, (h, -1))
        mistakes = {
            "heads hold whole tokens: the entries were split in memory order": x.view_as(right),
            "a head takes every H-th feature, but its slice must be consecutive": strided,
            "the token axis is before the heads: no token would see another": tokens_first,
        }
        otherwise = "not (B, H, T, d_k) with features h·d_k to (h + 1)·d_k in head h"
        compare(candidate(x, h), right, mistakes, otherwise)


def relative_bias(table: Tensor, T: int, S: int) -> Tensor:
    """Additive mask (1, H, T, S) from a table (H, 2R + 1): one number per head and distance."""
    reach = table.size(1) // 2
    query, key = (torch.arange(n, device=table.device) for n in (T, S))
    distance = key - query.unsqueeze(1)  # (T, S)
    return table[:, distance.clamp(-reach, reach) + reach].unsqueeze(0)  # (1, H, T, S)


def check_relative_bias(candidate: Callable[[Tensor, int, int], Tensor]) -> None:
    """Compares candidate(table, T, S) with a lookup, place by place; then checks the gradient."""
    for h, reach, T, S in ((2, 2, 4, 4), (3, 2, 6, 9), (1, 3, 3, 2)):
        table = torch.arange(h * (2 * reach + 1)).view(h, -1).double() / 10  # (H, 2R + 1)
        table.requires_grad_()
        bias = candidate(table, T, S)
        assert bias.shape == (1, h, T, S), (
            "the shape must be (1, H, T, S): the same for all sentences"
        )
        apart = torch.arange(S) - torch.arange(T).unsqueeze(1)  # (T, S), j − i
        inside = apart.clamp(-reach, reach)
        around = (apart + reach) % (2 * reach + 1) - reach
        columns = {
            "left and right are swapped: a key's distance is its place minus the query's": -inside,
            "left and right get the same number: the distance has a sign": inside.abs(),
            "far keys take numbers from the table's other end: clamp the distance": around,
        }
        mistakes = {said: table[None, :, reach + at] for said, at in columns.items()}
        otherwise = "a number of the table is at the wrong distance"
        compare(bias, table[None, :, reach + inside], mistakes, otherwise)
        if bias.requires_grad:
            (learned,) = torch.autograd.grad(bias.sum(), table, allow_unused=True)
        reached = bias.requires_grad and learned is not None
        assert reached, "the table gets no gradient, so nothing would be learned"


@torch.no_grad()
def without_head(layer: MultiHeadedAttention, i: int) -> MultiHeadedAttention:
    """A new layer without head i: its rows of W^Q, W^K, W^V and its columns of W^O are gone."""
    layer = copy.deepcopy(layer)
    width = layer.project_query.out_features  # H·d_k
    kept = torch.arange(width).view(layer.h, -1)[torch.arange(layer.h) != i].flatten()
    for linear in (layer.project_query, layer.project_key, layer.project_value):
        linear.weight = nn.Parameter(linear.weight[kept].clone())
        linear.bias = nn.Parameter(linear.bias[kept].clone())
        linear.out_features = len(kept)
    out = layer.project_output
    out.weight, out.in_features = nn.Parameter(out.weight[:, kept].clone()), len(kept)
    layer.h -= 1
    return layer


def check_without_head(
    candidate: Callable[[MultiHeadedAttention, int], MultiHeadedAttention],
) -> None:
    """Takes each of four heads out of a layer; compares with the layer in which it is silent."""
    torch.manual_seed(0)
    layer = MultiHeadedAttention(h=4, d_model=12, dropout=0.3).double().eval()
    before = copy.deepcopy(layer.state_dict())
    query, memory = torch.randn(2, 5, 12).double(), torch.randn(2, 7, 12).double()

    def untouched() -> bool:
        return all(torch.equal(now, before[name]) for name, now in layer.state_dict().items())

    def shapes(module: nn.Module) -> dict[str, torch.Size]:
        return {name: p.shape for name, p in module.named_parameters() if p.requires_grad}

    def silent(columns: slice) -> Tensor:
        """As large as before, but W^O ignores what comes from the columns."""
        muted = copy.deepcopy(layer)
        muted.project_output.weight.data[:, columns] = 0
        return muted(query, memory, memory)

    wanted = [silent(slice(3 * i, 3 * i + 3)) for i in range(4)]
    for i in range(4):
        smaller = candidate(layer, i)
        made = isinstance(smaller, nn.Module)
        assert made, f"return a layer, not a {type(smaller).__name__}"
        changed = "the layer itself was changed: work on a copy"
        assert untouched() and smaller is not layer, changed
        assert smaller.h == 3, "the new layer still splits into four heads: its h must be 3"
        assert shapes(smaller) == shapes(without_head(layer, i)), (
            "a weight or bias has the wrong shape, or can't be trained any more: a head owns d_k "
            "rows of three `.weight`s, their biases, and d_k columns of `project_output.weight`"
        )
        assert smaller.dropout.p == layer.dropout.p, "the new layer has another dropout probability"
        others = {f"the wrong head is gone: {j} instead of {i}": wanted[j] for j in range(4)}
        otherwise = "the other heads have changed: what they own must stay"
        compare(smaller.eval()(query, memory, memory), wanted[i], others, otherwise)
        own = all(map(torch.equal, smaller.parameters(), without_head(layer, i).parameters()))
        assert own, "the key's bias has another head's numbers, which softmax hides"
        scramble(smaller)
        assert untouched(), "both layers share a tensor: training one would change the other"
    try:
        twice = candidate(candidate(layer, 0), 0).eval()(query, memory, memory)
    except (IndexError, RuntimeError):  # the shapes don't fit
        twice = wanted[0]
    assert same_numbers(twice, silent(slice(6))), (
        "taking out a second head fails: d_k stays 3, which is out_features / h and no longer D / "
        "h. And in_features and out_features must follow the weights"
    )
