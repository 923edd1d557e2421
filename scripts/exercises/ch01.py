"""Chapter 1's exercises: our solutions, and checkers that say what is wrong."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from scripts.book.exercises import compare, same_numbers
from scripts.book.instruments import MostAlive
from scripts.ch01_attention import attention, masked_softmax


def insisting_query(share: float) -> list[float]:
    """The score is s·2/√4 = s, and the other two are 0: share = eˢ / (eˢ + 2).

    So s is 0.6931, 5.2883 and 9.9034: each further nine in the share adds about ln 10 = 2.3. A
    weight of exactly 1 needs an infinite score.
    """
    return [math.log(2 * share / (1 - share)), 0.0, 0.0, 0.0]


def check_insisting_query(candidate: Callable[[float], list[float]]) -> None:
    """Compares the four numbers with the keys of *a red ball* and reads off the weight."""
    key = torch.tensor([[2, 0, 0, 1], [0, 2, 0, 1], [0, 0, 2, 1]], dtype=torch.float64)  # (S, d_k)
    for share in (0.5, 0.9, 0.99, 0.9999):
        query = torch.as_tensor(candidate(share), dtype=torch.float64)
        assert query.shape == (4,), "the keys have four numbers, so the query must have four"
        assert not query[1:].any(), "only the first number may differ from 0"
        undivided, two_words = (key @ query).softmax(-1), (key[:2] @ query / 2).softmax(-1)
        mistakes = {
            "right only without dividing by √d_k: a score is half of q · k": undivided[0],
            "two other words count too: a score of 0 becomes e⁰ = 1 in the softmax": two_words[0],
        }
        weight = attention(query[None], key, key)[1][0, 0]
        otherwise = "the weight isn't the share: solve the softmax formula for s"
        compare(share, weight, mistakes, otherwise)


def window_mask(n: int, r: int, gap: int = 1) -> Tensor:
    """Boolean (1, n, n): i sees j if i − j is one of 0, gap, …, (r − 1)·gap.

    L layers with r = 3 and gaps 1, 3, 9, … look back over 2·(1 + 3 + … + 3^(L−1)) = 3^L − 1
    places, so log₃ n layers, rounded up, are enough: the paper's log_k n, reached by attention.
    """
    back = torch.arange(n).unsqueeze(1) - torch.arange(n)  # (n, n)
    return ((back >= 0) & (back <= (r - 1) * gap) & (back % gap == 0)).unsqueeze(0)


def check_window_mask(candidate: Callable[[int, int, int], Tensor]) -> None:
    """Compares the mask candidate(n, r, gap) with the definition, place by place."""
    for n, r, gap in ((6, 6, 1), (7, 3, 1), (9, 3, 2), (4, 6, 1), (5, 1, 1)):
        mask = candidate(n, r, gap)
        assert mask.shape == (1, n, n), "the shape must be (1, n, n): one row for each query"
        assert mask.dtype == torch.bool, (
            "the mask must be a boolean tensor: numbers would be added to the scores"
        )
        seen = [[any(i - m * gap == j for m in range(r)) for j in range(n)] for i in range(n)]
        wanted, mask = torch.tensor(seen), mask[0]  # (n, n)
        back = torch.arange(n).unsqueeze(1) - torch.arange(n)  # how far j lies behind i
        assert not torch.equal(mask, ~wanted), (
            "the mask is inverted: in this series True means *may look*"
        )
        assert not mask[back < 0].any(), "a position sees a later one: the window only looks back"
        assert mask.diagonal().all(), "a position doesn't see itself: row 0 would see nothing"
        too_far = "a position sees too far: it is itself one of the r, so it looks back r − 1 times"
        assert not mask[back > (r - 1) * gap].any(), too_far
        assert not mask[back % gap != 0].any(), (
            "a distance that isn't a multiple of gap is allowed too"
        )
        assert torch.equal(mask, wanted), "an allowed position is missing: the window is too narrow"


def additive_attention(
    query: Tensor, key: Tensor, value: Tensor, w: Tensor, m: Tensor, u: Tensor, mask=None
) -> tuple[Tensor, Tensor]:
    """Output (..., T, d_v) and weights (..., T, S), from scores uᵀ tanh(Wq + Mk).

    For each pair it writes `a` numbers to memory, a dot product only one. Without the tanh the
    score is uᵀWq + uᵀMk. Within a row the first term is the same for all keys, and softmax ignores
    a shift: all queries get the same weights.
    """
    pairs = (query @ w.T).unsqueeze(-2) + (key @ m.T).unsqueeze(-3)  # (..., T, S, a)
    weights = masked_softmax(pairs.tanh() @ u, mask)  # (..., T, S)
    return weights @ value, weights


def check_additive_attention(candidate: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Compares weights and output with scores made pair by pair; then tries a mask and a batch."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 4), (5, 4), (5, 2), (6, 4), (6, 4), (6,))  # query, key, value, w, m, u
    inputs = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    query, key, value, w, m, u = inputs

    def scores(w: Tensor, m: Tensor) -> Tensor:
        return torch.stack([torch.stack([(w @ q + m @ k).tanh() @ u for k in key]) for q in query])

    output, weights = candidate(*inputs)
    assert weights.shape == (3, 5), "the weights must be (T, S): one for each pair of query and key"
    right = scores(w, m)  # (T, S)
    flat = (key @ m.T @ u).expand(3, 5)
    mistakes = {
        "the columns sum to 1, but the rows must: the keys compete for a query": right.softmax(0),
        "all queries get the same weights: without tanh, q only shifts its row": flat.softmax(-1),
        "W and M are swapped: W is for the query, M for the key": scores(m, w).softmax(-1),
        "divided by √d_k: these scores are not sums of d_k products": (right / 2).softmax(-1),
    }
    otherwise = "not the weights that the formula gives, pair by pair"
    compare(weights, right.softmax(-1), mistakes, otherwise)
    mixed = same_numbers(output, weights @ value)
    assert mixed, "the weights are right, but the output isn't the values mixed by them"
    mask = torch.tensor([[True, False, True, True, False], [False] * 5, [True] * 5])
    mixture, masked = candidate(*inputs, mask)
    assert not same_numbers(masked, weights), "the mask changes nothing"
    assert not masked.isnan().any(), (
        "NaN: in a row that may look at nothing, all scores are −∞, which gives 0/0"
    )
    assert not masked[1].any(), (
        "a row that may look at nothing has weights: with −10⁹ everywhere, all are equal"
    )
    obeyed = same_numbers(masked, masked_softmax(right, mask))
    assert obeyed, "what the mask forbids must get weight 0"
    hidden = same_numbers(mixture, masked @ value)
    assert hidden, "the weights obey the mask, but the output doesn't: mix the values by them"
    for floats in (right, torch.zeros(3, 5).masked_fill(~mask, -math.inf)):
        added = same_numbers(candidate(*inputs, floats)[1], masked_softmax(right, floats))
        assert added, "a mask of floats is added to the scores, as in `attention`; it may hold −∞"
    three = [torch.stack((x, -x, 2 * x)) for x in (query, key, value)]  # B is T: nothing raises
    one = candidate(*three, w, m, u)[0]  # (B, T, d_v)
    assert same_numbers(one[0], output), "the results in a batch differ from those one by one"
    two = candidate(*(torch.stack((-x, x)) for x in three), w, m, u)[0]  # (2, B, T, d_v)
    assert same_numbers(two[1], one), "with two axes before (T, D) the results are others"


def streaming_attention(query: Tensor, blocks: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention's output (T, d_v) from key and value blocks that pass once.

    Both sums are measured against the largest score so far. When a larger one turns up, both
    shrink by the same factor, and their quotient stays the same.
    """
    largest = query.new_full((len(query), 1), -math.inf)  # (T, 1), the largest score so far
    mix, total = 0.0, 0.0  # Σ e^(s − largest)·v (T, d_v) and Σ e^(s − largest) (T, 1)
    for key, value in blocks:
        scores = query @ key.T / math.sqrt(query.size(-1))  # (T, s)
        newest = torch.maximum(largest, scores.amax(dim=-1, keepdim=True))
        shrink, powers = (largest - newest).exp(), (scores - newest).exp()
        mix = mix * shrink + powers @ value
        total = total * shrink + powers.sum(dim=-1, keepdim=True)
        largest = newest
    return mix / total


def check_streaming_attention(candidate: Callable[[Tensor, Iterator[tuple]], Tensor]) -> None:
    """Compares the streamed output with `attention`'s, in blocks of several sizes.

    Then it weighs what is in memory.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 4), (12, 4), (12, 2))  # query, key, value
    query, key, value = (torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)

    def streamed(key: Tensor, sizes: tuple[int, ...]) -> Tensor:
        pairs = zip(key.split(sizes), value.split(sizes), strict=True)
        return candidate(query, ((k.clone(), v.clone()) for k, v in pairs))

    for sizes in ((12,), (1,) * 12, (5, 4, 3)):
        pairs = zip(key.split(sizes), value.split(sizes), strict=True)
        parts = [attention(query, k, v)[0] for k, v in pairs]
        mean = sum(parts) / len(parts)
        mistakes = {
            "the scores aren't divided by √d_k": attention(2 * query, key, value)[0],
            "only the last block counts": parts[-1],
            "the blocks' outputs are averaged: add up both sums over all blocks": mean,
        }
        otherwise = "wrong for some block sizes: rescale both sums by the same factor"
        compare(streamed(key, sizes), attention(query, key, value)[0], mistakes, otherwise)
    query = query.abs()
    for scale in (-4000, 4000):  # all scores below -1,000, then all far above 0
        steep = key.abs() * torch.linspace(1, 2, 12).unsqueeze(1).double() * scale
        got = streamed(steep, (5, 4, 3))
        largest = "NaN for scores far from 0: subtract the largest so far, each query its own"
        assert not got.isnan().any(), largest
        shrink = "wrong for large scores: when a larger one comes, both sums must shrink"
        assert same_numbers(got, attention(query, steep, value)[0]), shrink
    with MostAlive() as memory:
        candidate(query, ((torch.randn(16, 4), torch.randn(16, 2)) for _ in range(64)))
    assert memory.most < 64 * 16 * (4 + 2) * query.itemsize / 2, (
        "more than half of all keys and values are in memory at once: keep sums, not blocks"
    )
