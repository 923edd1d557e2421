"""The study of two stacks and of one: the same batches, equally many weights, new positions."""

from dataclasses import asdict, replace

import pytest
import torch
from test_studies_runner import simulated

from scripts.book.instruments import scramble
from scripts.ch06_training import BOS, EOS, LabelSmoothing
from scripts.ch07_multi30k import Example, make_batch
from scripts.ch17_small_gpt import asked_next, make_stack, stack_loss
from scripts.ch18_one_stack import AfterSource, asked_hidden, asked_pairs
from scripts.studies import stacks
from scripts.studies.rows import SEEDS, SWEEP
from scripts.studies.runner import these

PAIRS = [
    Example([5, 6, 7, EOS], [BOS, 8, 9, EOS]),
    Example([9, EOS], [BOS, 5, 6, 7, 8, EOS]),
    Example([8, 7, 6, 5, 9, 9, EOS], [BOS, 6, EOS]),
]


def fresh(name, **more):
    """A row's small model, shaken, in double precision."""
    torch.manual_seed(0)
    row, config = stacks.ROWS[name], replace(stacks.BASE, d_model=16, d_ff=32, heads=2, **more)
    model = row.build(config, 12).double().eval()
    scramble(model)
    return row, config, model


def test_a_batch_gives_its_pairs_back():
    assert stacks.pairs_of(make_batch(PAIRS)) == PAIRS


def test_two_stacks_and_one_weigh_the_same_but_for_norms():
    sizes = {}
    for name in stacks.ROWS:
        model = stacks.ROWS[name].build(stacks.BASE, stacks.BASE.vocab)
        sizes[name] = sum(p.numel() for p in model.parameters())
    one = {size for name, size in sizes.items() if name != stacks.TWO}
    assert one == {sizes[stacks.TWO] - 3 * stacks.BASE.d_model}


def test_places_begin_anew_with_each_target():
    ids = torch.tensor([[5, 6, EOS, BOS, 8, 9], [9, EOS, BOS, 5, 6, 7]])
    assert stacks.restarted(ids).tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]]


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_the_fast_road_gives_the_same_sums_and_gradients(norm_first, positions, float64):
    torch.manual_seed(2)
    model = make_stack(20, 2, 16, 32, 4, dropout=0.0, norm_first=norm_first, positions=positions)
    scramble(model)
    draw = torch.Generator().manual_seed(0)
    for batch in (
        asked_next([[BOS, 5, 6, EOS], [BOS, EOS]]),
        asked_hidden([[BOS, *range(4, 18), EOS], [BOS, *[5, 6, 7] * 5, EOS]], 19, draw),
        asked_pairs(PAIRS, "causal"),
        asked_pairs(PAIRS, "prefix"),
    ):
        assert batch.ntokens
        found = []
        for loss_of in (stack_loss, stacks.fast_stack_loss):
            model.zero_grad()
            sums = loss_of(model, batch, LabelSmoothing(0.1))
            sums[0].backward()
            found.append([*sums, *(p.grad.clone() for p in model.parameters())])
        torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sees", ["causal", "prefix"])
def test_the_loss_is_chapter_18s_and_without_new_positions_the_textbooks(sees):
    row, config, model = fresh(sees)
    found = row.loss_of(config)(model, make_batch(PAIRS), LabelSmoothing(0.1))
    torch.testing.assert_close(
        found, stack_loss(model, asked_pairs(PAIRS, sees), LabelSmoothing(0.1))
    )


@pytest.mark.parametrize("name", [name for name in stacks.ROWS if name != stacks.TWO])
def test_training_and_decoding_see_the_same_positions(name):
    """The loss of a text is that of its steps, taken with the cache that the search uses."""
    row, config, model = fresh(name)
    for pair in PAIRS:
        _, nll = row.loss_of(config)(model, make_batch([pair]), LabelSmoothing(0.0))
        reading = row.search.keywords["reading"](model, torch.tensor([pair.src]), row.sees)
        steps = 0.0
        for token, following in zip(pair.tgt, pair.tgt[1:], strict=False):
            logits = reading.logits(reading.step(torch.tensor([[token]])))
            steps -= logits.log_softmax(-1)[0, following]
        torch.testing.assert_close(nll, steps)
    assert (row.search.keywords["reading"] is AfterSource) == ("anew" not in name)


@pytest.mark.parametrize("name", [name for name in stacks.ROWS if name != stacks.TWO])
def test_company_changes_no_pairs_loss(name):
    row, config, model = fresh(name)
    loss, criterion = row.loss_of(config), LabelSmoothing(0.1)
    alone = [torch.stack(loss(model, make_batch([pair]), criterion)) for pair in PAIRS]
    torch.testing.assert_close(torch.stack(loss(model, make_batch(PAIRS), criterion)), sum(alone))


def test_each_row_has_its_sweep_and_its_seeds():
    runs = simulated(stacks.wanted_runs, lambda one: abs(one["lr"] - stacks.BASE.lr))
    for name in stacks.ROWS:
        rates = {run["lr"] for run in these(runs, row=name, seed=SWEEP)}
        assert rates == {stacks.BASE.lr / 2, stacks.BASE.lr, 2 * stacks.BASE.lr}
        counted = [run for run in these(runs, row=name) if run["seed"] != SWEEP]
        assert {(run["lr"], run["seed"]) for run in counted} == {(stacks.BASE.lr, s) for s in SEEDS}


@pytest.mark.parametrize("name", [stacks.TWO, "prefix, positions anew"])
def test_a_run_learns_and_translates(name):
    config = replace(stacks.BASE, corpus="few", vocab=300, d_model=16, d_ff=32, layers=1)
    setting = asdict(replace(config, epochs=2, heads=2, warmup=4, max_tokens=4096))
    found = stacks.work(setting, {"row": name, "lr": 0.004, "seed": 1})
    assert found["losses"][0] > found["losses"][1] and 0 <= found["bleu"] < 100
