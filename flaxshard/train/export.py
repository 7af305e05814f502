"""Writes a trained model as files that a program without flaxshard runs.

The files are::

    model.stablehlo      the task's prediction, of `jax.export`
    model.safetensors    the parameters and the other collections
    model.json           names, shapes and dtypes of both, and where they are of

A program needs JAX, flatbuffers and safetensors to run them::

    from jax import export
    from safetensors.numpy import load_file

    with open("model/model.stablehlo", "rb") as f:
      exported = export.deserialize(f.read())
    variables = load_file("model/model.safetensors")
    outputs = exported.call(variables, {"inputs": images})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import json
import os
from typing import Any

from etils import epath
import jax
from jax import export as jax_export
import numpy as np
import optax

from flaxshard import tasks
from flaxshard.core import checks
from flaxshard.core import files
from flaxshard.core import trees
from flaxshard.core.version import VERSION
from flaxshard.state import lora
from flaxshard.state.train_state import TrainState
from flaxshard.tasks.task import AdaptedTask
from flaxshard.train import load as load_lib
from flaxshard.train import same_run

FUNCTION_FILE = "model.stablehlo"
VARIABLES_FILE = "model.safetensors"
DESCRIPTION_FILE = "model.json"


def export(
  source: Any,
  path: str | os.PathLike[str],
  *,
  task: Any = None,
  example: Mapping[str, Any] | None = None,
  platforms: Sequence[str] = ("cpu", "cuda", "tpu"),
  batch_size: int | None = None,
) -> dict[str, Any]:
  """Writes a trained model as files that a program without flaxshard runs.

  The exported function takes the arrays of `model.safetensors` by name and the
  arrays of a batch by name, those that the task's `predict` reads. It returns
  what `predict` returns: arrays in dicts, lists and tuples. The model is in
  evaluation mode. With the wrapper
  `EMA` the parameters are the averages; factors of `LoRA` are merged into them.

  Args:
    source: The workdir of a run, whose latest checkpoint is exported; what
      `fs.load` returned; or a `TrainState`.
    path: The folder for the files, on a file system or in a bucket.
    task: The task object of a run that was given one: see `fs.load`. For a
      `TrainState`, a task whose `predict` is exported; None calls the model
      with `batch["inputs"]`.
    example: For a `TrainState` alone: the arrays of one example by name,
      without the batch dimension, or `jax.ShapeDtypeStruct`s of them.
    platforms: Where the function can run: any of `"cpu"`, `"cuda"`, `"rocm"`
      and `"tpu"`. None of them need be on this machine.
    batch_size: Examples in a batch of the function; None: any number.

  Returns:
    The content of `model.json`.

  Raises:
    ValueError: The workdir cannot be loaded, `path` holds files already, the
      model cannot be exported for any batch size or one of the platforms.
    ImportError: `safetensors` or `flatbuffers` is not installed.

  Example:
    >>> import flaxshard as fs
    >>> description = fs.export("/tmp/digits", "/tmp/model")  # doctest: +SKIP
    >>> description["inputs"]  # doctest: +SKIP
    {'inputs': {'shape': ['batch', 8, 8, 1], 'dtype': 'float32'}}

  References:
    https://docs.jax.dev/en/latest/export/export.html
    https://huggingface.co/docs/safetensors
  """
  if batch_size is not None:
    checks.integer("batch_size", batch_size, minimum=1)
  for platform in platforms:
    # JAX takes any name, and the characters of a text.
    checks.one_of("platforms", platform, ("cpu", "cuda", "rocm", "tpu"))
  # Found before the export, which takes a while.
  with checks.extra("fs.export", "export"):
    import flatbuffers  # noqa: F401
    from safetensors import numpy as safetensors_numpy
  path = files.absolute(path)
  files.check_writable("path", path, create=False)
  for name in (FUNCTION_FILE, VARIABLES_FILE, DESCRIPTION_FILE):
    if epath.Path(os.path.join(path, name)).exists():
      raise ValueError(f"path={path!r} has {name} already: use another folder.")
  facts: dict[str, Any] = {}
  task = None if task is None else tasks.adapt(task)
  if isinstance(source, TrainState):
    if not example:
      raise ValueError(
        "a TrainState is exported with example={'inputs': ...}: one example, "
        f"without the batch dimension; got example={example!r}."
      )
    state = source
  else:
    if not isinstance(source, load_lib.Loaded):
      source = load_lib.load(source, task=task)
    state, example, task = source.state, source.example, task or source.task
    facts["task"] = task.name
    facts["config"] = same_run.config_to_json(source.config)
  variables, call = _flatten(state, task)
  exported = _export(call, variables, example, tuple(platforms), batch_size)
  (_, inputs), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
  outputs = jax.tree.unflatten(exported.out_tree, exported.out_avals)
  description = {
    "flaxshard": VERSION,
    "jax": jax.__version__,
    "step": int(source.step),
    **facts,
    "platforms": list(exported.platforms),
    "inputs": jax.tree.map(same_run.array_to_json, inputs),
    "outputs": jax.tree.map(same_run.array_to_json, outputs),
    "variables": jax.tree.map(same_run.array_to_json, variables),
  }
  epath.Path(path).mkdir(parents=True, exist_ok=True)
  for name, content in (
    (VARIABLES_FILE, safetensors_numpy.save(variables)),
    (FUNCTION_FILE, bytes(exported.serialize())),
    # Where it is, the others are complete.
    (DESCRIPTION_FILE, json.dumps(description, indent=2).encode()),
  ):
    epath.Path(os.path.join(path, name)).write_bytes(content)
  return description


def _flatten(
  state: TrainState, task: AdaptedTask | None
) -> tuple[dict[str, np.ndarray], Callable[..., Any]]:
  """Returns the variables by name, and the prediction as a function of them.

  Args:
    state: The train state.
    task: The task; None: the model is called with the inputs.
  """
  # The factors of LoRA are merged into the parameters of the model.
  tree = lora.merge_lora(state.replace(params=state.eval_params))
  bare_state = TrainState.create(
    apply_fn=lora.model_apply(state.apply_fn), tx=optax.identity(), **tree
  )
  paths, structure = jax.tree_util.tree_flatten_with_path(tree)
  arrays = {trees.path_string(path): x for path, x in paths}
  if len(arrays) < len(paths):
    raise ValueError("two parameters have the same path: a file holds one.")
  variables = {
    name: np.ascontiguousarray(jax.device_get(x)).reshape(x.shape)
    for name, x in arrays.items()
    # A file cannot hold the PRNG keys of NNX modules: they are constants.
    if not trees.is_prng_key(x)
  }

  def call(variables: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
    leaves = [variables.get(name, x) for name, x in arrays.items()]
    given = jax.tree.unflatten(structure, leaves)
    return load_lib.predict(task, bare_state.replace(**given), batch)

  return variables, call


def _export(
  call: Callable[..., Any],
  variables: Mapping[str, np.ndarray],
  example: Mapping[str, Any],
  platforms: tuple[str, ...],
  batch_size: int | None,
) -> jax_export.Exported:
  """Returns the exported prediction, with the inputs that it reads.

  Args:
    call: The prediction, a function of the variables and a batch.
    variables: The variables by name.
    example: Arrays of an example or their shapes, without the batch dimension.
    platforms: Where it can run.
    batch_size: Examples in a batch; None: any number.

  Raises:
    ValueError: The model or JAX raises an error.
  """

  def export_with(
    size: Any, example: Mapping[str, Any], platforms: tuple[str, ...]
  ) -> jax_export.Exported:
    batch = {
      key: jax.ShapeDtypeStruct(
        (size, *np.shape(x)),
        jax.dtypes.canonicalize_dtype(trees.dtype_of(x)),
      )
      for key, x in example.items()
    }
    exported = jax_export.export(jax.jit(call), platforms=platforms)
    return exported(variables, batch)

  hint = ""
  if batch_size is None:
    hint = (
      " for any number of examples. In the code of the model, x.shape[0] may "
      "be any number, and len(x) may not. Or give the number: batch_size=1"
    )
  try:
    # Only a function for a fixed size drops the arguments that it does not use.
    # They are in the order of their names, first the variables.
    fixed = export_with(batch_size or 2, example, platforms[:1])
    used = {
      key: example[key]
      for i, key in enumerate(sorted(example), start=len(variables))
      if i in fixed.module_kept_var_idx
    }
    size = batch_size or jax_export.symbolic_shape("batch")[0]
    return export_with(size, used, platforms)
  except Exception as e:  # a model may raise any error for a symbolic size
    raise ValueError(
      f"the prediction cannot be exported for platforms={platforms}{hint}: "
      f"{type(e).__name__}: {e}"
    ) from e
