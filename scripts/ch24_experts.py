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
# After this chapter you can build a layer that holds many feed-forward networks, its *experts*, and uses only a few of them for each token. You can say why some fall idle, and keep them in use.
#
# | | |
# |---|---|
# | In the paper | §3.3 of [Attention Is All You Need](https://arxiv.org/abs/1706.03762), the feed-forward layer |
# | Time | 15 minutes to read, 35 with the code; a minute to run on a CPU |
# | Before, after | [Chapter 23 · Long memory](ch23_long_memory.ipynb) · [Chapter 25 · All of it on one page](ch25_one_page.ipynb) |
#
# *If you read only three cells:* `dispatch`, the chart of *The experiment*, the words of each expert.
#
# Shapes: **B** batch, **S** length, **D** `d_model`, **N** tokens of a batch, **E** experts, **k** of them for each token.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import textwrap
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from scripts.book.exercises import check
from scripts.book.figures.experts import dispatch_chart, in_use_chart, step_chart, visits_chart
from scripts.book.verdict import verdict_line
from scripts.ch04_encoder_decoder import EncoderLayer
from scripts.ch07_multi30k import encode_pairs, make_batch
from scripts.ch22_todays_block import RIVALS_OF_PARTS, SwiGLU, block_means, block_verdicts
from scripts.core.models import STUDIED, load_model
from scripts.corpora.captions import aligned_pairs
from scripts.corpora.load import load_corpus

# %%
torch.set_default_dtype(torch.float64)  # so that checks can ask for agreement to many digits

# %% [markdown]
# ## A mixture of experts
#
# > **In short.** Many feed-forward networks replace one, and a router sends each token to a few of them. A token meets only a part of the layer's parameters.
#
# A *mixture of experts* ([Shazeer et al. 2017](https://arxiv.org/abs/1701.06538); Switch, [Fedus et al. 2021](https://arxiv.org/abs/2101.03961); DeepSeekMoE, [Dai et al. 2024](https://arxiv.org/abs/2401.06066)) has E feed-forward networks $f_1, \dots, f_E$, the experts, and a *router*, a matrix $W_r$ (D, E). For a token $x \in \mathbb{R}^D$:
#
# $$p=\mathrm{softmax}(xW_r),\qquad y=\sum_{e\,\in\,\mathrm{top}\,k}\frac{p_e}{\sum_{e'\in\,\mathrm{top}\,k}p_{e'}}\,f_e(x)\;+\;f_\text{shared}(x)$$
#
# - **Top k.** Only the k experts with the largest $p_e$ compute. As in Mixtral, their weights are rescaled to sum to 1. DeepSeekMoE and Switch (k = 1) keep $p_e$. So do we for k = 1: a weight of 1 would give the router no gradient.
# - **Shared** (of these, in DeepSeekMoE). One more expert, $f_\text{shared}$, computes every token.
#
# **Predict.** Mixtral 8×7B ([Jiang et al. 2024](https://arxiv.org/abs/2401.04088)) has 32 layers of width 4,096. Each has eight SwiGLU experts (chapter 22) of width 14,336, and a token visits two. Its attention has 32 heads of 128 in 8 groups. Its vocabulary has 32,000 pieces and two tables, for input and output. How many parameters does it have in all, and how many does one token meet?

# %%
D, width, vocab, layers = 4096, 14336, 32_000, 32
expert = 3 * D * width
other = 2 * D * D + 2 * D * (8 * 128) + 8 * D  # queries, outputs; keys, values; router
for name, experts in (("in all", 8), ("met by a token", 2)):
    print(f"{name}: {(layers * (experts * expert + other) + 2 * vocab * D) / 1e9:.1f} billion")

# %% [markdown]
# The paper says 47 and 13 billion.
#
# ### Sorting the visits
#
# A token *visits* its k experts. `dispatch` sorts the N·k visits by expert and cuts the list where the expert changes: an expert's visits are one matrix. Then it sums each token's weighted results.

# %%
chosen = torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2]])  # four tokens, two visits each
dispatch_chart(chosen, experts=4)

# %% [markdown]
# Such code is *dropless* ([MegaBlocks, Gale et al. 2022](https://arxiv.org/abs/2211.15841)). Earlier code had room for a fixed number of visits at each expert, and dropped the rest.
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
# `real` is True where there are words, and False at padding. `bias` is added to p when experts are chosen. It is 0 until *Remedies* moves it, and a *buffer*: saved, but without a gradient.
#
# **Your turn.** Write `MixtureOfExperts`.


# %% tags=["yours"]
class MixtureOfExperts(nn.Module):
    """The best of many SwiGLUs for each token, and shared ones for all; dropless.

    It has `top`, which is k, `router`, linear without bias, the lists `experts` and `shared`, and the
    buffer `bias` (E,), for choosing alone. A call leaves `probs` (N, E) and `visits` (E,).
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
        if self.top > 1:  # a single one keeps its p, or the error would teach the router nothing
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
        best = (p + layer.bias).topk(top).indices
        weights = p[best] / p[best].sum() if top > 1 else p[best]
        routed = sum(w * layer.experts[e](token) for w, e in zip(weights, best, strict=True))
        torch.testing.assert_close(y, routed + layer.shared[0](token))
print(f"visits: {layer.visits.tolist()}, {layer.visits.sum()} in all: two for each of 17 words")

# %% [markdown]
# ## Why experts fall idle
#
# > **In short.** If the router reads a mean that all tokens share, a step along it raises an expert's score for all. If experts read it and learn, such steps add up. In our toy, few experts stay in use only where both hold.
#
# Routing can *collapse*: nearly all tokens go to the same few experts. The usual explanation is a circle (Shazeer et al., §4): an expert that is chosen learns, and one that has learned is chosen more often. But tokens differ. Why are the same experts chosen for nearly all?
#
# Let a token be $x=m+n$: the mean m is the same for all tokens, the noise n isn't. With $w_e$ for column e of $W_r$, expert e's score is $m\cdot w_e+n\cdot w_e$. A step of $w_e$ along m raises the first term for all tokens alike.

# %%
torch.manual_seed(0)
angles = torch.arange(8) * torch.pi / 4 + 0.3
router = 2 * torch.stack([angles.cos(), angles.sin()], dim=-1)  # (E, 2)
direction = torch.ones(2) / 2**0.5
step_chart(router, torch.randn(150, 2), mean=4 * direction, step=0.8 * direction)

# %% [markdown]
# In the upper row, the step wins some tokens; in the lower, nearly all. But there, orange had most before. Is the start to blame, or the steps?
#
# The gradient of $w_e$ is a sum of tokens, each times how much a higher score of e would raise the token's error. In this sum noise mostly cancels, and m adds up if expert e is better, or worse, for nearly all tokens. Experts that read m may bring this about: what m adds to their results is wrong for all tokens alike, and the first that learns to avoid it is better for all.
#
# ### The experiment
#
# Eight experts, two for each token, learn a small function of noise n (16 features). Where m is read, too, it is 1 in each feature. (In a real layer, router and experts read the same.)
#
# |Row|Router reads|Experts read|Changed|
# |---|---|---|---|
# |*neither reads a mean*|n|n||
# |*only the experts do*|n|m+n||
# |*only the router does*|m+n|n||
# |*experts don't learn*|m+n|m+n|only the router learns|
# |*m's scores stay fixed*|n|m+n|what m would add to the scores at first, a constant, is added|
# |*even start*|m+n|m+n|the same constant is subtracted|
# |*both*|m+n|m+n||
#
# An expert is *in use* if it has over 2% of the visits (even: 12.5%). **Predict.** Which rows end with few in use if the start is the cause? Which if the router must read m, and experts that read m must learn?


# %%
def in_use(visits: Tensor) -> int:
    """How many experts have more than 2% of the visits (E,)."""
    return int((visits > 0.02 * visits.sum()).sum())


def toy_run(seed, router_mean=0, expert_mean=0, fixed_mean=0, experts_learn=True):
    """Experts in use at the first step and in the last 20; scores' shared change over their own."""
    torch.manual_seed(seed)
    inner, outer = torch.randn(2, 16, 16) / 4
    router = nn.Linear(16, 8, bias=False)
    experts = nn.ModuleList(SwiGLU(16, 16, 0.0) for _ in range(8)).requires_grad_(experts_learn)
    start = router.weight.detach().clone()  # (E, D)
    optimizer, visits = torch.optim.Adam([router.weight, *experts.parameters()], lr=0.01), []
    for _ in range(200):
        noise = torch.randn(256, 16)  # (N, D)
        scores = router(noise + router_mean) + fixed_mean * start.sum(1)  # (N, E)
        best, chosen = scores.topk(2)
        result = dispatch(noise + expert_mean, chosen, best.softmax(-1), experts)
        error = (result - (noise @ inner).tanh() @ outer).square().mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        visits.append(chosen.flatten().bincount(minlength=8))
    move = router.weight.detach() - start  # (E, D)
    shared = router_mean * move.sum(1).norm() / move.norm()  # m·move over n·move's deviation
    return in_use(visits[0]), in_use(sum(visits[-20:])), shared.item()


# %%
both = {"router_mean": 1, "expert_mean": 1}
settings = {
    "neither reads a mean": {},
    "only the experts do": {"expert_mean": 1},
    "only the router does": {"router_mean": 1},
    "experts don't learn": {**both, "experts_learn": False},
    "m's scores stay fixed": {"expert_mean": 1, "fixed_mean": 1},
    "even start": {**both, "fixed_mean": -1},
    "both": both,
}
toys = {name: [toy_run(seed, **how) for seed in range(6)] for name, how in settings.items()}
for name, runs in toys.items():
    shared = sum(run[2] for run in runs) / len(runs)
    print(f"{name}: the shared change of scores is {shared:.1f} times the tokens' own")
in_use_chart(toys)

# %% [markdown]
# - **The circle alone isn't the cause.** In the first two rows experts learn and are chosen, and stay.
# - **The start alone isn't the cause.** If it were, *m's scores stay fixed* would end with few, and *even start* with all. They end with 5.5 and 3.5 on average.
# - **The router must read m.** Where only the experts do, nearly all stay in use: no score can rise for all tokens.
# - **Experts that read m must learn.** Otherwise steps along m don't add up: the shared change of scores is 1.1 to 1.3 times the tokens' own (a step in a random direction: once), in *even start* and *both* 2.5 to 2.8 times.
#
# ## Remedies
#
# > **In short.** Punish uneven visits in the loss, correct them by a bias, or take the mean away from the router.
#
# - **A penalty** in the loss (Switch). With $v_e$ expert e's part of the visits and $P_e$ its mean probability, it is $E\sum_e v_e P_e$: 1 if all is even, and E/k if all tokens are sure of the same k experts. Only $P_e$ has a gradient, which may work against the task.
# - **A bias** beside the loss ([Wang et al. 2024](https://arxiv.org/abs/2408.15664)). After each step, add `speed` to the bias of each expert that had less than its even part, and take it from those that had more. The weights are computed without it.
# - **No mean at the router.** Subtract the tokens' mean from what it reads.
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
# ### Tokens of a trained translator
#
# Do experts fall idle on a real model's tokens? Is the error lower if a remedy brings them back? In 300 steps, a mixture (eight experts of width 16, two for a token) learns to imitate the last feed-forward layer of chapter 9's encoder, the *teacher*, on captions of chapter 7's sample. Errors, on others, are divided by the outputs' variance.
#
# Beside it learn two dense layers: as wide as two experts, and as all. In a control, the router's inputs are shrunk to the length that they have without their mean, with the mean left in.
#
# **Predict.** How much of the inputs' mean square lies in their mean? And near which dense layer's error will a mixture's be?

# %%
trained = load_model(STUDIED)
teacher = trained.model.encoder.layers[-1].feed_forward


def tokens_of(captions: list[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Ids (N,), and what the teacher reads (N, D), of all words of the captions."""
    batch, read = make_batch(encode_pairs(captions, trained.tokenizer)), []
    with torch.no_grad(), teacher.register_forward_pre_hook(lambda _, x: read.append(x[0])):
        trained.model.encode(batch.src, batch.src_mask)
    real = batch.src_mask[:, 0]  # (B, S)
    return batch.src[real], read[0][real]


corpus = load_corpus("sample")
(_, inputs), (_, new_inputs) = tokens_of(corpus["train"][:500]), tokens_of(corpus["test"][:100])
outputs, new_outputs = teacher(inputs).detach(), teacher(new_inputs).detach()
mean = inputs.mean(0)  # (D,)
in_mean = mean.square().sum() / inputs.square().sum(-1).mean()
print(f"{len(inputs)} tokens, {in_mean:.0%} in their mean")


# %%
def imitate(seed, read=lambda x: x, penalty=0.0, speed=0.0, experts=8, width=16):
    """A mixture (with one expert: a dense layer) that imitates the teacher; its visits (steps, E)."""
    torch.manual_seed(seed)
    layer = MixtureOfExperts(inputs.size(1), width, 0.0, experts, min(experts, 2), shared=0)
    layer.router.register_forward_pre_hook(lambda _, given: read(given[0]))
    optimizer, visits = torch.optim.Adam(layer.parameters()), []
    for step in range(300):
        optimizer.param_groups[0]["lr"] = 0.003 * (1 - step / 300)
        drawn = torch.randint(len(inputs), (256,))
        error = (layer(inputs[drawn]) - outputs[drawn]).square().mean()
        optimizer.zero_grad()
        (error + penalty * balance_penalty(layer.probs, layer.visits)).backward()
        optimizer.step()
        move_bias(layer, speed)
        visits.append(layer.visits)
    return layer, torch.stack(visits)


ways = {
    "none": {},
    "penalty": {"penalty": 0.1},
    "bias": {"speed": 0.03},  # thirty times the default: there are only 300 steps
    "no mean at the router": {"read": lambda x: x - mean},
    "as short, with its mean": {"read": lambda x: (1 - in_mean).sqrt() * x},
    "dense, width 32": {"experts": 1, "width": 32},
    "dense, width 128": {"experts": 1, "width": 128},
}
learned = {name: [imitate(seed, **how) for seed in range(3)] for name, how in ways.items()}

# %%
for name, runs in learned.items():
    errors = [(layer(new_inputs) - new_outputs).square().mean() for layer, _ in runs]
    used = [in_use(layer.visits) for layer, _ in runs]
    print(f"{name}: in use {used}, error", *(f"{e / new_outputs.var():.3f}" for e in errors))
visits_chart({name: learned[name][0][1] for name in [*ways][:4]})

# %% [markdown]
# Without a remedy, two to four experts are in use with these three seeds; with each, seven or eight. For each seed the error is then lower; shorter inputs alone don't help. (The counts are of new tokens, the picture is of the training, in means of ten steps: at the end the bias still swings.) A mixture's error lies between those of the dense layers: without the mean, three quarters of the way from the narrow one's to the wide one's, at about the narrow one's work.
#
# **Predict.** Which tokens does each expert take? (Fifty captions of ours; ▁ begins a word.)

# %%
ids, states = tokens_of([pair.texts for pair in aligned_pairs()])
layer, _ = learned["no mean at the router"][0]
likeliest = layer.route(states)[1][:, 0]  # (N,): each token's first expert
for expert in range(8):
    own = Counter(map(trained.tokenizer.processor.id_to_piece, ids[likeliest == expert].tolist()))
    pieces = [f"{piece} {n}" for piece, n in own.most_common(40)]
    print(textwrap.fill(f"expert {expert}: {' '.join(pieces)}", 110))
VERBS = "sitzt steht läuft spielt liest trägt hält springt schläft verkauft"
verbs = [trained.tokenizer.processor.piece_to_id(f"▁{verb}") for verb in VERBS.split()]
of_verbs = states[torch.isin(ids, torch.tensor(verbs))]
torch.manual_seed(0)
untrained = MixtureOfExperts(inputs.size(1), 16, 0.0, shared=0)
for mixture, read in ((layer, of_verbs), (untrained, of_verbs - mean)):
    most = mixture.route(read)[1][:, 0].bincount().max()
    print(f"{most} of {len(of_verbs)} verbs have the same expert first")

# %% [markdown]
# These are each expert's 40 commonest pieces, of one seed. Expert 3 takes nearly all verbs, with many nouns. Expert 0 has each *Ein* and *Eine* that begins a caption, expert 2 those inside, and each caption's end. Nobody named parts of speech. Nor do the encoder's states sort the words alone: an untrained router (the last line) spreads the verbs.
#
# ### Padding isn't routed
#
# A mixture counts visits, and a remedy would balance padding's, too. So the encoder layer tells it where there are words:


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
# > **In short.** 70% more parameters bring no gain that this record shows.
#
# In chapter 22's record, each feed-forward layer of the row *experts* has eight SwiGLUs and a shared one. To a token's mean loss is added 0.01 times each mixture's penalty. A token meets three of the nine, together about as wide as a layer of *SwiGLU*, the rival. Rows are means of three seeds; *first* and *last* are training losses, *loss* is the validation's.

# %%
print(verdict_line("experts", block_verdicts()["experts"], RIVALS_OF_PARTS["experts"]))
block_means(["2017", "SwiGLU", "experts"])

# %% [markdown]
# A token meets 362,000 of the model's 620,000 parameters. Beside *SwiGLU* the training loss is 0.015 lower, and the validation loss 0.007, of which one seed makes most. How many experts were in use isn't on record.
#
# ## Summary
#
# - A router sends each token to k of E experts; dropless code sorts these visits.
# - In our toy, most experts fall idle where they and the router read a mean that tokens share, and both learn.
# - On a trained encoder's fixed tokens, a penalty, a bias, or no mean at the router keeps them in use.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · A router
#
# *code · difficulty ●○○ · worth ●●● · 15 minutes*, `solution("router")`
#
# From a router's logits (N, E), give the indices of each token's `top` experts, (N, top), likeliest first, and their weights, (N, top), as in this chapter's layer, with their gradient.


# %%
def router(logits: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Each token's best experts and their weights, both (N, top)."""
    ...


check(router)

# %% [markdown]
# ### Exercise 2 · What isn't dropped here
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*, `solution("dropped_share")`
#
# A layer that isn't dropless has room for $\lceil\text{factor}\cdot Nk/E\rceil$ visits at each expert. For the choices of N tokens, chosen (N, k), and E experts: what share of all visits is dropped?


# %%
def dropped_share(chosen: Tensor, experts: int, factor: float) -> float:
    """The share of visits, 0 to 1, for which there is no room."""
    ...


check(dropped_share)

# %% [markdown]
# Next: [Chapter 25 · All of it on one page](ch25_one_page.ipynb)
