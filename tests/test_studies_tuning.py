"""Fine-tuning: it works on a copy, and minimum risk lowers the risk that it measures."""

import copy
from dataclasses import replace

import torch

from scripts.core.models import Trained
from scripts.core.settings import build_model
from scripts.studies.recipes import BASE
from scripts.studies.tuning import Tuning, cross_entropy, fine_tuned, minimum_risk


def novice_of(forty_pairs):
    torch.manual_seed(0)
    config = replace(BASE, d_model=16, d_ff=16, heads=2, corpus="sample")
    model = build_model(config, len(forty_pairs.tokenizer)).eval()
    return Trained(model, forty_pairs.tokenizer, config)


def test_fine_tuning_works_on_a_copy_and_meets_the_same_sentences(forty_pairs):
    novice = novice_of(forty_pairs)
    how = Tuning(steps=3, sentences=4, lr=1e-2)
    before = copy.deepcopy(novice.model.state_dict())
    met: dict[str, list] = {"one": [], "two": [], "other": []}

    def loss(name):
        def of(model, examples):
            met[name].append(list(examples))
            assert not model.training
            return cross_entropy(novice.config)(model, examples)

        return of

    for name, seed in (("one", 1), ("two", 1), ("other", 2)):
        model = fine_tuned(novice, forty_pairs.train, loss(name), how, seed)
        assert any(
            not torch.equal(p, q)
            for p, q in zip(model.parameters(), novice.model.parameters(), strict=True)
        )
    assert met["one"] == met["two"] != met["other"]
    assert [len(examples) for examples in met["one"]] == [4, 4, 4]
    assert all(torch.equal(t, before[n]) for n, t in novice.model.state_dict().items())


def test_minimum_risk_lowers_the_risk_of_its_own_draws(forty_pairs):
    novice = novice_of(forty_pairs)
    how = Tuning(candidates=6, sharpness=0.3, steps=12, sentences=4, lr=2e-3)
    loss = minimum_risk(novice, how, 1)
    model = fine_tuned(novice, forty_pairs.train[:4], loss, how, 1)

    def judged(model):
        draws = [minimum_risk(novice, how, seed) for seed in range(5)]
        with torch.no_grad():
            return sum(draw(model, forty_pairs.train[:4]).item() for draw in draws)

    assert judged(model) < judged(novice.model)
