"""Other people's Transformers in the series' sizes: what a training step races against.

Each takes a chapter's batch and gives its logits; weights start as the package starts them. None of
them is a reference for our results: tests compare those with `nn.Transformer` on our weights.
"""

import warnings
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from scripts.ch01_attention import subsequent_mask
from scripts.ch03_embeddings_and_positions import MAX_LEN, Embeddings, PositionalEncoding
from scripts.ch06_training import BOS, EOS, PAD, Batch, LabelSmoothing
from scripts.ch11_where_the_time_goes import Shape


def both(sides: tuple[str, str], settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings for two sides, whose names go before those of the settings."""
    return {f"{side}_{name}": value for side in sides for name, value in settings.items()}


class TorchTransformer(nn.Module):
    """`nn.Transformer` with chapter 3's embedding around it: batch to logits (B, T, V)."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.embed = nn.Sequential(
            Embeddings(shape.d_model, shape.vocab), PositionalEncoding(shape.d_model, shape.dropout)
        )
        nn.init.normal_(self.embed[0].lut.weight, std=shape.d_model**-0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pre-norm has no nested tensors; nor has training
            sizes = (shape.d_model, shape.h, shape.N, shape.N, shape.d_ff, shape.dropout)
            self.body = nn.Transformer(*sizes, batch_first=True, norm_first=shape.norm_first)
        self.generator = nn.Linear(shape.d_model, shape.vocab)
        self.generator.weight = self.embed[0].lut.weight

    def forward(self, batch: Batch) -> Tensor:
        padding = batch.src == PAD
        x = self.body(
            self.embed(batch.src),
            self.embed(batch.tgt),
            tgt_mask=~subsequent_mask(batch.tgt.size(1))[0],
            src_key_padding_mask=padding,
            tgt_key_padding_mask=batch.tgt == PAD,
            memory_key_padding_mask=padding,
        )
        return self.generator(x)


class Marian(nn.Module):
    """Hugging Face's `MarianMTModel`: batch to logits (B, T, V)."""

    def __init__(self, shape: Shape):
        super().__init__()
        from transformers import MarianConfig, MarianMTModel

        one = {"layers": shape.N, "ffn_dim": shape.d_ff, "attention_heads": shape.h}
        drops = ("dropout", "attention_dropout", "activation_dropout")
        config = MarianConfig(
            vocab_size=shape.vocab,
            d_model=shape.d_model,
            activation_function="relu",
            max_position_embeddings=MAX_LEN,
            scale_embedding=True,
            pad_token_id=PAD,
            eos_token_id=EOS,
            forced_eos_token_id=EOS,
            decoder_start_token_id=BOS,
            **both(("encoder", "decoder"), one),
            **dict.fromkeys(drops, shape.dropout),
        )
        self.body = MarianMTModel(config)

    def forward(self, batch: Batch) -> Tensor:
        return self.body(
            input_ids=batch.src,
            attention_mask=(batch.src != PAD).long(),
            decoder_input_ids=batch.tgt,
            use_cache=False,
        ).logits


class XTransformers(nn.Module):
    """x-transformers' encoder and decoder, tables tied: batch to logits (B, T, V)."""

    def __init__(self, shape: Shape):
        super().__init__()
        from x_transformers import XTransformer

        one = {"num_tokens": shape.vocab, "max_seq_len": MAX_LEN, "depth": shape.N}
        one |= {"attn_dim_head": shape.d_model // shape.h, "ff_mult": shape.d_ff / shape.d_model}
        one |= dict.fromkeys(("attn_dropout", "ff_dropout", "emb_dropout"), shape.dropout)
        sides = both(("enc", "dec"), one | {"heads": shape.h, "attn_flash": True})
        self.body = XTransformer(dim=shape.d_model, tie_token_emb=True, **sides)
        self.body.decoder.net.to_logits.weight = self.body.encoder.token_emb.emb.weight

    def forward(self, batch: Batch) -> Tensor:
        real = batch.src != PAD
        memory = self.body.encoder(batch.src, mask=real, return_embeddings=True)
        return self.body.decoder.net(
            batch.tgt, mask=batch.tgt != PAD, context=memory, context_mask=real
        )


PEERS = {
    "nn.Transformer": TorchTransformer,
    "MarianMTModel": Marian,
    "x-transformers": XTransformers,
}
PACKAGES = {"MarianMTModel": "transformers", "x-transformers": "x_transformers"}


def peer_loss(model: nn.Module, batch: Batch, criterion: LabelSmoothing) -> tuple[Tensor, Tensor]:
    """The smoothed loss as a user of PyTorch would write it, summed over the real tokens."""
    loss = F.cross_entropy(
        model(batch).flatten(0, 1),
        batch.tgt_y.flatten(),
        ignore_index=PAD,
        label_smoothing=criterion.smoothing,
        reduction="sum",
    )
    return loss, loss.detach()
