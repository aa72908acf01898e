"""Model families. Adding one means adding one file here with ARCHITECTURES, QK_NORM, `qkv_bias` and `table`.

`ARCHITECTURES`: the names under `architectures` in config.json. `table(config) -> list[Row]`: every tensor that a
checkpoint of this config holds. `QK_NORM`: whether queries and keys have norms. `qkv_bias(config)`: whether q, k, v
have biases. A family with experts also has `is_moe_layer(config, layer)`.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
from types import ModuleType

from jetrl_conversion.errors import ConversionError


@functools.cache
def registry() -> dict[str, ModuleType]:
    """Architecture name -> family module, found by looking at the files of this folder."""
    found: dict[str, ModuleType] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for architecture in getattr(module, "ARCHITECTURES", ()):
            found[architecture] = module
    return found


def family_of(architecture: str) -> ModuleType:
    """The family module of an architecture.

    Raises:
        ConversionError: unknown architecture; the nearest known one is named.
    """
    known = registry()
    if architecture in known:
        return known[architecture]
    near = difflib.get_close_matches(architecture, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConversionError(f"unknown architecture {architecture!r} (known: {', '.join(sorted(known))}){hint}")
