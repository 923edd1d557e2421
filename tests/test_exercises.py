"""Exercises: each solution is right, each mistake is told; and what readers see besides."""

import math
import re
from contextlib import contextmanager
from itertools import zip_longest
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import CHAPTERS
from sacrebleu.metrics import BLEU
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from scripts.book.exercises import check, find, modules_by_name, same, solution, solution_results
from scripts.ch01_attention import attention, masked_softmax
from scripts.ch02_multi_head_attention import MultiHeadedAttention, split_heads
from scripts.ch06_training import LabelSmoothing, copy_batches, tiny_model, train_step
from scripts.ch19_ablations import patient
from scripts.ch22_todays_block import rotated, rotated_in_pairs
from scripts.ch23_long_memory import write_and_read
from scripts.exercises.ch06 import gradient_of

NAMES = modules_by_name()
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


def test_chapters_check_each_exercise_and_say_how_hard_it_is_but_show_no_answer():
    texts = {path.stem[:4]: path.read_text("utf-8") for path in CHAPTERS}
    for name, chapter in NAMES.items():
        assert re.search(rf"^check\({name}\)$", texts[chapter], re.MULTILINE)
        assert f'`solution("{name}")`' in texts[chapter]
    for text in map(texts.get, NAMES.values()):
        assert text.count("\n# ### Exercise ") == len(re.findall(WORTH, text)) >= 2
        assert not re.search(r"^solution\(", text, re.MULTILINE)


CAPTIONS = [
    "A dog sleeps in the garden.",
    "Two men play.",
    "a b c d e",
    "in the in the in the garden",
]
REFERENCES = [["a dog is asleep in the garden."], ["Two women play."], ["a b c d e f", "a b c d"]]
REFERENCES += [["in the garden a dog", "the dog in the garden in a park"]]
SACREBLEU = BLEU().corpus_score(CAPTIONS, [*zip_longest(*REFERENCES)]).score
ENCODER = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 20), 3, enable_nested_tensor=False)
MAPS = torch.rand(2, 3, 4, 4, dtype=torch.float64)
Q, K, V = torch.rand(3, 4, 6, dtype=torch.float64)
SIZES = np.geomspace(1e7, 1e9, 20_001)
LOSSES = 406.4 * SIZES**-0.34 + 410.7 * (1e18 / (6 * SIZES)) ** -0.28
LOGITS = torch.tensor([[1.0, 3.0, 2.0]])
HALVES = SimpleNamespace(encode=lambda text: text[::2])
PLACES = [[2, 3, 4, 4], [1, 2, 3, 4]]
BLOCKS = torch.block_diag(torch.ones(1, 1), torch.ones(3, 3)).tril() > 0
FACTS = {  # arguments, and what our solution should give, from elsewhere
    "as_text": ((["▁Ein", "▁H", "am", "mer", "."],), "Ein Hammer."),
    "window_mask": ((5, 2, 2), (torch.eye(5) + torch.eye(5).roll(2, 0).tril())[None] > 0),
    "streaming_attention": ((Q, zip(K.split(1), V.split(1), strict=True)), attention(Q, K, V)[0]),
    "slice_heads": ((MAPS[0, :, :3], 2), split_heads(MAPS[0, :, :3], 2)),
    "relative_bias": ((10 + torch.arange(5)[None], 2, 4), 10 + torch.tensor(PLACES)[None, None]),
    "squared_gap": ((-3, 4), 4 - 2 * math.cos(3) - 2 * math.cos(0.03)),
    "stretched": ((torch.eye(2)[[0, 1, 0]], 5), torch.eye(2)[[0, 1, 0, 1, 0]]),
    "encoder_parameters": ((3, 8, 20), sum(p.numel() for p in ENCODER.parameters())),
    "two_sums_norm": ((Q, K[0], V[0], 0.1), F.layer_norm(Q, (6,), K[0], V[0], 0.1)),
    "first_shift": (("a\nb\n\u2028\n",), 2),
    "wasted_scores": (([1, 2, 10, 10], [[0, 1], [2, 3]]), 3 / 208),
    "mean_over_ranks": (([Q[0], Q[1:].mean(0)], [1, 3]), Q.mean(0)),
    "sign_test": (([5] * 12, [6] * 8 + [4] * 2 + [5] * 2), 112 / 1024),
    "many_references": ((CAPTIONS, REFERENCES), SACREBLEU),
    "packed_attention": ((Q, K, V, [1, 3], True), attention(Q, K, V, BLOCKS)[0]),
    "decoding_cost": (([1, 2, 2, 3, 5, 7], 0.5, 5.0), 33),
    "rollout": ((MAPS,), (MAPS[1].mean(0) + torch.eye(4)) @ (MAPS[0].mean(0) + torch.eye(4)) / 4),
    "bits_from_pieces": ((math.log(2), ["ab def", "ä"], HALVES), 6 / 9),
    "packed_mask": (
        (torch.tensor([[7, 0, 0, 0, -1]]),),
        torch.block_diag(BLOCKS, torch.ones(1, 1))[None] > 0,
    ),
    "false_alarms": ((2, 0.5), 0.75),
    "holm": (([0.04, 0.001, 0.03, 0.015, 0.08],), [0.09, 0.005, 0.09, 0.06, 0.09]),
    "size_for_loss": ((2.0, 6.0, 0.5, 5.0), 4),
    "closest_to_people": (([["ab", "bc", "cb"]], ["cd"], lambda a, b: len({*a} & {*b})), ["bc"]),
    "policy_loss": ((LOGITS[0], torch.tensor([0.5, 0.2, 0.4]), [3]), (0.2 - 0.75 + 0.1) / 3),
    "shared_heads": ((MAPS, 6), MAPS.repeat_interleave(2, 1)),
    "gated_delta": ((Q, K, V, torch.ones(4), Q[0]), write_and_read(Q, K, V, Q[0], True)),
    "dropped_share": ((torch.tensor([[0, 1]] * 6), 4, 1.1), 4 / 12),
}


@pytest.mark.parametrize("name", FACTS)
def test_our_solution_gives_what_is_known(name):
    arguments, right = FACTS[name]
    assert same(ours(name)(*arguments), right)


WARMUP = [1 / 16, 2 / 16, 3 / 16]
PROPERTIES = {  # what our solution gives where an exercise asks for properties, part by part
    "linear_rate": [["ValueError", *WARMUP, *[n / 28 for n in range(7, 0, -1)], 0, 0], ...],
    "confused": [6, 1],
    "deepened": [2, ..., True, [True] * 4],
    "misleading_table": [True, [False, False, True]],
    "likeliest_text": [
        ["ten dogs", math.log(0.091), 3, True, True],
        ["", math.log(0.4), 1, True, True],
        ["a dog", math.log(0.32), 2, True, True],
        ["a dog sleeps", math.log(0.16), 4, True, True],
    ],
    "stopwatch": [0.2, 0.5, 0.6],
    "hide_words": [[True, True], [True, True], True, [True, False]],
}


@pytest.mark.parametrize("name", PROPERTIES)
def test_our_solution_has_the_properties(name, float64):
    parts = [result for case in solution_results(name) for result in case]
    for part, right in zip(parts, PROPERTIES[name], strict=True):
        assert right is ... or same(part, right)


def test_a_streamed_gradient_is_that_of_a_training_step():
    model, criterion, group = tiny_model(d_model=16), LabelSmoothing(0.1), [*copy_batches(2, 4, 1)]
    ours("streamed_gradient")(model, iter(group), criterion)
    streamed = gradient_of(model)
    train_step(model, group, criterion, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.testing.assert_close(streamed, gradient_of(model))


def test_without_a_head_is_as_if_it_were_silent():
    layer, x = MultiHeadedAttention(4, 12, dropout=0.0), torch.randn(1, 5, 12)
    smaller = ours("without_head")(layer, 2)
    layer.project_output.weight.data[:, 6:9] = 0
    torch.testing.assert_close(smaller(x, x, x), layer(x, x, x))


def test_silenced_values_come_back_after_an_error():
    layer = MultiHeadedAttention(4, 12, dropout=0.0)
    before = parameters_to_vector(layer.parameters())
    with pytest.raises(KeyError), ours("values_silenced")(layer, 2):
        silent = [not row.any() for row in layer.project_value.weight]
        raise KeyError
    assert silent == [6 <= i < 9 for i in range(12)]
    assert torch.equal(parameters_to_vector(layer.parameters()), before)


def test_shared_layers_are_one_module_and_the_decoder_keeps_its_own():
    model = patient(layers=3)
    first, decoder = model.encoder.layers[0], [*model.decoder.layers]
    ours("shared_layers")(model)
    assert [*model.encoder.layers] == [first] * 3 and [*model.decoder.layers] == decoder


def test_the_best_size_is_that_of_the_lowest_loss():
    best = ours("best_size")(1e18, 406.4, 0.34, 410.7, 0.28)
    assert best == pytest.approx(SIZES[LOSSES.argmin()], rel=1e-3)


def test_a_half_layout_gives_the_same_scores():
    x, weights = MAPS.flatten(0, 1)[:1].repeat(1, 1, 6), torch.rand(2, 24, 24, dtype=torch.float64)
    scores = []
    for turn, change in ((rotated_in_pairs, lambda w, h: w), (rotated, ours("half_layout"))):
        query, key = (turn(split_heads(x @ change(weight, 3).T, 3)) for weight in weights)
        scores.append(query @ key.mT)
    torch.testing.assert_close(*scores)


def pair_by_pair(query, key, value, w, m, u, mask=None):
    queries = (query @ w.T).unbind(-2)
    scores = [(x.unsqueeze(-2) + key @ m.T).tanh() @ u for x in queries]
    weights = masked_softmax(torch.stack(scores, dim=-2), mask)
    return weights @ value, weights


def divided_by_the_sum(logits, top):
    weights, chosen = logits.softmax(-1).topk(top)
    return chosen, weights / weights.sum(-1, keepdim=True) if top > 1 else weights


RIGHT = {
    "additive_attention": pair_by_pair,
    "router": divided_by_the_sum,
}


@pytest.mark.parametrize("name", RIGHT)
def test_another_right_answer_passes_too(name):
    check(RIGHT[name], name)


def documented_dots(n, r):
    """What is wanted."""
    ...


@contextmanager
def decorated_dots(n, r): ...


@pytest.mark.parametrize("stub", [documented_dots, decorated_dots])
def test_a_stub_is_not_tried_yet(stub, capsys):
    check(stub, "window_mask")
    assert capsys.readouterr().out == "window_mask: not tried yet\n"


WRONG_FORMS = [
    ("window_mask", lambda n, r, gap: 7, "be a tensor (1, 6, 6) of bool, not a int"),
    (
        "window_mask",
        lambda *x: ours("window_mask")(*x)[0].double(),
        "not a tensor (6, 6) of floats",
    ),
    ("window_mask", lambda *x: None if x else 0, "your function gives None: is `return` missing?"),
    ("false_alarms", lambda rows, level: 0.1, "(false_alarms(25, 0.05) should be 0.72"),
]


@pytest.mark.parametrize("name, function, words", WRONG_FORMS)
def test_what_is_wrong_with_the_form_is_named(name, function, words):
    assert words in message(function, name)


def test_errors_of_a_function_are_shown_and_the_default_dtype_is_put_back():
    with pytest.raises(ZeroDivisionError):
        check(lambda pieces: 1 / 0, "as_text")
    assert torch.get_default_dtype() == torch.float32


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'no_such'; the exercises are .*window_mask"):
        solution("no_such")


def test_solution_prints_our_source(capsys):
    solution("confused")
    assert capsys.readouterr().out.startswith("@torch.no_grad()\ndef confused(")
