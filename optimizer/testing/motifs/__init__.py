"""The motif of each pass: `MOTIF` in the file that has the name of the pass."""

from __future__ import annotations

import importlib
import pkgutil

from optimizer.testing._motif import Motif

MOTIFS: dict[str, Motif] = {
    entry.name: importlib.import_module(f"{__name__}.{entry.name}").MOTIF
    for entry in pkgutil.iter_modules(__path__)
}
