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
# After this chapter you can build a layer that holds many feed-forward networks, its *experts*, and uses only a few of them for each token. You can say when some fall idle, and keep them in use.
#
# | | |
# |---|---|
# | In the paper | §3.3 of [Attention Is All You Need](https://arxiv.org/abs/1706.03762), the feed-forward layer |
# | Time | 15 minutes to read, 35 with the code; two minutes to run on a CPU |
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
from collections import Counter, namedtuple
from collections.abc import Sequence

import torch
from scipy.cluster.vq import kmeans2
from torch import Tensor, nn

from scripts.book.exercises import check
from scripts.book.figures import experts as figures
from scripts.book.verdict import verdict_line
from scripts.ch04_encoder_decoder import EncoderLayer
from scripts.ch07_multi30k import encode_pairs, make_batch
from scripts.ch22_todays_block import SwiGLU, block_means, block_verdicts
from scripts.core.models import STUDIED, load_model
from scripts.corpora.captions import VERBS, aligned_pairs
from scripts.corpora.load import load_corpus

# %%
torch.set_default_dtype(torch.float64)  # so that checks can ask for agreement to many digits

# %% [markdown]
# ## A mixture of experts
#
# > **In short.** A router sends each token to a few of many feed-forward networks. So a layer gains parameters without more work for a token. The price is memory: it holds them all.
#
# A *mixture of experts* ([Shazeer et al. 2017](https://arxiv.org/abs/1701.06538); Switch, [Fedus et al. 2021](https://arxiv.org/abs/2101.03961); DeepSeekMoE, [Dai et al. 2024](https://arxiv.org/abs/2401.06066)) has E feed-forward networks $f_1, \dots, f_E$, the experts, and a *router*, a matrix $W_r$ (D, E). For a token $x \in \mathbb{R}^D$:
#
# $$p=\mathrm{softmax}(xW_r),\qquad y=\sum_{e\,\in\,\mathrm{top}\,k}\frac{p_e}{\sum_{e'\in\,\mathrm{top}\,k}p_{e'}}\,f_e(x)\;+\;f_\text{shared}(x)$$
#
# - **Top k.** Only the k experts with the largest $p_e$ compute. As in Mixtral, their weights are rescaled to sum to 1; not for k = 1 (Switch), where a weight of 1 would give the router no gradient.
# - **Shared.** One more expert, $f_\text{shared}$, computes every token. (DeepSeekMoE.)
#
# **Predict.** Mixtral 8×7B ([Jiang et al. 2024](https://arxiv.org/abs/2401.04088)) has 32 layers of width 4,096. Each has eight SwiGLU experts (chapter 22) of width 14,336, and a token visits two. Its attention has 32 heads of 128 in 8 groups. Its vocabulary has 32,000 pieces and two tables, for input and output. How many parameters does it have in all, and how many does one token meet?

# %%
D, width, vocab, layers = 4096, 14336, 32_000, 32
expert = 3 * D * width
other = 2 * D * D + 2 * D * (8 * 128) + 8 * D  # queries, outputs; keys, values; router
for name, experts in (("in all", 8), ("met by a token, with the whole tables", 2)):
    print(f"{name}: {(layers * (experts * expert + other) + 2 * vocab * D) / 1e9:.1f} billion")

# %% [markdown]
# The paper says 47 and 13 billion.
#
# ### Sorting the visits
#
# A token *visits* its k experts. `dispatch` sorts the N·k visits by expert and cuts the list where the expert changes: an expert's visits are one matrix. Then it sums each token's weighted results.

# %%
chosen = torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2]])  # four tokens, two visits each
figures.dispatch_chart(chosen, experts=4)

# %% [markdown]
# Such code is *dropless* ([MegaBlocks, Gale et al. 2022](https://arxiv.org/abs/2211.15841)): earlier code had fixed room for visits at each expert, and dropped the rest.
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
# Check against the sum of all experts, with weight 0 for those not chosen:

# %%
rows, weights, experts = torch.randn(4, 3), torch.rand(4, 2), [nn.Linear(3, 3) for _ in range(4)]
sparse = torch.zeros(4, 4).scatter(1, chosen, weights)  # (N, E)
by_all = sum(sparse[:, [e]] * expert(rows) for e, expert in enumerate(experts))
torch.testing.assert_close(dispatch(rows, chosen, weights, experts), by_all)

# %% [markdown]
# ### The layer
#
# `real` is True where there are words, and False at padding. `bias` is added to p when experts are chosen, and is 0 until *Remedies* moves it. It is a *buffer*: saved, but without a gradient.
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
layer = MixtureOfExperts(16, 12, 0.0, experts=6)
layer.bias[5] = 0.1
for token, y in zip(x[real], layer(x, real)[real], strict=True):
    p = (layer.router.weight @ token).softmax(0)
    best = (p + layer.bias).topk(2).indices
    routed = sum(p[e] / p[best].sum() * layer.experts[e](token) for e in best)
    torch.testing.assert_close(y, routed + layer.shared[0](token))
assert MixtureOfExperts(16, 12, top=1).route(x[real])[2].max() < 1  # a single one keeps its p

# %% [markdown]
# ## When experts fall idle
#
# > **In short.** If the router reads a mean that all tokens share, steps along it can leave few experts in use: in our toy only where one does nearly as well as eight.
#
# Routing can *collapse*: nearly all tokens go to the same few experts. The usual explanation is a circle (Shazeer et al., §4): an expert that is chosen learns, and one that has learned is chosen more often. But tokens differ: why the same experts for nearly all?
#
# Let a token be $x=m+n$: all tokens share the mean m, not the noise n. With $w_e$ for column e of $W_r$, expert e's score is $m\cdot w_e+n\cdot w_e$. A step of $w_e$ along m raises the first term for all tokens alike.

# %%
torch.manual_seed(0)
angles = torch.arange(8) * torch.pi / 4 + 0.3
router = 2 * torch.stack([angles.cos(), angles.sin()], dim=-1)  # (E, 2)
direction = torch.ones(2) / 2**0.5
figures.step_chart(router, torch.randn(150, 2), mean=4 * direction, step=0.8 * direction)

# %% [markdown]
# In the upper row, the step wins orange some tokens; in the lower, orange ends with nearly all. But there it led before. Must one expert lead from the start, or can many steps make a leader?
#
# The gradient of $w_e$ is $\sum_i g_i x_i$: each token times how much a higher score of e would raise its error. All $x_i$ share m, so m's part is $(\sum_i g_i)\, m$. If e is better than the other expert for some tokens only, the $g_i$ have both signs, and this is small; if for nearly all, it is large. Where one expert can learn the whole task, whichever is ahead is ahead for nearly all tokens. So we expect few in use there.
#
# ### The experiment
#
# Eight experts, two for each token, learn a *task*: to imitate a network with fixed random weights, from noise n of 16 features. Experts and tasks are tanh or SwiGLU networks, so the chart has four rows. The mean m is 1 in each feature, and only the router may read it.
#
# |Column|Score of expert e|
# |---|---|
# |*neither*|$n\cdot w_e$|
# |*uneven start*|$n\cdot w_e$, plus the untrained router's $m\cdot w_e$, kept fixed|
# |*steps along m*|$(m+n)\cdot w_e$, minus the untrained router's $m\cdot w_e$|
# |*both*|$(m+n)\cdot w_e$|
#
# An expert is *in use* if it has over 2% of the visits (even: 12.5%). **Our measure** of whether one expert can learn the task: the error of *one alone*, which computes every token, over that of *neither*.
#
# **Predict.** If the circle is enough, *neither* ends with few. Which columns do, and in which rows?


# %%
def in_use(visits: Tensor) -> int:
    return int((visits > 0.02 * visits.sum()).sum())  # of visits (E,)


def toy_run(seed, expert, task, start=0, move=0, experts=8, rate=0.01):
    """Experts in use in the last 20 of 200 steps, and the last error over the targets' variance."""
    torch.manual_seed(seed)
    mean, fixed = torch.ones(16), torch.randn(3, 16, 16) / 4  # m, and the task's weights
    router, learned = torch.randn(16, experts) / 7, torch.randn(3, experts, 16, 16) / 7
    first, parameters = router.clone(), [router.requires_grad_(), learned.requires_grad_()]
    optimizer, visits = torch.optim.Adam(parameters, rate), []
    for _ in range(200):
        noise = torch.randn(128, 16)  # (N, D)
        shift = start * (mean @ first) + move * (mean @ (router - first))  # (E,)
        best, chosen = (noise @ router + shift).topk(min(experts, 2))
        sparse = torch.zeros(128, experts).scatter(1, chosen, best.softmax(-1))  # (N, E)
        result = torch.einsum("ne,end->nd", sparse, expert(noise, learned))
        target = task(noise, fixed)
        error = (result - target).square().mean() / target.var()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        visits.append(sparse.count_nonzero(0))
    return in_use(sum(visits[-20:])), error.item()


networks = {
    "tanh": lambda x, w: (x @ w[0]).tanh() @ w[1],
    "SwiGLU": lambda x, w: (nn.functional.silu(x @ w[0]) * (x @ w[2])) @ w[1],
}
ways = {"neither": {}, "untrained": {"start": 1, "rate": 0}, "uneven start": {"start": 1}}
ways |= {"steps along m": {"move": 1}, "both": {"start": 1, "move": 1}, "one alone": {"experts": 1}}

# %%
toys = {}
for name in ("tanh, tanh", "SwiGLU, SwiGLU", "SwiGLU, tanh", "tanh, SwiGLU"):  # experts, task
    pair = [networks[network] for network in name.split(", ")]
    for way, how in ways.items():
        toys[name, way] = [toy_run(seed, *pair, **how) for seed in range(6)]
figures.in_use_chart(toys)

# %% [markdown]
# - **The circle isn't enough.** In *neither*, experts learn and are chosen, and seven or eight end in use.
# - **Nor is a mean.** In the lower rows, where one alone has over twice *neither*'s error, all columns end with six or more on average.
# - **A mean and a task that one expert can learn leave few.** In the upper rows, steps along m do so without an uneven start, and their error is below *neither*'s. (An uneven start alone leaves 4.0 and 5.7: there the circle loses some, too.)
#
# This fits our expectation without proving it: in these rows, experts and task are also of one kind.
#
# ## Remedies
#
# > **In short.** Punish uneven visits in the loss, correct them by a bias, or take the mean away from the router.
#
# - **A penalty** in the loss (Switch). With $v_e$ expert e's part of the visits and $P_e$ its mean probability, it is $E\sum_e v_e P_e$: 1 if all is even, and E/k if all tokens are sure of the same k experts. Only $P_e$ has a gradient, which may work against the task.
# - **A bias** beside the loss ([Wang et al. 2024](https://arxiv.org/abs/2408.15664)). After each step, add `speed` to the bias of each expert that had less than its even part, and take it from the others.
# - **No mean at the router.** Subtract the tokens' mean (in training, a running one) from what it reads.
#
# **Your turn.** Write the first two.


# %% tags=["yours"]
def balance_penalty(probs: Tensor, visits: Tensor) -> Tensor:
    """E·Σ vₑPₑ of probs (N, E) and visits (E,), 1 where all is even (Fedus et al. 2021, eq. 4)."""
    return len(visits) * (visits / visits.sum() * probs.mean(0)).sum()


def move_bias(layer: MixtureOfExperts, speed: float = 1e-3) -> None:
    """Raise the bias of experts with fewer visits than the mean, lower that of those with more."""
    layer.bias += speed * (layer.visits.float().mean() - layer.visits).sign()


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
# Do experts fall idle on a trained model's tokens, too, and by an uneven start or by steps along m? In 300 steps, a mixture (eight experts of width 16, two for a token) learns to imitate the last feed-forward layer of chapter 9's encoder, the *teacher*, on 500 captions of chapter 7's generated sample. Errors are measured on 100 others, and divided by the outputs' variance.
#
# The scores are the toy's four, and m is the tokens' mean. Here experts read it, too. If the steps are the cause, they alone leave few, and an uneven start alone doesn't.
#
# **Predict** what each does.

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
print(f"{mean.square().sum() / inputs.square().sum(-1).mean():.0%} of the squares are the mean's")


# %%
Imitation = namedtuple("Imitation", "layer history used error")


def imitate(seed, start=1, move=1, penalty=0.0, speed=0.0, experts=8):
    """The layer, its visits at each step, experts in use in the last ten, its error at last."""
    torch.manual_seed(seed)
    layer = MixtureOfExperts(inputs.size(1), 16, 0.0, experts, min(experts, 2), shared=0)
    first = layer.router.weight.detach().clone()  # (E, D)

    def score(router, given, _):
        shift = start * (first @ mean) + move * ((router.weight - first) @ mean)  # (E,)
        return (given[0] - mean) @ router.weight.T + shift  # (N, E)

    layer.router.register_forward_hook(score)
    optimizer, history = torch.optim.Adam(layer.parameters()), []
    for step in range(300):
        optimizer.param_groups[0]["lr"] = 0.003 * (1 - step / 300)
        drawn = torch.randint(len(inputs), (256,))
        error = (layer(inputs[drawn]) - outputs[drawn]).square().mean()
        optimizer.zero_grad()
        (error + penalty * balance_penalty(layer.probs, layer.visits)).backward()
        optimizer.step()
        move_bias(layer, speed)
        history.append(layer.visits)
    error = (layer(new_inputs) - new_outputs).square().mean() / new_outputs.var()
    return Imitation(layer, history, in_use(sum(history[-10:])), error.item())


settings = {
    "both": {},
    "steps along m": {"start": 0},
    "uneven start": {"move": 0},
    "neither": {"start": 0, "move": 0},  # no mean at the router
    "both, penalty": {"penalty": 0.1},  # ten times the record's
    "both, bias": {"speed": 0.03},  # thirty times the default: there are only 300 steps
    "one alone": {"experts": 1},
}
learned = {name: [imitate(seed, **how) for seed in range(3)] for name, how in settings.items()}

# %%
for name, runs in learned.items():
    print(f"{name}:", *(f"{run.used} in use, error {run.error:.3f};" for run in runs))
figures.visits_chart({name: runs[0] for name, runs in learned.items() if name != "one alone"})

# %% [markdown]
# With *both*, two to four experts are in use (three seeds). The cause is the toy's: steps along m alone leave three, an uneven start alone seven or eight. But one alone (with half the work) has 2.7 times *neither*'s error, as in the toy's lower rows, where most stay in use. So our measure, taken after training, doesn't foresee this; why, we don't know.
#
# Each remedy, *neither* included, keeps all eight, at lower errors than *both*'s.
#
# **Predict.** For which tokens is each expert the likeliest? (Fifty captions of ours; ▁ begins a word.)

# %%
ids, states = tokens_of([pair.texts for pair in aligned_pairs()])
pieces = [trained.tokenizer.processor.id_to_piece(i) for i in ids.tolist()]
routed = [run.layer.route(states)[1][:, 0] for run in learned["neither"]]  # (N,) each
for expert in range(8):
    own = Counter(piece for piece, e in zip(pieces, routed[0], strict=True) if e == expert)
    print(f"expert {expert}:", *(f"{piece} {count}" for piece, count in own.most_common(12)))


# %% [markdown]
# With this seed, expert 0 takes *Ein* and *Eine*, 2 a caption's end and indefinite articles inside, 3 verbs and some people, 5 prepositions and definite articles, 7 things and places. The others have no clear theme. As a control, k-means finds eight groups in the teacher's inputs.


# %%
found = [kmeans2(inputs.numpy(), 8, minit="++", seed=seed)[0] for seed in range(3)]  # (8, D) each
nearest = [torch.cdist(states, torch.from_numpy(means)).argmin(1) for means in found]
kinds = {"first": "Ein Eine", "inside": "ein eine einen", "dative": "einem einer", "verb": VERBS}


def held(groups, of_kind):
    """In the group that holds most of a kind: how many are of the kind, of how many."""
    group = groups == groups[of_kind].mode().values  # (N,)
    return f"{(group & of_kind).sum()} of {group.sum()}"


for kind, words in kinds.items():
    of_kind = torch.tensor([piece.removeprefix("▁") in words.split() for piece in pieces])  # (N,)
    for name, groupings in (("router", routed), ("k-means", nearest)):
        print(f"{kind} ({of_kind.sum()}), {name}:", [held(groups, of_kind) for groups in groupings])

# %% [markdown]
# K-means does better on verbs and datives, and about as well on the articles inside. So the encoder's states already sort much. Only the router keeps first articles nearly to themselves.
#
# ### The encoder's padding isn't routed
#
# A remedy would balance padding's visits, too. So the layer tells its mixture where words are:


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
# > **In short.** With 70% more parameters, neither BLEU nor the validation loss shows a gain.
#
# In chapter 22's record, each feed-forward layer of the row *experts* has eight SwiGLUs and a shared one. To each token's loss, 0.01 times each mixture's penalty is added. A token meets three of the nine, together about as wide as a layer of *SwiGLU*, the rival. Rows are means of three seeds, after three passes; *loss* is the validation's.

# %%
for score in ("BLEU", "loss"):
    print(verdict_line("experts", block_verdicts(score)["experts"], "SwiGLU", score))
block_means(["2017", "SwiGLU", "experts"])

# %% [markdown]
# A token meets 362,000 of the model's 620,000 parameters. The same work as in *SwiGLU* took 1.6 times as long on the record's CPU, and neither score differs by more than noise. How many experts were in use isn't on record.
#
# ## Summary
#
# - A router sends each token to k of E experts; dropless code sorts these visits.
# - If a router reads a mean that tokens share, steps along it can leave few experts in use: in our toy only where one does nearly as well as eight, on a trained encoder's tokens also where it doesn't.
# - There, a penalty, a bias, or no mean at the router keeps all in use.
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
