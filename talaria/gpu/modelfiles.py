"""What a model's files say about its size, without loading it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from talaria.errors import InputError

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}


class ModelFiles(NamedTuple):
    """Sizes over all ranks."""

    name: str
    layers: int
    weight_bytes: int
    """Of the checkpoint: what the host holds as an image, about."""
    kv_bytes_per_token: int
    kv_parts: int
    """Heads of it, which ranks share; with more ranks some have the same. A latent is one."""
    context_tokens: int = 0
    """Of the longest request; 0 where the files do not say."""

    def kv_bytes_on_rank(self, ranks: int) -> float:
        """Of the KV of a token."""
        return self.kv_bytes_per_token / min(ranks, self.kv_parts)


def read(path: str, where: str) -> ModelFiles:
    """Raises InputError where there is no ``config.json`` that can be read and says its sizes."""
    folder, fix = Path(path), "give the folder of a downloaded model"
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{path}/config.json cannot be read: {why}", where=where, fix=fix) from None
    try:
        text = {**config, **(config.get("text_config") or {})}
        layers = int(text.get("num_hidden_layers", 1))
        kv_bytes = layers * _kv_elements(text) * _element_bytes(text)
        context = int(text.get("max_position_embeddings") or 0)
    except (AttributeError, TypeError, ValueError, ArithmeticError) as error:
        raise InputError(f"{path}/config.json does not describe a model: {error!r}", where=where, fix=fix) from None
    return ModelFiles(folder.name, layers, max(1, _weight_bytes(folder)), max(1, kv_bytes), max(1, _kv_heads(text)), context)


def revision(path: str) -> str:
    """Tells one state of a model's files from another: their names, sizes and times; of a path that is no folder, its name."""
    files = sorted(Path(path).iterdir()) if Path(path).is_dir() else []
    facts = [path, *(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files if file.is_file())]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _weight_bytes(folder: Path) -> int:
    """Of the files that SGLang would load: a folder may have the same weights in an older format too."""
    sizes = (sum(file.stat().st_size for file in folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin"))
    return next(filter(None, sizes), 0)


def _kv_elements(config: dict[str, Any]) -> int:
    """Of one token in one layer."""
    if "kv_lora_rank" in config:
        return int(config["kv_lora_rank"]) + int(config.get("qk_rope_head_dim", 0))
    heads = int(config.get("num_attention_heads", 1))
    head_dim = int(config.get("head_dim") or int(config.get("hidden_size", heads)) // heads)
    return 2 * _kv_heads(config) * head_dim


def _kv_heads(config: dict[str, Any]) -> int:
    return 1 if "kv_lora_rank" in config else int(config.get("num_key_value_heads") or config.get("num_attention_heads", 1))


def _element_bytes(config: dict[str, Any]) -> int:
    return BYTES.get(str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"), 2)
