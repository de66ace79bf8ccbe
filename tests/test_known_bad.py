"""The known-bad control: the fuzz must find what torch's own fusion and dead code removal break.

`torch.fx.experimental.optimization.fuse` folds BatchNorm as this package does. Were one of its
defects no longer found here, either torch mended it (then take the row out) or the fuzz went blind.
"""

from __future__ import annotations

import warnings

import pytest
from torch import fx

from benchmarks import subjects
from optimizer.testing import SHAPES, Counterexample, check_pass
from tests.quality import hunt as _hunt
from tests.single_pass import rows

with warnings.catch_warnings():
    # The module itself uses something that torch deprecates.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.fx.experimental.optimization import fuse

slow = pytest.mark.integration


def torch_fuse(model, inputs):
    return fuse(model)


def torch_dead_code(model, inputs):
    traced = fx.symbolic_trace(model)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


FUSED, DEAD = "conv bn", "dup linear drop"  # what these tools get right
IMAGE, DIFFER = (2, 4, 4, 4), "values differ"
# What the programs are made of, the input's shape, and what the smallest one must show.
DEFECTS_OF_FUSE = {
    "a conv shared with a path that has no BatchNorm": (
        "relu linear conv add dup swap out bn again", IMAGE, DIFFER),
    "a Linear and BatchNorm block called twice": ("relu block again add", (2, 3), DIFFER),
    "over (N, C, L) with L == C": ("relu linear bn add t01", (4, 4, 4), DIFFER),
    "over (N, C, L) with another width": ("relu linear linear4 bn add", (2, 3, 5), "AssertionErr"),
    "without scale and shift": ("relu linear bn_plain add", (2, 3), "TypeError"),
    "a BatchNorm in training mode": ("relu linear bn_train add", (2, 3), "eval"),
    "a hook on a folded BatchNorm": ("relu conv bn hook", IMAGE, DIFFER),
}  # fmt: skip
# What is used of these is only the effect.
DEFECTS_OF_DEAD_CODE = [
    f"relu shift {written} add" for written in ("idouble_statement", "mask_fill", "iview_statement")
]


@slow
@rows("words shape message", DEFECTS_OF_FUSE)
def test_torch_fuse_is_caught(words, shape, message):
    alphabet = (*words.split(), *([FUSED] if "hook" in words else []))

    with pytest.raises(Counterexample) as caught:
        check_pass(torch_fuse, FUSED, alphabet=alphabet, shapes=[shape], max_examples=300)
    assert message in str(caught.value)
    assert len(caught.value.reduced.spec.tokens) <= 4


@pytest.mark.parametrize("words", DEFECTS_OF_DEAD_CODE)
def test_torch_dead_code_removal_is_caught(words):
    with pytest.raises(Counterexample, match=DIFFER) as caught:
        check_pass(torch_dead_code, DEAD, alphabet=words.split(), max_examples=100)
    assert len(caught.value.reduced.spec.tokens) == 1


RIGHT = {
    "fuse": (torch_fuse, FUSED, "flatten|t01|conv|conv_k3 bn_small|conv_groups bn", [IMAGE]),
    "dead code": (torch_dead_code, DEAD, "dup t01 drop|dup relu_F drop|add|linear", SHAPES),
}


@rows("subject motif words shapes", RIGHT)
def test_a_tool_passes_where_it_is_right(subject, motif, words, shapes):
    alphabet = ("relu", motif, *words.split("|"))

    assert check_pass(subject, motif, alphabet=alphabet, shapes=shapes, max_examples=60) is None


@slow
def test_the_hunt_lists_distinct_defects_each_with_a_test():
    found = {target: _hunt.hunt(target, examples=40) for target in ("fx_fuse", "dead_code")}
    signatures = [each.signature for defects in found.values() for each in defects]

    assert len(signatures) == len(set(signatures)) >= 9
    assert {"TypeError · linear bn_plain", "wrong answer · mask_fill"} <= {*signatures}
    page = "\n".join(_hunt.listing("dead_code", found["dead_code"]))
    assert page.count("def test_counterexample") == len(found["dead_code"])
    assert "from tests.quality.hunt import Hunted" in page


@slow
@pytest.mark.parametrize("target", sorted({*_hunt.targets()} - {"fx_fuse", "dead_code"}))
def test_a_target_of_the_hunt_passes_where_it_is_right(target):
    subject, count = _hunt.Hunted(target), subjects.named(target).hunt.examples // 6
    motif = "dup tanh swap tanh add"

    assert check_pass(subject, motif, alphabet=("relu", "add", motif), max_examples=count) is None
