"""The best translator's recipe: losses, pairs, what resumes, and that the records are of it."""

from functools import partial
from signal import SIGTERM

import pytest
import torch
from conftest import ROOT
from torch.testing import assert_close

from scripts.book.records import ARCHIVE, RESULTS, load_record
from scripts.ch06_training import EOS, LabelSmoothing
from scripts.ch07_multi30k import encode_pairs, make_batch
from scripts.ch21_learning_from_models import risk_of_candidates
from scripts.core.checkpoints import load_tensors, weights
from scripts.core.data import TrainingData
from scripts.core.models import load_model
from scripts.core.settings import TrainConfig
from scripts.core.signals import Stopped, StopSignal
from scripts.fast.fast import FAST, PLAIN, fast_loss
from scripts.fast.run import training_of
from scripts.studies import best, lessons, risk
from scripts.studies.lessons import LessonConfig, Workshop, diversified, lesson_loss, sound
from scripts.studies.recipes import sequence_log_probs
from scripts.studies.risk import RiskTraining, bleu_risks, risk_loss

CRITERION = LabelSmoothing(0.1)
FIRST = ROOT / "models" / "sample-de-en"  # where trainings start here
TEXTS = [[[7, 9, 30], [8]], [[5, 6, 7, 8, 9, 10]], [[40, 41], [42], [43, 44, 45]]]
RISKS = [[0.3, 0.9], [0.5], [0.1, 0.2, 0.8]]


# Minimum risk.


@pytest.fixture
def make(forty_pairs, tmp_path, monkeypatch):
    """make() is a training by risk from shipped weights, on forty pairs."""
    monkeypatch.setattr(risk, "AHEAD", 2)
    monkeypatch.setattr(risk, "CANDIDATES", 2)
    changes = {"max_tokens": 128, "device": "cpu", "average": 0, "risk": 150.0}
    config = LessonConfig(**vars(load_model(FIRST).config) | changes)
    parts = {"kind": RiskTraining, "loss_for": lesson_loss, "tune": FIRST}
    return partial(training_of, config, forty_pairs, tmp_path, **parts)


@pytest.mark.parametrize("switches", [FAST, PLAIN], ids=["fast", "plain"])
def test_loss_and_gradient_are_those_of_chapter_21_beside_cross_entropy(make, switches):
    """On rows and on rectangles; each source's risk counts once for each token of its reference."""
    training = make()
    training.load()
    judged = (zip(*both, strict=True) for both in zip(TEXTS, RISKS, strict=True))
    training.attempts = {i: [*attempts] for i, attempts in enumerate(judged)}
    model, pairs, batch = training.model.eval(), training.examples[:3], training.judged(range(3))
    expected, nll = fast_loss(model, make_batch(pairs), CRITERION)
    log_probs = sequence_log_probs(model, batch.src, [[[*t, EOS] for t in ts] for ts in TEXTS])
    lengths = torch.tensor([len(t) + 1 for ts in TEXTS for t in ts])
    risks = torch.tensor(sum(RISKS, []))
    by_source = risk_of_candidates(log_probs / lengths, risks, [2, 1, 3], 6.0)  # (B,)
    targets = torch.tensor([len(pair.tgt) - 1.0 for pair in pairs])
    expected = expected + 150 * (by_source @ targets)
    parameters = list(model.parameters())
    slopes = torch.autograd.grad(expected, parameters)
    loss, same = risk_loss(model, batch, CRITERION, 150.0, switches)
    assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    assert_close(same, nll, rtol=1e-5, atol=1e-4)
    for found, slope in zip(torch.autograd.grad(loss, parameters), slopes, strict=True):
        error = (found - slope).norm().item()  # entries go from 1e-6 to 1,846: judged as a whole
        assert error < 1e-3 * max(slope.norm().item(), 1)


def test_a_risk_is_one_minus_the_sentences_bleu():
    reference = "a dog runs over the green grass ."
    perfect, near, far = bleu_risks([reference, "a dog runs over grass .", "two men"], reference)
    assert perfect == pytest.approx(0) and 0 < near < far == pytest.approx(1, abs=0.02)
    # One word differs of eight: 7/8 of the words, (5+1)/(7+1) of the pairs, 4/7, 3/6.
    (one,) = bleu_risks(["a dog runs over the red grass ."], reference)
    assert one == pytest.approx(1 - (7 / 8 * 6 / 8 * 4 / 7 * 3 / 6) ** 0.25, abs=1e-6)


def test_a_run_starts_from_its_weights_judges_its_own_texts_and_resumes_to_the_bit(make):
    def steps(training, count):
        training.load()
        training.model.train()
        for _ in range(count):
            training.step()
        return weights(training.model)

    whole = make()
    shipped = weights(load_model(FIRST).model)
    assert all(tensor.equal(shipped[name]) for name, tensor in weights(whole.model).items())
    end, decode = steps(whole, 3), whole.data.tokenizer.decode
    for pair, attempts in whole.attempts.items():
        ids, risks = zip(*attempts, strict=True)
        assert [*risks] == bleu_risks([*map(decode, ids)], decode(whole.examples[pair].tgt))
    stop = StopSignal()
    stop.number = SIGTERM  # after the first step: it is heeded where the model writes
    with pytest.raises(Stopped, match="after step 2"):
        make().train_epoch(stop)
    resumed = steps(make(resume=True), 1)
    assert all(tensor.equal(resumed[name]) for name, tensor in end.items())


# Pairs.


def test_turned_around_is_the_other_direction(forty_pairs):
    turned = lessons.turned_around(forty_pairs)
    assert turned.corpus["train"] == [(b, a) for a, b in forty_pairs.corpus["train"]]
    assert turned.train == encode_pairs(turned.corpus["train"], forty_pairs.tokenizer)
    assert turned.val == encode_pairs(turned.corpus["val"], forty_pairs.tokenizer)


def test_a_distilled_corpus_keeps_sources_order_and_validation(forty_pairs):
    data = lessons.distilled(forty_pairs, lambda sources: [f"{len(s)} letters" for s in sources])
    sources = [source for source, _ in forty_pairs.corpus["train"]]
    assert data.corpus["train"] == [(s, f"{len(s)} letters") for s in sources]
    assert data.train == encode_pairs(data.corpus["train"], forty_pairs.tokenizer)
    assert data.val is forty_pairs.val and data.corpus["val"] is forty_pairs.corpus["val"]
    with pytest.raises(ValueError):
        lessons.distilled(forty_pairs, lambda sources: sources[1:])


def test_diversified_keeps_peoples_pairs_first_and_each_pair_once(forty_pairs):
    people = forty_pairs.corpus["train"]
    sources, targets = map(list, zip(*people, strict=True))
    forward = [*["A B C D."] * 37, "", "C " * 60, targets[39]]  # two unsound, one that people wrote
    new = diversified(forty_pairs, [forward, forward], [["D E F G."] * 40])
    first, more = list(dict.fromkeys(people)), new.corpus["train"][len(set(people)) :]
    assert new.corpus["train"][: len(first)] == first
    assert more[:37] == list(dict.fromkeys((source, "A B C D.") for source in sources[:37]))
    assert more[37:] == list(dict.fromkeys(("D E F G.", target) for target in targets))
    assert new.train == encode_pairs(new.corpus["train"], forty_pairs.tokenizer)
    assert new.val == forty_pairs.val and new.corpus["val"] == forty_pairs.corpus["val"]
    assert sound(("ein Hund", "a dog")) and not sound(("ein Hund", " "))
    with pytest.raises(ValueError):
        diversified(forty_pairs, [forward[:-1]], [])


# The recipe.


def test_the_records_are_of_the_recipe(monkeypatch):
    """Settings, and from whom each run learns, as recorded when the model was trained."""
    noted = {}

    def run(shop, name, models, data=None, tests=True, **changes):
        noted[name] = models, tests, shop.config(name, **changes)
        return name

    monkeypatch.setattr(Workshop, "run", run)
    monkeypatch.setattr(Workshop, "data", None)
    monkeypatch.setattr(best, "turned_around", lambda data: data)
    best.all_mean(Workshop(), 3)
    best.all_mean(Workshop(), 1)
    parts = load_record("ladder-all-mean-3")["learned_from"]["mean_of"]
    assert {*parts, "all-mean-3", "reverse-onward-1", "reverse-onward-2"} <= noted.keys()
    assert {path.stem for path in RESULTS.glob("ladder-*.json")} == {f"ladder-{n}" for n in noted}
    for name, (models, tests, config) in noted.items():
        record = load_record(f"ladder-{name}")
        assert {k: v for k, v in record["learned_from"].items() if v} == models
        assert ("test" in record) == tests
        settings = vars(config) | {"alpha": record["config"]["alpha"]}
        free = {"precision", "device", "name"}  # auto depends on the machine
        settings = {key: settings[key] for key in settings.keys() & {*record["config"]} - free}
        assert settings.items() <= record["config"].items()
        assert record["lesson"].get("risk", 0.0) == config.risk
        if config.risk:
            constants = record["lesson"]["candidates"], record["lesson"]["sharpness"]
            assert constants == (risk.CANDIDATES, risk.SHARPNESS)


@pytest.mark.parametrize("path", sorted(ARCHIVE.glob("*.json")), ids=lambda path: path.stem)
def test_an_archived_record_says_which_commit_has_its_command(path):
    record = load_record(path.stem)
    commit = record["commit"].removesuffix("+changes")
    assert record["repeat"] == f"git checkout {commit} && {record['command']}"


@pytest.fixture
def shop(forty_pairs, monkeypatch, tmp_path):
    """A workshop whose first model is small, on a few pairs, in an empty folder of runs."""
    pairs, encoded = forty_pairs.corpus["train"], forty_pairs.train
    corpus = {"train": pairs[:12], "val": pairs[:4], "test": pairs[:2]}
    data = TrainingData(corpus, forty_pairs.tokenizer, encoded[:12], encoded[:4])
    monkeypatch.setattr(Workshop, "data", data)
    monkeypatch.setattr(risk, "CANDIDATES", 2)
    monkeypatch.setattr(lessons, "STUDIED", FIRST)
    monkeypatch.setattr(best, "FIRST", FIRST.name)
    monkeypatch.setattr(best, "step_back", lambda: None)
    monkeypatch.setitem(lessons.PRESETS, "small", load_model(FIRST).config)
    monkeypatch.setenv("SERIES_RUNS", str(tmp_path))
    return Workshop()


def test_the_recipe_skips_what_is_on_record_and_goes_on_with_what_stopped(shop, monkeypatch):
    folder = shop.folder(best.all_mean(shop, 1))
    folders = {path.parent.name: path.parent for path in folder.parent.glob("*/record.json")}
    records = {name: load_record("record", path) for name, path in folders.items()}
    wide, risky = records["ladder-widened-1"], records["ladder-risk-again-1"]
    assert wide["repeat"] == "python -m scripts.studies.best --only widened-1 --save"
    assert wide["their_sha256"]["reverse-onward-2"] == shop.digests(["reverse-onward-2"])
    assert wide["train_pairs"] > len(shop.data.train) == risky["train_pairs"]
    losses = [record["history"][0]["train_loss"] for record in (risky, wide)]
    assert losses[0] > 2 * losses[1]  # risk weighs 150
    assert type(load_model(folder).config) is TrainConfig  # a plain model
    runs = records["ladder-all-mean-1"]["learned_from"]["mean_of"]
    tensors = [load_tensors(shop.folder(run) / "model.safetensors")[0] for run in runs]
    for name, tensor in load_tensors(folder / "model.safetensors")[0].items():
        expected = sum(each[name].double() for each in tensors) / 5
        assert_close(tensor.double(), expected, atol=1e-3, rtol=1e-3)
    before = shop.digests(["widened-1"])
    (shop.folder("widened-1") / "record.json").unlink()  # stopped after the training
    best.widened(shop, 1)
    assert shop.digests(["widened-1"]) == before
    with pytest.raises(ValueError, match=r"another --lr \(0.001, now 1.0\)"):
        shop.run("widened-2", {"start": [best.FIRST]}, lr=1.0)
    monkeypatch.setattr(lessons, "fit", None)  # all is on record: nothing trains
    assert best.all_mean(shop, 1) == "all-mean-1"


def test_the_command_does_one_step_and_refuses_what_is_none(shop, capsys):
    assert best.main(["--only", "reverse-onward-1"]) == 0
    record = load_record("record", shop.folder("reverse-onward-1"))
    assert "test" not in record and len(record["history"]) == 5
    for wrong in ("risk", "muon-1"):
        assert best.main(["--only", wrong]) == 2
    assert capsys.readouterr().err.count("only must be") == 2
