"""Chapter 22: the whole model against PyTorch's own functions and against a library's."""

import pytest
import torch
import torch.nn.functional as F
from tiny import shaken

from scripts import ch22_todays_block as ch22
from scripts.book.parts import small_runs
from scripts.core import optimizers

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


def test_a_start_is_zeroed_or_flipped_as_it_says_and_nothing_else():
    models = {}
    for start in ch22.STARTS:
        torch.manual_seed(0)
        models[start] = ch22.started_model(start, 50)
    for start, model in models.items():
        outputs = [(b.attention.project_output, b.feed_forward.contract) for b in model.blocks]
        zeroed = [not layer.weight.any() for pair in outputs for layer in pair]
        assert zeroed == ["zeroed" in start] * 4
        assert model.generator.weight is model.embed.weight
        assert torch.equal(model.embed.weight, models["Qwen3"].embed.weight)
        scales = model.norm.weight
        assert (scales.abs() == 1).all() and scales.sum() == (0 if "flipped" in start else 64)
        assert scales.requires_grad


@pytest.mark.parametrize("part", ch22.SLOWED)
def test_slowed_queries_and_keys_begin_alike_and_move_a_quarter(part):
    models, moved = [], []
    for make, name in ((ch22.small_model, part.split(",")[0]), (ch22.slowed_model, part)):
        torch.manual_seed(0)
        models.append(make(name, 50))
    ids = torch.randint(50, (2, 9))
    close(*(model(ids) for model in models))
    for model, scale in zip(models, (1, 4), strict=True):
        asks = model.blocks[1].attention.project_query.weight
        before = asks.detach().clone()
        model(ids).sin().sum().backward()
        torch.optim.Adam(model.parameters(), lr=0.01).step()
        moved.append((asks.detach() - before) / scale)
    close(moved[1], moved[0] / 4, rtol=1e-3, atol=1e-6)


def test_the_record_shows_harm_where_attention_is_not_sharp():
    loss, sharp = (small_runs(measure).loc[0.04] for measure in ("loss", "sharpness"))
    harm = loss.sub(loss["Qwen3"], axis=0)
    assert (harm["no QK-norm"] > harm[["Qwen3", "LayerNorm", "ReLU"]].max(axis=1)).all()
    assert (round(harm["no QK-norm"].min(), 2), round(harm["no QK-norm"].max(), 2)) == (0.06, 0.49)
    slowed = loss["no QK-norm, slowed"] - loss["Qwen3, slowed"]
    assert slowed.mean() > 2 * slowed.sem()
    assert sharp["no QK-norm, slowed"].mean() < sharp["Qwen3"].mean()


def test_sharpness_is_the_mean_largest_weight_of_all_but_the_first_token():
    model, ids = shaken(fresh_model()), torch.randint(60, (3, 9))
    layer, seen = model.blocks[0].attention, {}
    layer.project_query.register_forward_hook(lambda _, x, y: seen.update(q=y))
    layer.project_key.register_forward_hook(lambda _, x, y: seen.update(k=y))
    model(ids)
    q, k = (
        by_complex(seen[name].unflatten(-1, (-1, 8)).transpose(1, 2), norm)
        for name, norm in (("q", layer.query_norm), ("k", layer.key_norm))
    )
    scores = q @ k.repeat_interleave(2, dim=1).mT / 8**0.5
    largest = [scores[:, :, t, : t + 1].softmax(-1).amax(-1).mean().item() for t in range(1, 9)]
    assert abs(ch22.sharpness(model, ids) - sum(largest) / 8) < 1e-9


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
def test_muons_step_is_the_chapters(monkeypatch, shape):
    """In 16 bits and in 32; the chapter compares its own with a singular value decomposition."""
    matrix = torch.randn(shape)
    for half, error in ((True, 0.05), (False, 1e-5)):
        monkeypatch.setattr(optimizers, "multiplies_bf16", lambda device, half=half: half)
        fast = optimizers.near_orthogonal(matrix.float().unsqueeze(0))[0].double()
        assert (fast - ch22.orthogonalised(matrix)).norm() < error * fast.norm()
