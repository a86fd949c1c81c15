"""Measure the structure of `library/`: file sizes, naming, configuration passing, pre-flight checks.

    python tests/architecture/code_metrics.py [CHECKOUT ...]

prints one column per checkout (this one by default), so that two revisions can be compared.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

VERBS = frozenset(
    """
    abort accept accumulate acquire activate add adjust advance aggregate agree align all allocate allow
    announce append apply arrange as assemble assert assign attach augment autocast average back backward
    balance batch begin bind block bound broadcast build bypass cache calculate call can cap capture cast center
    chain change check choose chunk claim clamp classify clean clear clip close collate collect combine compare
    compile compose compress compute concat concatenate configure confirm connect consume contain contains
    contract convert copy correct count cover create crop cut deactivate decide decode decompress dedupe default
    defer define delete dequantize derive describe deserialize destroy detach detect determine disable discard
    discover dispatch distribute divide does download downsample drain draw drop dump elect emit empty enable
    encode end enforce ensure enter enumerate escape estimate evaluate examine exchange exclude execute exit
    expand expect explain export extend extract fail fetch fill filter finalize find finish fit fix flatten flip
    flush fold follow force forget format forward free freeze fsync fuse gather generate get greet group grow
    guard guess handle has hash hide hint hold hook identify ignore import include indent index infer init
    initialize inject insert inspect install instantiate interleave interpolate interrupt invert is iter iterate
    join keep kill label launch lay leave limit link list load locate lock log look lower make map mark mask
    match matches materialize maybe measure median merge mirror mix monitor move multiply must name narrow needs
    normalize note notify observe offload open order overlay override pack pad parse partition patch pause
    perform permute persist pick pin place plan plot poll pop post predict prefetch prepare preserve prevent
    preview print prioritize probe process produce profile project promote propagate propose prune pull push put
    quantize queue quote raise rank rasterize reach read rebuild recompile recompute record recover reduce
    refresh refuse register reject release reload remap remember remove rename render reopen reorder repair
    repeat replace replicate report request requeue require requires reserve reset reshape reshard resize
    resolve restore resume retry return reuse reverse rewrite roll rotate round route run sample sanitize save
    scale scan scatter schedule search seed select send separate serialize set shard share shift should show
    shrink shuffle shut shutdown sign signal silence simulate size skip slice snapshot solve sort spawn split
    spread stack stage start step stop store stream strip submit subtract suggest sum summarize supports
    suppress suspend swap switch sync synchronize tag take terminate test tie time to tokenize touch trace track
    train transfer transform translate transpose traverse trim truncate try tune turn undo unflatten unfold
    unify uninstall unload unlock unpack unpin unquote unregister unscale unset unshard unwrap update upgrade
    upload upscale use uses validate vary verify visit wait walk want wants warm warmup warn watch weigh weight
    wrap write yield zero
    """.split()
)
"""First words that make a function name read as an instruction or a question (`is_`, `has_`, `should_`)."""

IRREGULAR = frozenset(
    """
    told kept dealt made built found held sent shown drawn chosen written left spread given taken seen known laid paid
    said met lost won gone done begun bound brought bought caught cut felt fit forgotten forgiven frozen grown heard
    hidden hit hung hurt led learnt lent let lit meant overrun proven put rewritten risen run shut sold spent split
    spoken stood struck stuck swept taught thought thrown torn understood unread woken worn within beside behind
    """.split()
) - {"cut", "fit", "run", "put", "split", "let", "hit", "shut", "spread", "left"}
NOT_PARTICIPLES = frozenset({"seed", "feed", "embed", "need", "exceed", "proceed", "shed", "speed", "bed", "unembed"})
PREPOSITIONS = frozenset({"of", "at", "by", "to", "in", "on", "as", "from", "with", "beside", "within", "behind"})

PREFLIGHT_MODULES = re.compile(
    r"(^|/)(validate\w*|preflight|refusals|checks)\.py$|dataset/(dataset_config|schema)\.py$"
    r"|config/(parser|options|loading|types|toml_positions|kohya_compat|kohya|network_args?|network_arg_types)\.py$"
    r"|^(errors|registry|cli)\.py$"
)
"""Modules that may refuse settings: the pre-flight lists, the parsers, and what they report with."""

PREFLIGHT_NAME = re.compile(
    r"^_?validate(_|$)|(^|_)(problems|conflicts|misfits?|refuse|rehearse|contradictions|misplaced)(_|$)"
)
"""The last ones are the words of version 0.1."""

FRAGMENT_STARTS = frozenset(
    """
    of for by from as at on in to with without inside into between per besides beside within beyond behind beginning
    before after until since up
    it its they them their those these such ours hers one's
    who whom whose
    none
    assumed called incremented independent returned refers shown stands tolerated written
    larger smaller further former others alternatively either
    """.split()
)
"""First words of docstrings that only its author can complete: prepositions ("Of the limit."), pronouns without what they
stand for ("Its name."), participles without a subject ("Shown first."), comparatives without what is compared."""

RELATIVES = frozenset({"what", "how", "where", "which", "why", "when"})
"""First words that make the docstring of a function a fragment: a function returns, lists or writes something."""

LIMITS: dict[str, tuple[float, float]] = {
    "files over 600 lines": (0, 0),
    "functions over 60 lines": (0, 0),
    "bare participles": (0, 0),
    "begin with a verb, %": (90, 100),
    "public names defined twice": (0, 0),
    "docstring fragments": (0, 0),
    "calls with six or more positional arguments": (0, 0),
    "knobs on the family interface": (0, 13),
}
"""The smallest and the largest value that `test_code_metrics.py` accepts; the other rows are printed, so that growth
is seen, and fail no build: a new file, option or check needs no change here."""


@dataclass(frozen=True)
class Docstring:
    """A docstring or the string below a field or constant, and where it begins."""

    file: str
    line: int
    text: str
    is_of_function: bool  # and not of a property

    @property
    def is_fragment(self) -> bool:
        """Whether its first sentence does not stand alone."""
        return is_fragment(self.text, is_of_function=self.is_of_function)


@dataclass(frozen=True)
class Function:
    """A function or method, and where it is defined."""

    file: str
    name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef
    is_property: bool


@cache
def list_nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Every node of a module, found once for all figures."""
    return tuple(ast.walk(tree))


def list_functions(file: str, tree: ast.Module) -> Iterator[Function]:
    """Every function and method of a module, nested ones included."""
    for node in list_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            decorators = {ast.unparse(item).split("(")[0].rpartition(".")[2] for item in node.decorator_list}
            yield Function(file, node.name, node, bool(decorators & {"property", "cached_property"}))


def list_docstrings(file: str, tree: ast.Module) -> Iterator[Docstring]:
    """Every docstring of a module, and every string below a field or constant."""
    properties = {item.node for item in list_functions(file, tree) if item.is_property}
    for node in list_nodes(tree):
        statements = getattr(node, "body", None)
        for statement in statements if isinstance(statements, list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and statement is node.body[0]
                yield Docstring(file, statement.lineno, value.value, is_function and node not in properties)


def is_fragment(text: str, *, is_of_function: bool = False) -> bool:
    """Whether the first sentence of a docstring is a fragment: see ``FRAGMENT_STARTS``; or ``this -> that`` in prose."""
    sentence = re.split(r"(?<=[.!?])\s", " ".join(text.split()), maxsplit=1)[0]
    words = re.findall(r"[\w'`-]+", sentence.lower())
    prose = re.sub(r"``[^`]*``", "", sentence)
    return (
        not words
        or words[0] in FRAGMENT_STARTS
        or words[:2] == ["the", "same"]
        or (is_of_function and words[0] in RELATIVES)
        or "->" in prose
        or "→" in prose
    )


def list_variadic_names(trees: Iterable[ast.Module]) -> set[str]:
    """Names of functions and classes that take any number of positional arguments, which cannot be keywords."""
    names = set()
    for tree in trees:
        for node in list_nodes(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.args.vararg is not None:
                names.add(node.name)
    return names


def has_many_positional_arguments(call: ast.Call, variadic_names: set[str]) -> bool:
    """Whether a call has six positional arguments or more, where keywords would say what they are.

    Messages with their values (``logger.info``), unpacked sequences and ``*args`` do not count.
    """
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    owner = getattr(call.func, "value", None)
    if name in variadic_names or getattr(owner, "id", "") == "logger":
        return False
    return sum(not isinstance(argument, ast.Starred) for argument in call.args) >= 6


def is_dunder(name: str) -> bool:
    """Whether Python itself calls it."""
    return name.startswith("__") and name.endswith("__")


def begins_with_verb(name: str) -> bool:
    """Whether the first word of a function name is an instruction or a question."""
    return name.strip("_").split("_")[0] in VERBS


def is_bare_participle(name: str) -> bool:
    """Whether a function name is a single participle or preposition: `told`, `kept`, `of`."""
    words = name.strip("_").split("_")
    if len(words) != 1 or words[0] in NOT_PARTICIPLES | VERBS:
        return False
    return words[0] in IRREGULAR | PREPOSITIONS or (words[0].endswith("ed") and len(words[0]) > 3)


def takes_run_config(function: Function) -> int:
    """How many parameters of a function are the whole `RunConfig`."""
    arguments = function.node.args
    annotations = [item.annotation for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return sum("RunConfig" in ast.unparse(item) for item in annotations if item is not None)


def refuses_settings(function: Function) -> bool:
    """Whether a function refuses what the user set: it raises `ConfigError`, or its name says so.

    `FileError`, for files that turn out to be damaged while they are read, does not count: no list can know that before.
    """
    raises = any(
        isinstance(node, ast.Raise) and node.exc is not None and "ConfigError" in ast.unparse(node.exc)
        for node in ast.walk(function.node)
    )
    return raises or bool(PREFLIGHT_NAME.search(function.name))


def count_public_duplicates(trees: dict[str, ast.Module]) -> int:
    """Public top-level functions and classes whose name is defined in more than one module."""
    names = Counter(
        node.name
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    )
    return sum(count > 1 for count in names.values())


COMPONENT_NAMES = frozenset({"vae", "text_encoder"})
"""Options that are called as the component of a pipeline that they replace; where one stands, it may be the latter."""


@dataclass(frozen=True)
class OptionTable:
    """A literal that names two or more options of training outside the schemas."""

    file: str
    line: int
    names: frozenset[str]
    is_constant: bool
    """Whether it is assigned at the top of a module or class."""

    @property
    def is_table(self) -> bool:
        """Whether it lists options: two that a check names together are a pair, not a table."""
        return self.is_constant or len(self.names) > 2


def list_option_names(trees: dict[str, ast.Module]) -> frozenset[str]:
    """The fields of ``config/schema*.py`` that are declared by ``define_option`` or a short form of it."""
    return frozenset(
        node.target.id
        for file, tree in trees.items()
        if file.startswith("config/schema")
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and _is_option(node.value)
    )


def _is_option(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func).lstrip("_").startswith("define_")


def list_option_tables(trees: dict[str, ast.Module]) -> list[OptionTable]:
    """Every outermost tuple, list, set, dict or split text with the names of two or more options of training."""
    options = list_option_names(trees) - COMPONENT_NAMES
    found: list[OptionTable] = []

    def visit(file: str, node: ast.AST, is_constant: bool) -> None:
        names = _collect_option_names(node, options)
        if len(names) > 1:
            found.append(OptionTable(file, getattr(node, "lineno", 0), names, is_constant))
            return
        is_constant = is_constant and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(file, child, is_constant)

    for file, tree in trees.items():
        if not file.startswith("config/schema"):
            visit(file, tree, is_constant=True)
    return found


def _collect_option_names(node: ast.AST, options: frozenset[str]) -> frozenset[str]:
    """The options that a literal names; keys and values of a dict alike."""
    if isinstance(node, ast.Constant):
        return frozenset({node.value} & options) if isinstance(node.value, str) else frozenset()
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "split":
        text = node.func.value
        is_text = isinstance(text, ast.Constant) and isinstance(text.value, str)
        return frozenset(text.value.split()) & options if is_text else frozenset()
    items: list[ast.AST | None] = []
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        items = [item.value if isinstance(item, ast.Starred) else item for item in node.elts]
    elif isinstance(node, ast.Dict):
        items = [*node.keys, *node.values]
    return frozenset(name for item in items if item is not None for name in _collect_option_names(item, options))


FAMILY_INTERFACE = {"models/facts.py": "FamilyFacts", "models/base.py": "Family"}
"""The module and class of what the author of a model family fills in: its facts, and its methods."""


def list_family_members(trees: dict[str, ast.Module]) -> list[ast.stmt]:
    """The fields, class variables and methods at the top level of the family interface."""
    return [
        member
        for file, name in FAMILY_INTERFACE.items()
        if file in trees
        for node in trees[file].body
        if isinstance(node, ast.ClassDef) and node.name == name
        for member in node.body
    ]


def measure(root: Path) -> dict[str, float]:
    """The table of one checkout."""
    paths = sorted((root / "library").rglob("*.py"))
    sources = {path.relative_to(root / "library").as_posix(): path.read_text(encoding="utf-8") for path in paths}
    trees = {file: ast.parse(source) for file, source in sources.items()}
    lines = {file: len(source.splitlines()) for file, source in sources.items()}
    functions = [item for file, tree in trees.items() for item in list_functions(file, tree)]
    named = [item for item in functions if not is_dunder(item.name)]
    folders = Counter(path.parent for path in paths if path.name != "__init__.py")
    skips = {name: _count_skips(root / name) for name in ("library", "tests")}
    outside = [item for item in named if not PREFLIGHT_MODULES.search(item.file)]
    variadic_names = list_variadic_names(trees.values())
    calls = [node for tree in trees.values() for node in list_nodes(tree) if isinstance(node, ast.Call)]
    docstrings = [item for file, tree in trees.items() for item in list_docstrings(file, tree)]
    family = list_family_members(trees)
    modules = [file for file in lines if not file.endswith(("__init__.py", "__main__.py"))]
    option_tables = list_option_tables(trees)
    return {
        "files": len(paths),
        "lines": sum(lines.values()),
        "files under 40 lines": sum(lines[file] < 40 for file in modules),
        "files under 60 lines": sum(lines[file] < 60 for file in modules),
        "files over 400 lines": sum(count > 400 for count in lines.values()),
        "files over 600 lines": sum(count > 600 for count in lines.values()),
        "folders over 20 files": sum(count > 20 for folder, count in folders.items() if folder.name != "families"),
        "functions": len(named),
        "functions over 60 lines": sum((f.node.end_lineno or 0) - f.node.lineno + 1 > 60 for f in functions),
        "bare participles": sum(is_bare_participle(item.name) for item in named),
        "begin with a verb, %": round(100 * sum(begins_with_verb(item.name) for item in named) / max(1, len(named)), 1),
        "public names defined twice": count_public_duplicates(trees),
        "RunConfig parameters": sum(takes_run_config(item) for item in functions),
        "docstring fragments": sum(item.is_fragment for item in docstrings),
        "calls with six or more positional arguments": sum(
            has_many_positional_arguments(call, variadic_names) for call in calls
        ),
        "knobs on the family interface": sum(isinstance(member, (ast.AnnAssign, ast.Assign)) for member in family),
        "methods of the family interface": sum(isinstance(member, ast.FunctionDef) for member in family),
        "fmt: skip in library": skips["library"],
        "fmt: skip in tests": skips["tests"],
        "pre-flight functions outside the list": sum(refuses_settings(item) for item in outside),
        "places that name several options": len(option_tables),
        "option tables outside the schemas": sum(table.is_table for table in option_tables),
    }


def _count_skips(folder: Path) -> int:
    mark = "# fmt: " + "skip"
    return sum(path.read_text(encoding="utf-8").count(mark) for path in folder.rglob("*.py"))


def main(folders: list[str]) -> None:
    """Print the table, a column for each checkout."""
    roots = [Path(folder).resolve() for folder in folders] or [ROOT]
    for root in roots:
        if not (root / "library").is_dir():
            sys.exit(f"{root}: no checkout of this project; it has no folder library")
    tables = [measure(root) for root in roots]
    width = max(len(name) for name in tables[0])
    for name in tables[0]:
        print(f"{name:{width}}", *(f"{table[name]:>10,}" for table in tables))


if __name__ == "__main__":
    main(sys.argv[1:])
