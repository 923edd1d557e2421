# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     notebook_metadata_filter: kernelspec,jupytext,-jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Chapter 24 · Experts
#
# After this chapter you can build a layer that holds many feed-forward networks and uses only a few of them for each token. You can say why some of them may fall idle, and keep them busy.
#
# | | |
# |---|---|
# | In the paper | §3.3 of [Attention Is All You Need](https://arxiv.org/abs/1706.03762), the feed-forward layer |
# | Time | 15 minutes to read, 35 with the code; half a minute to run on a CPU |
# | Before, after | [Chapter 23 · Long memory](ch23_long_memory.ipynb) · [Chapter 25 · All of it on one page](ch25_one_page.ipynb) |
#
# *If you read only three cells:* `dispatch`, the two clouds and the table of *Why experts fall idle*.
#
# Shapes: **B** batch, **S** length, **D** `d_model`, **N** tokens of a batch, **E** experts, **k** of them for each token.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
from collections.abc import Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from scripts.book.charts import heatmap, titled
from scripts.book.exercises import check
from scripts.book.figures.experts import cones_chart, dispatch_chart, visits_chart
from scripts.book.verdict import verdict_line
from scripts.ch04_encoder_decoder import EncoderLayer
from scripts.ch06_training import PAD
from scripts.ch07_multi30k import encode_pairs, make_batch
from scripts.ch22_todays_block import RIVALS_OF_PARTS, SwiGLU, block_means, block_verdicts
from scripts.core.models import STUDIED, load_model
from scripts.corpora.captions import aligned_pairs

# %%
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## A mixture of experts
#
# > **In short.** Use many feed-forward layers instead of one. A small router sends each token to the few that it scores highest. The model holds more, but a token costs hardly more than in one layer as wide as those few together.
#
# Most of a large Transformer's parameters are in its feed-forward layers, and each token meets all of them. Mixtures of experts ([Shazeer et al. 2017](https://arxiv.org/abs/1701.06538); Switch, [Fedus et al. 2021](https://arxiv.org/abs/2101.03961); DeepSeekMoE, [Dai et al. 2024](https://arxiv.org/abs/2401.06066)) change that. For a token $x \in \mathbb{R}^D$, a router $W_r$ (D, E) and experts $f_1, \dots, f_E$:
#
# $$ p = \mathrm{softmax}(x W_r), \qquad y = \sum_{e\,\in\,\mathrm{top}\,k} \frac{p_e}{\sum_{e'\in\,\mathrm{top}\,k} p_{e'}}\, f_e(x) \;+\; f_\text{shared}(x) $$
#
# - **Top k.** Only the k likeliest experts compute, and their weights are rescaled to sum to 1. With k = 1, rescaling would be a mistake: the weight would always be 1, and the router would get no gradient. Switch then keeps $p_e$, and so do we.
# - **Shared.** One more expert, which every token visits.
#
# **Predict.** Mixtral 8×7B ([Jiang et al. 2024](https://arxiv.org/abs/2401.04088)) has 32 layers of width 4,096, each with eight SwiGLU experts (chapter 22) of width 14,336, two for each token. Its attention has 32 heads of 128 in 8 groups, its vocabulary 32,000 pieces and two tables. How many parameters does it have in all, and how many does one token meet?

# %%
D, width, vocab, layers = 4096, 14336, 32_000, 32
expert = 3 * D * width
other = 2 * D * D + 2 * D * 1024 + 8 * D  # queries, outputs; keys, values; router
for name, experts in (("in all", 8), ("met by a token", 2)):
    print(f"{name}: {(layers * (experts * expert + other) + 2 * vocab * D) / 1e9:.1f} billion")

# %% [markdown]
# The paper says 47 and 13.
#
# ### Everyone to their experts
#
# A token *visits* its k experts. Each expert should compute all its visits at once. So `dispatch` sorts the N·k visits by expert, and cuts the list where the expert changes. Then each token's results are summed, times their weights.

# %%
chosen = torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2]])  # four tokens, two visits each
dispatch_chart(chosen, experts=4)

# %% [markdown]
# Such code is called *dropless* ([MegaBlocks, Gale et al. 2022](https://arxiv.org/abs/2211.15841)). Earlier code gave each expert room for a fixed number of visits, and dropped the rest.
#
# **Your turn.** Write `dispatch`.


# %% tags=["yours"]
def dispatch(rows: Tensor, chosen: Tensor, share: Tensor, experts: Sequence[nn.Module]) -> Tensor:
    """Each row through its chosen experts, weighted: rows (N, D), chosen and share (N, k), to (N, D)."""
    order = chosen.flatten().argsort(stable=True)  # (N·k,): visits, by expert
    visitor = order // chosen.size(1)  # (N·k,): whose visit
    counts = chosen.flatten().bincount(minlength=len(experts)).tolist()
    parts = rows[visitor].split(counts)  # E times (count, D): no visit is left out
    done = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])
    weighted = done * share.flatten()[order].unsqueeze(-1)  # (N·k, D)
    return torch.zeros_like(rows).index_add(0, visitor, weighted)


# %% [markdown]
# Check. If every expert computes every token, and all but the chosen weights are 0, the sum is the same:

# %%
torch.manual_seed(0)
rows, share, experts = torch.randn(4, 3), torch.rand(4, 2), [nn.Linear(3, 3) for _ in range(4)]
every = torch.stack([expert(rows) for expert in experts], dim=1)  # (N, E, D)
weights = torch.zeros(4, 4).scatter(1, chosen, share)  # (N, E)
by_all = torch.einsum("ne,ned->nd", weights, every)
torch.testing.assert_close(dispatch(rows, chosen, share, experts), by_all)

# %% [markdown]
# ### The layer
#
# After a call, `probs` and `visits` tell what the router did. `real` says where there are words: padding visits nobody. `bias` is 0 until the section on remedies. It is a *buffer*: without a gradient, but saved with the weights.
#
# **Your turn.** Write `MixtureOfExperts`.


# %% tags=["yours"]
class MixtureOfExperts(nn.Module):
    """The best of many SwiGLUs for each token, and shared ones for all; dropless.

    It keeps `top`, how many. Its parts are `router`, a linear map without bias, and the lists
    `experts` and `shared`; `bias` (E,), a buffer, is added when experts are chosen, not when they
    are weighed. After a call `probs` (N, E) and `visits` (E,) are its tokens' and their counts.
    """

    def __init__(self, d_model: int, width: int, dropout=0.1, experts=8, top=2, shared=1):
        super().__init__()
        self.top = top
        self.router = nn.Linear(d_model, experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(d_model, width, dropout) for _ in range(experts))
        self.shared = nn.ModuleList(SwiGLU(d_model, width, dropout) for _ in range(shared))
        self.register_buffer("bias", torch.zeros(experts))

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """rows (N, D) to probabilities (N, E), the chosen experts (N, k) and their weights (N, k)."""
        probs = self.router(rows).softmax(dim=-1)
        chosen = (probs + self.bias).topk(self.top, dim=-1).indices
        share = probs.gather(-1, chosen)
        if self.top > 1:  # a single one keeps its probability, or the router would learn nothing
            share = share / share.sum(-1, keepdim=True)
        return probs, chosen, share

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """x (..., D) to (..., D); zeros where real (...) is False, at padding."""
        rows = x.flatten(0, -2) if real is None else x[real]  # (N, D): places don't matter
        self.probs, chosen, share = self.route(rows)
        self.visits = chosen.flatten().bincount(minlength=len(self.experts))
        y = dispatch(rows, chosen, share, self.experts)
        for expert in self.shared:
            y = y + expert(rows)
        return y.view_as(x) if real is None else torch.zeros_like(x).index_put((real,), y)


# %% [markdown]
# Check, again token by token, with a bias that changes who is chosen:

# %%
torch.manual_seed(0)
x, real = torch.randn(2, 10, 16), torch.arange(10) < torch.tensor([[10], [7]])  # (B, S, D), (B, S)
for top in (1, 2):
    layer = MixtureOfExperts(16, 12, 0.0, experts=6, top=top, shared=1)
    layer.bias[5] = 0.1
    for token, y in zip(x[real], layer(x, real)[real], strict=True):
        p = (layer.router.weight @ token).softmax(0)
        best = (p + layer.bias).argsort(descending=True)[:top].tolist()
        routed = sum(p[e] * layer.experts[e](token) for e in best)
        whole = sum(p[e] for e in best) if top > 1 else 1
        torch.testing.assert_close(y, routed / whole + layer.shared[0](token))
print(f"visits: {layer.visits.tolist()}, {layer.visits.sum()} in all: two for each of 17 words")

# %% [markdown]
# ## Why experts fall idle
#
# > **In short.** An expert that is chosen learns, and an expert that has learned is chosen. That is the usual explanation. In our toy this circle turns only if tokens share a mean.
#
# A router may come to send nearly all tokens to the same few experts: routing *collapses*. There are two explanations.
#
# **A circle.** An expert that is chosen learns, and an expert that has learned is chosen (Shazeer et al., §4).
#
# **A shared mean.** Let $w_e$ be the router's vector for expert e. The expert with the highest score $x \cdot w_e$ wins x, and it wins $2x$ as well. So each expert wins in a *cone* that begins at 0. Tokens around 0 fall into every cone. If they share a mean far from 0, they lie in the same few. In the picture, x has two features, and the second cloud's mean is 4 away from 0. (That is drastic: 89% of these tokens' mean square lies in their mean. In the toy below it is half.)

# %%
torch.manual_seed(0)
angles = torch.arange(8) * torch.pi / 4 + 0.3
router = torch.stack([angles.cos(), angles.sin()], dim=-1)  # (E, 2)
cloud = torch.randn(300, 2)  # (N, 2)
cones_chart(router, {"mean 0": cloud, "mean 4 away": cloud + 8**0.5})

# %% [markdown]
# At a mean of 0, if x is as frequent as −x, full collapse is impossible. Their scores are opposite, so no expert is among the best two of eight for both. None gets more than half of the tokens, and at least four are visited.
#
# ### The experiment
#
# The circle needs experts that learn. So we cross the two explanations. One layer of eight experts, two for each token, learns a small function of 16 features. Either all of it learns, or only the router does, and the experts stay as they were drawn.
#
# A token is noise plus a mean, 0 or 1 in each feature. In a real layer, router and experts read the same. Here we choose a mean for the router and one for the experts. The function is of the noise alone, so it is the same in all rows.
#
# We call an expert *in use* if it has 2% of the visits. (An even share is 12.5%.) **Predict.** Which rows will have all eight in use if the circle is the cause? If the mean is?


# %%
def toy_run(
    router_mean: float, expert_mean: float, learn: bool, seed: int, penalty=None, after=None, n=8
) -> tuple[Tensor, float]:
    """Shares of visits (200, 8) while a mixture learns a fixed function, and its late error."""
    torch.manual_seed(seed)
    inner, outer = torch.randn(2, 16, 16) / 4
    layer = MixtureOfExperts(16, 16, dropout=0.0, experts=n, top=2, shared=0)
    layer.router.register_forward_pre_hook(lambda _, x: x[0] - expert_mean + router_mean)
    layer.experts.requires_grad_(learn)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    shares, errors = [], []
    for _ in range(200):
        noise = torch.randn(256, 16)
        error = (layer(noise + expert_mean) - (noise @ inner).tanh() @ outer).square().mean()
        optimizer.zero_grad()
        (error + penalty(layer) if penalty else error).backward()
        optimizer.step()
        if after:
            after(layer)
        shares.append(layer.visits / layer.visits.sum())
        errors.append(error.item())
    return torch.stack(shares), sum(errors[-20:]) / 20


def in_use(shares: Tensor) -> int:
    """How many experts have 2% of the visits: shares (steps, E)."""
    return int((shares.mean(0) > 0.02).sum())


# %%
counts, runs = {}, {}
for at_router, at_experts, learn in product((0, 1), (0, 1), (False, True)):
    own = [toy_run(at_router, at_experts, learn, seed) for seed in range(6)]
    runs[at_router, at_experts, learn], means = own, f"router {at_router}, experts {at_experts}"
    counts[f"{means}: untrained"] = [in_use(shares[:1]) for shares, _ in own]
    what = "all learn" if learn else "the router learns"
    counts[f"{means}: {what}"] = [in_use(shares[-20:]) for shares, _ in own]
*others, last = counts.values()
assert sum(last) + 6 < min(map(sum, others))  # by more than one expert, on average
titled(
    heatmap([*counts.values()], [*counts], column_title="seed", digits=0, cell=(42, 26)),
    "Fewest are left where router and experts read a mean, and all learn",
    "Experts in use, of eight: before any step, or in the last 20 of 200 steps. Before the colon, "
    "the mean of what each reads.",
)

# %% [markdown]
# In the last row two or three are left. So neither explanation is enough:
#
# - **No mean at the router:** seven or eight stay in use, whoever learns. The circle doesn't turn.
# - **A mean at the router:** a fresh router leaves up to three idle, as the cones suggest; one that learns alone, up to four.
# - **A mean at the router alone:** the experts learn, and more of them are in use than before. The circle doesn't turn here either.
#
# With seeds 6 to 13, two to five are left in the last row, five to seven in the one above.
#
# ### The mean of real tokens
#
# At a mean of 1, half of the mean square of the toy's tokens lies in their mean. **Predict.** How much does in what chapter 9's translator gives to its feed-forward layers? (Fifty captions.)

# %%
trained, inputs = load_model(STUDIED), []
for layer in (*trained.model.encoder.layers, *trained.model.decoder.layers):
    layer.feed_forward.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
batch = make_batch(encode_pairs([pair.texts for pair in aligned_pairs()], trained.tokenizer))
with torch.no_grad():
    trained.model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
for side, ids, of_side in (("encoder", batch.src, inputs[:3]), ("decoder", batch.tgt, inputs[3:])):
    words = [x[ids != PAD] for x in of_side]  # (N, D) for each layer
    print(side, *(f"{x.mean(0).square().sum() / x.square().sum(-1).mean():.0%}" for x in words))

# %% [markdown]
# Real tokens share a mean, too, though a smaller one. In the toy a smaller one is enough: `toy_run(0.75, 0.75, True, seed)`, a share of 36%, leaves three in use for all six seeds, and 0.5, a share of 20%, three to five.
#
# ## Remedies
#
# > **In short.** Count the visits, and push against what is uneven: in the loss, or beside it.
#
# - **A penalty** in the loss (Switch). With $v_e$ the share of visits (the paper's $f_e$) and $P_e$ the mean probability of expert e, it is $E\sum_e v_e P_e$: 1 if all is even, and E/k if all tokens are sure of the same k experts. Its gradient pulls at the router, against the task if need be.
# - **A bias** beside the loss ([Wang et al. 2024](https://arxiv.org/abs/2408.15664), used in DeepSeek-V3). After each step, add $u$ (`speed`) to the bias of every expert that had less than its even share, and take $u$ from those that had more. The bias decides who is *chosen*. The weights stay the router's.
#
# Below stands a third: subtract the tokens' mean from what the router reads.
#
# **Your turn.** Write both.


# %% tags=["yours"]
def balance_penalty(probs: Tensor, visits: Tensor) -> Tensor:
    """E·Σ vₑPₑ: share of visits times mean probability, 1 where all is even (Fedus et al. 2021, eq. 4).

    probs (N, E), visits (E,). The visits are counts, so only the probabilities have a gradient.
    """
    return len(visits) * (visits / visits.sum() * probs.mean(0)).sum()


def move_bias(layer: MixtureOfExperts, speed: float = 1e-3) -> None:
    """Raise the bias of experts with fewer visits than the mean, lower that of those with more."""
    visits = layer.visits.to(layer.bias.dtype)
    layer.bias += speed * (visits.mean() - visits).sign()


# %%
even, sure = torch.full((24, 6), 1 / 6), torch.tensor([0.5, 0.5, 0, 0, 0, 0]).expand(24, 6)
assert abs(balance_penalty(even, torch.full((6,), 8)) - 1) < 1e-9
assert balance_penalty(sure, torch.tensor([24, 24, 0, 0, 0, 0])) == 6 / 2

layer = MixtureOfExperts(16, 12, experts=3)
layer.visits = torch.tensor([9, 3, 0])
move_bias(layer, speed=0.5)
assert layer.bias.tolist() == [-0.5, 0.5, 0.5]

# %% [markdown]
# **Predict.** Does each bring all eight back? And does the error fall?


# %%
def pull(layer: MixtureOfExperts) -> Tensor:
    """What the penalty adds to the toy's loss."""
    return 0.1 * balance_penalty(layer.probs, layer.visits)


push = partial(move_bias, speed=0.01)
remedied = {"none": runs[1, 1, True], "no mean at the router": runs[0, 1, True]}
remedied["penalty"] = [toy_run(1, 1, True, seed, penalty=pull) for seed in range(6)]
remedied["bias"] = [toy_run(1, 1, True, seed, after=push) for seed in range(6)]
remedied["only two experts"] = [toy_run(1, 1, True, seed, n=2) for seed in range(6)]
for name, own in remedied.items():
    used, errors = [in_use(shares[-20:]) for shares, _ in own], [error for _, error in own]
    print(f"{name}: in use {used}, mean error {sum(errors) / 6:.4f}")
visits_chart({name: remedied[name][0][0] for name in [*remedied][:-1]})

# %% [markdown]
# Penalty and bias keep all eight in use, but the error doesn't fall. This toy doesn't need eight: two alone, which every token visits, do as well. Without a mean at the router the error is a tenth lower. The number of experts isn't why: penalty and bias have as many.
#
# ### Padding visits nobody
#
# Chapter 4's feed-forward layer needs no mask: nothing looks at padding's results. A mixture counts visits. So its encoder layer says where there are words:


# %%
class SparseEncoderLayer(EncoderLayer):
    """Chapter 4's layer around a mixture, which is told where there are words."""

    def forward(self, x: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """x (B, S, D), src_mask (B, 1, S), to (B, S, D)."""
        real = None if src_mask is None else src_mask[:, 0]  # (B, S)
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, src_mask))
        return self.sublayer[1](x, lambda x: self.feed_forward(x, real))


# %% [markdown]
# **Predict.** A sentence of 12 words is padded to 48 places, all with the same vector. Eight experts, two for each token: how many visits are counted without a mask, and what share has the busiest expert at least?

# %%
torch.manual_seed(0)
words, layer = torch.randn(12, 16), MixtureOfExperts(16, 12)
x = torch.cat([words, torch.ones(36, 16)])
for name, real in (("without a mask", None), ("with it", torch.arange(48) < 12)):
    layer(x, real)
    busiest = layer.visits.max() / layer.visits.sum()
    print(f"{name}: {layer.visits.sum()} visits, busiest expert {busiest:.1%}")

# %% [markdown]
# The padding goes to the same two experts: 36 of 96 visits each, 37.5%. A remedy would mostly balance padding.
#
# ## On record
#
# > **In short.** Seven tenths more parameters bring no gain that can be told from chance.
#
# In chapter 22's record, each feed-forward layer of the row *experts* has eight experts and a shared one. A token meets two and the shared one, together about as wide as the dense layer. The penalty's weight is 0.01, and the encoder's padding isn't routed. The experts are SwiGLUs, so SwiGLU is the row to beat.

# %%
print(verdict_line("experts", block_verdicts()["experts"], RIVALS_OF_PARTS["experts"]))
block_means(["2017", "SwiGLU", "experts"])

# %% [markdown]
# The model has 620,000 parameters. A token meets 362,000 of them, about as many as the base has. *What the record can't say:* whether all experts were in use: their visits weren't kept.
#
# ## Summary
#
# - A router sends each token to k of E experts. Shared experts see every token.
# - Dropless code sorts the visits by expert, and drops none.
# - In our toy most experts fell idle where router and experts both read a shared mean and all learned. A penalty, a bias, or a router that doesn't see the mean keeps them busy.
#
# ## What these papers did that we don't
#
# They place experts on different GPUs. DeepSeek-V3 has 256 routed experts, 8 for each token.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · A router
#
# *code · difficulty ●○○ · worth ●●● · 15 minutes*
#
# From a router's logits (N, E), give the indices of each token's `top` experts, (N, top), likeliest first, and their weights, (N, top), as in this chapter's formula, with their gradient. (`solution("router")` shows ours.)


# %%
def router(logits: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Each token's best experts and their weights, both (N, top)."""
    ...


check(router)

# %% [markdown]
# ### Exercise 2 · What isn't dropped here
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# A layer that isn't dropless has room for $\lceil \text{factor} \cdot Nk/E \rceil$ visits at each expert. For the choices of N tokens, chosen (N, k), and E experts: what share of all visits is dropped? (`solution("dropped_share")` shows ours.)


# %%
def dropped_share(chosen: Tensor, experts: int, factor: float) -> float:
    """The share of visits, 0 to 1, for which there is no room."""
    ...


check(dropped_share)

# %% [markdown]
# Next: [Chapter 25 · All of it on one page](ch25_one_page.ipynb)
