"""PyTorch's own Transformer with our weights, and whether it computes what ours does."""

import copy
import warnings
from functools import partial

import torch
from torch import Tensor, nn

from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch04_encoder_decoder import EncoderDecoder, torch_layer_state


def to_torch_transformer(model: EncoderDecoder, final_norms: bool = False) -> nn.Transformer:
    """PyTorch's own Transformer with `model`'s weights; embeddings and generator stay outside.

    `final_norms`: keep both final LayerNorms of a post-norm model, which the paper doesn't have.
    """
    layer = model.encoder.layers[0]
    norm_first = layer.sublayer[0].norm_first
    with warnings.catch_warnings():  # it warns that pre-norm can't use its nested tensors
        warnings.simplefilter("ignore")
        theirs = nn.Transformer(
            d_model=layer.size,
            nhead=layer.self_attn.h,
            num_encoder_layers=len(model.encoder.layers),
            num_decoder_layers=len(model.decoder.layers),
            dim_feedforward=layer.feed_forward.expand.out_features,
            dropout=layer.sublayer[0].dropout.p,
            layer_norm_eps=layer.sublayer[0].norm.eps,
            batch_first=True,
            norm_first=norm_first,
        )
    for ours, other in ((model.encoder, theirs.encoder), (model.decoder, theirs.decoder)):
        for mine, reference in zip(ours.layers, other.layers, strict=True):
            reference.load_state_dict(torch_layer_state(mine))
        if norm_first:
            other.norm.load_state_dict(ours.norm.state_dict())
        elif not final_norms:
            other.norm = None
    return theirs.train(model.training)


def torch_vectors(
    theirs: nn.Transformer, model: EncoderDecoder, src: Tensor, tgt: Tensor
) -> Tensor:
    """What `nn.Transformer` makes of src and tgt with `model`'s embeddings: (B, T, D)."""
    return theirs(
        model.src_embed(src),
        model.tgt_embed(tgt),
        tgt_mask=~subsequent_mask(tgt.size(1))[0],  # True = hidden
        src_key_padding_mask=src == 0,
        tgt_key_padding_mask=tgt == 0,
        memory_key_padding_mask=src == 0,
    )


def assert_parity(model: EncoderDecoder, src: Tensor, tgt: Tensor) -> None:
    """Raise AssertionError if an output or a gradient isn't `nn.Transformer`'s; 0 pads src and tgt.

    Gradients are compared by taking a step: if all weights are equal afterwards, each gradient was.
    """
    model = copy.deepcopy(model)
    theirs = to_torch_transformer(model)
    tgt_mask = padding_mask(tgt) & subsequent_mask(tgt.size(1))
    mine = model(src, tgt, padding_mask(src), tgt_mask)  # (B, T, D)
    reference = torch_vectors(theirs, model, src, tgt)
    close = partial(torch.testing.assert_close, rtol=1e-8, atol=1e-9)
    close(mine, reference)

    tables = [model.src_embed[0].lut.weight, model.tgt_embed[0].lut.weight]
    losses = [vectors[tgt != 0].sin().sum() for vectors in (mine, reference)]  # no pads
    close(*(torch.autograd.grad(loss, tables, retain_graph=True) for loss in losses))
    sum(losses).backward()
    with torch.no_grad():
        for p in (*model.encoder.parameters(), *model.decoder.parameters(), *theirs.parameters()):
            p -= p.grad
    close(to_torch_transformer(model).state_dict(), theirs.state_dict())
