"""Phrase books: models so small that all they can say is written down in a table of words."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

START, END = "<s>", "</s>"


class PhraseBook(nn.Module):
    """A stand-in for a trained model: p(next word | last word) comes from a table.

    It ignores the source. `words` lists the vocabulary; a word without a row ends the sentence.
    """

    def __init__(self, next_words: Mapping[str, Mapping[str, float]]):
        super().__init__()
        rest = dict.fromkeys(word for row in next_words.values() for word in row if word != END)
        self.words = ["<pad>", "<unk>", START, END, *rest]
        table = torch.zeros(len(self.words), len(self.words), dtype=torch.float64)  # (V, V)
        for i, word in enumerate(self.words):
            for following, p in next_words.get(word, {END: 1.0}).items():
                table[i, self.words.index(following)] = p
        self.register_buffer("log_table", table.log())
        self.generator = nn.Identity()

    def encode(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """src (B, S) to a memory that nothing reads, (B, S, 1)."""
        return torch.zeros(*src.shape, 1, dtype=torch.float64)

    def decode(
        self, memory: Tensor, src_mask: Tensor | None, tgt: Tensor, tgt_mask: Tensor | None = None
    ) -> Tensor:
        """tgt (B, T) to log-probabilities (B, T, V), where position t looks at token t alone."""
        return self.log_table[tgt]

    def step(self, tokens: Tensor) -> Tensor:
        """As a decoding in progress, which has nothing to remember: tokens (B, k) to (B·k, V)."""
        return self.log_table[tokens.flatten()]

    def logits(self, x: Tensor) -> Tensor:
        """What `step` gave already says what may come next."""
        return self.generator(x)

    def text(self, ids: Iterable[int]) -> str:
        """Ids as words."""
        return " ".join(self.words[i] for i in ids)


def every_sentence(
    next_words: Mapping[str, Mapping[str, float]],
) -> list[tuple[tuple[str, ...], float]]:
    """All sentences of a table of words with their probabilities, likeliest first."""
    finished, unfinished = [], [((), 1.0)]
    while unfinished:
        words, p = unfinished.pop()
        for word, q in next_words[words[-1] if words else START].items():
            (finished if word == END else unfinished).append(((*words, word), p * q))
    return sorted(finished, key=lambda sentence: -sentence[1])
