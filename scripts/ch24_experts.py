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
# After this chapter you can build a layer that holds many feed-forward networks and uses only a few of them for each token. You can say why some may fall idle, and keep them busy.
#
# | | |
# |---|---|
# | In the paper | §3.3 of [Attention Is All You Need](https://arxiv.org/abs/1706.03762), the feed-forward layer |
# | Time | 15 minutes to read, 35 with the code; a minute to run on a CPU |
# | Before, after | [Chapter 23 · Long memory](ch23_long_memory.ipynb) · [Chapter 25 · All of it on one page](ch25_one_page.ipynb) |
#
# *If you read only three cells:* `dispatch`, the table of *Why experts fall idle*, the words of each expert.
#
# Shapes: **B** batch, **S** length, **D** `d_model`, **N** tokens of a batch, **E** experts, **k** of them for each token.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
from collections import Counter
from collections.abc import Sequence

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
# > **In short.** Many feed-forward layers replace one. A router sends each token to the few that it scores highest. The model holds more, but a token costs hardly more than in one layer as wide as those few.
#
# Most of a large Transformer's parameters are in its feed-forward layers, and each token meets all of them. Mixtures of experts ([Shazeer et al. 2017](https://arxiv.org/abs/1701.06538); Switch, [Fedus et al. 2021](https://arxiv.org/abs/2101.03961); DeepSeekMoE, [Dai et al. 2024](https://arxiv.org/abs/2401.06066)) change that. For a token $x \in \mathbb{R}^D$, a router $W_r$ (D, E) and experts $f_1, \dots, f_E$:
#
# $$ p = \mathrm{softmax}(x W_r), \qquad y = \sum_{e\,\in\,\mathrm{top}\,k} \frac{p_e}{\sum_{e'\in\,\mathrm{top}\,k} p_{e'}}\, f_e(x) \;+\; f_\text{shared}(x) $$
#
# - **Top k.** Only the k likeliest experts compute, and their weights are rescaled to sum to 1. With k = 1 a rescaled weight would always be 1, and the error would give the router no gradient. So there Switch and we keep $p_e$.
# - **Shared.** One more expert, for all tokens.
#
# **Predict.** Mixtral 8×7B ([Jiang et al. 2024](https://arxiv.org/abs/2401.04088)) has 32 layers of width 4,096, each with eight SwiGLU experts (chapter 22) of width 14,336, two for each token. Its attention has 32 heads of 128 in 8 groups, its vocabulary 32,000 pieces and two tables (input, output). How many parameters does it have in all, and how many does one token meet?

# %%
D, width, vocab, layers = 4096, 14336, 32_000, 32
expert = 3 * D * width
other = 2 * D * D + 2 * D * 1024 + 8 * D  # queries, outputs; keys, values; router
for name, experts in (("in all", 8), ("met by a token", 2)):
    print(f"{name}: {(layers * (experts * expert + other) + 2 * vocab * D) / 1e9:.1f} billion")

# %% [markdown]
# The paper says 47 and 13.
#
# ### Sorting the visits
#
# A token *visits* its k experts. To let each compute all its visits at once, `dispatch` sorts the N·k visits by expert, and cuts the list where the expert changes. Then it sums each token's weighted results.

# %%
chosen = torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2]])  # four tokens, two visits each
dispatch_chart(chosen, experts=4)

# %% [markdown]
# Such code is called *dropless* ([MegaBlocks, Gale et al. 2022](https://arxiv.org/abs/2211.15841)). Earlier code gave each expert room for a fixed number of visits, and dropped the rest.
#
# **Your turn.** Write `dispatch`.


# %% tags=["yours"]
def dispatch(rows: Tensor, chosen: Tensor, weights: Tensor, experts: Sequence[nn.Module]) -> Tensor:
    """Each row through its chosen experts, summed: rows (N, D), chosen and weights (N, k), to (N, D)."""
    order = chosen.flatten().argsort(stable=True)  # (N·k,): visits, by expert
    visitor = order // chosen.size(1)  # (N·k,): whose visit
    counts = chosen.flatten().bincount(minlength=len(experts)).tolist()
    parts = rows[visitor].split(counts)  # E times (count, D): no visit is left out
    done = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])
    weighted = done * weights.flatten()[order].unsqueeze(-1)  # (N·k, D)
    return torch.zeros_like(rows).index_add(0, visitor, weighted)


# %% [markdown]
# Check. If every expert computes every token, and all but the chosen weights are 0, the sum is the same:

# %%
rows, weights, experts = torch.randn(4, 3), torch.rand(4, 2), [nn.Linear(3, 3) for _ in range(4)]
sparse = torch.zeros(4, 4).scatter(1, chosen, weights)  # (N, E)
by_all = sum(sparse[:, [e]] * expert(rows) for e, expert in enumerate(experts))
torch.testing.assert_close(dispatch(rows, chosen, weights, experts), by_all)

# %% [markdown]
# ### The layer
#
# After a call, `probs` and `visits` tell what the router did. `real` says where there are words. `bias` starts at 0; *Remedies* moves it. It is a *buffer*: saved, without gradient.
#
# **Your turn.** Write `MixtureOfExperts`.


# %% tags=["yours"]
class MixtureOfExperts(nn.Module):
    """The best of many SwiGLUs for each token, and shared ones for all; dropless.

    It keeps `top`, how many, `router`, linear without bias, the lists `experts` and `shared`, and the
    buffer `bias` (E,), added when experts are chosen; after a call `probs` (N, E) and `visits` (E,).
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
        weights = probs.gather(-1, chosen)
        if self.top > 1:  # a single one keeps its probability, or the router would learn nothing
            weights = weights / weights.sum(-1, keepdim=True)
        return probs, chosen, weights

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """x (..., D) to (..., D); zeros where real (...) is False, at padding."""
        rows = x.flatten(0, -2) if real is None else x[real]  # (N, D): places don't matter
        self.probs, chosen, weights = self.route(rows)
        self.visits = chosen.flatten().bincount(minlength=len(self.experts))
        shared = sum(expert(rows) for expert in self.shared)
        y = dispatch(rows, chosen, weights, self.experts) + shared
        return y.view_as(x) if real is None else torch.zeros_like(x).index_put((real,), y)


# %% [markdown]
# Check, token by token, with a bias that changes who is chosen:

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
# > **In short.** Only chosen experts learn. Where tokens share a mean, one step of the router moves an expert's score for all of them. Then few experts are left.
#
# A router may come to send nearly all tokens to the same few experts: routing *collapses*. The usual explanation is a circle (Shazeer et al., §4): an expert that is chosen learns, and one that has learned is chosen. But why should it be ahead for all tokens?
#
# Let tokens have a common mean m: $x = m + n$. Expert e's score is $w_e \cdot m + w_e \cdot n$, where $w_e$ is the router's vector for it. The first term is the same for all tokens. It can matter twice:
#
# - **At the start.** The expert that wins x wins $2x$ as well. So each wins in a *cone* that begins at 0. A cloud of tokens around 0 falls into every cone, one far from 0 into few.
# - **In learning.** A step of $w_e$ along m raises its score for all tokens at once.

# %%
torch.manual_seed(0)
angles = torch.arange(8) * torch.pi / 4 + 0.3
router = torch.stack([angles.cos(), angles.sin()], dim=-1)  # (E, 2)
cloud = torch.randn(300, 2)  # (N, 2)
cones_chart(router, {"mean 0": cloud, "mean 4 away": cloud + 8**0.5})

# %% [markdown]
# If −x is as frequent as x, full collapse is impossible. An expert's scores for x and −x are opposite, so it isn't among the best two of eight for both. At least four are visited.
#
# ### The experiment
#
# Eight experts, two for each token, learn a small function of 16 features. A token is noise plus a mean, 0 or 1 in each feature. In a real layer, router and experts read the same; here each has its own mean. The function, of the noise alone, is the same in all rows.
#
# In the last five rows the mean is 1 for both. In four something else differs:
#
# - *experts as drawn:* only the router learns.
# - *router can't learn along it:* the mean's part of its scores stays as before the first step.
# - *router waits:* its 200 steps begin when the experts have learned for 200.
# - *even start:* the mean's part before the first step is subtracted from all scores.
#
# We call an expert *in use* if it has more than 2% of the visits. (An even part is 12.5%.) **Predict.** Which of these four rows have few in use if the start is the cause? If learning along the mean is?


# %%
def train_mixture(layer, batches, remedy=lambda layer: 0.0, wait=0) -> tuple[Tensor, float]:
    """Parts of the visits (steps, E) while a layer learns to make y of x, and its last error."""
    optimizer, parts = torch.optim.Adam(layer.parameters(), lr=0.01), []
    for step, (x, y) in enumerate(batches):
        layer.router.requires_grad_(step >= wait)
        error = (layer(x) - y).square().mean()
        optimizer.zero_grad()
        (error + remedy(layer)).backward()
        optimizer.step()
        parts.append(layer.visits / layer.visits.sum())
    return torch.stack(parts), error.item()


def toy_run(seed: int, router_mean, expert_mean, learn=True, lift=0, wait=0) -> Tensor:
    """Parts of the visits (steps, 8); `lift` times a mean of 1 is added to the first scores."""
    torch.manual_seed(seed)
    inner, outer = torch.randn(2, 16, 16) / 4
    layer = MixtureOfExperts(16, 16, dropout=0.0, shared=0)
    layer.experts.requires_grad_(learn)
    lifted = lift * layer.router.weight.detach().sum(1)  # (E,): stays as it is now
    layer.router.register_forward_pre_hook(lambda _, x: x[0] - expert_mean + router_mean)
    layer.router.register_forward_hook(lambda _, x, scores: scores + lifted)
    noises = (torch.randn(256, 16) for _ in range(wait + 200))
    batches = ((n + expert_mean, (n @ inner).tanh() @ outer) for n in noises)
    return train_mixture(layer, batches, wait=wait)[0]


def in_use(parts: Tensor) -> int:
    """How many experts have 2% of the visits: parts (steps, E)."""
    return int((parts.mean(0) > 0.02).sum())


# %%
settings = {
    "neither reads a mean": (0, 0),
    "the experts alone": (0, 1),
    "the router alone": (1, 0),
    "both, experts as drawn": (1, 1, False),
    "both, router can't learn along it": (0, 1, True, 1),
    "both, router waits": (1, 1, True, 0, 200),
    "both, even start": (1, 1, True, -1),
    "both": (1, 1),
}
runs = {name: [toy_run(seed, *how) for seed in range(6)] for name, how in settings.items()}
counts = {"both, before any step": [in_use(parts[:1]) for parts in runs["both"]]}
counts |= {name: [in_use(parts[-20:]) for parts in own] for name, own in runs.items()}
*others, even_start, both = map(sum, counts.values())
assert max(even_start, both) + 6 < min(others)  # by more than one expert, on average
titled(
    heatmap([*counts.values()], [*counts], column_title="seed", digits=0, cell=(42, 26)),
    "Fewest are left where both read a mean and learn",
    "Experts in use, of eight, in the last 20 steps: who reads a mean, and what else differs.",
)

# %% [markdown]
# - **The router must learn along the mean.** If it can't, five or six are left. In *both*, where it can, two or three are, and from an even start two to five. So an uneven start is neither needed nor enough.
# - **The circle needs a mean at the router.** Without one, seven or eight stay in use.
# - **It is a circle.** Where the experts don't learn, or learn before the router does, more stay in use.
#
# The experts must read the mean, too: otherwise six to eight stay in use. Our guess: then all tokens share an error, and the first expert to lose it is better for all.
#
# ## Remedies
#
# > **In short.** Punish uneven visits in the loss, or correct them by a bias. Or take the mean away from the router.
#
# - **A penalty** in the loss (Switch). With $v_e$ expert e's part of the visits (the paper's $f_e$) and $P_e$ its mean probability, it is $E\sum_e v_e P_e$: 1 if all is even, and E/k if all tokens are sure of the same k experts. Only $P_e$ has a gradient, which may work against the task.
# - **A bias** beside the loss ([Wang et al. 2024](https://arxiv.org/abs/2408.15664), used in DeepSeek-V3). After each step, add `speed` to the bias of every expert that had less than its even part, and take it from those that had more. It affects who is *chosen*; the weights are computed without it.
# - **No mean at the router**, as our experiment suggests. Subtract the tokens' mean from what it reads.
#
# **Your turn.** Write the first two.


# %% tags=["yours"]
def balance_penalty(probs: Tensor, visits: Tensor) -> Tensor:
    """E·Σ vₑPₑ of probs (N, E) and visits (E,), 1 where all is even (Fedus et al. 2021, eq. 4)."""
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
# ### Real tokens
#
# Fifty captions go through the encoder of chapter 9's translator. In 60 steps, a mixture learns to imitate the encoder's last feed-forward layer. Its error on the same tokens is divided by the outputs' variance.
#
# **Predict.** How much of the inputs' mean square lies in their mean? (In the toy: half.) Does each remedy bring all eight experts back, and lower the error?

# %%
trained, seen = load_model(STUDIED), []
dense = trained.model.encoder.layers[-1].feed_forward
dense.register_forward_hook(lambda _, given, result: seen.extend((*given, result)))
batch = make_batch(encode_pairs([pair.texts for pair in aligned_pairs()], trained.tokenizer))
with torch.no_grad():
    trained.model.encode(batch.src, batch.src_mask)
ids, x, y = (t[batch.src != PAD] for t in (batch.src, *seen))  # (N,), (N, D), (N, D)
mean = x.mean(0)  # (D,)
print(f"{len(x)} tokens, {mean.square().sum() / x.square().sum(-1).mean():.0%} in their mean")


# %%
def imitate(seed: int, shift=0.0, remedy=lambda layer: 0.0, experts=8) -> tuple:
    """A mixture learns to do what the layer does: the mixture, parts of its visits, last error."""
    torch.manual_seed(seed)
    layer = MixtureOfExperts(x.size(1), 16, dropout=0.0, experts=experts, shared=0)
    layer.router.register_forward_pre_hook(lambda _, given: given[0] - shift)
    return layer, *train_mixture(layer, [(x, y)] * 60, remedy)


remedies = {
    "only two experts": {"experts": 2},
    "none": {},
    "penalty": {"remedy": lambda layer: 0.1 * balance_penalty(layer.probs, layer.visits)},
    "bias": {"remedy": lambda layer: move_bias(layer, speed=0.03) or 0.0},
    "no mean at the router": {"shift": mean},
}
remedied = {name: [imitate(seed, **how) for seed in range(3)] for name, how in remedies.items()}
for name, own in remedied.items():
    used, errors = [in_use(parts[-5:]) for _, parts, _ in own], [e / y.var() for *_, e in own]
    print(f"{name}: in use {used}, error", *(f"{error:.3f}" for error in errors))
visits_chart({name: own[0][1] for name, own in [*remedied.items()][1:]})

# %% [markdown]
# Left alone, three to five are in use. With each remedy it is seven or eight, and for each seed the error is lower. With only two experts it is far higher. It is lowest without a mean at the router, though the bias keeps as many in use.
#
# **Predict.** Which tokens does each expert take?

# %%
first = remedied["no mean at the router"][0][0].route(x)[1][:, 0]  # (N,): the likeliest experts
for expert in range(8):
    pieces = Counter(map(trained.tokenizer.processor.id_to_piece, ids[first == expert].tolist()))
    print(f"expert {expert}:", *(f"{piece} {n}" for piece, n in pieces.most_common(8)))

# %% [markdown]
# Expert 0 took each *Ein* and *Eine*, expert 5 only other indefinite articles, expert 7 many people and animals. Like words have like vectors. Even a fresh router tends to send these to the same experts.
#
# ### Padding isn't routed
#
# Chapter 4's feed-forward layer needs no mask: nothing uses padding's results. But a mixture counts visits. Where padding's vectors are alike, they go to the same few experts, and a remedy would balance padding, too. So the encoder layer tells the mixture where there are words:


# %%
class SparseEncoderLayer(EncoderLayer):
    """Chapter 4's layer around a mixture, which is told where there are words."""

    def forward(self, x: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """x (B, S, D), src_mask (B, 1, S), to (B, S, D)."""
        real = None if src_mask is None else src_mask[:, 0]  # (B, S)
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, src_mask))
        return self.sublayer[1](x, lambda x: self.feed_forward(x, real))


# %% [markdown]
# ## On record
#
# > **In short.** Seven tenths more parameters bring no gain in BLEU that can be told from chance.
#
# In chapter 22's record, each feed-forward layer of the row *experts* has eight SwiGLUs and a shared one. A token meets two and the shared one, together about as wide as a layer of the row *SwiGLU*, its rival. The penalty's weight is 0.01, and the encoder's padding isn't routed. Rows are means of three seeds; *first* and *last* are training losses.

# %%
print(verdict_line("experts", block_verdicts()["experts"], RIVALS_OF_PARTS["experts"]))
block_means(["2017", "SwiGLU", "experts"])

# %% [markdown]
# Of the model's 620,000 parameters, a token meets 362,000, about as many as the base has. Whether all experts were in use isn't on record.
#
# ## Summary
#
# - A router sends each token to k of E experts. Shared experts see every token.
# - Dropless code sorts the visits by expert, and drops none.
# - In our toy most experts fall idle where router and experts read a mean that tokens share, and both learn.
# - A penalty, a bias, or no mean at the router keeps them busy.
#
# ## What these papers did that we don't
#
# They spread experts over many devices. DeepSeek-V3 has 256 routed experts, 8 for each token.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · A router
#
# *code · difficulty ●○○ · worth ●●● · 15 minutes*
#
# From a router's logits (N, E), give the indices of each token's `top` experts, (N, top), likeliest first, and their weights, (N, top), as in this chapter's layer, with their gradient. (`solution("router")` shows ours.)


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
