"""Which modules of a model are its layers, and what is done with each.

A layer is the unit that is swapped, recomputed or kept. Layers are found by themselves or named by patterns;
a policy then gives each one a word. Everything here looks at a model once and changes nothing; it holds no
state, and knows a framework only by its `Kind`. "Module" stands for what a framework calls so: a `Cell` in MindSpore.

**The rule by which layers are found.** A *container* is a `torch.nn.ModuleList` or `torch.nn.Sequential`, a
`mindspore.nn.CellList` or `mindspore.nn.SequentialCell`.
Children of one container that have parameters and share their class with another child of it are *repeated*.
A repeated child is a layer, and nothing below it is looked at, so the outermost ones count. Two refinements:
a repeated child that is itself a plain container (the stages of a ResNet) is looked into first and is a layer
only if nothing is found inside; a repeated child without children of its own (the `Linear`s of a small head)
is a layer only if the model has nothing larger that is repeated. All containers count: the layers of an
encoder come first, then those of its decoder.

**Patterns** name modules as `model.named_modules()` or `cell.cells_and_names()` does. `*`, `?` and `[…]` stand
within one part between two dots, so `"blocks.*"` is every block and not what is inside; `**` stands for any number
of parts.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, cast, get_args

from ebbtide.errors import SettingError

Word = Literal["swap", "keep", "recompute"]
Policy = Word | Mapping[str, Word]
WORDS: tuple[str, ...] = get_args(Word)


@dataclass(frozen=True)
class Kind:
    """How the modules of a framework are walked, and what its texts call them."""

    named: Callable[[Any], Mapping[str, Any]]  # all of a model, each once, by name
    children: Callable[[Any], Iterator[tuple[str, Any]]]
    has_parameters: Callable[[Any], bool]
    containers: tuple[type, ...]
    class_of: Callable[[Any], type]
    containers_text: str
    names_text: str
    instead: str  # of layers, to swap any code


@dataclass(frozen=True)
class Layer:
    """A module of the model that is treated as one."""

    name: str
    module: Any
    word: Word


def plan(
    kind: Kind,
    model: Any,
    policy: Policy,
    layers: Sequence[str] | None,
    include: Sequence[str],
    exclude: Sequence[str],
) -> list[Layer]:
    """The layers of `model` in the order of their registration, each with its word.

    Raises `SettingError` for a policy or pattern that is wrong or matches nothing, and for layers inside of
    each other.
    """
    known = kind.named(model)
    names = _named(kind, known, layers) if layers is not None else find_layers(kind, model)
    names = _with_policy_names(kind, known, names, policy)
    if not names:
        raise SettingError(
            f"{type(model).__name__} has no repeated blocks in {kind.containers_text}",
            f'name its layers by patterns, layers=["encoder", "blocks.*"], or use `with {kind.instead}:`',
        )
    _refuse_nested(kind, known, names)
    words = _words(kind, known, names, policy)
    chosen = set(select(kind, names, include, "include")) if include else set(names)
    chosen -= set(select(kind, names, exclude, "exclude"))
    planned = [Layer(n, known[n], words[n] if n in chosen else "keep") for n in names]
    _refuse_all_left_out(planned, words)
    _refuse_no_effect(planned, policy)
    return planned


# ---- finding


def find_layers(kind: Kind, model: Any) -> list[str]:
    """Names of the repeated blocks of `model`, by the rule at the top of this module; maybe none."""
    return _blocks(kind, model, "", leaves=False) or _blocks(kind, model, "", leaves=True)


def _blocks(kind: Kind, module: Any, prefix: str, *, leaves: bool) -> list[str]:
    repeated = _repeated(kind, module)
    found: list[str] = []
    for name, child in kind.children(module):
        full = prefix + name
        if id(child) not in repeated:
            found += _blocks(kind, child, full + ".", leaves=leaves)
        elif type(child) in kind.containers:
            found += _blocks(kind, child, full + ".", leaves=leaves) or [full]
        elif leaves or next(kind.children(child), None) is not None:
            found.append(full)
    return found


def _repeated(kind: Kind, module: Any) -> set[int]:
    """Children of a container, by identity, that have parameters and whose class occurs at least twice in it."""
    if not isinstance(module, kind.containers):
        return set()
    children = [child for child in cast(Iterable[Any], module) if kind.has_parameters(child)]
    counts = Counter(kind.class_of(child) for child in children)
    return {id(child) for child in children if counts[kind.class_of(child)] >= 2}


# ---- naming


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern (see the top of this module) matches the whole of a module's name."""
    return _parts_match(pattern.split("."), name.split("."))


def _parts_match(pattern: list[str], name: list[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_parts_match(pattern[1:], name[i:]) for i in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _parts_match(pattern[1:], name[1:])


def select(kind: Kind, names: Iterable[str], patterns: Sequence[str], what: str) -> list[str]:
    """Those of `names` that one of the patterns matches, in their order.

    Raises:
        SettingError: A pattern matches none of them.
    """
    names = [name for name in names if name]
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            raise SettingError(
                f"the pattern {pattern!r} of {what} matches none of {_some(names)}", _nearest(kind, pattern, names)
            )
    return [name for name in names if any(matches(pattern, name) for pattern in patterns)]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return f"{shown} … ({len(names)} names)" if len(names) > 4 else shown or "no names at all"


def _nearest(kind: Kind, pattern: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    stars = "* stands within one part between dots, ** for any number of parts"
    return f"{meant}names are those of {kind.names_text}; {stars}"


def _named(kind: Kind, known: Mapping[str, Any], patterns: Sequence[str]) -> list[str]:
    if not patterns:
        raise SettingError("layers=[] names no layer", "leave layers= out to have them found, or name patterns")
    return select(kind, known, patterns, "layers=")


def _with_policy_names(kind: Kind, known: Mapping[str, Any], names: list[str], policy: Policy) -> list[str]:
    """The layers, and the modules that patterns of the policy name besides them, which win over those they touch."""
    if not isinstance(policy, Mapping):
        return names
    strange = [p for p in policy if isinstance(p, str) and not any(matches(p, name) for name in names)]
    named = select(kind, known, strange, "policy")
    wanted = {*named, *(name for name in names if not any(_touch(name, other) for other in named))}
    return [name for name in known if name in wanted]


def _touch(one: str, other: str) -> bool:
    """Whether one of two modules is inside of the other, by their names."""
    return (one + ".").startswith(other + ".") or (other + ".").startswith(one + ".")


def _refuse_nested(kind: Kind, known: Mapping[str, Any], names: Sequence[str]) -> None:
    layer_of = {id(known[name]): name for name in names}
    for name in names:
        inside = (module for module in kind.named(known[name]).values() if module is not known[name])
        for module in inside:
            if id(module) in layer_of:
                raise SettingError(
                    f"the layer {layer_of[id(module)]} is inside of the layer {name}",
                    "name one of the two: a layer's tensors are moved together",
                )


# ---- words


def _words(kind: Kind, known: Mapping[str, Any], names: Sequence[str], policy: Policy) -> dict[str, Word]:
    if isinstance(policy, Mapping):
        return _words_by_pattern(kind, names, policy)
    word = check_word(policy)
    words = dict.fromkeys(names, word)
    if not _used_again(kind, known, names[-1]):
        words[names[-1]] = "keep"
    return words


def _words_by_pattern(kind: Kind, names: Sequence[str], policy: Mapping[str, Word]) -> dict[str, Word]:
    if not policy:
        raise SettingError("policy={} decides nothing", 'say policy="swap", or {pattern: word}')
    words: dict[str, Word] = dict.fromkeys(names, "keep")
    decided_by: dict[str, str] = {}
    for pattern, word in policy.items():
        if not isinstance(pattern, str):
            raise SettingError(f"{pattern!r} is no pattern", "the keys of a policy are texts such as 'blocks.*'")
        for name in select(kind, names, [pattern], "policy"):
            words[name], decided_by[name] = check_word(word), pattern
    for pattern in policy:
        if pattern not in decided_by.values():
            raise SettingError(
                f"the pattern {pattern!r} of policy decides nothing: the ones after it match all that it matches",
                "the last pattern that matches a layer decides, so put the special ones last",
            )
    return words


def _refuse_all_left_out(planned: Sequence[Layer], words: Mapping[str, Word]) -> None:
    """What include and exclude leave of a policy must not be nothing."""
    wanted = [name for name, word in words.items() if word != "keep"]
    if wanted and all(layer.word == "keep" for layer in planned):
        raise SettingError(
            f"the policy would have no effect: include= and exclude= leave out all that it names, {_some(wanted)}",
            'leave out less, or say policy="keep"',
        )


def _refuse_no_effect(planned: Sequence[Layer], policy: Policy) -> None:
    """A single word that ends up with every layer kept was meant otherwise."""
    if isinstance(policy, Mapping) or policy == "keep" or any(layer.word != "keep" for layer in planned):
        return
    last = planned[-1].name
    raise SettingError(
        f"policy={policy!r} would have no effect: the last layer ({last}) is kept, since its backward comes next, "
        f"and there is no other among {len(planned)}",
        f"name what you mean by a pattern: policy={{{last!r}: {policy!r}}}",
    )


def _used_again(kind: Kind, known: Mapping[str, Any], name: str) -> bool:
    """Whether a container lists this very module more than once, so that its last call isn't its only one."""
    layer = known[name]
    containers = (module for module in known.values() if isinstance(module, kind.containers))
    return any(sum(child is layer for child in cast(Iterable[Any], each)) >= 2 for each in containers)


def check_word(word: object) -> Word:
    """The word of a policy, or `SettingError`."""
    if not isinstance(word, str) or word not in WORDS:
        near = difflib.get_close_matches(str(word), WORDS, n=1)
        said = f"did you mean {near[0]!r}? " if near else ""
        raise SettingError(
            f"{word!r} is no policy", f'{said}say "swap", "keep" or "recompute", or {{pattern: one of them}}'
        )
    return cast(Word, word)
