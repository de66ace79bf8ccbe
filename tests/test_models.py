"""Every workload is complete, reproducible, and sensitive to what a rewrite could get wrong."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

import models
from benchmarks._workloads import LIBRARIES
from models import _torchvision_import

ROOT = Path(__file__).parent.parent

SEEDS = (
    "toy_model",
    "transpose_toy",
    "simple_mlp",
    "simple_cnn",
    "tiny_convnet",
    "resnet_block",
    "masked_assign",
    "masked_assign_where",
)
TORCHVISION = (
    "resnet18",
    "resnet50",
    "mobilenet_v3_large",
    "efficientnet_b0",
    "convnext_tiny",
    "vit_b_16",
    "swin_t",
    "swin_v2_t",
    "densenet121",
    "shufflenet_v2_x1_0",
    "regnet_y_400mf",
    "vgg11_bn",
    "deeplabv3_mobilenet_v3_large",
    "r3d_18",
)
SYNTHETIC = (
    "linear_bn_relu_10",
    "linear_bn_relu_100",
    "transpose_chain_10",
    "transpose_chain_100",
    "masked_postprocess_256",
    "masked_postprocess_4096",
)
WITHOUT_BATCHNORM = {
    *(set(SEEDS) - {"toy_model", "tiny_convnet"}),
    *(name for name in SYNTHETIC if not name.startswith("linear_bn_relu")),
    *("convnext_tiny", "vit_b_16", "swin_t", "swin_v2_t"),
}
# Quick to load, with every kind of tensor that is drawn: statistics, norms, tables, scales.
LIGHT = (*SEEDS, *SYNTHETIC, "shufflenet_v2_x1_0", "swin_v2_t")


@pytest.fixture(scope="module", params=[*SEEDS, *TORCHVISION, *SYNTHETIC])
def workload(request: pytest.FixtureRequest) -> models.Workload:
    return models.load(request.param)


@lru_cache(maxsize=1)
def answer(workload: models.Workload) -> list[Tensor]:
    """The outputs of the workload's own call, which several tests compare."""
    return outputs(workload, workload.example_inputs)


def outputs(
    workload: models.Workload,
    inputs: tuple[Tensor, ...] | None = None,
    buffers: dict[str, Tensor] | None = None,
) -> list[Tensor]:
    """The output tensors of one call, with other inputs or buffers than the workload's own."""
    call = workload.example_inputs if inputs is None else inputs
    with torch.no_grad():
        result = torch.func.functional_call(workload.module, buffers or {}, call)
    return pytree.tree_leaves(result)


def difference(before: list[Tensor], after: list[Tensor]) -> float:
    """The smallest relative change of any output."""
    pairs = zip(before, after, strict=True)
    return min(((new - old).norm() / old.norm()).item() for old, new in pairs)


def batchnorms(workload: models.Workload) -> list[str]:
    modules = workload.module.named_modules()
    return [path for path, module in modules if isinstance(module, _BatchNorm)]


def other_statistics(workload: models.Workload, paths: list[str]) -> dict[str, Tensor]:
    buffers = dict(workload.module.named_buffers())
    means = {f"{path}.running_mean": buffers[f"{path}.running_mean"] + 0.1 for path in paths}
    variances = {f"{path}.running_var": buffers[f"{path}.running_var"] * 1.2 for path in paths}
    return means | variances


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
    completed = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.strip()


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("seeds", SEEDS),
        ("torchvision", TORCHVISION),
        ("synthetic", SYNTHETIC),
        *LIBRARIES.items(),
    ],
)
def test_every_family_is_complete(family, expected):
    assert set(models.names(family)) == set(expected)


def test_names_without_a_family_lists_every_family():
    assert set(models.names()) == {*SEEDS, *TORCHVISION, *SYNTHETIC, *chain(*LIBRARIES.values())}


def test_a_workload_knows_its_name_family_and_mode(workload):
    assert workload.name in models.names(workload.family)
    assert isinstance(workload.example_inputs, tuple)
    assert not any(module.training for module in workload.module.modules())


def test_a_workload_has_batchnorms_where_its_architecture_has(workload):
    assert bool(batchnorms(workload)) == (workload.name not in WITHOUT_BATCHNORM)


def test_every_floating_point_tensor_is_random(workload):
    floating = [t for t in tensors(workload) if t.is_floating_point() and t.numel() > 1]

    assert all(tensor.std() > 0 for tensor in floating)


def test_output_is_finite_and_not_constant(workload):
    for output in answer(workload):
        assert output.isfinite().all()
        assert output.std() > 0.01 * output.abs().max()


def test_output_varies_with_the_input(workload):
    opposite = tuple(-t if t.is_floating_point() else t for t in workload.example_inputs)

    assert difference(answer(workload), outputs(workload, opposite)) > 0.01


def test_output_varies_with_the_statistics_of_the_first_batchnorm(workload):
    first = batchnorms(workload)[:1]
    if first:
        changed = outputs(workload, buffers=other_statistics(workload, first))
        assert difference(answer(workload), changed) > 0.001


def test_output_varies_with_the_statistics_of_all_batchnorms(workload):
    every = batchnorms(workload)
    if every:
        changed = outputs(workload, buffers=other_statistics(workload, every))
        assert difference(answer(workload), changed) > 0.01


def test_bfloat16_stays_finite(workload):
    inputs = tuple(t.bfloat16() if t.is_floating_point() else t for t in workload.example_inputs)
    state = workload.module.state_dict()
    lowered = {name: t.bfloat16() for name, t in state.items() if t.is_floating_point()}

    assert all(output.isfinite().all() for output in outputs(workload, inputs, lowered))


def test_loading_twice_gives_the_same_bits_and_shares_nothing():
    first, second = models.load("swin_v2_t"), models.load("swin_v2_t")

    pairs = list(zip(tensors(first), tensors(second), strict=True))

    assert all(torch.equal(one, other) for one, other in pairs)
    assert all(one.data_ptr() != other.data_ptr() for one, other in pairs)


@pytest.mark.integration
def test_another_process_with_another_hash_seed_builds_the_same_bits():
    code = f"import runpy; print(runpy.run_path({__file__!r})['digest']({LIGHT!r}))"

    assert python(code, PYTHONHASHSEED="1") == digest(LIGHT)


def test_workloads_do_not_depend_on_the_callers_random_state():
    torch.manual_seed(1)
    first = digest(LIGHT)
    torch.manual_seed(2)

    assert digest(LIGHT) == first


@pytest.mark.parametrize("name", LIGHT)
def test_loading_leaves_the_global_random_state_untouched(name):
    before = torch.random.get_rng_state()
    models.load(name)

    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_default_device_does_not_change_the_weights():
    with torch.device("meta"):
        workload = models.load("toy_model")

    assert all(tensor.device.type == "cpu" for tensor in tensors(workload))


def test_the_device_argument_moves_module_and_inputs():
    workload = models.load("toy_model", device="meta")

    assert all(tensor.is_meta for tensor in tensors(workload))


def test_an_unknown_name_is_told_the_nearest_names():
    with pytest.raises(models.UnknownWorkloadError, match=r"did you mean .*'resnet18'"):
        models.load("resnet-18")


def test_a_name_near_to_nothing_is_told_where_the_names_are():
    with pytest.raises(models.UnknownWorkloadError, match=r"there are .*resnet18, "):
        models.load("#")


def test_an_unknown_family_is_told_the_nearest_family():
    with pytest.raises(models.UnknownWorkloadError, match="did you mean 'torchvision'"):
        models.names("torchvison")


@pytest.mark.parametrize(("name", "package"), [("repvgg_a0", "timm"), ("vit_base", "transformers")])
def test_a_library_that_is_not_installed_is_told_with_how_to_install_it(name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(ImportError, match=rf"run pip install '\.\[{package}\]' in the clone"):
        models.load(name)


def test_an_unusable_device_is_refused():
    with pytest.raises(models.UnavailableDeviceError, match="pass device='cpu'"):
        models.load("toy_model", device="cuda:99")


def test_sized_builders_take_any_size():
    workload = models.synthetic.linear_bn_relu(3, width=8)

    assert workload.name == "linear_bn_relu_3_8"
    assert len(workload.module) == 9
    assert outputs(workload)[0].shape == (16, 8)


def test_a_registered_size_is_the_builder_at_that_size():
    built, loaded = models.synthetic.transpose_chain(10), models.load("transpose_chain_10")

    assert torch.equal(outputs(built)[0], outputs(loaded)[0])


def test_the_transpose_chain_has_one_node_for_each_transpose_and_each_run():
    graph = fx.symbolic_trace(models.synthetic.transpose_chain(30).module).graph

    assert len(graph.nodes) == 30 + 30 // 3 + 2


def test_masked_assignment_and_where_are_the_same_function():
    assign, where = models.load("masked_assign"), models.load("masked_assign_where")

    assert torch.equal(outputs(assign)[0], outputs(where, assign.example_inputs)[0])


def test_masked_postprocessing_selects_some_but_not_all():
    boxes, scores = outputs(models.load("masked_postprocess_256"))

    for output, values in [(boxes, (0.0, 1.0)), (scores, (0.0, -1.0))]:
        for value in values:
            assert 0 < (output == value).sum() < output.numel() - 16


def test_importing_and_listing_imports_none_of_the_heavy_packages():
    code = """
import sys, models
models.names()
print({"torchvision", "hypothesis", "asv", "optimizer"} & set(sys.modules))
"""

    assert python(code) == "set()"


def test_missing_torchvision_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)

    with pytest.raises(ImportError, match=r"pip install '.\[models\]'"):
        models.load("resnet18")


@pytest.mark.integration
def test_torchvision_imports_in_a_fresh_process_without_a_warning():
    code = "import models; print(models.load('shufflenet_v2_x1_0').family)"

    assert python(code) == "torchvision"


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


def after_importing(folder: Path, *loaded: str, rest: str = "", show: str = "") -> str:
    """What `show` is once a torchvision whose library has the operators `loaded` is imported."""
    package = folder / "torchvision"
    package.mkdir()
    (package / "_inside.py").touch()
    (package / "extension.py").write_text(LOADING.format(names=loaded))
    names = ("nms", "qnms", "of_tomorrow")
    (package / "__init__.py").write_text(A_TORCHVISION.format(names=names, rest=rest))
    code = f"""
import sys, torch
from models._torchvision_import import import_torchvision
try:
    torchvision = import_torchvision()
except ImportError as error:
    torchvision = error
print({show or "torchvision"})
"""
    return python(code, PYTHONPATH=str(folder))


SCHEMAS = "*(getattr(torch.ops.torchvision, name).default._schema for name in {}), sep='\\n'"


@pytest.mark.integration
@pytest.mark.parametrize("loaded", [(), ("nms",), ("nms", "qnms", "of_tomorrow")])
def test_only_operators_that_do_not_load_are_declared(
    loaded: tuple[str, ...], tmp_path: Path
) -> None:
    names = ("nms", "qnms", "of_tomorrow")

    schemas = after_importing(tmp_path, *loaded, show=SCHEMAS.format(names)).splitlines()

    theirs, ours = "(Tensor theirs) -> Tensor", "(...) -> ..."
    assert schemas == [f"torchvision::{name}{theirs if name in loaded else ours}" for name in names]


@pytest.mark.integration
def test_every_module_of_torchvision_is_where_it_belongs(tmp_path: Path) -> None:
    assert after_importing(tmp_path, show="torchvision._inside.__name__") == "torchvision._inside"


@pytest.mark.integration
def test_a_torchvision_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    rest = "raise RuntimeError('compiled for another CUDA')"

    told = after_importing(tmp_path, rest=rest)

    assert told.startswith("torchvision cannot be imported beside torch ")
    assert told.endswith(": compiled for another CUDA")


@pytest.mark.integration
def test_a_package_that_torchvision_lacks_is_named(tmp_path: Path) -> None:
    told = after_importing(tmp_path, rest="import no_such_package")

    assert told.endswith(": No module named 'no_such_package'")


@pytest.mark.integration
def test_an_operator_that_stays_missing_ends_the_attempts(tmp_path: Path) -> None:
    rest = "raise RuntimeError('operator torchvision::nms does not exist')"

    assert after_importing(tmp_path, rest=rest).endswith("torchvision::nms does not exist")


@pytest.mark.integration
def test_a_torchvision_that_failed_before_is_imported_after_all() -> None:
    code = """
import contextlib
with contextlib.suppress(RuntimeError):
    import torchvision
from models._torchvision_import import import_torchvision
print(import_torchvision().extension.__name__)
"""

    assert python(code) == "torchvision.extension"


def test_importing_torchvision_twice_is_harmless():
    first = _torchvision_import.import_torchvision()

    assert _torchvision_import.import_torchvision() is first
