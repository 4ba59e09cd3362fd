"""A decoder-only language model of today's form: RMSNorm before each part, rotary positions, no
biases.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from ashl.errors import UsageError
from ashl.option import Count, option

BASE = 10_000.0  # base of the wavelengths of rotary positions
SPREAD = 0.02  # standard deviation of the initial weights


class Block(nn.Module):
    """Causal self-attention, then two linear maps, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attend = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.widen, self.narrow = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = (
            self.attend(self.norm1(x))
            .view(batch, length, 3, self.heads, width // self.heads)
            .transpose(1, 3)
        )
        query, key, value = parts.unbind(2)
        seen = functional.scaled_dot_product_attention(
            rotate_pairs(query, turns), rotate_pairs(key, turns), value, is_causal=True
        )
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(functional.gelu(self.widen(self.norm2(x))))


class Decoder(nn.Module):
    """Map tokens, int64 [b, length], to logits of the next token at each position [b, length,
    words].
    """

    turns: Tensor

    def __init__(
        self, words: int, length: int, width: int, heads: int, layers: int, tied: bool
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.register_buffer("turns", rotation_angles(length, width // heads), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Last matrices of a block: their outputs add up over the layers.
                ends = name.endswith(("mix.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=SPREAD / math.sqrt(2 * layers) if ends else SPREAD)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.turns)
        return self.head(self.norm(x))


def rotation_angles(length: int, width: int) -> Tensor:
    """Return cosine and sine of each position and pair of elements, [2, length, width / 2]."""
    speeds = BASE ** (-torch.arange(0, width, 2) / width)
    turns = torch.outer(torch.arange(length), speeds)
    return torch.stack([turns.cos(), turns.sin()])


def rotate_pairs(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate each pair of elements by its angle at this position; x is [b, heads, length,
    width].
    """
    cosine, sine = turns
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1)


@option
class GPT:
    """Decoder-only transformer with RMSNorm and rotary positions.

    With `tie_embeddings`, one matrix serves as input and output embedding. It has about
    12·layers·width² parameters: 0.8 million with width 128 and 4 layers, 85 million with 768 and
    12.

    Source: Radford et al., 2019. RMSNorm: Zhang and Sennrich, NeurIPS 2019. Rotary positions: Su et
    al., "RoFormer", 2021. Tied embeddings: Press and Wolf, EACL 2017.
    """

    width: Count
    heads: Count
    layers: Count
    tie_embeddings: bool

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Return the network.

        Raises: UsageError unless samples are rows of tokens and the width is a multiple of twice
        the heads.
        """
        if len(sample_shape) != 1:
            text = "x".join(map(str, sample_shape))
            raise UsageError(
                f"Model gpt needs rows of tokens, and a sample here is {text}; take dataset=text."
            )
        if self.width % (2 * self.heads):
            raise UsageError(
                f"model.width={self.width} leaves each of model.heads={self.heads} no even number"
                " of elements, as rotary positions need; take a multiple of twice the heads"
            )
        return Decoder(
            num_classes, sample_shape[0], self.width, self.heads, self.layers, self.tie_embeddings
        )
