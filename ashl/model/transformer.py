"""A small causal transformer."""

import torch
from torch import Tensor, nn

from ashl.errors import UsageError
from ashl.option import Count, option


class Decoder(nn.Module):
    """Map tokens, int64 [b, length], to logits of the next token at each position [b, length,
    words].
    """

    def __init__(self, words: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            block, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.words(tokens) + self.places(torch.arange(length, device=tokens.device))
        return self.head(self.blocks(x, mask=mask, is_causal=True))


@option
class Transformer:
    """Causal self-attention, normalised before each part.

    Source: Vaswani et al., "Attention is all you need", 2017, in the form of Radford et al.,
    "Language models are unsupervised multitask learners", 2019.
    """

    width: Count
    heads: Count
    layers: Count

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Return the network.

        Raises: UsageError unless samples are rows of tokens and the heads divide the width.
        """
        if len(sample_shape) != 1:
            text = "x".join(map(str, sample_shape))
            raise UsageError(
                f"Model transformer needs rows of tokens, and a sample here is {text}; take"
                " dataset=text."
            )
        if self.width % self.heads:
            raise UsageError(
                f"model.width={self.width} is not divisible by model.heads={self.heads}; take for"
                " example 1"
            )
        return Decoder(num_classes, sample_shape[0], self.width, self.heads, self.layers)
