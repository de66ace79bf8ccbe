"""Every workload is complete, reproducible, and sensitive to what a rewrite could get wrong."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

import models
from benchmarks._workloads import LIBRARIES
from tests.repository import table

ROOT = Path(__file__).parent.parent
OWN = {
    "seeds": "toy_model transpose_toy simple_mlp simple_cnn tiny_convnet resnet_block"
    " masked_assign masked_assign_where",
    "torchvision": "resnet18 resnet50 mobilenet_v3_large efficientnet_b0 convnext_tiny vit_b_16"
    " swin_t swin_v2_t densenet121 shufflenet_v2_x1_0 regnet_y_400mf vgg11_bn"
    " deeplabv3_mobilenet_v3_large r3d_18",
    "synthetic": "linear_bn_relu_10 linear_bn_relu_100 transpose_chain_10 transpose_chain_100"
    " masked_postprocess_256 masked_postprocess_4096",
}
SEEDS, TORCHVISION, SYNTHETIC = (names.split() for names in OWN.values())
FAMILIES = {"seeds": SEEDS, "torchvision": TORCHVISION, "synthetic": SYNTHETIC, **LIBRARIES}
WITHOUT_BATCHNORM = {
    *(set(SEEDS) - {"toy_model", "tiny_convnet"}),
    *(name for name in SYNTHETIC if not name.startswith("linear_bn_relu")),
    *("convnext_tiny", "vit_b_16", "swin_t", "swin_v2_t"),
}
# Quick to load, with every kind of tensor that is drawn: statistics, norms, tables, scales.
LIGHT = (*SEEDS, *SYNTHETIC, "shufflenet_v2_x1_0", "swin_v2_t")


def outputs(
    workload: models.Workload,
    inputs: tuple[Tensor, ...] | None = None,
    state: dict[str, Tensor] | None = None,
) -> list[Tensor]:
    """The output tensors of one call, with other inputs or tensors than the workload's own."""
    call = workload.example_inputs if inputs is None else inputs
    with torch.no_grad():
        result = torch.func.functional_call(workload.module, state or {}, call)
    return pytree.tree_leaves(result)


def difference(before: list[Tensor], after: list[Tensor]) -> float:
    """The smallest relative change of any output."""
    pairs = zip(before, after, strict=True)
    return min(((new - old).norm() / old.norm()).item() for old, new in pairs)


def other_statistics(workload: models.Workload, paths: list[str]) -> dict[str, Tensor]:
    buffers = dict(workload.module.named_buffers())
    means = {f"{path}.running_mean": buffers[f"{path}.running_mean"] + 0.1 for path in paths}
    variances = {f"{path}.running_var": buffers[f"{path}.running_var"] * 1.2 for path in paths}
    return means | variances


def mapped(inputs: tuple[Tensor, ...], change: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    return tuple(change(each) if each.is_floating_point() else each for each in inputs)


def tensors(workload: models.Workload) -> Iterator[Tensor]:
    yield from workload.module.state_dict().values()
    yield from workload.example_inputs


def digest(names: tuple[str, ...]) -> str:
    """A hash of every bit of the weights and inputs of the named workloads."""
    state = hashlib.sha256()
    for name in names:
        for tensor in tensors(models.load(name)):
            state.update(tensor.numpy().tobytes())
    return state.hexdigest()


def python(code: str, **environment: str) -> str:
    """What `code` prints in a fresh interpreter."""
    command = [sys.executable, "-W", "error", "-c", code]
    own = os.environ | environment
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_family_is_complete() -> None:
    assert {name: set(models.names(name)) for name in FAMILIES} == {
        name: set(each) for name, each in FAMILIES.items()
    }
    assert set(models.names()) == set(chain(*FAMILIES.values()))


@pytest.mark.parametrize("name", [*SEEDS, *TORCHVISION, *SYNTHETIC])
def test_a_workload_is_random_and_depends_on_its_input_and_its_statistics(name: str) -> None:
    workload = models.load(name)
    answer, inputs = outputs(workload), workload.example_inputs
    state = workload.module.state_dict()
    lowered = {path: each.bfloat16() for path, each in state.items() if each.is_floating_point()}
    paths = [path for path, module in workload.module.named_modules()
             if isinstance(module, _BatchNorm)]  # fmt: skip

    assert workload.name in models.names(workload.family)
    assert isinstance(inputs, tuple)
    assert not any(module.training for module in workload.module.modules())
    floating = [t for t in tensors(workload) if t.is_floating_point() and t.numel() > 1]
    assert all(tensor.std() > 0 for tensor in floating)
    assert all(output.isfinite().all() for output in answer)
    assert all(output.std() > 0.01 * output.abs().max() for output in answer)
    in_bfloat16 = outputs(workload, mapped(inputs, Tensor.bfloat16), lowered)
    assert all(output.isfinite().all() for output in in_bfloat16)
    assert difference(answer, outputs(workload, mapped(inputs, Tensor.neg))) > 0.01
    assert bool(paths) == (name not in WITHOUT_BATCHNORM)
    for several, least in ((paths[:1], 0.001), (paths, 0.01)) * bool(paths):
        changed = outputs(workload, state=other_statistics(workload, several))
        assert difference(answer, changed) > least


def test_the_bits_do_not_depend_on_the_callers_random_state_and_device_which_stay() -> None:
    found = set[str]()
    for device, seed in (("cpu", 1), ("meta", 2)):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        with torch.device(device):
            found.add(digest(LIGHT))
        assert torch.equal(torch.random.get_rng_state(), before)
    assert len(found) == 1


def test_what_is_loaded_twice_shares_nothing() -> None:
    both = map(tensors, (models.load("swin_v2_t"), models.load("swin_v2_t")))
    assert all(one.data_ptr() != other.data_ptr() for one, other in zip(*both, strict=True))


@pytest.mark.integration
def test_another_process_with_another_hash_seed_builds_the_same_bits() -> None:
    code = f"import runpy; print(runpy.run_path({__file__!r})['digest']({LIGHT!r}))"
    assert python(code, PYTHONHASHSEED="1") == digest(LIGHT)


def test_the_device_argument_moves_module_and_inputs() -> None:
    assert all(each.is_meta for each in tensors(models.load("toy_model", device="meta")))


TO_INSTALL = r"pip install '\.\[{}\]'"
UNKNOWN, UNAVAILABLE = models.UnknownWorkloadError, models.UnavailableDeviceError


@table(
    "ask lacks error said",
    (lambda: models.load("resnet-18"), "", UNKNOWN, r"did you mean .*'resnet18'"),
    (lambda: models.load("#"), "", UNKNOWN, r"there are .*resnet18, "),
    (lambda: models.names("torchvison"), "", UNKNOWN, "did you mean 'torchvision'"),
    (lambda: models.load("toy_model", device="cuda:99"), "", UNAVAILABLE, "pass device='cpu'"),
    (lambda: models.load("resnet18"), "torchvision", ImportError, TO_INSTALL.format("models")),
    (lambda: models.load("repvgg_a0"), "timm", ImportError, TO_INSTALL.format("timm")),
    (lambda: models.load("vit_base"), "transformers", ImportError,
     TO_INSTALL.format("transformers") + " in the clone"),
)  # fmt: skip
def test_what_cannot_be_loaded_is_told_with_what_to_do(
    ask: Any, lacks: str, error: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks:
        monkeypatch.setitem(sys.modules, lacks, None)
    with pytest.raises(error, match=said):
        ask()


def test_sized_builders_take_any_size() -> None:
    workload = models.synthetic.linear_bn_relu(3, width=8)
    graph = fx.symbolic_trace(models.synthetic.transpose_chain(30).module).graph
    built, loaded = models.synthetic.transpose_chain(10), models.load("transpose_chain_10")

    assert (workload.name, len(workload.module)) == ("linear_bn_relu_3_8", 9)
    assert outputs(workload)[0].shape == (16, 8)
    assert len(graph.nodes) == 30 + 30 // 3 + 2  # one for each transpose and each run
    assert torch.equal(outputs(built)[0], outputs(loaded)[0])


def test_masked_assignment_and_where_are_the_same_function() -> None:
    assign, where = models.load("masked_assign"), models.load("masked_assign_where")
    assert torch.equal(outputs(assign)[0], outputs(where, assign.example_inputs)[0])


def test_masked_postprocessing_selects_some_but_not_all() -> None:
    boxes, scores = outputs(models.load("masked_postprocess_256"))
    for output, values in [(boxes, (0.0, 1.0)), (scores, (0.0, -1.0))]:
        for value in values:
            assert 0 < (output == value).sum() < output.numel() - 16


NAMES = ("nms", "qnms", "of_tomorrow")
# What a torchvision of another version does as it is imported: it loads its operators, under
# whatever file name, if it can, and attaches meta kernels to some whether it could or not.
A_TORCHVISION = """
import torch
from . import extension

for name in {names}:
    torch.library.register_fake(f"torchvision::{{name}}", lambda x: x)
{rest}
"""
# A library is loaded only once, however often it is asked for.
LOADING = """
import torch
import torchvision._inside

if not hasattr(torch, "loaded"):
    torch.loaded = torch.library.Library("torchvision", "DEF")
    for name in {names}:
        torch.loaded.define(f"{{name}}(Tensor theirs) -> Tensor")
"""
IMPORTING = """
import torch
from models._torchvision_import import import_torchvision
try:
    told = import_torchvision()._inside.__name__
except ImportError as error:
    told = error
print(told, *(getattr(torch.ops.torchvision, name).default._schema for name in {names}), sep="|")
"""
INSIDE, FAILED = "torchvision._inside", "torchvision cannot be imported beside torch "
MISSING = "operator torchvision::nms does not exist"


@pytest.mark.integration
@table(
    "loaded rest start end",
    ((), "", INSIDE, INSIDE),
    (("nms",), "", INSIDE, INSIDE),
    (NAMES, "", INSIDE, INSIDE),
    (NAMES, "raise RuntimeError('for another CUDA')", FAILED, ": for another CUDA"),
    (NAMES, "import no_such_package", "", ": No module named 'no_such_package'"),
    ((), f"raise RuntimeError({MISSING!r})", FAILED, MISSING),
)
def test_only_operators_that_do_not_load_are_declared_and_a_failure_says_why(
    loaded: tuple[str, ...], rest: str, start: str, end: str, tmp_path: Path
) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "_inside.py").touch()
    (package / "extension.py").write_text(LOADING.format(names=loaded))
    (package / "__init__.py").write_text(A_TORCHVISION.format(names=NAMES, rest=rest))
    code = IMPORTING.format(names=NAMES)
    told, *schemas = python(code, PYTHONPATH=str(tmp_path)).split("|")

    assert told.startswith(start)
    assert told.endswith(end)
    theirs, ours = "(Tensor theirs) -> Tensor", "(...) -> ..."
    assert schemas == [f"torchvision::{name}{theirs if name in loaded else ours}" for name in NAMES]


@pytest.mark.integration
@table("before", ("",), ("import torchvision",))
def test_torchvision_is_imported_without_a_warning_also_where_it_failed_before(before: str) -> None:
    code = f"import contextlib\nwith contextlib.suppress(RuntimeError):\n    {before or 'pass'}\n"
    code += "import models; print(models.load('shufflenet_v2_x1_0').family)"
    assert python(code) == "torchvision"
