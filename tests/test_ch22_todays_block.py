"""Chapter 22: the whole model against PyTorch's own functions and against a library's."""

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from tiny import shaken
from torch import nn

from scripts import ROOT
from scripts import ch22_todays_block as ch22
from scripts.book.parts import RIVALS_OF_PARTS, added_loss, block_means, small_runs
from scripts.book.records import load_record
from scripts.ch06_training import LabelSmoothing, batch_loss
from scripts.ch07_multi30k import encode_pairs, make_batch
from scripts.core import optimizers
from scripts.core.models import load_model
from scripts.corpora.load import load_corpus

close = torch.testing.assert_close

pytestmark = pytest.mark.usefixtures("float64")


def fresh_model(groups=2, **more):
    return ch22.LanguageModel(60, 2, 32, h=4, groups=groups, width=48, **more)


def turns(places, d):
    """cos + i·sin (T, d/2) of each place and frequency."""
    return torch.polar(torch.ones(()), places[:, None] * 10_000.0 ** -(torch.arange(0, d, 2) / d))


def by_complex(x, norm):
    """Heads (B, H, T, 8), normed and turned."""
    x = torch.complex(*F.rms_norm(x, (8,), norm.weight, 1e-5).chunk(2, -1))
    return torch.view_as_real(x * turns(torch.arange(x.size(-2)), 8)).mT.flatten(-2)


def by_pytorch(model, ids):
    """The model again, with PyTorch's functions and complex numbers."""

    def heads(linear, x):
        return (x @ linear.weight.T).unflatten(-1, (-1, 8)).transpose(1, 2)

    def normed(x, norm):
        return F.rms_norm(x, (32,), norm.weight, 1e-5)

    x = F.embedding(ids, model.embed.weight)
    for block in model.blocks:
        a, f, y = block.attention, block.feed_forward, normed(x, block.attention_norm)
        q, k = (
            by_complex(heads(a.project_query, y), a.query_norm),
            by_complex(heads(a.project_key, y), a.key_norm),
        )
        v = heads(a.project_value, y)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + y.transpose(1, 2).flatten(-2) @ a.project_output.weight.T
        y = normed(x, block.feed_norm)
        x = x + (F.silu(y @ f.gate.weight.T) * (y @ f.expand.weight.T)) @ f.contract.weight.T
    return normed(x, model.norm) @ model.generator.weight.T


@pytest.mark.parametrize("groups, tie", [(1, True), (2, False), (4, True)])
def test_the_model_in_pytorchs_own_functions_gradients_too(groups, tie):
    model, ids = shaken(fresh_model(groups, tie=tie)), torch.randint(60, (2, 9))
    outputs = model(ids), by_pytorch(model, ids)
    close(*outputs)
    close(*(torch.autograd.grad(y.sin().sum(), [*model.parameters()]) for y in outputs))
    assert (model.generator.weight is model.embed.weight) == tie


def test_the_papers_layout_turns_neighbours():
    x = torch.randn(2, 3, 7, 8)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    by_hand = torch.view_as_real(pairs * turns(torch.arange(5, 12), 8)).flatten(-2)
    close(ch22.rotated_in_pairs(x, start=5), by_hand)
    assert ch22.rotated(x.float()).dtype == torch.float32


def test_a_cache_of_several_tokens():
    layer, x = shaken(fresh_model()).blocks[0].attention, torch.randn(2, 9, 32)
    (k, v), (more_k, more_v) = layer.remember(x[:, :5]), layer.remember(x[:, 5:], start=5)
    kept = torch.cat((k, more_k), dim=2), torch.cat((v, more_v), dim=2)
    close(layer.look(x[:, 5:], kept, torch.ones(4, 9).tril(5).bool()), layer(x)[:, 5:])
    assert k.shape == v.shape == (2, 2, 5, 8)


def test_swiglus_dropout():
    assert not ch22.SwiGLU(6, 10, dropout=1.0)(torch.randn(2, 3, 6)).any()


def test_zeroed_outputs_make_the_blocks_the_identity_and_still_learn():
    model, x = fresh_model(), torch.randn(2, 5, 32)
    ch22.zero_outputs(model)
    assert torch.equal(model.blocks(x), x)
    model.generator(model.blocks(x)).sin().sum().backward()
    for block in model.blocks:
        assert block.attention.project_output.weight.grad.abs().max() > 0
        assert block.feed_forward.contract.weight.grad.abs().max() > 0


@pytest.mark.parametrize("part", ch22.TAKEN_BACK)
def test_a_part_of_the_experiment_changes_one_thing(part):
    model, base = ch22.small_model(part, 50), ch22.small_model("Qwen3", 50)
    names = [set(dict(m.named_parameters())) for m in (model, base)]
    of = {"Qwen3": "none", "no QK-norm": "_norm", "LayerNorm": "norm.", "ReLU": "feed_forward"}
    assert all(of[part] in name for name in names[0] ^ names[1])
    assert (names[0] == names[1]) == (part == "Qwen3")
    sizes = [sum(p.numel() for p in m.blocks.parameters()) for m in (model, base)]
    assert abs(sizes[0] / sizes[1] - 1) < 0.01


def test_a_start_is_zeroed_untied_or_flipped_as_it_says_and_nothing_else():
    models = {}
    for start in ch22.STARTS:
        torch.manual_seed(0)
        models[start] = ch22.started_model(start, 50)
    for start, model in models.items():
        outputs = [(b.attention.project_output, b.feed_forward.contract) for b in model.blocks]
        zeroed = [not layer.weight.any() for pair in outputs for layer in pair]
        assert zeroed == ["zeroed" in start] * 4
        assert (model.generator.weight is model.embed.weight) == ("untied" not in start)
        assert torch.equal(model.embed.weight, models["Qwen3"].embed.weight)
        scales = model.norm.weight
        assert (scales.abs() == 1).all() and scales.sum() == (0 if "flipped" in start else 64)
        assert scales.requires_grad


@pytest.mark.parametrize("slow", [0.25, 1.0])
def test_queries_and_keys_learn_at_their_own_rate(slow):
    rows, moved = [[1, *range(5, 20), 2]] * 20, {}
    model = ch22.small_model("Qwen3", 50).float()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    next(ch22.train_small(model, 0.01, 1, rows, slow=slow))
    for name, weight in model.named_parameters():
        moved[name] = (weight - before[name]).abs().max().item()
    asks = {name for name in moved if name.endswith(("project_query.weight", "project_key.weight"))}
    assert len(asks) == 4
    for name, size in moved.items():  # Adam's first step is its rate
        assert size == pytest.approx(0.01 / 25 * (slow if name in asks else 1), rel=0.01)


def test_the_record_shows_harm_where_attention_is_not_sharp():
    parts = ["no QK-norm", "no QK-norm, slowed", "LayerNorm", "ReLU"]
    added, sharp = added_loss(parts), small_runs("sharpness").loc[0.04]
    high, low = added.loc[0.04], added.loc[0.005]
    assert (high["no QK-norm"] > high[["LayerNorm", "ReLU"]].max(axis=1).clip(lower=0)).all()
    assert (high[["LayerNorm", "ReLU"]].mean() < 0).all() and (low["no QK-norm"] < 0).all()
    assert (high["no QK-norm, slowed"] > 0).sum() == 7
    assert sharp["no QK-norm, slowed"].mean() < sharp["Qwen3"].mean() - 0.04


def test_the_record_shows_harm_only_where_a_word_is_repeated_and_not_for_long():
    added = added_loss(["zeroed", "untied, zeroed", "flipped, zeroed"]).groupby("rate").mean()
    later = added_loss(["zeroed"], steps=240)["zeroed"].groupby("rate")
    assert (added["zeroed"] > 0).tolist() == [False, True, True, True]
    assert (added[["untied, zeroed", "flipped, zeroed"]] < 0).all(axis=None)
    assert (later.mean() < 0.035).all() and (later.mean() < 2 * later.sem()).all()


def test_the_translators_record_is_as_the_chapter_sums_it_up():
    bleu = block_means(list(RIVALS_OF_PARTS)[:11])["bleu"]
    assert (bleu[:8].idxmax(), bleu.idxmax(), bleu.idxmin()) == (
        "rotary",
        "today, Muon",
        "zeroed outputs",
    )
    runs = pd.DataFrame(load_record("block-multi30k")["runs"])
    long = runs[(runs["seed"] > 0) & (runs["epochs"] == 9)].groupby("row")["bleu"].mean()
    assert round(long["today"] - long["2017"], 1) == 2.9
    assert round(bleu["today, Muon"] - block_means(["2017"])["bleu"].item(), 1) == 7.1


def test_sharpness_is_the_mean_largest_weight_of_all_but_the_first_token():
    model, ids, largest = shaken(fresh_model()), torch.randint(60, (3, 9)), []
    seen = {}
    for block in model.blocks:
        for name in ("query", "key"):
            layer, key = getattr(block.attention, f"project_{name}"), (block, name)
            layer.register_forward_hook(lambda _, x, y, key=key: seen.update({key: y}))
    model(ids)
    for block in model.blocks:
        q, k = (
            by_complex(seen[block, name].unflatten(-1, (-1, 8)).transpose(1, 2), norm)
            for name, norm in (
                ("query", block.attention.query_norm),
                ("key", block.attention.key_norm),
            )
        )
        scores = q @ k.repeat_interleave(2, dim=1).mT / 8**0.5
        largest += [
            scores[:, :, t, : t + 1].softmax(-1).amax(-1).mean().item() for t in range(1, 9)
        ]
    assert abs(ch22.sharpness(model, ids) - sum(largest) / 16) < 1e-9


def test_muons_step_is_even_but_for_one_direction_and_adams_hardly_evener_than_the_gradient():
    """As the picture's title says, of the gradient that the chapter takes."""
    trained = load_model(ROOT / "models" / "sample-de-en", "cpu")
    model, pairs = trained.model.double().eval(), load_corpus("sample")["test"][:64]
    batch = make_batch(encode_pairs(pairs, trained.tokenizer))
    loss, _ = batch_loss(model, batch, LabelSmoothing(0.1))
    (gradient,) = torch.autograd.grad(loss, model.decoder.layers[-1].feed_forward.expand.weight)
    U, S, Vh = torch.linalg.svd(gradient, full_matrices=False)
    steps = ch22.orthogonalised(gradient), gradient.sign()
    muon, adam = ((U.mT @ step @ Vh.mT).diagonal().abs() for step in steps)
    assert muon[:-1].max() < 2 * muon[:-1].min() and muon[-1] < 0.01 * muon[0]
    assert adam.median() / adam[0] < 2 * S.median() / S[0]


@pytest.mark.audit
def test_the_model_is_qwen3(monkeypatch):
    """The library computes norms and angles in 32 bits; in 64 all digits agree."""
    library = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    model, ids = shaken(fresh_model()), torch.randint(60, (2, 30))
    logits = model(ids)
    assert 1e-12 < (ch22.qwen3_logits(model, ids) - logits).abs().max() < 1e-5

    def norm(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)

    def cos_sin(self, x, position_ids):
        turn = turns(position_ids[0], self.config.head_dim).repeat(1, 2)
        return turn.real[None], turn.imag[None]

    monkeypatch.setattr(library.Qwen3RMSNorm, "forward", norm)
    monkeypatch.setattr(library.Qwen3RotaryEmbedding, "forward", cos_sin)
    assert (ch22.qwen3_logits(model, ids) - logits).abs().max() < 1e-12

    def in_pairs(x, start=0, rotated=ch22.rotated):
        x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
        return torch.stack(rotated(x, start).chunk(2, dim=-1), dim=-1).flatten(-2)

    monkeypatch.setattr(ch22, "rotated", in_pairs)  # with the paper's layout it is another model
    assert (ch22.qwen3_logits(model, ids) - model(ids)).abs().max() > 0.01


@pytest.mark.parametrize("shape", [(12, 12), (20, 8), (8, 20)])
def test_two_steps_of_muon_are_the_commands_and_nearly_pytorchs(monkeypatch, shape):
    monkeypatch.setattr(optimizers, "multiplies_bf16", lambda device: False)
    start, average = torch.randn(shape), torch.zeros(shape)
    models = {"ours": start.clone(), "commands": nn.Parameter(start.clone())}
    steppers = [optimizers.Muon([models["commands"]], lr=0.1)]
    if hasattr(torch.optim, "Muon"):  # from 2.9; it multiplies in 16 bits
        models["pytorch"] = nn.Parameter(start.clone())
        steppers.append(torch.optim.Muon([models["pytorch"]], lr=0.1, weight_decay=0.0))
    for _ in range(2):
        gradient = torch.randn(shape)
        for name in models.keys() - {"ours"}:
            models[name].grad = gradient.clone()
        for stepper in steppers:
            stepper.step()
        ch22.muon_step(models["ours"], gradient, average, 0.1)
    moved = {name: (weight - start).detach() for name, weight in models.items()}
    for name, error in {"commands": 1e-5, "pytorch": 0.05}.items():
        if name in moved:
            assert (moved[name] - moved["ours"]).norm() < error * moved["ours"].norm()
