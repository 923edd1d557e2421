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
# After this chapter you can build a layer that holds many feed-forward networks and uses only a few of them for each token, keep all of them busy, and recognise other ideas in current models' code.
#
# | | |
# |---|---|
# | In the paper | §3.3 of [Attention Is All You Need](https://arxiv.org/abs/1706.03762), the feed-forward layer |
# | Time | 15 minutes to read, 30 with the code; a quarter of a minute to run on a CPU |
# | Before, after | [Chapter 23 · Long memory](ch23_long_memory.ipynb) · [Chapter 25 · All of it on one page](ch25_one_page.ipynb) |
#
# *If you read only three cells:* `dispatch`, the chart of *Keeping the experts busy*, the table of *What else there is*.
#
# Shapes: **B** batch, **S** length, **D** `d_model`, **N** tokens of a batch, **E** experts, **k** of them for each token.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import copy
import statistics
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from scripts.book.exercises import check
from scripts.book.figures.since import routing_chart
from scripts.book.verdict import verdict_line
from scripts.ch01_attention import padding_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch04_encoder_decoder import EncoderLayer
from scripts.ch22_todays_block import RIVALS_OF_PARTS, SwiGLU, block_means, block_verdicts

# %%
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## A mixture of experts
#
# > **In short.** Use many feed-forward layers instead of one. A small router sends each token to the few that it scores highest. The model holds more, but a token costs hardly more multiplications than in a dense layer as wide as those few together.
#
# Most of a large Transformer's parameters are in its feed-forward layers, and each token meets all of them. Mixtures of experts ([Shazeer et al. 2017](https://arxiv.org/abs/1701.06538); Switch, [Fedus et al. 2021](https://arxiv.org/abs/2101.03961); DeepSeekMoE, [Dai et al. 2024](https://arxiv.org/abs/2401.06066)) change that. For a token $x \in \mathbb{R}^D$, a router $W_r$ (D, E) and experts $f_1, \dots, f_E$:
#
# $$ p = \mathrm{softmax}(x W_r), \qquad y = \sum_{e\,\in\,\mathrm{top}\,k} \frac{p_e}{\sum_{e'\in\,\mathrm{top}\,k} p_{e'}}\, f_e(x) \;+\; f_\text{shared}(x) $$
#
# - **Top k.** Only the k likeliest experts compute, and their weights are rescaled to sum to 1. With k = 1, rescaling would be a mistake: the weight would always be 1, and the router would get no gradient. Switch then keeps $p_e$, and so do we.
# - **Shared.** What all tokens need is learned once, by an expert that every token visits.
#
# **Predict.** Mixtral 8×7B ([Jiang et al. 2024](https://arxiv.org/abs/2401.04088)) has 32 layers of width 4,096, each with eight SwiGLU experts (chapter 22) of width 14,336, two for each token. Its attention has 32 heads of 128 in 8 groups, its vocabulary 32,000 pieces, with one table for reading and another for writing. How many parameters does it have in all, and how many does one token meet?

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
# Earlier code gave each expert *room* for a fixed number of tokens and dropped the rest: they passed the layer unchanged. **Dropless** code ([MegaBlocks, Gale et al. 2022](https://arxiv.org/abs/2211.15841)) sorts all N·k visits by expert instead, and cuts the list where the expert changes.


# %%
def dispatch(rows: Tensor, chosen: Tensor, share: Tensor, experts: Sequence[nn.Module]) -> Tensor:
    """Each row through its chosen experts, weighted: rows (N, D), chosen and share (N, k), to (N, D)."""
    order = chosen.flatten().argsort(stable=True)  # (N·k,): visits, by expert
    visitor = order // chosen.size(1)  # (N·k,): whose visit
    counts = chosen.flatten().bincount(minlength=len(experts)).tolist()
    parts = rows[visitor].split(counts)  # E times (count, D): no visit is left out
    done = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])
    weighted = done * share.flatten()[order].unsqueeze(-1)  # (N·k, D)
    return torch.zeros_like(rows).index_add(0, visitor, weighted)


# %%
chosen = torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2]])  # four tokens, two visits each
order = chosen.flatten().argsort(stable=True)
print("expert of each visit, sorted:", chosen.flatten()[order].tolist())
print("the token that visits:       ", (order // 2).tolist())

# %% [markdown]
# Padding must not be routed, so `forward` takes `real`, which says where there are words. `balance_penalty`, `visits` and `bias` belong to the next section. `bias` is a *buffer*: it has no gradient, but is saved with the weights.


# %%
def balance_penalty(probs: Tensor, visits: Tensor) -> Tensor:
    """E·Σ vₑPₑ: share of visits times mean probability, 1 where all is even (Fedus et al. 2021, eq. 4).

    probs (N, E), visits (E,). The visits are counts, so only the probabilities have a gradient.
    """
    return len(visits) * (visits / visits.sum() * probs.mean(0)).sum()


class MixtureOfExperts(nn.Module):
    """The `top` best of `experts` SwiGLUs for each token, and `shared` ones for all; dropless.

    After a call `penalty` is the balance penalty of its tokens and `visits` (E,) their counts.
    `bias` (E,) is added when experts are chosen, not when they are weighed.
    """

    def __init__(
        self,
        d_model: int,
        width: int,
        dropout: float = 0.1,
        experts: int = 8,
        top: int = 2,
        shared: int = 1,
    ):
        super().__init__()
        if not 1 <= top <= experts:
            raise ValueError(f"top must be from 1 to the number of experts, {experts}, not {top}")
        self.top = top
        self.router = nn.Linear(d_model, experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(d_model, width, dropout) for _ in range(experts))
        self.shared = nn.ModuleList(SwiGLU(d_model, width, dropout) for _ in range(shared))
        self.register_buffer("bias", torch.zeros(experts))
        self.penalty: Tensor | None = None
        self.visits: Tensor | None = None

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
        probs, chosen, share = self.route(rows)
        self.visits = chosen.flatten().bincount(minlength=len(self.experts))
        self.penalty = balance_penalty(probs, self.visits)
        y = dispatch(rows, chosen, share, self.experts)
        for expert in self.shared:
            y = y + expert(rows)
        return y.view_as(x) if real is None else torch.zeros_like(x).index_put((real,), y)


def active_parameters(model: nn.Module) -> int:
    """Parameters that one token meets: all but the experts that it isn't sent to."""
    idle = 0
    for part in model.modules():
        if isinstance(part, MixtureOfExperts):
            size = sum(p.numel() for p in part.experts[0].parameters())
            idle += (len(part.experts) - part.top) * size
    return sum(p.numel() for p in model.parameters()) - idle


# %% [markdown]
# Check. One expert alone *is* the dense layer. And a loop over tokens, without sorting, must give the same results.

# %%
torch.manual_seed(0)
x = torch.randn(2, 10, 16)
dense, lone = SwiGLU(16, 24, 0.0), MixtureOfExperts(16, 24, 0.0, experts=1, top=1, shared=0)
lone.experts[0].load_state_dict(dense.state_dict())
assert torch.equal(lone(x), dense(x))

layer = MixtureOfExperts(16, 12, 0.0, experts=6, top=2, shared=1)
for token, found in zip(x.flatten(0, 1), layer(x).flatten(0, 1), strict=True):
    p = (layer.router.weight @ token).softmax(0)
    best = sorted(range(6), key=lambda e: -p[e])[:2]
    by_hand = sum(p[e] * layer.experts[e](token) for e in best) / sum(p[e] for e in best)
    torch.testing.assert_close(found, by_hand + layer.shared[0](token))
count = sum(p.numel() for p in layer.parameters())
print(f"visits: {layer.visits.tolist()}, {layer.visits.sum()} in all: two for each of 20 tokens")
print(f"parameters: {count:,}, of which a token meets {active_parameters(layer):,}")

# %% [markdown]
# ## Keeping the experts busy
#
# > **In short.** Left alone, a router may always pick the same few experts. One explanation: an expert that is chosen learns, and one that has learned is chosen.
#
# Two remedies:
#
# - **A penalty** in the loss (Switch). With $v_e$ the share of visits (the paper's $f_e$) and $P_e$ the mean probability of expert e, it is $E\sum_e v_e P_e$: 1 if all is even, and at most E/k, when all tokens are sure of the same k experts. (It is also 1 when only the probabilities are even, so look at the visits, too.) The loss becomes, for example, `loss + 0.01 * sum(layer.penalty for layer in mixtures)`. Its gradient pulls at the router, against the task if need be.
# - **A bias** outside the loss ([Wang et al. 2024](https://arxiv.org/abs/2408.15664), used in DeepSeek-V3). After each step (`move_bias`), add $u$ (`speed`) to the bias of every expert that had less than its fair share, and take $u$ from those that had more. The bias decides who is *chosen*; the weights stay the router's, and no gradient is added.


# %%
def move_bias(layer: MixtureOfExperts, speed: float = 1e-3) -> None:
    """Raise the bias of experts with fewer visits than the mean, lower that of those with more."""
    visits = layer.visits.to(layer.bias.dtype)
    layer.bias += speed * (visits.mean() - visits).sign()


# %%
even = torch.full((24, 6), 1 / 6)
sure = torch.tensor([0.5, 0.5, 0, 0, 0, 0]).expand(24, 6)  # of experts 0 and 1
same_two = torch.tensor([24, 24, 0, 0, 0, 0])
cases = {
    "all even": (even, torch.full((6,), 8)),
    "all sure of the same two of six": (sure, same_two),
    "probabilities even, all to the same two": (even, same_two),
}
for name, (probs, visits) in cases.items():
    print(f"{name}: penalty {balance_penalty(probs, visits):.2f}")

# %% [markdown]
# In a toy, one layer of eight experts, two per token, learns a small function. The inputs have a mean of 1, not 0. **Predict.** Without a remedy, how many experts still have 2% of the visits after 200 steps? And with a mean of 0?


# %%
def routing_history(
    remedy: Literal["none", "penalty", "bias"], mean: float = 1.0
) -> tuple[Tensor, MixtureOfExperts, float]:
    """A small mixture learns a fixed function: shares of visits (200, E), the layer, its late error."""
    torch.manual_seed(0)
    inner, outer = torch.randn(2, 16, 16) / 4
    layer = MixtureOfExperts(16, 16, dropout=0.0, experts=8, top=2, shared=0)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    history, errors = [], []
    for _ in range(200):
        x = torch.randn(256, 16) + mean
        error = (layer(x) - (x @ inner).tanh() @ outer).square().mean()
        optimizer.zero_grad()
        (error + 0.1 * layer.penalty if remedy == "penalty" else error).backward()
        optimizer.step()
        if remedy == "bias":
            move_bias(layer, speed=0.01)
        history.append(layer.visits / layer.visits.sum())
        errors.append(error.item())
    return torch.stack(history), layer, statistics.mean(errors[-20:])


# %%
routings = {remedy: routing_history(remedy) for remedy in ("none", "penalty", "bias")}
routings["none, mean 0"] = routing_history("none", mean=0.0)
late = {name: history[-20:].mean(0) for name, (history, _, _) in routings.items()}
in_use = {name: int((share > 0.02).sum()) for name, share in late.items()}
for name, (_, _, error) in routings.items():
    print(f"{name}: {in_use[name]} experts in use at the end, error {error:.4f}")
histories = {remedy: routings[remedy][0] for remedy in ("none", "penalty", "bias")}
routing_chart(histories)

# %% [markdown]
# The collapse costs nothing that we see: the three errors with a mean of 1 are about the same. But it wastes parameters and, on several GPUs, time.
#
# One toy with one seed shows that a collapse can happen, but not why, or which remedy is better.
#
# **Pitfall.** *Routed padding.* Chapter 4's feed-forward layer needs no mask: nothing looks at padding's results. A mixture does, when it counts visits. **Predict.** A sentence of 12 words is padded to 48 places; there are eight experts, two per token. All padding is the same vector, as without positions. With a layer that knows no mask, how many visits are counted, and what share does the busiest expert have at least?


# %%
class SparseEncoderLayer(EncoderLayer):
    """Chapter 4's layer around a mixture, which is told where there are words."""

    def forward(self, x: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """x (B, S, D), src_mask (B, 1, S), to (B, S, D)."""
        real = None if src_mask is None else src_mask[:, 0]  # (B, S)
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, src_mask))
        return self.sublayer[1](x, lambda x: self.feed_forward(x, real))


# %%
torch.manual_seed(0)
src = torch.tensor([[7] * 12 + [0] * 36])  # (B, S): ids, 0 is padding
x = torch.where(src.unsqueeze(-1) > 0, torch.randn(1, 48, 16), torch.ones(16))
parts = (MultiHeadedAttention(4, 16, 0.0), MixtureOfExperts(16, 12, 0.0), 0.0)
seen = {}
for kind in (EncoderLayer, SparseEncoderLayer):
    layer = kind(16, *copy.deepcopy(parts))
    seen[kind.__name__] = layer(x, padding_mask(src))[:, :12]
    mixture = layer.feed_forward
    total, busiest = mixture.visits.sum(), mixture.visits.max() / mixture.visits.sum()
    print(
        f"{kind.__name__}: {total} visits, busiest expert {busiest:.1%}, penalty {mixture.penalty:.2f}"
    )
torch.testing.assert_close(*seen.values())  # the words' own results don't change
alone = layer(x[:, :12], padding_mask(src[:, :12]))
torch.testing.assert_close(alone, seen["SparseEncoderLayer"])

# %% [markdown]
# The 36 equal padding vectors go to the same two experts: 36 of the 96 visits each, 37.5%, before any word comes. The words' results are the same, but the penalty mostly measures padding. So check that the visits are k times the number of *words*.
#
# **Pitfall.** *A bias that isn't saved.* Kept as a plain attribute, the bias stays out of `state_dict`, and after loading the experts are chosen without it. A *persistent* buffer is saved.

# %%
torch.manual_seed(0)
trained = routings["bias"][1]
loaded = MixtureOfExperts(16, 16, 0.0, experts=8, top=2, shared=0)
loaded.load_state_dict(trained.state_dict())
rows = torch.randn(256, 16) + 1.0
before = trained.route(rows)[1].sort().values  # (N, k)
assert torch.equal(loaded.route(rows)[1].sort().values, before)
loaded.bias.zero_()
moved = (loaded.route(rows)[1].sort().values != before).any(-1).double().mean()
print(f"without the bias, {moved:.0%} of the tokens change an expert")

# %% [markdown]
# ## On record
#
# > **In short.** Seven tenths more parameters bring no gain that can be told from chance.
#
# In chapter 22's record, each feed-forward layer of the row *experts* has eight experts and a shared one. A token meets two and the shared one, together about as wide as the dense layer. The penalty's weight is 0.01, and the encoder's padding isn't routed. The experts are SwiGLUs, so SwiGLU is the row to beat.

# %%
print(verdict_line("experts", block_verdicts()["experts"], RIVALS_OF_PARTS["experts"]))
block_means(["2017", "SwiGLU", "experts"])

# %% [markdown]
# The model has 620,000 parameters. A token meets 362,000 of them, about as many as the base has. Each routed expert learns from only a part of 29,000 captions; with many more tokens, experts may pay off. *What the record can't say:* whether all experts were in use (their visits weren't kept), and what the bias would do.
#
# ## What else there is
#
# You will meet these names in current models' code:
#
# | name | the idea | source |
# |---|---|---|
# | multi-token prediction | extra output layers guess the tokens after the next one; the guesses can also speed up decoding | [Gloeckle et al. 2024](https://arxiv.org/abs/2404.19737) |
# | differential attention | two softmaxes, one subtracted from the other, so noise in both cancels | [Ye et al. 2024](https://arxiv.org/abs/2410.05258) |
# | gated attention | each head's output is multiplied by a sigmoid of the input, so a head can stay silent | [Qiu et al. 2025](https://arxiv.org/abs/2505.06708) |
# | soft-capping | logits and scores pass through $c\tanh(z/c)$, so none grows beyond c | [Gemma 2, 2024](https://arxiv.org/abs/2408.00118) |
# | hyper-connections | several residual roads side by side, mixed by learned weights | [Zhu et al. 2024](https://arxiv.org/abs/2409.19606) |
# | Mamba-2 | a state that fades by a factor computed from the token: a kind of linear attention (chapter 23) | [Dao and Gu 2024](https://arxiv.org/abs/2405.21060) |
# | native sparse attention | blocks of keys are summarised, the best are read in full, a window sees the nearest | [Yuan et al. 2025](https://arxiv.org/abs/2502.11089) |
# | YaRN | rotary wavelengths are stretched (frequencies lowered), long ones more than short ones, to read longer texts than in training | [Peng et al. 2023](https://arxiv.org/abs/2309.00071) |
#
# ## Summary
#
# - The model holds E experts. A router sends each token to k of them; shared ones see every token.
# - Dropless code sorts the visits by expert, and drops none.
# - Padding is neither routed nor counted.
# - Left alone, routing may collapse. A penalty in the loss works against that, or a bias outside it, which is saved with the weights.
#
# ## What these papers did that we don't
#
# They place experts on different GPUs. DeepSeek-V3 has 256 routed experts and one shared, 8 active, and scores them by sigmoids.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · A router
#
# *code · difficulty ●○○ · worth ●●● · 15 minutes*
#
# From a router's logits (N, E), give the indices of each token's `top` experts, (N, top), likeliest first, and their weights, (N, top), as in this chapter's formula, with their gradient. Mind `top = 1`. (`solution("router")` shows ours.)


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
# A layer that isn't dropless has room for $\lceil \text{factor} \cdot Nk/E \rceil$ visits at each expert. For the choices of N tokens, chosen (N, k), and E experts: what share of all visits is dropped? (`solution("dropped_share")` shows ours.) Then ask the toy's three routers, with a factor of 1.25: `routings["none"][1].route(torch.randn(256, 16) + 1.0)[1]` are choices.


# %%
def dropped_share(chosen: Tensor, experts: int, factor: float) -> float:
    """The share of visits, 0 to 1, for which there is no room."""
    ...


check(dropped_share)

# %% [markdown]
# <details><summary>The three routers</summary>
#
# The router left alone loses about half of the visits: three experts have room for 15.6% each, and hardly any token visits the other five. The two that are balanced lose hardly anything.
#
# </details>
#
# ### Exercise 3 · Chosen, not weighed
#
# *think · difficulty ●●○ · worth ●●○ · 10 minutes*
#
# The bias counts when experts are chosen, and not in their weights. What would happen if it did count there? And why does $v_e$ in the penalty need no gradient?
#
# <details><summary>An answer</summary>
#
# A raised bias would make an expert *louder* for every token that visits it, whether it suits the token or not.
#
# Visits are counts: they change in jumps, so their derivative is 0 or doesn't exist. The probabilities carry the gradient, and $v_e$ says how much each counts: the more visits an expert has, the harder its probability is pushed down.
#
# </details>
#
# Next: [Chapter 25 · All of it on one page](ch25_one_page.ipynb)
