"""Wrong answers to exercises that look right on easy data: each is refused, and told why."""

import copy
import math
from collections import Counter
from contextlib import contextmanager
from itertools import permutations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scripts.book.exercises import check, home_of
from scripts.ch01_attention import masked_softmax, subsequent_mask
from scripts.ch06_training import EOS, PAD, batch_loss
from scripts.ch07_multi30k import SPECIALS
from scripts.ch08_decoding import hypothesis, next_log_probs
from scripts.ch10_judging import BleuParts, ngram_counts, tokens_13a


def ours(name):
    return getattr(home_of(name), name)


# Part I


def additive(softmax=masked_softmax, mix=None):
    def attend(query, key, value, w, m, u, mask=None):
        pairs = (query @ w.T).unsqueeze(-2) + (key @ m.T).unsqueeze(-3)
        scores = pairs.tanh() @ u
        weights = softmax(scores, mask)
        return (scores.softmax(-1) if mix == "unmasked" else weights) @ value, weights

    return attend


def nan_for_floats(scores, mask):
    floats = mask is not None and mask.is_floating_point()
    return (scores + mask).softmax(-1) if floats else masked_softmax(scores, mask)


def one_axis_alone(*given):
    attend = ours("additive_attention")
    if given[0].dim() == 2:
        return attend(*given)
    outs = [attend(*three, *given[3:])[0] for three in zip(*given[:3], strict=True)]
    return torch.stack(outs) + (given[0].dim() > 3), outs[0]


def of_a_copied_table(table, T, S):
    return nn.Parameter(ours("relative_bias")(table, T, S).detach().clone())


def changing_the_smaller(change):
    def without(layer, i):
        smaller = ours("without_head")(layer, i)
        change(smaller, layer, i)
        return smaller

    return without


def other_key_bias(smaller, layer, i):
    other = ours("without_head")(layer, (i + 1) % layer.h)
    smaller.project_key.bias = nn.Parameter(other.project_key.bias.detach().clone())


@torch.no_grad()
def with_a_residual(layers):
    """Ours, but each layer adds to its input."""
    x = torch.randn(4, 8)[torch.tensor([*permutations(range(4))])]
    for layer in layers:
        x = x + layer(x, x, x, subsequent_mask(4))
    return torch.isclose(x[:, -1], x[:1, -1]).all(dim=-1).sum().item()


def fixed_eps(x, weight, bias, eps):
    return F.layer_norm(x, (x.size(-1),), weight, bias, 1e-5)


def frozen_weight(x, weight, bias, eps):
    return ours("two_sums_norm")(x, weight.detach(), bias, eps)


# Parts II and III


def by_source_tokens(model, batches, criterion):
    model.zero_grad()
    tokens = 0
    for batch in batches:
        batch_loss(model, batch, criterion)[0].backward()
        tokens += int((batch.src != PAD).sum())
    for p in model.parameters():
        p.grad /= tokens


def asserting_rate(step, peak, warmup, total):
    assert step >= 1
    return ours("linear_rate")(step, peak, warmup, total)


def counting_sentences(splits, min_freq):
    counts = Counter(word for words in splits["train"] for word in set(words))
    kept = [word for word, times in counts.most_common() if times >= min_freq]
    everywhere = Counter(word for words in splits["train"] for word in words)
    kept.sort(key=lambda word: -everywhere[word])
    return {word: i for i, word in enumerate([*SPECIALS, *kept])}


def batches(strict=False, keeps_widths=False):
    def make(examples, max_tokens, rng):
        order = sorted(
            rng.sample(range(len(examples)), len(examples)),
            key=lambda i: (len(examples[i].tgt), len(examples[i].src)),
        )
        found, wide = [[]], [0, 0]
        for i in order:
            pair = [len(examples[i].src), len(examples[i].tgt)]
            if sum(pair) > max_tokens:
                raise ValueError
            wide = [max(a, b) for a, b in zip(wide, pair, strict=True)]
            cells = (len(found[-1]) + 1) * sum(wide) + (strict and len(found[-1]) > 0)
            if cells > max_tokens:
                found.append([])
                wide = wide if keeps_widths else pair
            found[-1].append(i)
        rng.shuffle(found)
        return found

    return make


def yielding(examples, max_tokens, rng):
    yield from ours("budget_batches")(examples, max_tokens, rng)


def with_dropout_on(model, src, max_len):
    """Ours, but the generator's dropout stays on."""
    memory, prefixes = model.encode(src, None), [(0.0, ())]
    while True:
        prefixes.sort()
        cost, ids = prefixes.pop(0)
        if len(ids) == max_len or EOS in ids:
            return hypothesis(ids, -cost)
        log_probs = next_log_probs(model, memory, None, torch.tensor([[2, *ids]]))
        prefixes += [(cost - p, (*ids, token)) for token, p in enumerate(log_probs[0].tolist())]


def left_in_eval(model, src, max_len):
    model.eval()
    return ours("likeliest_text")(model, src, max_len)


def first_may_not_be_empty(means, tokens):
    out = means[0] * tokens[0]
    for mean, n in zip(means[1:], tokens[1:], strict=True):
        out = out + mean * n if n else out
    return out / sum(tokens)


def one_direction(first, second):
    wins = sum(b > a for a, b in zip(first, second, strict=True))
    losses = sum(b < a for a, b in zip(first, second, strict=True))
    n = wins + losses
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(losses + 1)) / 2**n)


def as_many_references_for_all(outputs, references):
    most = min(map(len, references))
    return ours("many_references")(outputs, [texts[:most] for texts in references])


def pooled(outputs, references):
    """N-grams are added up over the corpus, and clipped only then."""
    matches, totals, lengths = [], [], [0, 0]
    for n in range(1, 5):
        found, allowed = Counter(), Counter()
        for output, texts in zip(outputs, references, strict=True):
            found += ngram_counts(tokens_13a(output), n)
            most = Counter()
            for text in texts:
                most |= ngram_counts(tokens_13a(text), n)
            allowed += most
        matches.append((found & allowed).total())
        totals.append(found.total())
    for output, texts in zip(outputs, references, strict=True):
        c = len(tokens_13a(output))
        near = min((abs(len(tokens_13a(text)) - c), len(tokens_13a(text))) for text in texts)
        lengths = [lengths[0] + c, lengths[1] + near[1]]
    return BleuParts(matches, totals, *lengths).score


def by_a_block_mask(q, k, v, lengths, causal):
    owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    mask = owner[:, None] == owner
    mask = mask.tril() if causal else mask
    scores = (q @ k.T / q.size(-1) ** 0.5).masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ v


def deaf_packing(q, k, v, lengths, causal):
    return ours("packed_attention")(q.detach(), k, v, lengths, causal)


@torch.no_grad()
def without_gradient(x, weight, bias, chunk):
    return F.linear(x, weight, bias).logsumexp(1).square().sum()


def packing_if_somebody_ends(lengths, almost, packing):
    live, cost = len(lengths), 0.0
    for step in range(1, max(lengths) + 1):
        cost += live
        left = sum(length > step for length in lengths)
        if left and left < live and left <= almost * live:
            live, cost = left, cost + packing
    return cost


def rows_for_places(tokens, origins):
    _, B, K = tokens.shape
    at, read = torch.arange(B)[:, None].expand(B, K), []
    for new, origin in zip(tokens.flip(0), origins.flip(0), strict=True):
        read.append(new.gather(1, at))
        at = origin.gather(1, at)
    return torch.stack(read[::-1], dim=-1)


def own_error_twice(rough, error):
    return rough >= (rough - 2 * error).amax(1, keepdim=True)


def wrong_axis(step, past, beam, length):
    def turned(**given):
        logits, present = step(**given)
        return logits, present[:, ::-1].repeat(2, axis=1)

    return ours("host_beam")(turned, past, beam, length)


# Parts IV and V


@contextmanager
def new_parameters(layer, head):
    old = copy.deepcopy(layer.project_value)
    with ours("values_silenced")(layer, head):
        yield
    layer.project_value = old


@contextmanager
def frozen_after(layer, head):
    layer.project_value.requires_grad_(False)
    with ours("values_silenced")(layer, head):
        yield


def per_byte(nats, texts, tokenizer):
    pieces = sum(len(tokenizer.encode(text)) + 1 for text in texts)
    return nats * pieces / sum(len(text.encode()) + 1 for text in texts) / math.log(2)


def without_spaces(nats, texts, tokenizer):
    pieces = sum(len(tokenizer.encode(text)) + 1 for text in texts)
    characters = sum(len(text.replace(" ", "")) + 1 for text in texts)
    return nats * pieces / characters / math.log(2)


def hides_the_end(ids, starts, gap, generator):
    word = starts.long().cumsum(0) - 1
    draw = torch.rand(int(word[-1]) + 1, generator=generator)
    chosen = (draw[word] < 0.15) & (ids >= EOS)
    return ids.masked_fill(chosen, gap), ids.masked_fill(~chosen, PAD)


def always_the_same(ids, starts, gap, generator):
    return ours("hide_words")(ids, starts, gap, torch.Generator().manual_seed(0))


def best_from_zero(candidates, references, similarity):
    found = []
    for texts, reference in zip(candidates, references, strict=True):
        best, closest = 0, texts[0]
        for text in texts:
            if similarity(text, reference) > best:
                best, closest = similarity(text, reference), text
        found.append(closest)
    return found


def other_marks_alone(log_probs, risks, counts):
    """Candidates with the same mark count as one."""
    groups = risks.detach().split(list(counts))
    excess = [m[i] - m[m != m[i]].mean() for m in groups for i in range(len(m))]
    return (log_probs * torch.stack(excess)).mean()


def own_leaf(log_probs, risks, counts):
    return ours("policy_loss")(log_probs.detach().requires_grad_(), risks, counts)


def marks_frozen(log_probs, risks, counts):
    risks.requires_grad_(False)
    return ours("policy_loss")(log_probs, risks, counts)


def alibi(slopes=lambda h, n: -8 * n / h, filler=None):
    def bias(h, T, S):
        apart = torch.arange(S - T, S)[:, None] - torch.arange(S)
        steep = torch.tensor([2.0 ** slopes(h, n) for n in range(1, h + 1)])
        found = -steep[:, None, None] * apart.abs()
        return found if filler is None else found.masked_fill(apart < 0, filler)

    return bias


def online(largest=max, skips=lambda scores: (scores == -math.inf).all()):
    def candidate(parts):
        best, total, mixed = -math.inf, 0.0, 0.0
        for scores, v in parts:
            if skips(scores):
                continue
            higher = largest(best, scores.max().item())
            weights, shrink = (scores - higher).exp(), math.exp(best - higher)
            total, mixed = shrink * total + weights.sum(), shrink * mixed + weights @ v
            best = higher
        return mixed / total

    return candidate


def with_room(room):
    def dropped(chosen, experts, factor):
        visits = chosen.flatten().bincount(minlength=experts)
        allowed = room(chosen.numel(), experts, factor)
        return (visits - allowed).clamp(min=0).sum().item() / chosen.numel()

    return dropped


SLIPS = [
    ("additive_attention", additive(mix="unmasked"), "the output doesn't"),
    ("additive_attention", additive(nan_for_floats), "it may hold −∞"),
    ("additive_attention", one_axis_alone, "two axes"),
    ("relative_bias", of_a_copied_table, "no gradient"),
    ("without_head", changing_the_smaller(other_key_bias), "which softmax hides"),
    (
        "without_head",
        changing_the_smaller(lambda smaller, *_: smaller.requires_grad_(False)),
        "can't be trained",
    ),
    (
        "without_head",
        changing_the_smaller(lambda smaller, *_: setattr(smaller, "dropout", nn.Dropout(0.0))),
        "another dropout",
    ),
    ("without_head", lambda layer, i: layer.state_dict(), "return a layer"),
    ("confused", lambda layers: 6 if len(layers) == 1 else 1, "W^V is 0"),
    ("confused", with_a_residual, "W^V is 0"),
    ("two_sums_norm", fixed_eps, "not the numbers"),
    ("two_sums_norm", frozen_weight, "must learn, too"),
    ("streamed_gradient", by_source_tokens, "source's tokens"),
    ("linear_rate", asserting_rate, "raises AssertionError"),
    ("word_numbers", counting_sentences, "in one sentence"),
    ("word_numbers", lambda *given: [*ours("word_numbers")(*given)], "return a dictionary"),
    ("budget_batches", batches(strict=True), "exactly the limit"),
    ("budget_batches", batches(keeps_widths=True), "widths of its own"),
    ("budget_batches", yielding, "a list of batches"),
    ("misleading_table", lambda: [("the", 1.0)], "return a dictionary"),
    ("likeliest_text", with_dropout_on, "Dropout must be off"),
    ("likeliest_text", left_in_eval, "Dropout must be off"),
    ("mean_over_ranks", first_may_not_be_empty, "0 times NaN"),
    ("sign_test", one_direction, "8 losses"),
    ("many_references", as_many_references_for_all, "two references, the second one"),
    ("many_references", pooled, "before counts are added"),
    ("packed_attention", by_a_block_mask, "Too much memory"),
    ("packed_attention", deaf_packing, "The gradient"),
    ("chunked_z_loss", without_gradient, "has no gradient"),
    ("decoding_cost", packing_if_somebody_ends, "after each but the last"),
    ("trace_back", rows_for_places, "at the place where you are"),
    ("may_be_largest", own_error_twice, "both contain 4.5"),
    ("host_beam", wrong_axis, "third axis"),
    ("rollout", lambda maps: ours("rollout")(maps).T, "Rows and columns"),
    ("values_silenced", new_parameters, "the same objects"),
    ("values_silenced", frozen_after, "the same objects"),
    ("bits_from_pieces", per_byte, "bytes"),
    ("bits_from_pieces", without_spaces, "should give"),
    ("bits_from_pieces", lambda *given: torch.ones(3), "return one number"),
    ("hide_words", hides_the_end, "special token"),
    ("hide_words", always_the_same, "another seed others"),
    ("closest_to_people", best_from_zero, "Compare with the person"),
    ("policy_loss", other_marks_alone, "The gradient should be"),
    ("policy_loss", own_leaf, "that you were given"),
    ("policy_loss", marks_frozen, "`risks` itself was changed"),
    ("alibi_bias", alibi(lambda h, n: -(8 // h) * n), "slope times distance"),
    ("alibi_bias", alibi(lambda h, n: -(8 * n // h)), "slope times distance"),
    ("alibi_bias", alibi(filler=-math.inf), "Don't hide later keys"),
    ("alibi_bias", alibi(filler=0.0), "never below 0"),
    ("online_softmax", online(lambda best, new: new), "may also fall"),
    ("online_softmax", online(skips=lambda scores: scores[0] == -math.inf), "some hidden keys"),
    ("dropped_share", with_room(lambda n, e, f: round(f * n / e)), "is 3.3"),
    ("dropped_share", with_room(lambda n, e, f: math.ceil(f * -(-n // e))), "rounded up at the"),
    ("dropped_share", with_room(lambda n, e, f: math.ceil(f * (n // e))), "is 3.6"),
]


@pytest.mark.parametrize("name, slip, words", SLIPS, ids=[f"{s[0]}: {s[2]}" for s in SLIPS])
def test_a_slip_that_easy_data_would_hide_is_named(name, slip, words):
    with pytest.raises(AssertionError) as answer:
        check(slip, name)
    assert words in str(answer.value)


CHANGES = {
    "decoding_cost": lambda lengths, *_: lengths.sort(),
    "holm": lambda ps: ps.sort(),
    "rollout": lambda maps: maps.mul_(0.5),
    "trace_back": lambda tokens, origins: tokens.zero_(),
    "may_be_largest": lambda rough, error: rough.add_(error),
    "packed_mask": lambda owner: owner.add_(1),
    "leave_one_out": lambda x, *_: x.fill(1.0),
    "packed_attention": lambda q, *_: q.mul_(2),
    "two_sums_norm": lambda x, *_: x.data.sub_(1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whoever_changes_what_is_given_is_told(name):
    def changing(*given):
        right = ours(name)(*given)
        CHANGES[name](*given)
        return right

    with pytest.raises(AssertionError, match="itself was changed"):
        check(changing, name)


def test_places_may_be_hidden_in_another_order():
    def turned(x, losses, fit):
        found = []
        for i in range(len(x)):
            others = [np.concatenate((one[i + 1 :], one[:i])) for one in (x, losses)]
            found.append(np.log(losses[i] / fit(*others)(x[i : i + 1])[0]))
        return np.sqrt(np.square(found).mean())

    check(turned, "leave_one_out")
