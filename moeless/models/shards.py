"""The safetensors files of a checkpoint folder: which there are, and whether each is whole.

A damaged checkpoint is refused by the name of the file before anything is loaded. Pickled weights (`.bin`, `.pt`) are
never read.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from moeless.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
_BITS = {"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16}
_BITS |= {"U16": 16, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8}
_BITS |= {"F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}


def read_json_file(path: Path) -> dict[str, Any]:
    """A JSON object from a checkpoint file.

    Raises:
        CheckpointError: not readable, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} is damaged: not JSON; download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{str(path)!r} is damaged: not a JSON object; download it again")
    return value


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, after checking index against files against lengths.

    Raises:
        CheckpointError: no safetensors, a shard missing or truncated, or a tensor not in the shard the index names.
    """
    index = folder / INDEX_FILE
    if index.exists():
        weight_map = read_json_file(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{str(index)!r} is damaged: it has no weight_map")
        if any(not isinstance(f, str) or Path(f).name != f for f in weight_map.values()):
            raise CheckpointError(f"{str(index)!r} is damaged: its weight_map names files outside the folder")
    elif (folder / SINGLE_FILE).exists():
        weight_map = dict.fromkeys(read_header(folder / SINGLE_FILE), SINGLE_FILE)
    else:
        pickled = sorted(p.name for p in folder.glob("*.bin"))
        reason = f"only pickled weights ({pickled[0]}), which are not read; convert them" if pickled else "no weights"
        raise CheckpointError(f"{str(folder)!r} has {reason}: {SINGLE_FILE} or {INDEX_FILE} is needed")
    headers = {name: read_header(folder / name) for name in sorted(set(weight_map.values()))}
    for tensor, name in weight_map.items():
        if tensor not in headers[name]:
            raise CheckpointError(f"{str(folder / name)!r} lacks {tensor!r}, which {INDEX_FILE} says is in it")
    return {tensor: folder / name for tensor, name in weight_map.items()}


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> {dtype, shape, data_offsets} of one safetensors file whose length is as its header says.

    Raises:
        CheckpointError: missing, truncated or damaged.
    """
    if not path.is_file():
        raise CheckpointError(f"checkpoint shard {str(path)!r} is missing; download it again")
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if num_bytes < 8 or header_bytes > min(num_bytes - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(f"checkpoint shard {str(path)!r} is truncated or not safetensors: {num_bytes} bytes")
        try:
            header = json.loads(file.read(header_bytes))
            header.pop("__metadata__", None)
            expected = 8 + header_bytes + _data_bytes(header)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"checkpoint shard {str(path)!r} is damaged: bad header; download it again"
            ) from error
    if expected != num_bytes:
        raise CheckpointError(
            f"checkpoint shard {str(path)!r} is {'truncated' if num_bytes < expected else 'damaged'}: "
            f"{num_bytes:,} bytes where its header says {expected:,}; download it again"
        )
    return dict(header)


def _data_bytes(header: dict[str, dict[str, Any]]) -> int:
    """Bytes behind the header. Raises `ValueError` unless tensors lie end to end, each of the size of its shape."""
    end = 0
    for tensor in sorted(header.values(), key=lambda t: t["data_offsets"]):
        start, stop = tensor["data_offsets"]
        num_bits = math.prod(tensor["shape"]) * _BITS[tensor["dtype"]]
        if start != end or 8 * (stop - start) != num_bits or min([0, *tensor["shape"]]) < 0:
            raise ValueError(tensor)
        end = stop
    return end
