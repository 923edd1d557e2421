"""Exercises of chapter 10: our solutions, and checkers that tell the common mistakes apart."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scripts.book.instruments import scramble
from scripts.ch01_attention import attention, padding_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention, merge_heads, split_heads
from scripts.ch04_encoder_decoder import EncoderDecoder, make_model
from scripts.ch06_training import BOS, EOS
from scripts.ch07_multi30k import pad_rows
from scripts.ch09_training_run import Hypothesis, hypothesis
from scripts.ch10_decoding_and_bleu import (
    END,
    START,
    BleuParts,
    PrefixDecoding,
    beam_by_hand,
    every_sentence,
    ngram_counts,
    tokens_13a,
)


def check_misleading_table(candidate: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
    """Searches the table that candidate() gives, by beams of 1, 2 and 3."""
    table = candidate()
    assert START in table, f"No row says how a sentence begins: the table needs {START!r}."
    paths: list[tuple[str, ...]] = [(START,)]
    while paths:
        path = paths.pop()
        assert path[-1] in table, (
            f"{path[-1]!r} can be written and has no row: what comes after it?"
        )
        total = sum(table[path[-1]].values())
        assert abs(total - 1) < 1e-9, (
            f"The row of {path[-1]!r} sums to {total:.4g}. One of its words comes next, so it is 1."
        )
        assert len(path) < 9, "A sentence has eight words and no end yet: is there a circle?"
        paths += [(*path, word) for word in table[path[-1]] if word != END]
    (likeliest, p), *rest = every_sentence(table)
    assert rest and rest[0][1] < p - 1e-9, "Two sentences are the likeliest, or there is but one."
    hit = {beam: beam_by_hand(table, beam)[0][0][0] == likeliest for beam in (1, 2, 3)}
    assert not hit[1], (
        "Greedy decoding finds the likeliest sentence. Let it begin with a word that isn't the "
        "likeliest to begin with."
    )
    assert not hit[2], (
        "A beam of 2 finds the likeliest sentence. At some step its beginning has to be the third"
        " best."
    )
    assert hit[3], (
        "A beam of 3 misses the likeliest sentence, too. At each step no more than two beginnings"
        " may be better."
    )


def misleading_table() -> dict[str, dict[str, float]]:
    """The likelier a first word, the more the table hesitates after it."""
    return {
        START: {"the": 0.40, "a": 0.35, "one": 0.25},
        "the": {"dog": 0.34, "hound": 0.33, "puppy": 0.33},
        "a": {"dog": 0.52, "hound": 0.48},
        "one": {"dog": 1.0},
        "dog": {END: 1.0},
        "hound": {END: 1.0},
        "puppy": {END: 1.0},
    }


def check_wu_penalty(candidate: Callable[[Hypothesis, float], float]) -> None:
    """`candidate(hypothesis, alpha)`: its log-probability over ((5 + T)/6)^α (Wu et al. 2016)."""
    whole = hypothesis([7, 8, 9, EOS], -3.0)  # three words and their end: T = 4
    cut = hypothesis([7, 8, 9, 7], -3.0)  # the limit came before the end: T = 4, too
    assert candidate(whole, 0.0) == -3.0, "With alpha = 0 the score is the log-probability itself."
    found = candidate(whole, 0.6)
    mistakes = {
        -3 / (8 / 6) ** 0.6: (
            "'7 8 9 </s>' was scored as 3 tokens. To stop is a decision with a probability of its"
            " own, and it is in the sum: </s> counts."
        ),
        -3 * (9 / 6) ** 0.6: (
            "The log-probability was multiplied. It is negative: a longer text would get the "
            "worse, not the better for its length."
        ),
        -3
        / (9**0.6 / 6): "The 6 isn't raised to alpha, so that one token is no longer divided by 1.",
        -3 / 4**0.6: "That is this chapter's T^α, not the paper's.",
        -3
        / 9**0.6: "There is no 5 + 1 below: one token should be divided by 1, whatever alpha is.",
    }
    for value, message in mistakes.items():
        assert abs(found - value) > 1e-9, message
    assert abs(found + 3 / (9 / 6) ** 0.6) < 1e-9, (
        "'7 8 9 </s>' with log-probability −3 and alpha 0.6 has another score."
    )
    assert abs(candidate(cut, 0.6) - found) < 1e-9, (
        "A text that was cut at the limit has no </s>, and four tokens were scored: one was added"
        " for an end that it never had."
    )
    long = hypothesis([7] * 30 + [EOS], -5.0)
    assert candidate(long, 1.0) > candidate(whole, 1.0), (
        "A text of 31 tokens and −5 has the better mean than one of 4 and −3, and with alpha = 1 "
        "it doesn't win."
    )


def wu_penalty(found: Hypothesis, alpha: float) -> float:
    """log p / ((5 + T)/6)^α; `length` counts what was scored."""
    return found.log_prob / ((5 + found.length) / 6) ** alpha


TYPICAL_TOY = (0.4, 0.15, 0.12, 0.11, 0.09, 0.08, 0.05)  # H = 1.717: 0.15 is the most typical


def check_typical_words(candidate: Callable[[Tensor, float, float], Tensor]) -> None:
    """`candidate(log_probs, mass, temperature)`: (B, V) to (B, V), the typical words alone."""
    p = torch.tensor([TYPICAL_TOY], dtype=torch.float64)

    def kept(p: Tensor, mass: float, temperature: float = 1.0) -> list[list[int]]:
        found = candidate(p.log(), mass, temperature)  # (B, V)
        assert not found.isnan().any(), (
            "There are NaN. A word that was ruled out has p = 0 and log p = −∞, and 0·(−∞) isn't 0."
        )
        assert torch.allclose(found.sum(-1), torch.ones(len(p)).double()), (
            "A row doesn't sum to 1: what was taken off isn't given to the rest."
        )
        return [row.nonzero().flatten().tolist() for row in found]

    assert kept(p, 1.0) == [list(range(7))], "With mass 1 a word was taken off: all are needed."
    ((*words,),) = kept(p, 0.3)
    assert words not in ([0], [0, 1]), (
        "Of a word of 0.4 and six between 0.15 and 0.05 the first was kept. It's the likeliest, "
        "but it surprises less than one expects: it is the *distance* from the entropy that "
        "counts."
    )
    assert words != [1, 2], (
        "0.15 and 0.12 sum to 0.27, which isn't 0.3 yet: the word that crosses the mass belongs "
        "to it."
    )
    assert words == [1, 2, 3], (
        "With mass 0.3 other words were kept than those nearest to the entropy."
    )
    equal = torch.full((1, 4), 0.25, dtype=torch.float64)
    assert len(kept(equal, 0.45)[0]) == 2, (
        "Of four equally likely words two make a mass of 0.45, and you kept another number: a "
        "threshold on the distance lets all equals in."
    )
    both = torch.cat((equal, p[:, :4] / p[:, :4].sum()))
    alone = [kept(row.unsqueeze(0), 0.45)[0] for row in both]
    assert kept(both, 0.45) == alone, "A row's words change with the other rows of the batch."
    ruled_out = torch.cat((p, torch.zeros(1, 1).double()), dim=1)
    assert kept(ruled_out, 0.3) == [[1, 2, 3]], "A word with p = 0 changes what is kept."
    found = candidate(p.log(), 1.0, 0.5)
    assert torch.allclose(found, p.square() / p.square().sum()), (
        "With temperature 0.5 and mass 1 the probabilities aren't their squares, brought to 1. "
        "The temperature divides logarithms: after the softmax it is too late."
    )
    sharp = p**4 / (p**4).sum()
    assert kept(p, 0.3, 0.25) == kept(sharp, 0.3), (
        "With temperature 0.25 other words were kept than of the sharpened distribution: whose "
        "entropy is that?"
    )


def typical_words(log_probs: Tensor, mass: float, temperature: float = 1.0) -> Tensor:
    """(B, V) to (B, V): the fewest words nearest to the entropy that sum to `mass`."""
    log_p = (log_probs.double() / temperature).log_softmax(-1)  # (B, V)
    p = log_p.exp()
    entropy = -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1, keepdim=True)  # (B, 1)
    order = (-log_p - entropy).abs().argsort(dim=-1, stable=True)  # (B, V)
    ordered = p.gather(-1, order)
    before = ordered.cumsum(-1) - ordered  # what the more typical ones sum to
    kept = torch.zeros_like(p).scatter(-1, order, ordered.masked_fill(before >= mass, 0.0))
    return kept / kept.sum(-1, keepdim=True)


def check_many_references(candidate: Callable[[list[str], list[list[str]]], float]) -> None:
    """Holds candidate(outputs, references) against sacreBLEU."""
    from sacrebleu.metrics import BLEU

    def both(outputs: list[str], references: list[list[str]]) -> tuple[float, float]:
        streams = [list(stream) for stream in zip(*references, strict=True)]
        return candidate(outputs, references), BLEU().corpus_score(outputs, streams).score

    outputs = ["A dog sleeps in the garden.", "Two men play.", "A child jumps into the cold water."]
    one = [
        ["A dog is asleep in the garden."],
        ["Two women play."],
        ["A child jumps into the water."],
    ]
    found, right = both(outputs, one)
    for metric in (BLEU(), BLEU(effective_order=True)):
        scores = [metric.corpus_score([o], [r]).score for o, r in zip(outputs, one, strict=True)]
        assert abs(found - sum(scores) / 3) > 1e-6, (
            "That is the mean of the sentences' BLEU. Counts are added over the corpus first; a "
            "geometric mean of sums isn't the mean of geometric means."
        )
    assert abs(found - right / 100) > 1e-6, "The scale is 0 to 1; BLEU is reported from 0 to 100."
    assert abs(found - right) < 1e-6, "With one reference each, the score isn't that of sacreBLEU."
    stutter = ["in the garden in the garden in the garden a dog sleeps"]
    found, right = both(stutter, [["in the garden a dog sleeps and sleeps and sleeps again"]])
    assert found < right + 1e-6, (
        "An output that repeats itself scores too high: an n-gram matches at most as often as a "
        "reference has it."
    )
    refs = [["a dog in the garden", "in the garden a dog sleeps", "a dog sleeps in the garden"]]
    found, right = both(stutter, refs)
    assert found < right + 1e-6, (
        "With three references that each have 'in the garden' once, saying it three times matched"
        " more than once: the references' counts were added. What counts is the one that has it "
        "most often."
    )
    assert found > right - 1e-6, "Some n-grams that only one of the references has found no match."
    assert_closest_length(lambda *given: both(*given)[0])
    found, right = both(outputs, [[*a, b] for a, b in zip(one, outputs[::-1], strict=True)])
    assert abs(found - right) < 1e-6, (
        "For three outputs of two references each, it's another score."
    )


def assert_closest_length(bleu: Callable[[list[str], list[list[str]]], float]) -> None:
    """The second half of the check: all n-grams match, so that only the length decides."""
    of = {n: " ".join("abcdefgh"[:n]) for n in range(4, 9)}  # texts of so many words
    assert abs(bleu([of[5]], [[of[4], of[8]]]) - 100) < 1e-6, (
        "An output of 5 words with references of 4 and 8 is punished as too short, though 4 is "
        "closer."
    )
    assert bleu([of[6]], [[of[4], of[7]]]) < 99, (
        "An output of 6 words with references of 4 and 7 isn't too short for you: is that the "
        "shortest reference, and not the closest?"
    )
    assert abs(bleu([of[5]], [[of[6], of[4]]]) - 100) < 1e-6, (
        "An output of 5 words with references of 6 and 4: at a tie the shorter one counts, in "
        "whatever order they come."
    )


def many_references(outputs: list[str], references: list[list[str]]) -> float:
    """BLEU of a corpus: counts clipped by the most generous reference, lengths by the closest."""
    matches, totals, lengths = [0] * 4, [0] * 4, [0, 0]
    for output, texts in zip(outputs, references, strict=True):
        ours, theirs = tokens_13a(output), [tokens_13a(text) for text in texts]
        for n in range(1, 5):
            allowed: Counter[tuple[str, ...]] = Counter()
            for tokens in theirs:
                allowed |= ngram_counts(tokens, n)  # the larger of the two counts
            found = ngram_counts(ours, n)
            matches[n - 1] += (found & allowed).total()
            totals[n - 1] += found.total()
        lengths[0] += len(ours)
        lengths[1] += min((abs(len(tokens) - len(ours)), len(tokens)) for tokens in theirs)[1]
    return BleuParts(matches, totals, *lengths).score


def compare_a_step(theirs: PrefixDecoding, mine: Any, tokens: Tensor, what: str, hint: str) -> None:
    """Continues both by tokens (B, k): the same numbers, and each token computed once."""
    seen: list[int] = []

    def note(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        seen.append(given[0].shape[:-1].numel())  # positions that pass

    right = theirs.logits(theirs.step(tokens)).log_softmax(-1)  # (B·k, V)
    hook = theirs.model.decoder.layers[0].feed_forward.register_forward_hook(note)
    found = mine.logits(mine.step(tokens)).log_softmax(-1)
    hook.remove()
    assert sum(seen) <= tokens.numel(), (
        f"{what}: {sum(seen)} positions went through a layer for {tokens.numel()} new tokens. The "
        "old ones should come from the cache."
    )
    wrong = (found - right).abs().amax(-1).view(tokens.shape).amax(1) > 1e-9  # (B,)
    mixed = not wrong[0] and wrong.any() and tokens.shape == (3, 3)
    assert not mixed, (
        f"{what}: only the first sentence's numbers are right. `origin` counts within a sentence; "
        "its prefixes don't begin at row 0 of the cache."
    )
    assert not wrong.any(), f"{what}: the log-probabilities are others. {hint}"


@torch.no_grad()
def check_copied_cache(candidate: Callable[..., Any]) -> None:
    """Holds candidate(model, src, src_mask) against `PrefixDecoding`, step by step."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        model = make_model(6, 6, N=2, d_model=16, d_ff=32, h=2, dropout=0.0).double().eval()
        scramble(model)
        words = torch.randint(4, 6, (5, 3, 3))
    src = pad_rows([[4, 5, 4, EOS], [5, EOS], [4, 4, 5, EOS]])  # (3, 4)
    both = [way(model, src, padding_mask(src)) for way in (PrefixDecoding, candidate)]
    begin = torch.full((3, 1), BOS)
    compare_a_step(
        *both, begin, "At <s>", "Nothing is cached yet: check embedding, place and masks."
    )
    what, hint = "At the second token", "Does it stand at place 1, and see the first?"
    compare_a_step(*both, words[0, :, :1], what, hint)
    moves = (
        ([[0, 0, 0]] * 3, "When one prefix becomes three", "Each needs the whole past."),
        ([[0, 1, 2]] * 3, "When every prefix continues itself", "Nothing was to be moved."),
        (
            [[2, 0, 1], [1, 1, 0], [0, 2, 2]],
            "When prefixes change places",
            "A prefix that continues another has that one's past: the cache didn't follow.",
        ),
    )
    for step, (origin, what, hint) in enumerate(moves, start=1):
        for way in both:
            way.follow(torch.tensor(origin))
        compare_a_step(*both, words[step], what, hint)
    for way in both:
        way.keep(torch.tensor([2, 0]))
    what, hint = (
        "When a sentence has left",
        "All that is kept of it has to leave, its mask as well.",
    )
    compare_a_step(*both, words[4, :2], what, hint)


class CopiedCache:
    """A decoding in progress: each prefix has keys and values, copied when places change."""

    def __init__(self, model: EncoderDecoder, src: Tensor, src_mask: Tensor | None):
        self.model, self.src_mask, self.sources = model, src_mask, len(src)
        self.memory = model.encode(src, src_mask)  # (B·k, S, D), k = 1
        self.past: list[list[Tensor]] = [[] for _ in model.decoder.layers]  # (B·k, H, T, d_k)
        self.length = 0

    def step(self, tokens: Tensor) -> Tensor:
        """Continue each prefix by one of tokens (B, k): the decoder's last positions (B·k, D)."""
        embedding, position = self.model.tgt_embed
        x = embedding(tokens.reshape(-1, 1)) + position.pe[self.length]  # (B·k, 1, D)
        for past, layer in zip(self.past, self.model.decoder.layers, strict=True):
            x = layer.sublayer[0](x, partial(self.look_back, layer.self_attn, past))
            across = partial(layer.src_attn, key=self.memory, value=self.memory, mask=self.src_mask)
            x = layer.sublayer[1](x, across)
            x = layer.sublayer[2](x, layer.feed_forward)
        self.length += 1
        return self.model.decoder.norm(x).squeeze(1)

    def look_back(self, attn: MultiHeadedAttention, past: list[Tensor], x: Tensor) -> Tensor:
        """Self-attention of new tokens x (B·k, 1, D), whose keys and values join the past."""
        new = [split_heads(to(x), attn.h) for to in (attn.project_key, attn.project_value)]
        past[:] = [torch.cat(pair, dim=2) for pair in zip(past, new, strict=True)] if past else new
        q = split_heads(attn.project_query(x), attn.h)  # (B·k, H, 1, d_k)
        return attn.project_output(merge_heads(attention(q, *past)[0]))

    def logits(self, x: Tensor) -> Tensor:
        """Last positions x (N, D) to what may come next, (N, V)."""
        return self.model.generator(x)

    def follow(self, origin: Tensor) -> None:
        """Let the prefixes be those numbered origin (B, k), of each source's own."""
        begins = torch.arange(self.sources).unsqueeze(1) * (len(self.memory) // self.sources)
        self.copy_rows((begins + origin).flatten())

    def keep(self, rows: Tensor) -> None:
        """Go on with the sources numbered rows (N,) alone."""
        k = len(self.memory) // self.sources
        self.copy_rows((rows.unsqueeze(1) * k + torch.arange(k)).flatten())
        self.sources = len(rows)

    def copy_rows(self, rows: Tensor) -> None:
        """These rows of everything, in this order."""
        self.memory = self.memory[rows]
        if self.src_mask is not None:
            self.src_mask = self.src_mask[rows]
        self.past = [[kept[rows] for kept in past] for past in self.past]


def copied_cache(model: EncoderDecoder, src: Tensor, src_mask: Tensor | None) -> CopiedCache:
    """A `CopiedCache` at its beginning."""
    return CopiedCache(model, src, src_mask)
