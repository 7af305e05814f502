"""A decoder-only Transformer language model."""

from __future__ import annotations

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from flaxshard.core.policy import Policy
from flaxshard.models.fields import check_counts
from flaxshard.models.fields import check_rate

_normal = nn.initializers.normal(0.02)


class Block(nn.Module):
  """Causal attention and an MLP, each behind a LayerNorm and a residual.

  Attributes:
    policy: Precision policy.
    num_heads: Attention heads.
    mlp_dim: Width of the MLP.
    dropout: Rate of the dropout on both residual branches.
  """

  policy: Policy
  num_heads: int
  mlp_dim: int
  dropout: float

  @nn.compact
  def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
    """Maps [batch, length, dim] to the same shape and dtype."""
    dtypes: dict[str, Any] = dict(
      dtype=self.policy.compute_dtype, param_dtype=self.policy.param_dtype
    )
    dim = x.shape[-1]
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

  LayerNorm comes first in a block; it and the attention's softmax are float32
  in every policy. Positions are learned; the head has weights of its own.

  Attributes:
    num_classes: Size of the vocabulary: 256 for bytes.
    policy: Precision policy.
    num_layers: Blocks.
    num_heads: Attention heads; they divide `embed_dim`.
    embed_dim: Width of the residual stream.
    mlp_dim: Width of the MLPs.
    max_length: Number of positions, so the longest input.
    dropout: Rate of the dropout on the embeddings and on every residual branch,
      from the stream `"dropout"`, only when training.

  Example:
    >>> model = Transformer(num_classes=256, num_layers=1)
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

  @nn.compact
  def __call__(self, inputs: jax.Array, train: bool = False) -> jax.Array:
    """Computes the logits of every next token.

    Args:
      inputs: Tokens, int32 [batch, length].
      train: Whether dropout is on.

    Returns:
      Logits, float32 [batch, length, num_classes]; those at t see the tokens
      up to and including t.

    Raises:
      TypeError: The tokens are not integers, or a field is not of its type.
      ValueError: A field is out of range, the inputs do not have two
        dimensions or are longer than `max_length`, or `num_heads` does not
        divide `embed_dim`.
    """
    self._check(inputs)
    length = inputs.shape[1]
    dtypes: dict[str, Any] = dict(
      dtype=self.policy.compute_dtype, param_dtype=self.policy.param_dtype
    )
    positions = self.param(
      "positions",
      _normal,
      (self.max_length, self.embed_dim),
      self.policy.param_dtype,
    )
    x = nn.Embed(
      self.num_classes,
      self.embed_dim,
      embedding_init=_normal,
      name="embed",
      **dtypes,
    )(inputs)
    x = x + positions[:length].astype(x.dtype)
    x = nn.Dropout(self.dropout, deterministic=not train)(x)
    for i in range(self.num_layers):
      x = Block(
        policy=self.policy,
        num_heads=self.num_heads,
        mlp_dim=self.mlp_dim,
        dropout=self.dropout,
        name=f"block{i}",
      )(x, train)
    x = nn.LayerNorm(dtype=jnp.float32, name="norm")(x)
    logits = nn.Dense(self.num_classes, use_bias=False, name="head", **dtypes)(
      x
    )
    return logits.astype(self.policy.output_dtype)

  def _check(self, inputs: jax.Array) -> None:
    check_counts(
      num_layers=self.num_layers,
      num_heads=self.num_heads,
      embed_dim=self.embed_dim,
      mlp_dim=self.mlp_dim,
      max_length=self.max_length,
    )
    check_rate("dropout", self.dropout)
    if not jnp.issubdtype(inputs.dtype, jnp.integer):
      raise TypeError(f"inputs must be integer tokens, got {inputs.dtype}.")
    if inputs.ndim != 2:
      raise ValueError(
        f"inputs must have shape [batch, length], got {inputs.shape}."
      )
    if inputs.shape[1] > self.max_length:
      raise ValueError(
        f"inputs have length {inputs.shape[1]}; allowed: up to "
        f"max_length={self.max_length}."
      )
    if self.embed_dim % self.num_heads:
      raise ValueError(
        f"num_heads={self.num_heads} must divide embed_dim={self.embed_dim}."
      )


def _causal_attention(
  query: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
  """Attends from each position to itself and to those before it.

  Args:
    query: [batch, length, heads, dim].
    key: Like `query`.
    value: Like `query`.

  Returns:
    Like `value`, of its dtype.
  """
  length, dim = query.shape[1], query.shape[-1]
  # Products come out as float32, where neither they nor the mask overflow.
  logits = jnp.einsum(
    "bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32
  )
  mask = jnp.tril(jnp.ones((length, length), jnp.bool_))
  logits = jnp.where(mask, logits * dim**-0.5, jnp.finfo(jnp.float32).min)
  weights = jax.nn.softmax(logits).astype(value.dtype)
  return jnp.einsum("bhqk,bkhd->bqhd", weights, value)
