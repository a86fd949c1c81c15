"""The rules of the house, as a function from one module's source to what is wrong with it."""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import PurePosixPath

FLOORS: list[set[str]] = [
    {"errors", "registry", "randomness", "log", "atomic_files", "__init__"},
    {"config"},
    {"dataset", "diffusion"},
    {"data"},
    {"demo"},
    {"models", "adapters", "optim", "distributed"},
    {"parallel"},
    {"cache", "report"},
    {"training"},
    {"estimate"},
    {"tools", "cli", "__main__"},
]
"""A module imports from its own floor or from lower ones, never upwards."""

PEERS: list[set[str]] = [{"dataset", "diffusion"}, {"models", "adapters", "optim", "distributed"}, {"cache", "report"}]
"""Rooms of one floor that must not import each other."""

DOORS: dict[str, set[str]] = {
    "accelerate": {"distributed", "models", "parallel"},
    "argparse": {"config"},
    "deepspeed": {"distributed", "parallel"},
    "diffusers": {"models"},
    "filelock": {"training"},
    "huggingface_hub": {"cache", "models", "training"},
    "peft": {"adapters"},
    "psutil": {"distributed", "tools"},
    "pyarrow": {"dataset"},
    "toml": {"config"},
    "tomli": {"config"},
    "tomllib": {"config"},
    "torch.distributed": {"distributed", "parallel"},
    "transformers": {"models"},
    "tqdm": {"log"},
    "wandb": {"distributed"},
    "yaml": {"distributed"},
}
"""One third-party library, one door."""

SPEAKERS = {"cli"}
"""Who may print."""

DEVICE_ROOMS = {"distributed", "parallel"}
DEVICES = {"cuda", "cpu", "mps", "xpu", "npu", "hpu", "mlu"}
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60


def problems(path: PurePosixPath, source: str) -> list[str]:
    """What breaks the rules in the module at ``path`` below library/ (``data/buckets.py``)."""
    tree = ast.parse(source)
    found = []
    if len(source.splitlines()) > MAX_FILE_LINES:
        found.append(f"longer than {MAX_FILE_LINES} lines")
    if not ast.get_docstring(tree):
        found.append("no module docstring")
    if path.stem in FORBIDDEN_NAMES:
        found.append(f"a file called {path.stem}; name what it is")
    found += [f"line {node.lineno}: runs when imported" for node in tree.body if _acts(node)]
    for node in ast.walk(tree):
        found += [f"line {getattr(node, 'lineno', 1)}: {problem}" for problem in _of_node(node, path, tree)]
    return found


def room(path: PurePosixPath) -> str:
    """The part of the house: the top folder, or the file itself."""
    return path.with_suffix("").parts[0]


def module_name(path: PurePosixPath) -> str:
    return ".".join(("library", *path.with_suffix("").parts)).removesuffix(".__init__")


def circle(sources: Mapping[PurePosixPath, str]) -> list[str]:
    """Modules that import each other in a circle while they are imported, the first one twice; none if there is none.

    Without one each module's imports are complete before its own body runs, whichever module is the first.
    """
    names = {module_name(path) for path in sources}
    graph = {
        module_name(path): {*_imported_at_once(ast.parse(source), path, names)} for path, source in sources.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _imported_at_once(node: ast.AST, path: PurePosixPath, names: set[str]) -> Iterator[str]:
    """What is imported of this package when the module is, by name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom) and child.level:
            inside = path.parent.parts[: len(path.parent.parts) - child.level + 1]
            source = ".".join(("library", *inside, *(child.module or "").split("."))).rstrip(".")
            for alias in child.names:
                yield f"{source}.{alias.name}" if f"{source}.{alias.name}" in names else source
        elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
                yield from _imported_at_once(child, path, names)


def _of_node(node: ast.AST, path: PurePosixPath, tree: ast.Module) -> Iterator[str]:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from _imports(node, path)
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        if (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES:
            yield f"{node.name} is longer than {MAX_FUNCTION_LINES} lines"
        yield from (f"{node.name}: {name} keeps state in the module" for name in _caches(node))
    elif isinstance(node, ast.Global):
        yield "global"
    elif isinstance(node, ast.ExceptHandler) and node.type is None:
        yield "bare except"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
        if room(path) not in SPEAKERS:
            yield "print; use the module's logger, or return the text"
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "args":
        if isinstance(node.ctx, ast.Store):
            yield "writes to args; configuration is frozen"
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        if node.value.split(":")[0] in DEVICES and room(path) not in DEVICE_ROOMS:
            yield f"device name {node.value!r}; ask the accelerator for its device"
    if isinstance(node, ast.Attribute) and node.attr in DEVICES and room(path) not in DEVICE_ROOMS:
        if isinstance(node.value, ast.Name) and node.value.id == "torch":
            yield f"torch.{node.attr}; ask the accelerator for its device"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
        yield ".cuda(); use .to(device)"
    if isinstance(node, ast.Assign) and node in tree.body:
        yield from (f"{name} is changeable and belongs to the module" for name in _changeable(node))


def _imports(node: ast.Import | ast.ImportFrom, path: PurePosixPath) -> Iterator[str]:
    here = room(path)
    if isinstance(node, ast.ImportFrom) and node.level:
        base = [*path.parent.parts[: len(path.parent.parts) - node.level + 1], *(node.module or "").split(".")]
        base = [part for part in base if part]
        if node.level - 1 > len(path.parent.parts):
            yield "imports from above the package"
        for target in {base[0]} if base else {alias.name for alias in node.names}:
            if _floor(target) > _floor(here):
                yield f"imports upwards: {here} -> {target}"
            if target != here and any({target, here} <= peers for peers in PEERS):
                yield f"imports a peer: {here} -> {target}"
        return
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        names += [f"{node.module}.{alias.name}" for alias in node.names]
    for name in names:
        if name.split(".")[0] == "library":
            yield "imports its own package by name; write it relative"
        if name.split(".")[0] in ("benchmarks", "scripts"):
            yield f"{name} is not part of the package"
    for door, rooms in DOORS.items():
        if any(name == door or name.startswith(f"{door}.") for name in names) and here not in rooms:
            yield f"{door} may be imported only in {', '.join(sorted(rooms))}"


def _floor(name: str) -> int:
    for number, rooms in enumerate(FLOORS):
        if name in rooms:
            return number
    if name.startswith("__"):
        return 0
    raise AssertionError(
        f"library/{name} is on no floor; give it one in tests/support/house_rules.py and docs/architecture.md"
    )


def _acts(node: ast.stmt) -> bool:
    """Whether a top-level statement does more than to define."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    if isinstance(node, ast.If):
        test = ast.unparse(node.test)
        return test not in ("TYPE_CHECKING", "__name__ == '__main__'") and "sys.version_info" not in test
    if isinstance(node, ast.Try):
        return not all(isinstance(item, (ast.Import, ast.ImportFrom)) for item in node.body)
    return isinstance(node, (ast.For, ast.While, ast.With, ast.AugAssign, ast.Delete))


def _caches(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for decorator in node.decorator_list:
        text = ast.unparse(decorator)
        if text.split("(")[0].rpartition(".")[2] in ("cache", "lru_cache"):
            yield text


def _changeable(node: ast.Assign) -> Iterator[str]:
    """Lists, dicts and sets under a name that is not written as a constant."""
    for target in node.targets:
        if isinstance(target, ast.Name) and isinstance(node.value, (ast.List, ast.Dict, ast.Set)):
            if not target.id.strip("_").isupper() and target.id != "__all__":
                yield target.id
