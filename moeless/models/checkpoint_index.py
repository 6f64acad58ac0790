"""Which checkpoint tensors make up which parameter of a model, through transformers' own weight conversions.

Checkpoints name and lay out experts in their own ways (one tensor an expert, or all fused; transposed; interleaved).
transformers knows how to convert each when it loads a whole model; here the same rules are asked about single
parameters, so that one expert can be read by itself. Nothing is read but headers.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from moeless.models.shards import tensor_files


class CheckpointIndex:
    """Parameter name -> the tensors it is made of, by the conversion's source pattern.

    Attributes:
        mapping: transformers' conversions for this model.
        sources: parameter -> {source pattern, None without a conversion: checkpoint keys in natural order}.
        converters: parameter -> its conversion, where there is one.
    """

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        """Index `folder` for `model`, which may live on the meta device but must still have all its parameters.

        Raises:
            CheckpointError: a shard is missing, truncated or damaged.
        """
        self.files = tensor_files(folder)
        self.mapping: list[Any] = get_model_conversion_mapping(model)
        self.sources: dict[str, dict[str | None, list[str]]] = defaultdict(lambda: defaultdict(list))
        self.converters: dict[str, WeightConverter] = {}
        self._handles: dict[Path, Any] = {}
        self._lock = threading.Lock()  # the loader thread and the main thread read at the same time
        renamings = [m for m in self.mapping if isinstance(m, WeightRenaming)]
        converters = [m for m in self.mapping if isinstance(m, WeightConverter)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        parameters = model.state_dict()
        for key in sorted(self.files, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, parameters)
            self.sources[name][pattern].append(key)
            if pattern is not None:
                self.converters[name] = by_pattern[pattern]

    def slice_of(self, key: str) -> Any:
        """A safetensors slice of a tensor; indexing it gives a view of the memory-mapped file, read when touched."""
        path = self.files[key]
        with self._lock:
            if path not in self._handles:
                self._handles[path] = safe_open(path, framework="pt")
            return self._handles[path].get_slice(key)
