"""Chapter 2's exercises: each checker accepts the solution and tells the common mistakes apart."""

import math

import pytest
import torch
from torch import nn

from scripts.book.exercises import rejection
from scripts.ch02_multi_head_attention import (
    check_multi_query,
    check_relative_bias,
    check_slice_heads,
    check_without_head,
    distance_bias,
    multi_query_layer,
    multi_query_variant,
    silenced,
    solution_multi_query,
    solution_relative_bias,
    solution_slice_heads,
    solution_without_head,
    split_by_bare_view,
    split_heads,
)

SOLVED = [
    (check_slice_heads, solution_slice_heads),
    (check_relative_bias, solution_relative_bias),
    (check_without_head, solution_without_head),
    (check_multi_query, solution_multi_query),
]


@pytest.mark.parametrize("check, solution", SOLVED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_solution_passes_whatever_the_default_dtype(check, solution, dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert check(solution) is None
    finally:
        torch.set_default_dtype(before)


def test_another_way_to_write_a_solution_passes_too():
    check_slice_heads(split_heads)
    check_slice_heads(lambda x, h: x.view(*x.shape[:2], h, -1).permute(0, 2, 1, 3))
    check_multi_query(
        lambda x, memory, *rest: multi_query_layer(*rest[:5])(x, memory, memory, *rest[5:])
    )


def places(T, S):
    return torch.arange(S) - torch.arange(T).unsqueeze(1)


SLICES = {
    "memory order": split_by_bare_view,
    "every H-th": lambda x, h: x.unflatten(-1, (-1, h)).movedim(-1, 1),
    "before the heads": lambda x, h: x.unflatten(-1, (h, -1)),
    "not (B, H": lambda x, h: split_heads(x, h).flip(1),
}

BIAS = {
    "are swapped": lambda table, T, S: solution_relative_bias(table.flip(1), T, S),
    "has a sign": lambda table, T, S: table[
        :, (places(T, S).abs() + table.size(1) // 2).clamp(max=table.size(1) - 1)
    ][None],
    "other end": lambda table, T, S: table[:, (places(T, S) + table.size(1) // 2) % table.size(1)][
        None
    ],
    "wrong distance": lambda table, T, S: solution_relative_bias(table.roll(1, 1), T, S),
    "the shape is": lambda table, T, S: solution_relative_bias(table, T, S)[0],
    "no gradient": lambda table, T, S: solution_relative_bias(table.detach(), T, S),
}


def in_place(layer, i):
    with torch.no_grad():
        layer.project_value.weight[3 * i : 3 * i + 3] = 0
    return layer


def shifted_output(layer, i):
    """The columns of W^O that stay belong to other heads than the rows that stay elsewhere."""
    smaller = solution_without_head(layer, i)
    output = solution_without_head(layer, (i + 1) % layer.h).project_output
    smaller.project_output.weight = nn.Parameter(output.weight)
    return smaller


def too_small(layer, i):
    smaller = solution_without_head(layer, i)
    smaller.project_key.bias = None
    return smaller


HEADS = {
    "changed": in_place,
    "three": silenced,
    "another head is gone: not 0, but 3": lambda layer, i: solution_without_head(layer, 3 - i),
    "answer otherwise": shifted_output,
    "owns": too_small,
}

QUERIES = {
    "neighbours": multi_query_variant(split=split_by_bare_view),
    "aren't divided": multi_query_variant(stretch=math.sqrt(4)),
    "divided by √D": multi_query_variant(stretch=math.sqrt(4 / 8)),
    "needs an axis": multi_query_variant(),
    "key and value are swapped": lambda x, y, q, k, v, o, h, mask=None: solution_multi_query(
        x, y, q, v, k, o, h
    ),
    "all one": lambda x, y, q, k, v, o, h, mask=None: solution_multi_query(
        x, y, q, k, v, o.flip(0), h
    ),
    "right without": lambda x, y, q, k, v, o, h, mask=None: solution_multi_query(
        x, y, q, k, v, o, h
    ),
    "shape of the query": lambda x, y, *rest: solution_multi_query(x, y, *rest).mT,
}

WRONG = [
    (check_slice_heads, SLICES),
    (check_relative_bias, BIAS),
    (check_without_head, HEADS),
    (check_multi_query, QUERIES),
]


@pytest.mark.parametrize("check, wrong", WRONG, ids=lambda x: getattr(x, "__name__", ""))
def test_each_mistake_gets_an_answer_of_its_own(check, wrong):
    answers = {words: rejection(check, candidate) for words, candidate in wrong.items()}
    for words, answer in answers.items():
        assert words in answer, f"{words!r} is not in {answer!r}"
    assert len(set(answers.values())) == len(wrong) >= 2


def test_a_fixed_penalty_is_one_of_the_tables_that_could_be_learned():
    slopes = [0.0, 0.5, 2.0]
    table = -torch.arange(-4, 5).abs() * torch.tensor(slopes).unsqueeze(1)
    torch.testing.assert_close(solution_relative_bias(table, 5, 5), distance_bias(5, slopes))
