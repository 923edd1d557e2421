"""Exercises: each solution is right, each mistake is told; and what readers see besides."""

import ast
import math
import re
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import CHAPTERS
from sacrebleu.metrics import BLEU
from torch import nn
from torch.nn import functional as F

from scripts.book.exercises import (
    check,
    find,
    first_failure,
    modules_by_name,
    same,
    solution,
    solution_results,
)
from scripts.ch01_attention import masked_softmax
from scripts.ch02_multi_head_attention import MultiHeadedAttention, split_heads
from scripts.ch04_encoder_decoder import make_model
from scripts.ch06_training import LabelSmoothing, copy_batches, gradient_of, tiny_model, train_step
from scripts.ch22_todays_block import rotated, rotated_in_halves

NAMES = modules_by_name()
TEXTS = {path.stem[:4]: path.read_text("utf-8") for path in CHAPTERS}
WORTH = r"# \*(think|code|project) · difficulty [●○]{3} · worth [●○]{3} · \d+ minutes\*"


def ours(name):
    return find(name).solution


def message(function, name):
    with pytest.raises(AssertionError) as error:
        check(function, name)
    return str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_our_solution_passes_and_each_mistake_gets_its_message(name, capsys):
    check(ours(name))
    assert capsys.readouterr() == ("", "") and torch.get_default_dtype() == torch.float32
    mistakes = find(name).mistakes
    assert [message(wrong, name) for _, wrong in mistakes] == [text for text, _ in mistakes]
    assert len({find(name).otherwise, *dict(mistakes)}) == len(mistakes) + 1 >= 3


@pytest.mark.parametrize("name", NAMES)
def test_the_chapter_has_a_stub_that_says_what_is_wanted_and_its_check(name):
    text = TEXTS[NAMES[name]]
    assert re.search(rf"^check\({name}\)$", text, re.MULTILINE)
    assert f'`solution("{name}")`' in text
    (stub,) = [node for node in ast.parse(text).body if getattr(node, "name", "") == name]
    assert ast.get_docstring(stub) and ast.unparse(stub.body[-1]) == "..."


@pytest.mark.parametrize("chapter", sorted(set(NAMES.values())))
def test_each_says_how_hard_it_is_what_it_is_worth_and_how_long_it_takes(chapter):
    text = TEXTS[chapter]
    assert text.count("\n# ### Exercise ") == len(re.findall(WORTH, text)) >= 3
    assert not re.search(r"^solution\(", text, re.MULTILINE)  # no notebook shows an answer


CAPTIONS = [
    "A dog sleeps in the garden.",
    "Two men play.",
    "a b c d e",
    "in the in the in the garden",
]
REFERENCES = [["a dog is asleep in the garden."], ["Two women play."]]
REFERENCES += [
    ["a b c d e f", "a b c d"],
    ["in the garden a dog", "the dog in the garden in a park"],
]
SACREBLEU = BLEU().corpus_score(CAPTIONS, [*zip_longest(*REFERENCES)]).score
ENCODER = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 20), 3, enable_nested_tensor=False)
SPLITS = {"train": [["a", "b", "a"], ["b", "a", "c"]], "val": [["c"]]}
MAPS = torch.rand(2, 3, 4, 4, dtype=torch.float64)
SIZES = np.geomspace(1e7, 1e9, 20_001)
LOSSES = 406.4 * SIZES**-0.34 + 410.7 * (1e18 / (6 * SIZES)) ** -0.28
LOGITS = torch.tensor([[1.0, 3.0, 2.0]])
HALVES = SimpleNamespace(encode=lambda text: text[::2])
FACTS = {  # arguments, and what our solution should give, from elsewhere
    "insisting_query": ((0.9,), [math.log(18), 0, 0, 0]),
    "window_mask": ((3, 2, 2), torch.tensor([[[1, 0, 0], [0, 1, 0], [1, 0, 1]]]).bool()),
    "slice_heads": ((MAPS[0], 2), split_heads(MAPS[0], 2)),
    "relative_bias": ((LOGITS, 2, 4), torch.tensor([[[[3.0, 2, 2, 2], [1, 3, 2, 2]]]])),
    "squared_gap": ((3, 2), math.sin(3) ** 2 + (math.cos(3) - 1) ** 2),
    "stretched": ((torch.eye(2)[[0, 1, 0]], 5), torch.eye(2)[[0, 1, 0, 1, 0]]),
    "encoder_parameters": ((3, 8, 20), sum(p.numel() for p in ENCODER.parameters())),
    "linear_rate": ((9, 0.7, 3, 9), 0.1),
    "reversed_target": ((torch.tensor([[5, 6, 3, 0]]),), torch.tensor([[2, 6, 5, 3, 0]])),
    "word_numbers": ((SPLITS, 2), {"<pad>": 0, "<unk>": 1, "<s>": 2, "</s>": 3, "a": 4, "b": 5}),
    "wasted_scores": (([1, 2, 10, 10], [[0, 1], [2, 3]]), 3 / 208),
    "near_the_best": ((MAPS[0, 0].log(), 0.0, 0.5), F.normalize(MAPS[0, 0] ** 2, p=1.0)),
    "sign_test": (([5] * 12, [6] * 8 + [4] * 2 + [5] * 2), 112 / 1024),
    "many_references": ((CAPTIONS, REFERENCES), SACREBLEU),
    "decoding_cost": (([1, 2, 2, 3, 5, 7], 0.5, 5.0), 33),
    "may_be_largest": ((LOGITS, torch.full((1, 3), 0.5)), torch.tensor([[False, True, True]])),
    "rollout": ((MAPS,), (MAPS[1].mean(0) + torch.eye(4)) @ (MAPS[0].mean(0) + torch.eye(4)) / 4),
    "bits_from_pieces": ((math.log(2), ["ab def", "ä"], HALVES), 6 / 9),
    "packed_mask": (
        (torch.tensor([[0, 0, -1]]),),
        torch.tensor([[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]) > 0,
    ),
    "false_alarms": ((2, 0.5), 0.75),
    "holm": (([0.04, 0.001, 0.03, 0.015, 0.08],), [0.09, 0.005, 0.09, 0.06, 0.09]),
    "size_for_loss": ((2.0, 6.0, 0.5, 5.0), 4),
    "closest_to_people": (([["ab", "bc", "cb"]], ["cd"], lambda a, b: len({*a} & {*b})), ["bc"]),
    "policy_loss": (
        (LOGITS[0], torch.tensor([0.5, 0.2, 0.4]), [3]),
        (0.2 - 3 * 0.25 + 2 * 0.05) / 3,
    ),
    "shared_heads": ((MAPS, 6), MAPS.repeat_interleave(2, 1)),
    "alibi_bias": (
        (2, 1, 3),
        -torch.tensor([[[2.0, 1, 0]], [[2, 1, 0]]]) / torch.tensor([[[16.0]], [[256]]]),
    ),
    "router": ((LOGITS, 2), (torch.tensor([[1, 2]]), torch.tensor([[3.0, 2.0]]).softmax(-1))),
    "dropped_share": ((torch.tensor([[0, 1]] * 6), 4, 1.1), 4 / 12),
}


@pytest.mark.parametrize("name", FACTS)
def test_our_solution_gives_what_is_known(name):
    arguments, right = FACTS[name]
    assert same(ours(name)(*arguments), right)


SAID = {  # what our solution gives where an exercise asks for properties, part by part
    "deepened": [False, ..., ..., True, ...],
    "fresh_stack": [[True, 3, 3, [3, 3, 3, 3]]],
    "budget_batches": [[*range(300)], True, True, False, [True, False], True, True, ...],
    "misleading_table": [*[True] * 9, [False, False, True]],
    "likeliest_text": [
        ["ten dogs", math.log(0.091), 3, True, True],
        ["", math.log(0.4), 1, True, True],
        ["a dog", math.log(0.32), 2, True, True],
        ["a dog sleeps", math.log(0.16), 4, True, True],
    ],
    "resumable_stream": [[[*range(12)]] * 2, False, True, [False, False], [True, True], True],
    "stopwatch": [0.2, 0.5, 0.6],
    "hide_words": [[True, True], True, True, True, [True, False]],
    "confused": [6, 1, 24],
    "token_rate": [63 / 4],
    "values_silenced": [..., ..., True] * 2,
    "shared_layers": [..., [1, 3]],
}


@pytest.mark.parametrize("name", SAID)
def test_our_solution_has_the_properties(name):
    torch.set_default_dtype(torch.float64)
    parts = [result for case in solution_results(name) for result in case]
    assert all(
        right is ... or same(part, right) for part, right in zip(parts, SAID[name], strict=True)
    )


def test_a_streamed_gradient_is_that_of_a_training_step():
    model, criterion, group = tiny_model(d_model=16), LabelSmoothing(0.1), [*copy_batches(2, 4, 1)]
    ours("streamed_gradient")(model, iter(group), criterion)
    streamed = gradient_of(model)
    train_step(model, group, criterion, torch.optim.SGD(model.parameters(), lr=0.0))
    torch.testing.assert_close(streamed, gradient_of(model))


def test_without_a_head_is_as_if_it_were_silent():
    layer, x = MultiHeadedAttention(4, 12, dropout=0.0), torch.randn(1, 5, 12)
    smaller = ours("without_head")(layer, 2)
    layer.project_output.weight.data[:, 6:9] = 0
    torch.testing.assert_close(smaller(x, x, x), layer(x, x, x))


def test_the_best_size_is_that_of_the_lowest_loss():
    best = ours("best_size")(1e18, 406.4, 0.34, 410.7, 0.28)
    assert best == pytest.approx(SIZES[LOSSES.argmin()], rel=1e-3)


def test_a_half_layout_gives_the_same_scores():
    x, weights = MAPS.flatten(0, 1)[:1].repeat(1, 1, 6), torch.rand(2, 24, 24, dtype=torch.float64)
    scores = []
    for turn, change in ((rotated, lambda w, h: w), (rotated_in_halves, ours("half_layout"))):
        query, key = (turn(split_heads(x @ change(weight, 3).T, 3)) for weight in weights)
        scores.append(query @ key.mT)
    torch.testing.assert_close(*scores)


# Wrong functions that are right until the case in which they fail: there, memory or rounding tells.
INDEPENDENT = {
    "streaming_attention": [3, 5],
    "two_sums_norm": [1],
    "mean_over_ranks": [1, 3],
    "packed_attention": [2],
    "chunked_z_loss": [1, 2],
    "online_softmax": [2, 7],
    "gated_delta": [1],
    "shared_heads": [2],
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_another_way_agrees_until_memory_or_overflow_tells(name):
    torch.set_default_dtype(torch.float64)
    failures = [first_failure(wrong, name)[0][0] for _, wrong in find(name).mistakes]
    assert failures[-len(INDEPENDENT[name]) :] == INDEPENDENT[name]


def by_half_the_formula(x, weight, bias, eps):
    """Σ (x − μ)² = Σ x² − μ Σ x."""
    total, squares = x.sum(-1, True), (x * x).sum(-1, True)
    variance = (squares - total * total / 8) / 8
    return (x - total / 8) / (variance + eps).sqrt() * weight + bias


def filled_from_the_old(model, N):
    """A new model into which the old numbers are loaded."""
    deep = make_model(11, 11, N, 8, 16, 2, 0.0, norm_first=True, tie="all")
    deep.load_state_dict(model.state_dict(), strict=False)
    for stack in (deep.encoder, deep.decoder):
        for layer in stack.layers[2:]:
            for name, p in layer.named_parameters():
                if "contract" in name or "project_output" in name:
                    nn.init.zeros_(p)
    return deep


def hidden_in_another_order(x, losses, fit):
    residuals = []
    for i in range(len(x)):
        others = [np.concatenate((values[i + 1 :], values[:i])) for values in (x, losses)]
        residuals.append(np.log(losses[i] / fit(*others)(x[i : i + 1])[0]))
    return np.sqrt(np.square(residuals).mean())


def layer_by_hand(x, attend, think, norms, norm_first):
    if norm_first:
        x = x + attend(norms[0](x))
        return x + think(norms[1](x))
    x = norms[0](x + attend(x))
    return norms[1](x + think(x))


def pair_by_pair(query, key, value, w, m, u, mask=None):
    queries = (query @ w.T).unbind(-2)
    scores = [(x.unsqueeze(-2) + key @ m.T).tanh() @ u for x in queries]
    weights = masked_softmax(torch.stack(scores, dim=-2), mask)
    return weights @ value, weights


RIGHT = {
    "additive_attention": pair_by_pair,
    "layer_from_parts": layer_by_hand,
    "as_text": lambda pieces: " ".join("".join(pieces).split("▁")).strip(),
    "two_sums_norm": by_half_the_formula,
    "deepened": filled_from_the_old,
    "reversed_target": lambda src: torch.tensor(
        [[2, *[i for i in row[::-1] if i > 3], 3, *[0] * row.count(0)] for row in src.tolist()]
    ),
    "leave_one_out": hidden_in_another_order,
    "word_numbers": lambda *given: dict(reversed(ours("word_numbers")(*given).items())),
    "budget_batches": lambda *given: ours("budget_batches")(*given)[::-1],
}


@pytest.mark.parametrize("name", RIGHT)
def test_another_right_answer_passes_too(name):
    check(RIGHT[name], name)


def one_direction(first, second):
    wins = sum(b > a for a, b in zip(first, second, strict=True))
    losses = sum(b < a for a, b in zip(first, second, strict=True))
    tail = sum(math.comb(wins + losses, k) for k in range(losses + 1))
    return min(1.0, 2 * tail / 2 ** (wins + losses))


def other_key_bias(layer, i):
    smaller = ours("without_head")(layer, i)
    smaller.project_key.bias = ours("without_head")(layer, (i + 1) % layer.h).project_key.bias
    return smaller


SLIPS = {  # wrong only in details, which hides in easy data
    "additive_attention": lambda *x: (
        ours("additive_attention")(*x[:6])[0],
        ours("additive_attention")(*x)[1],
    ),
    "relative_bias": lambda *x: nn.Parameter(ours("relative_bias")(*x).detach().clone()),
    "without_head": other_key_bias,
    "two_sums_norm": lambda x, w, b, eps: ours("two_sums_norm")(x, w.detach(), b, eps),
    "linear_rate": lambda step, *x: ours("linear_rate")(step, *x) if step else [][0],
    "likeliest_text": lambda *x: replace(ours("likeliest_text")(*x), length=3),
    "sign_test": one_direction,
    "packed_attention": lambda q, *x: ours("packed_attention")(q.detach(), *x),
    "decoding_cost": lambda lengths, *x: ours("decoding_cost")(sorted(set(lengths)), *x),
    "values_silenced": lambda layer, i: ours("values_silenced")(layer.requires_grad_(False), i),
    "hide_words": lambda ids, *x: ours("hide_words")(ids + 4 * (ids == 1), *x),
    "policy_loss": lambda p, *x: ours("policy_loss")(p.detach().requires_grad_(), *x),
    "online_softmax": lambda parts: ours("online_softmax")(
        (scores, v) for scores, v in parts if scores[0] > -math.inf
    ),
    "gated_delta": lambda q, k, v, a, b: ours("gated_delta")(q, k, v, a, torch.ones_like(b)),
}


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_is_refused_in_general_words(name):
    assert message(SLIPS[name], name).startswith(find(name).otherwise)


def dots(n, r): ...


def documented_dots(n, r):
    """What is wanted."""
    ...


def passes(n, r):
    pass


@contextmanager
def decorated_dots(n, r): ...


@pytest.mark.parametrize("stub", [dots, documented_dots, passes, decorated_dots])
def test_a_stub_is_not_tried_yet(stub, capsys):
    check(stub, "window_mask")
    assert capsys.readouterr().out == "window_mask: not tried yet\n"


BROKEN = [
    ("window_mask", lambda n, r, gap: 7, "return a Tensor, not a int"),
    ("window_mask", lambda *x: None if x else 0, "your function gives None: is `return` missing?"),
    (
        "window_mask",
        lambda *x: ours("window_mask")(*x).double(),
        "of bool, not a tensor (1, 6, 6) of",
    ),
    ("window_mask", lambda *x: ours("window_mask")(*x)[0], "be a tensor (1, 6, 6) of bool, not"),
    ("sign_test", lambda first, second: [0.5], "return one number, not a list"),
    ("word_numbers", lambda splits, n: ["the"], "return a dict, not a list"),
    ("rollout", lambda maps: ours("rollout")(maps.mul_(0.5)), "`maps` itself was changed"),
    ("holm", lambda ps: ps.sort() or ps, "`ps` itself was changed: make a new one"),
    ("false_alarms", lambda rows, level: 0.1, "(false_alarms(25, 0.05) should be 0.72"),
]


@pytest.mark.parametrize("name, function, words", BROKEN)
def test_what_is_wrong_with_the_form_is_named(name, function, words):
    assert words in message(function, name)


def test_errors_of_a_function_are_shown_and_the_default_dtype_is_put_back(capsys):
    with pytest.raises(ZeroDivisionError):
        check(lambda pieces: 1 / 0, "as_text")
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("ask", [solution, lambda name: check(dots, name)])
def test_unknown_names_are_refused_with_the_known_ones(ask):
    with pytest.raises(ValueError, match="'no_such'; the exercises are .*window_mask"):
        ask("no_such")


def test_solution_prints_our_source_and_what_it_uses(capsys):
    solution("deepened")
    printed = capsys.readouterr().out
    assert printed.startswith("def last_steps(") and "\n\n\ndef deepened(" in printed
    solution("confused")
    printed = capsys.readouterr().out
    assert printed.startswith("@torch.no_grad()\ndef confused(") and printed.count("def ") == 1
