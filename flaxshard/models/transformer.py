"""A decoder-only Transformer language model.

Sources: Vaswani et al., "Attention Is All You Need", 2017 (arXiv:1706.03762),
with the normalization in front of each branch as in GPT-2.
"""

from __future__ import annotations

from flax import linen as nn
import jax
import jax.numpy as jnp

from flaxshard.core import checks
from flaxshard.core.policy import Policy

# As in GPT-2.
_normal = nn.initializers.normal(0.02)


class Block(nn.Module):
  """Causal attention and an MLP, each a residual branch with a LayerNorm.

  Attributes:
    policy: Precision policy.
    num_heads: Number of attention heads.
    mlp_dim: Width of the MLP.
    dropout: Dropout rate at the end of both residual branches.
  """

  policy: Policy
  num_heads: int
  mlp_dim: int
  dropout: float

  @nn.compact
  def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
    """Maps [batch, length, dim] to the same shape and dtype."""
    dtypes = self.policy.dtypes
    dim = x.shape[-1]
    # float32: squares of large activations overflow in float16.
    y = nn.LayerNorm(dtype=jnp.float32, name="attention_norm")(x)
    query, key, value = (
      nn.Dense(dim, name=name, **dtypes)(y).reshape(
        *y.shape[:-1], self.num_heads, -1
      )
      for name in ("query", "key", "value")
    )
    y = _causal_attention(query, key, value)
    y = nn.Dense(dim, name="out", **dtypes)(y.reshape(x.shape))
    x = x + nn.Dropout(self.dropout, deterministic=not train)(y)
    y = nn.LayerNorm(dtype=jnp.float32, name="mlp_norm")(x)
    y = nn.gelu(nn.Dense(self.mlp_dim, name="mlp_in", **dtypes)(y))
    y = nn.Dense(dim, name="mlp_out", **dtypes)(y)
    return x + nn.Dropout(self.dropout, deterministic=not train)(y)


class Transformer(nn.Module):
  """A decoder-only language model over tokens, such as the bytes of a text.

  LayerNorm and the softmax of the attention are float32 in every policy. The
  position embeddings are learned. The head does not share the weights of the
  token embedding.

  Attributes:
    num_classes: Size of the vocabulary: 256 for bytes.
    policy: Precision policy.
    num_layers: Number of blocks.
    num_heads: Number of attention heads; must divide `embed_dim`.
    embed_dim: Width of the residual stream.
    mlp_dim: Width of the MLPs.
    max_length: Number of positions, the largest length of an input.
    dropout: Dropout rate of the embeddings and of every residual branch, in
      [0, 1). Dropout is active in training only and uses the random stream
      `"dropout"`.
    remat: Whether the backward pass computes the activations inside of each
      block again, from the input of the block, to save their memory. The
      parameters are the same.

  Example:
    >>> import flaxshard as fs, jax, jax.numpy as jnp
    >>> model = fs.models.Transformer(num_classes=256, num_layers=1)
    >>> tokens = jnp.zeros((2, 16), jnp.int32)
    >>> model.apply(model.init(jax.random.key(0), tokens), tokens).shape
    (2, 16, 256)
  """

  num_classes: int
  policy: Policy = Policy()
  num_layers: int = 4
  num_heads: int = 4
  embed_dim: int = 128
  mlp_dim: int = 512
  max_length: int = 512
  dropout: float = 0.0
  remat: bool = False

  @nn.compact
  def __call__(self, inputs: jax.Array, train: bool = False) -> jax.Array:
    """Computes the logits of the next token at every position.

    Args:
      inputs: Tokens, int32 [batch, length].
      train: Whether dropout is active.

    Returns:
      Logits, float32 [batch, length, num_classes]. The logits at position t
      depend on the tokens up to and including t.

    Raises:
      TypeError: The tokens are not integers, or `dropout` is no number.
      ValueError: `dropout` is out of range, the inputs do not have two
        dimensions or are longer than `max_length`, or `num_heads` does not
        divide `embed_dim`.
    """
    self._check(inputs)
    length = inputs.shape[1]
    dtypes = self.policy.dtypes
    shape = (self.max_length, self.embed_dim)
    positions = self.param("positions", _normal, shape, self.policy.param_dtype)
    x = nn.Embed(
      self.num_classes,
      self.embed_dim,
      embedding_init=_normal,
      name="embed",
      **dtypes,
    )(inputs)
    # Without the cast, float32 parameters would make `x` float32.
    x = x + positions[:length].astype(x.dtype)
    x = nn.Dropout(self.dropout, deterministic=not train)(x)
    # `train` is argument 2 of a block; the block itself is argument 0.
    block = nn.remat(Block, static_argnums=(2,)) if self.remat else Block
    for i in range(self.num_layers):
      x = block(
        policy=self.policy,
        num_heads=self.num_heads,
        mlp_dim=self.mlp_dim,
        dropout=self.dropout,
        name=f"block{i}",
      )(x, train)
    x = nn.LayerNorm(dtype=jnp.float32, name="norm")(x)
    head = nn.Dense(self.num_classes, use_bias=False, name="head", **dtypes)
    return head(x).astype(self.policy.output_dtype)

  def _check(self, inputs: jax.Array) -> None:
    # Flax's Dropout accepts any number, and turns 1.5 into wrong values.
    checks.number("dropout", self.dropout, minimum=0, below=1)
    # JAX's error would be about a reshape.
    if self.embed_dim % self.num_heads:
      raise ValueError(
        f"num_heads={self.num_heads} must divide embed_dim={self.embed_dim}."
      )
    if inputs.ndim != 2:
      raise ValueError(
        f"inputs must have shape [batch, length], got {inputs.shape}."
      )
    # Slicing the positions would return fewer, and fail to broadcast.
    if inputs.shape[1] > self.max_length:
      raise ValueError(
        f"inputs must have a length of at most max_length={self.max_length}, "
        f"got {inputs.shape[1]}."
      )


def _causal_attention(
  query: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
  """Attends from each position to itself and to earlier positions.

  Args:
    query: [batch, length, heads, dim].
    key: Array like `query`.
    value: Array like `query`.

  Returns:
    Array of the shape and dtype of `value`.
  """
  length, dim = query.shape[1], query.shape[-1]
  # float32: products and the mask value would overflow in float16.
  logits = jnp.einsum(
    "bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32
  )
  mask = jnp.tril(jnp.ones((length, length), jnp.bool_))
  logits = jnp.where(mask, logits * dim**-0.5, jnp.finfo(jnp.float32).min)
  weights = jax.nn.softmax(logits).astype(value.dtype)
  return jnp.einsum("bhqk,bkhd->bqhd", weights, value)
