"""What tests use of the package's rooms: a module that moves there is renamed here alone."""
# ruff: noqa: F401

from __future__ import annotations

from optimizer import passes
from optimizer.__main__ import main
from optimizer._dynamo import backend
from optimizer.analysis import measure
from optimizer.analysis.measure import Spread
from optimizer.core.context import forked_rng, is_tracing
from optimizer.core.copy import structural_copy
from optimizer.core.device import Cuda, Mps, device_of
from optimizer.core.errors import Refused
from optimizer.core.guards import GUARDS
from optimizer.core.inputs import Call, opened, storages_in, tensors_in
from optimizer.core.node import callee, hold, module_of, name_of_call
from optimizer.core.ops import MAY_COPY, add_over, mul_over
from optimizer.core.report import Choice, Refusal, Rewrite, Size
from optimizer.facts.facts import Facts
from optimizer.frontend.dynamo import GuardedModule
from optimizer.frontend.module import OptimizedModule, Unchanged
from optimizer.frontend.outside import Outside, restored
from optimizer.frontend.symbolic import capture
from optimizer.frontend.traceable import Code
from optimizer.lowering import candidates, choose, engines, module, packed, plan
from optimizer.lowering.candidates import AS_IT_IS, CANDIDATES, POLICIES, Policy, require_one_device
from optimizer.lowering.choose import Chooser, Times, Tuning
from optimizer.lowering.engines import ENGINES, engines_here, engines_named
from optimizer.lowering.module import LoweredModule
from optimizer.lowering.packed import with_packed_weights
from optimizer.lowering.partition import KNOWN
from optimizer.lowering.precision import HEADROOM, in_precision
from optimizer.lowering.trace import Recorder, straight_line
from optimizer.passes import fuse, select
from optimizer.passes.fuse import LinearReLU
from optimizer.rewrite.affine import layer_like
from optimizer.rewrite.contract import PHASES, Pattern, whole_graph
from optimizer.testing._strategies import NOT_RECORDED, models
from optimizer.verify.equivalence import BOUNDS, relative_error
