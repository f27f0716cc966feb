"""Weights of a BERT in safetensors, in the layout of Hugging Face's transformers.

There a kernel is [out, in], and queries, keys and values are three matrices. Here a
kernel is [in, out] and the three lie in one, its columns [heads, 3, features]. Files
are read with or without the prefix `bert.` of models with heads, and with LayerNorm's
old names, gamma and beta.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.models.bert import BERTConfig

FILE = "model.safetensors"
# Errors name this many tensors, and count the others.
_SHOWN = 4

_OUTER = {
    "tokens": "embeddings.word_embeddings.weight",
    "positions": "embeddings.position_embeddings.weight",
    "types": "embeddings.token_type_embeddings.weight",
    "norm": "embeddings.LayerNorm",
    "pooler": "pooler.dense",
    "words": "cls.predictions.transform.dense",
    "norm_words": "cls.predictions.transform.LayerNorm",
    "word_bias": "cls.predictions.bias",
}
_BLOCK = {
    "attention/out": "attention.output.dense",
    "norm_attention": "attention.output.LayerNorm",
    "mlp_in": "intermediate.dense",
    "mlp_out": "output.dense",
    "norm_mlp": "output.LayerNorm",
}
_HEADS = {"pretrain": "cls.seq_relationship", "classify": "classifier"}
_ENDS = {"kernel": "weight", "scale": "weight", "bias": "bias"}
# What a file may lack: heads, which then begin at random.
_OPTIONAL = ("cls.", "classifier.", "pooler.")


class _Tensors(NamedTuple):
    """The tensors of a file that make one parameter."""

    names: list[str]
    shape: tuple[int, ...]  # of each
    join: Callable[[list[np.ndarray]], np.ndarray]
    split: Callable[[np.ndarray], list[np.ndarray]]


class Loaded(NamedTuple):
    """Parameters from a file, in the memory of the host."""

    params: Any  # NumPy arrays; None for those of heads that the file lacks
    fresh: tuple[str, ...]  # names of the tensors that it lacks

    def into(self, params: Any) -> Any:
        """The model's parameters, those that the file has replaced."""
        treedef = jax.tree.structure(params)
        mine = treedef.flatten_up_to(self.params)
        pairs = zip(jax.tree.leaves(params), mine, strict=True)
        return treedef.unflatten(
            [old if new is None else jnp.asarray(new) for old, new in pairs]
        )


def load_bert(folder: str | Path, config: BERTConfig, params: Any) -> Loaded:
    """Reads parameters of `BERT` from a folder with model.safetensors.

    A file may hold more positions than the model has: the first are taken.

    Args:
      folder: with model.safetensors and perhaps config.json, or the file itself.
      config: the sizes.
      params: the model's parameters, of which only shapes and dtypes are read.

    Raises:
      ValueError: no such file, or tensors that are missing, of other shapes or of
        layers that the model has not, in one line.
    """
    path = Path(folder)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"`pretrained.folder` must hold {FILE}, got '{folder}' without it."
        )
    _check_config(path.with_name("config.json"), config)
    library = _safetensors()
    try:
        # The interface to NumPy does not know bfloat16.
        with library.safe_open(path, framework="flax") as file:
            return _read(file, str(path), config, params)
    except (OSError, library.SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"`pretrained.folder` cannot be read, got '{path}': {reason}."
        ) from None


def save_bert(path: str | Path, config: BERTConfig, params: Any) -> None:
    """Writes parameters of `BERT` so that `load_bert` and transformers read them.

    Args:
      path: of the file, usually model.safetensors.
      config: the sizes.
      params: the model's parameters, whole.
    """
    prefix = "bert."
    found: dict[str, np.ndarray] = {}
    for place, leaf in _leaves(params):
        held = np.asarray(jax.device_get(leaf))
        tensors = _tensors(place, held.shape, config)
        for name, part in zip(tensors.names, tensors.split(held), strict=True):
            is_head = name.startswith(("cls.", "classifier."))
            found[name if is_head else prefix + name] = np.ascontiguousarray(part)
    _safetensors()
    from safetensors.numpy import save_file

    save_file(found, str(path), metadata={"format": "pt"})


def _read(file: Any, source: str, config: BERTConfig, params: Any) -> Loaded:
    there = {_plain_name(name): name for name in file.keys()}
    faults: list[str] = []
    fresh: list[str] = []
    used: set[str] = set()
    made = []
    for place, leaf in _leaves(params):
        tensors = _tensors(place, leaf.shape, config)
        used |= set(tensors.names)
        missing = [name for name in tensors.names if name not in there]
        if missing and all(name.startswith(_OPTIONAL) for name in missing):
            fresh += missing
            made.append(None)
            continue
        bad = [f"{name} is missing" for name in missing]
        for name in set(tensors.names) - set(missing):
            shape = tuple(file.get_slice(there[name]).get_shape())
            if not _fits(place, shape, tensors.shape):
                wanted, got = list(tensors.shape), list(shape)
                bad.append(f"{name} must be {wanted}, got {got}")
        faults += sorted(bad)
        if not bad:
            parts = [np.asarray(file.get_tensor(there[n])) for n in tensors.names]
            parts = [part[: tensors.shape[0]] for part in parts]
            made.append(tensors.join(parts).astype(leaf.dtype))
    faults += [
        f"{name} is of no layer of the model"
        for name in sorted(set(there) - used)
        if name.startswith("encoder.layer.")
    ]
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise ValueError(
            f"`pretrained.folder` must fit the section model, got '{source}': "
            f"{'; '.join(faults[:_SHOWN])}{more}."
        )
    return Loaded(jax.tree.unflatten(jax.tree.structure(params), made), tuple(fresh))


def _leaves(params: Any) -> list[tuple[str, Any]]:
    """(path such as blocks/0/mlp_in/kernel, array) of each parameter."""
    return [
        (
            jax.tree_util.keystr(path, simple=True, separator="/").removesuffix(
                "/value"
            ),
            leaf,
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    ]


def _plain_name(name: str) -> str:
    """A tensor's name without the prefix, LayerNorm's parameters by their new names."""
    name = name.removeprefix("bert.")
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        if name.endswith(old):
            name = name.removesuffix(old) + new
    return name


def _fits(place: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    if place == "positions":
        return shape[1:] == wanted[1:] and shape[:1] >= wanted[:1]
    return shape == wanted


def _tensors(place: str, shape: tuple[int, ...], config: BERTConfig) -> _Tensors:
    """Which tensors a parameter is made of, and how."""
    prefix = ""
    if place.startswith("blocks/"):
        _, layer, place = place.split("/", 2)
        prefix = f"encoder.layer.{layer}."
    if place in _OUTER:  # an array by itself
        return _one(_OUTER[place], shape)
    module, _, end = place.rpartition("/")
    if module == "attention/qkv":
        names = [
            f"{prefix}attention.self.{name}.{_ENDS[end]}"
            for name in ("query", "key", "value")
        ]
        return _three(names, shape, config.heads)
    known = _BLOCK if prefix else _OUTER | {"head": _HEADS[config.task]}
    name = f"{prefix}{known[module]}.{_ENDS[end]}"
    if end != "kernel":
        return _one(name, shape)
    return _Tensors([name], shape[::-1], lambda x: x[0].T, lambda x: [x.T])


def _one(name: str, shape: tuple[int, ...]) -> _Tensors:
    return _Tensors([name], shape, lambda x: x[0], lambda x: [x])


def _three(names: list[str], shape: tuple[int, ...], heads: int) -> _Tensors:
    """Of queries, keys and values: a kernel [in, heads * 3 * K], or a bias."""
    lead, size = shape[:-1], shape[-1] // 3

    def join(parts: list[np.ndarray]) -> np.ndarray:
        by_head = [part.T.reshape(*lead, heads, size // heads) for part in parts]
        return np.stack(by_head, axis=-2).reshape(shape)

    def split(whole: np.ndarray) -> list[np.ndarray]:
        by_head = whole.reshape(*lead, heads, 3, size // heads)
        return [by_head[..., i, :].reshape(*lead, size).T for i in range(3)]

    return _Tensors(names, (size, *lead), join, split)


def _check_config(path: Path, config: BERTConfig) -> None:
    """Raises ValueError for what a model's config.json says and no shape shows."""
    if not path.is_file():
        return
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"'{path}' is not JSON: {error}.") from None
    wanted = {
        "model_type": ("bert", "an encoder of another kind"),
        "num_attention_heads": (config.heads, "set model.heads to it"),
        "hidden_act": ("gelu", "the model has no other"),
    }
    for key, (value, remedy) in wanted.items():
        if given.get(key, value) != value:
            raise ValueError(
                f"`pretrained.folder` must fit the section model, got {key} "
                f"{given[key]} in '{path}', not {value}: {remedy}."
            )


def _safetensors() -> Any:
    try:
        import safetensors
    except ImportError:
        raise ValueError(
            "`pretrained.folder` needs the package safetensors, which is not "
            "installed: pip install 'sfpo_jax[experiments]'."
        ) from None
    return safetensors
