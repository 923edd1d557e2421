"""UniDrop's parts, teachers and diversified pairs, against brute force and by hand."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from scripts.book.instruments import scramble
from scripts.ch04_encoder_decoder import make_model
from scripts.ch06_training import EOS, PAD, Batch, LabelSmoothing, batch_loss
from scripts.ch07_multi30k import encode_pairs
from scripts.ch12_going_fast import Layout
from scripts.ch19_ablations import attentions
from scripts.core.data import TrainingData, prepare
from scripts.core.models import load_model
from scripts.core.settings import PRESETS, TrainConfig, build_model
from scripts.fast.fast import FastPath, fast_loss
from scripts.fast.run import fit, training_of
from scripts.ladder import unidrop
from scripts.ladder.climbing import lesson_of
from scripts.ladder.distill import distill_loss, ensemble_probs, taught_loss
from scripts.ladder.diversify import diversified, pairs_sha256, sound
from scripts.ladder.lessons import LessonConfig, lesson_loss
from scripts.ladder.unidrop import drop_words, fewer_features, fewer_layers, with_unidrop

VOCAB = 14
CRITERION = LabelSmoothing(0.1)


def a_model(seed=0, dropout=0.0):
    torch.manual_seed(seed)
    model = make_model(VOCAB, VOCAB, N=2, d_model=16, d_ff=24, h=2, dropout=dropout, tie="all")
    scramble(model)
    return model.double()


@pytest.fixture
def batch() -> Batch:
    """Two sentences, one shorter."""
    src = torch.tensor([[5, 6, 7, 8, EOS], [9, 10, EOS, PAD, PAD]])
    return Batch(src, torch.tensor([[2, 5, 7, 9, EOS], [2, 8, EOS, PAD, PAD]]))


def gradients(loss_of, model, batch):
    model.zero_grad()
    loss_of(model, batch, CRITERION)[0].backward()
    return {name: p.grad for name, p in model.named_parameters()}


# Teachers.


def test_the_taught_loss_and_its_gradient_by_brute_force():
    torch.manual_seed(1)
    logits = torch.randn(5, VOCAB, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([4, 9, PAD, 3, PAD])
    q = torch.rand(5, VOCAB, dtype=torch.float64)
    q /= q.sum(-1, keepdim=True)
    loss, nll = taught_loss(logits, labels, q, CRITERION, 0.3)
    p = logits.detach().exp() / logits.detach().exp().sum(-1, keepdim=True)
    smoothed = 0.9 * torch.nn.functional.one_hot(labels, VOCAB) + 0.1 / VOCAB  # (5, V)
    target = 0.7 * smoothed + 0.3 * q  # (5, V)
    rows = [row for row, label in enumerate(labels) if label != PAD]
    by_hand = -sum(target[row, v] * p[row, v].log() for row in rows for v in range(VOCAB))
    torch.testing.assert_close(loss.detach(), by_hand)
    torch.testing.assert_close(nll.detach(), -sum(p[row, labels[row]].log() for row in rows))
    loss.backward()
    wanted = torch.zeros_like(p)
    wanted[rows] = (p - target)[rows]
    torch.testing.assert_close(logits.grad, wanted)


def test_an_ensemble_is_the_mean_of_probabilities(batch):
    """By each teacher's own classes, without dropout or gradient; the modes stay as before."""
    teachers = [a_model(1, dropout=0.5).train(), a_model(2, dropout=0.5).eval()]
    found = ensemble_probs(teachers, batch, CRITERION)
    assert [teacher.training for teacher in teachers] == [True, False]
    assert not found.requires_grad and all(p.grad is None for p in teachers[0].parameters())
    real = batch.tgt_y != PAD
    logits = []
    for teacher in teachers:
        teacher.eval()
        memory = teacher.encode(batch.src, batch.src_mask)
        x = teacher.decode(memory, batch.src_mask, batch.tgt, batch.tgt_mask)
        logits.append(teacher.generator(x)[real].detach().float())  # (N, V)
    mean = (logits[0].softmax(-1) + logits[1].softmax(-1)) / 2
    torch.testing.assert_close(found, mean)
    wrong = ((logits[0] + logits[1]) / 2).softmax(-1)  # of logits: another distribution
    assert (found - wrong).abs().max() > 1e-3


def test_a_student_without_weight_on_its_teacher_is_on_its_own(batch):
    model, teacher = a_model(1), a_model(2).eval()
    alone = gradients(fast_loss, model, batch)
    taught = gradients(partial(distill_loss, teachers=[teacher], weight=0.0), model, batch)
    for name in alone:
        torch.testing.assert_close(taught[name], alone[name])
    moved = gradients(partial(distill_loss, teachers=[teacher], weight=0.5), model, batch)
    assert not torch.allclose(moved["generator.proj.bias"], alone["generator.proj.bias"])


def test_who_is_their_own_teacher_learns_nothing(batch):
    """p − q is zero. A sharper teacher (another temperature) would pull."""
    model = a_model(1)
    by_self = partial(distill_loss, teachers=[model], weight=1.0)
    assert all(g.abs().max() < 1e-5 for g in gradients(by_self, model, batch).values())


# UniDrop.


def test_attention_drops_queries_keys_and_values_in_training_alone(monkeypatch):
    """Over one key the attention is that key's value, which shows what is dropped of it."""
    model = a_model().train()
    layer = model.encoder.layers[0].self_attn
    rows, layout = torch.ones(40, 48), Layout(torch.ones(40, 1).bool(), packed=True)
    path, rates = FastPath(), []
    dropped = path.dropped
    monkeypatch.setattr(path, "dropped", lambda x, p: rates.append(p) or dropped(x, p))
    attend = partial(path.attend, layer, rows, None, (layout, layout))
    assert attend().eq(1).all() and rates == [0]
    with fewer_features(model, 0.25):
        assert all(part.feature_dropout == 0.25 for part in attentions(model))
        found = attend()
        assert rates[1:] == [0.25]
        assert found.unique().tolist() == pytest.approx([0, 4 / 3])
        assert 0.2 < found.eq(0).double().mean() < 0.3
        model.eval()
        assert attend().eq(1).all()
        model.train()
    assert attend().eq(1).all()  # nothing of it stays


def test_layer_drop_is_the_mean_over_all_that_may_be_left(batch):
    """The expected loss by brute force: each stack with each of its non-empty subsets."""
    model, p, expected = a_model().train(), 0.3, 0.0
    whole = model.encoder.layers, model.decoder.layers
    chances = {(True, True): 0.7**2, (True, False): 0.21, (False, True): 0.21}
    total = sum(chances.values())
    losses = {}
    for subsets in itertools.product(chances, repeat=2):
        for stack, layers, stays in zip(
            (model.encoder, model.decoder), whole, subsets, strict=True
        ):
            stack.layers = torch.nn.ModuleList(itertools.compress(layers, stays))
        losses[subsets] = batch_loss(model, batch, CRITERION)[0].item()
        expected += losses[subsets] * chances[subsets[0]] * chances[subsets[1]] / total**2
    model.encoder.layers, model.decoder.layers = whole
    dropping, found = with_unidrop(fast_loss, layers=p), []
    torch.manual_seed(5)
    with torch.no_grad():
        found = [dropping(model, batch, CRITERION)[0].item() for _ in range(400)]
    for loss in found:
        assert min(abs(loss - one) for one in losses.values()) < 1e-9
    spread = torch.tensor(found).std().item() / 400**0.5
    assert abs(sum(found) / 400 - expected) < 4 * spread
    assert abs(losses[(True, True), (True, True)] - expected) > 6 * spread  # not the whole model's


def test_a_missing_layer_learns_nothing_and_is_back_after_a_fault(batch, monkeypatch):
    model = a_model().train()
    whole = model.encoder.layers, model.decoder.layers
    draws = iter([torch.zeros(2), torch.tensor([0.0, 0.9]), torch.tensor([0.9, 0.9])])
    monkeypatch.setattr(unidrop.torch, "rand", lambda *_, **__: next(draws))  # the first: none left
    found = gradients(with_unidrop(fast_loss, layers=0.5), model, batch)
    missing = {name for name, gradient in found.items() if gradient is None}
    assert missing and all(name.startswith("encoder.layers.0.") for name in missing)
    monkeypatch.undo()
    with pytest.raises(RuntimeError), fewer_layers(model, 0.5):
        raise RuntimeError
    assert (model.encoder.layers, model.decoder.layers) == whole
    assert list(model.state_dict()) == list(a_model().state_dict())


def test_words_go_and_the_ends_stay():
    torch.manual_seed(0)
    src = torch.full((4000, 6), 7)
    src[:, 4], src[:, 5] = EOS, PAD
    found = drop_words(src, 0.2)
    assert found[:, 4:].equal(src[:, 4:]) and set(found[:, :4].unique().tolist()) == {PAD, 7}
    gone = (found[:, :4] == PAD).sum(dim=1)
    assert abs((gone > 0).double().mean() - 0.5 * (1 - 0.8**4)) < 0.03
    assert abs(gone.double().mean() - 0.5 * 0.2 * 4) < 0.03
    assert (drop_words(src, 0.2, whole=1.0) == src).all()
    assert (drop_words(src, 1.0, whole=0.0)[:, :4] == PAD).all()


def test_a_dropped_word_is_seen_by_nobody(batch, monkeypatch):
    """The loss on what is left is the textbook's, by masks; the target stays whole."""
    monkeypatch.setattr(unidrop, "drop_words", lambda src, p: src.masked_fill(src == 6, PAD))
    model = a_model().train()
    left = Batch(batch.src.masked_fill(batch.src == 6, PAD), batch.full)
    found = with_unidrop(fast_loss, words=0.2)(model, batch, CRITERION)
    torch.testing.assert_close(found, batch_loss(model, left, CRITERION))
    assert abs(found[0] - fast_loss(model, batch, CRITERION)[0]) > 1e-3


def test_in_evaluation_nothing_is_dropped_and_nothing_drawn(batch):
    model = a_model().eval()
    before = torch.get_rng_state()
    found = with_unidrop(fast_loss, 0.5, 0.5, 0.5)(model, batch, CRITERION)
    assert torch.get_rng_state().equal(before)
    torch.testing.assert_close(found, fast_loss(a_model(), batch, CRITERION))


# Pairs.


@pytest.fixture(scope="module")
def data() -> TrainingData:
    whole = prepare(PRESETS["sample"])
    few = whole.corpus | {"train": whole.corpus["train"][:30], "val": whole.corpus["val"][:4]}
    return TrainingData(few, whole.tokenizer, whole.train[:30], whole.val[:4])


def test_diversified_is_the_union_without_duplicates(data):
    real = data.corpus["train"]
    sources, targets = map(list, zip(*real, strict=True))
    first = ["A B C D."] * 29 + [targets[29]]  # the last one a person wrote already
    second = ["A B C D."] * 28 + ["", "C " * 60]  # and these are unsound
    reverse = ["D E F G."] * 30
    found = diversified(data, [first, second], [reverse])
    wanted = (
        set(real) | {(one, "A B C D.") for one in sources[:29]} | {("D E F G.", o) for o in targets}
    )
    assert found.corpus["train"][:30] == list(dict.fromkeys(real))
    assert len(found.corpus["train"]) == len(set(found.corpus["train"]))
    assert set(found.corpus["train"]) == wanted
    assert found.train == encode_pairs(found.corpus["train"], data.tokenizer)
    assert found.val == data.val and found.corpus["val"] == data.corpus["val"]
    assert {k: v for k, v in found.corpus.items() if k != "train"} == {
        k: v for k, v in data.corpus.items() if k != "train"
    }
    assert diversified(data).corpus["train"] == list(dict.fromkeys(real))
    assert pairs_sha256(found) != pairs_sha256(data) == pairs_sha256(replace(data, val=[]))
    for wrong in (first[:-1], [*first, "one more"]):
        with pytest.raises(ValueError):
            diversified(data, [wrong])
    assert sound(("ein Hund", "a dog")) and not sound(("ein Hund", " "))


# The training.

TINY = LessonConfig(
    corpus="sample", layers=2, d_model=32, d_ff=64, heads=2, vocab=1000, dropout=0.1, epochs=2
)
TINY = replace(TINY, max_tokens=256, warmup=4, average=0, save_every=2, device="cpu")


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_lesson_leaves_a_plain_model(data, tmp_path, precision):
    """It trains with everything at once, in both precisions; what is saved is chapter 9's model."""
    drops = {"feature_drop": 0.2, "layer_drop": 0.3, "word_drop": 0.2}
    config = replace(TINY, **drops, taught=0.5, epochs=1, precision=precision)
    teacher = build_model(TINY, len(data.tokenizer))
    history = fit(config, data, tmp_path, loss_for=partial(lesson_loss, teachers=[teacher]))
    assert 0 < history[0]["train_loss"] < 20
    trained = load_model(tmp_path)
    assert type(trained.config) is TrainConfig and not lesson_of(trained.config)
    assert lesson_of(config) == drops | {"taught": 0.5}
    plain = build_model(TINY, len(data.tokenizer))
    assert trained.model.state_dict().keys() == plain.state_dict().keys()


def test_what_ships_stays_as_large_as_it_is():
    config = LessonConfig(feature_drop=0.1, layer_drop=0.1, word_drop=0.2)
    with torch.device("meta"):
        model = build_model(config, config.vocab)
    assert sum(p.numel() for p in model.parameters()) == 7_635_968


def test_without_a_lesson_it_is_the_plain_training(data, tmp_path):
    """To the bit. With one it isn't."""
    ends = []
    lesson = {"loss_for": lesson_loss}
    for number, (how, changes) in enumerate([({}, {}), (lesson, {}), (lesson, {"word_drop": 0.5})]):
        folder = tmp_path / str(number)
        folder.mkdir()
        fit(replace(TINY, epochs=1, **changes), data, folder, **how)
        ends.append((folder / "model.safetensors").read_bytes())
    assert ends[0] == ends[1] != ends[2]


@pytest.mark.parametrize(
    "changes", [{"word_drop": 0.3}, {"layer_drop": 0.0}, {"pairs": "others"}, {"teachers": "x"}]
)
def test_a_resume_under_another_lesson_is_refused(data, tmp_path, changes):
    config = replace(TINY, word_drop=0.2, layer_drop=0.2)
    training = training_of(config, data, tmp_path)
    training.load()
    training.step()
    training.save()
    training_of(config, data, tmp_path, resume=True)
    (name,) = changes
    with pytest.raises(ValueError, match=f"another --{name}"):
        training_of(replace(config, **changes), data, tmp_path, resume=True)


def test_lessons_that_make_no_sense():
    cpu = torch.device("cpu")
    for config, teachers in ((TINY, [a_model()]), (replace(TINY, taught=0.5), [])):
        with pytest.raises(ValueError, match="teachers"):
            lesson_loss(config, cpu, teachers)
    with pytest.raises(ValueError, match="path fast"):
        replace(TINY, step="textbook", feature_drop=0.1)
    with pytest.raises(ValueError, match="r_drop, too"):
        replace(TINY, taught=0.5, r_drop=1.0)
    with pytest.raises(ValueError, match="recording"):
        replace(TINY, step="graphed", layer_drop=0.1)
