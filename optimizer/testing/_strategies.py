"""Hypothesis strategies for generated models. Drawing touches no tensor: a `Spec` is words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from itertools import chain
from operator import itemgetter
from random import Random
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from optimizer.testing._assemble import Entry, Spec
from optimizer.testing._data import LAYOUTS
from optimizer.testing._machine import Shape
from optimizer.testing._tokens import FAMILIES, TOKENS
from optimizer.testing.motifs import INTERRUPTIONS, MOTIFS, Motif, words

# Equal sizes turn crashes into silent errors, distinct ones show wrong shapes: both are needed.
SHAPES: tuple[Shape, ...] = (
    (2, 3), (3, 3), (2, 3, 3), (4, 4, 4), (2, 3, 5), (2, 4, 4, 4), (3, 3, 3, 3), (2, 3, 5, 7),
    (2, 2, 3, 3, 3), (1, 4), (0, 3), (5,), (7, 5), (2, 1, 3), (1, 1, 1, 1), (2, 0, 3),
    (0, 4, 3, 3),
)  # fmt: skip

# The vocabularies that a model without an alphabet of its own may be written in.
SWARMS = range(1024)
# What is done between two readings of a value.
WRITES = (
    "idouble_statement", "write_read", "write_layer", "write_bias", "arg idouble_statement drop",
    "recall idouble_statement drop", "dup contiguous iview_statement drop", "out_weight",
    "dup relu_inplace hook drop",
)  # fmt: skip
# What stand-ins do not record: Dynamo does, which takes a second a model.
NOT_RECORDED = frozenset((
    "linear_opaque", "linear_grandchild", "squeeze_inplace", "transpose_inplace",
    "swapaxes_inplace", "swapdims_inplace", "t_inplace", "resize_inplace", "resize_as_inplace",
    "set_inplace", "as_strided_inplace", "kept_attribute", "kept_global", "kept_list",
    "kept_tuple", "kept_dict", "kept_bytes", "kept_array", "kept_class", "kept_function",
    "kept_default", "kept_keyword", "kept_nonlocal", "kept_random", "kept_numpy",
    "py_hides_written", "py_cached", "py_asks_rank", "py_asks_modes", "py_swallows", "py_loops",
    "py_keeps_value", "py_seeds", "py_generator", "py_forks", "py_puts_back",
    "py_without_gradients", "py_writes_weight", "py_autocasts", "py_shared", "py_exchanged",
    "py_replaced", "py_trains_within", "py_norm_trains_within", "py_asks_type", "py_asks_dtype",
    "decorated", "more", "attention_alone", "unknown_py_hides_written", "unknown_py_keeps_value",
    "unknown_py_seeds",
))  # fmt: skip
# Views that lie below the top, to be returned, or that nothing reads.
HELD = (
    "dup t01 swap", "dup flatten swap", "dup none_first swap", "dup t01 drop", "dup t12 out drop",
    "dup dup reshape_as swap",
)  # fmt: skip
# How a value is computed otherwise: with another number, of values computed anew, by functions.
OTHERWISE = ("otherwise", "anew", "another")
# What a program begins with: it reads what is there, or a value of the model's own shape.
FRESH: tuple[tuple[str, ...], ...] = ((), (), ("arg",), ("first",))
# What two branches of a model meet in.
JOINS = ("add", "mul", "sub", "maximum", "cat", "out", "reshape_as", "shape_as")

# NaNs and infinities hide what else is wrong with a model: they are asked for by name.
FINITE = ("dyadic", "random", "ill", "neutral")
# All but what expands one row, which nothing may write to.
WRITABLE = tuple(layout for layout in LAYOUTS if layout != "expanded")


def models(
    *,
    alphabet: Iterable[str] | None = None,
    focus: str | None = None,
    shapes: Iterable[Shape] = SHAPES,
    regimes: Iterable[str] = FINITE,
    layouts: Iterable[str] = WRITABLE,
    entries: Iterable[Entry] = ("module", "graph"),
    max_size: int = 16,
) -> st.SearchStrategy[Spec]:
    """Generated models, as `Spec`s: build the module in the body of the test.

    Args:
        alphabet: programs, each a token or several separated by spaces, that the model is made
            of; by default each model draws one of `SWARMS`.
        focus: name of a pass, or "capture", that they are to be about, see `swarm`; any by default.
        shapes: of the input; with a `focus`, by default also that of its motif, and that often.
        regimes: of the data; those that are finite by default.
        layouts: of the inputs; those that may be written to by default.
        entries: "module", "graph" or both: see `Spec`.
        max_size: the largest number of choices from the alphabet.

    Raises:
        InputError: a word is no token; the message names the nearest.
        KeyError: no motif is known for `focus`.
        ValueError: one of them is empty.
    """
    if focus in MOTIFS and shapes is SHAPES:  # a third of them: its own
        shapes = [*SHAPES, *[MOTIFS[focus].shape] * (len(SHAPES) // 2)]
    pieces = None if alphabet is None else list(alphabet)
    others = [[*each] for each in (shapes, regimes, layouts, entries)]
    if not all([pieces is None or pieces, *others]):
        raise ValueError("each of what is chosen from must name at least one choice.")
    for program in pieces or ():
        words(program)
    shape, regime, layout, entry = map(st.sampled_from, others)

    def programs(choices: list[str]) -> st.SearchStrategy[list[str]]:
        """Two lists in a row: Hypothesis makes one of six on average, however long it may be."""
        halves = (max_size - max_size // 2, max_size // 2)
        two = [st.lists(st.sampled_from(choices), max_size=most) for most in halves]
        return st.tuples(*two).map(lambda both: [*chain(*both)] or choices[:1])

    swarms = st.sampled_from(SWARMS).flatmap(lambda number: programs(swarm(focus, number)))
    drawn = swarms if pieces is None else programs(pieces)
    tokens = drawn.map(lambda program: words(" ".join(program)))
    return _novel(st.builds(Spec, tokens, shape, regime, st.integers(0, 7), layout, entry))


def _novel(specs: st.SearchStrategy[Spec]) -> st.SearchStrategy[Spec]:
    """The same, each example drawn anew.

    Else five of six are a copy of the one before with one choice in the place of another, be it
    a word in that of a shape: of 336 words, 500 models had 275, and 142 models the first shape.
    Hypothesis leaves alone what stands in a list of distinct elements.
    """
    return st.lists(specs, min_size=1, max_size=1, unique=True).map(itemgetter(0))


def on_each(
    examples: st.SearchStrategy[Any], count: int, *, number: int = 0, shrink: bool = False
) -> Callable[[Callable[[Any], None]], None]:
    """Call what is decorated on so many examples, others for another number, now."""
    options = settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow],
    )
    return lambda body: options(seed(number)(given(examples)(body)))()


def modules(**choices: Any) -> st.SearchStrategy[Spec]:
    """As `models`, each an nn.Module with a readable forward."""
    return models(**choices, entries=["module"])


def graphs(**choices: Any) -> st.SearchStrategy[Spec]:
    """As `models`, each a GraphModule that was built node by node."""
    return models(**choices, entries=["graph"])


@cache
def swarm(focus: str | None, number: int) -> list[str]:
    """The vocabulary of some models: a random part of what there is, other for another number.

    A model that has some of each family seldom has two words that meet; one with few of them
    does (Groce et al., Swarm Testing, ISSTA 2012). There stand half of the words of the motif and
    its near misses, a few others, and both as programs that were changed three times at most: a
    word was put in or replaced, or two branches, often alike, were made of a part and meet, or a
    value is computed twice, often with a write in between, a call is spelled otherwise, a view is
    held, or a layer is called on something else too.

    Args:
        focus: name of the pass whose motif it is; else every second has that of any pass.
        number: of the vocabulary; the same gives the same. Without a focus, one of 32 has a word
            that is `NOT_RECORDED`, about "capture" one of 4: one alone, as each hides the others.
    """
    random = Random(f"{focus} {number}")
    motif = Motif(fires=tuple(random.sample(list(TOKENS), 16)))
    if focus in MOTIFS or random.random() < 0.5:
        motif = MOTIFS[focus if focus in MOTIFS else random.choice(list(MOTIFS))]

    def half(choices: Iterable[str]) -> list[str]:
        kept = [*choices]
        return [each for each in kept if random.random() < 0.5] or kept[:1]

    def another(program: list[str]) -> list[str]:
        """The same with a word of its kin in the place of one."""
        place = random.randrange(max(1, len(program)))
        others = [random.choice(kin(each)) for each in program[place : place + 1]]
        return [*program[:place], *others, *program[place + 1 :]]

    def changed(program: list[str]) -> list[str]:
        """The same with one word more, with another one, or with something else around a part."""
        start, end = sorted(random.choices(range(len(program) + 1), k=2))
        before, part, after = program[:start], program[start:end], program[end:]
        deed = random.choice([*WRITES, random.choice(planted)]).split()
        word, join = random.choice(random.choice([own, planted])), random.choice(JOINS)
        second = random.choice([part, another(part), ["again"], ["again", word]])
        held = " ".join(random.choices(HELD, k=random.choice((1, 2)))).split()
        return random.choice(
            [
                *[[*before, word, *program[start:]], another(program), another(program)] * 2,
                [*before, "dup", *part, "swap", *deed, "swap", *after],
                [*before, "dup", *part, "swap", *deed, *second, join, *after],
                [*before, "dup", *part, "swap", *second, join, *after],
                [*before, "dup", *part, *deed, join, *after],
                [*before, *part, *deed, "recompute", join, *after],
                [*before, *part, f"recompute_{random.choice(OTHERWISE)}", join, *after],
                [*before, word, *deed, "recompute", join, *part, *after],
                [*before, *part, random.choice([*FAMILIES["keyword"]]), *after],
                [*before, *part, *held, *after],
                [*before, *part, random.choice(["arg", "recall"]), "again", *after],
            ]
        )

    own = half(dict.fromkeys(w for p in (*motif.fires, *motif.near) for w in p.split()))
    near = [each for each in FAMILIES.values() if not each.keys().isdisjoint(own)]
    family = list(random.choice(random.choice([near, list(FAMILIES.values())])))
    others = random.sample(family, min(6, len(family))) + random.sample(list(TOKENS), 4)
    planted = [*own, *others, *random.sample(list(FAMILIES["control"]), 4), *half(INTERRUPTIONS)]
    programs = [*half(motif.fires) * 2]
    for changes in (0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3):
        program = random.choice(random.choice([motif.fires, motif.near or motif.fires])).split()
        for _ in range(changes):
            program = changed(program)
        programs.append(" ".join([*random.choice(FRESH), *program]))
    share = {None: 32, "capture": 4}.get(focus, 0)
    alone = sorted(NOT_RECORDED)[number // (share or 1) % len(NOT_RECORDED)]
    few = [alone] * 16 if share and number % share == 0 else []
    every = planted + programs
    return [each for each in every if NOT_RECORDED.isdisjoint(each.split())] + few or every


@cache
def kin(word: str) -> list[str]:
    """The words that begin as one does: the same layer or operation, set or spelled otherwise."""
    start = word.partition("_")[0]
    return [each for each in TOKENS if each.partition("_")[0] == start] or [word]


def around(motif: Motif) -> list[str]:
    """A motif, its near misses, and the words of the families that its own belong to."""
    own = {token for program in motif.fires for token in words(program)}
    near = [family for family in FAMILIES.values() if own & set(family)]
    tokens = list(dict.fromkeys(chain(*near, FAMILIES["control"])))
    thirds = [*motif.fires, *motif.near], list(motif.interrupted())
    return tokens + [p for third in thirds for p in third * max(1, len(tokens) // len(third))]
