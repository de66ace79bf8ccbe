"""The asv suite: what inference costs at each commit, over models and variants of them."""

import contextlib
import os
import sys
from importlib import import_module

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when torch is imported

if sys.argv[1:2] == ["run_server"]:
    # asv's fork server: what it has imported, no benchmark needs to import again.
    with contextlib.suppress(ImportError):
        import_module("torch.fx.experimental.optimization")
        import_module("models._torchvision_import").import_torchvision()
        import_module("optimizer")
