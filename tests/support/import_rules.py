"""Rules for the modules of `library/`: layers, third-party imports, size, no state, no work on import."""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import PurePosixPath

LAYERS: list[set[str]] = [
    {"errors", "problems", "registry", "name_suggestions", "randomness", "log", "atomic_files", "__init__"},
    {"config", "storage"},
    {"dataset", "diffusion"},
    {"dataloader", "trackers"},
    {"demo", "captioning"},
    {"adapters", "optim", "distributed"},
    {"models"},
    {"parallel"},
    {"cache", "report"},
    {"evaluation"},
    {"training"},
    {"estimate"},
    {"tools", "web", "cli", "__main__"},
]
"""A module imports from its own layer or from lower ones, never upwards."""

PEERS: list[set[str]] = [
    {"config", "storage"},
    {"dataset", "diffusion"},
    {"adapters", "optim", "distributed"},
    {"cache", "report"},
]
"""Packages of one layer that must not import each other."""

ENTRY_POINTS: dict[str, set[str]] = {
    "accelerate": {"distributed", "models", "parallel"},
    "argparse": {"config"},
    "av": {"dataset"},
    "deepspeed": {"distributed", "parallel"},
    "diffusers": {"models"},
    "filelock": {"storage", "training"},
    "fsspec": {"storage"},
    "jinja2": {"report"},
    "huggingface_hub": {"cache", "captioning", "models", "training"},
    "peft": {"adapters"},
    "psutil": {"distributed", "tools", "web"},
    "pyarrow": {"dataset"},
    "toml": {"config"},
    "tomli": {"config"},
    "tomllib": {"config"},
    "torch.distributed": {"distributed", "parallel"},
    "onnxruntime": {"captioning"},
    "transformers": {"captioning", "models"},
    "starlette": {"web", "tools"},
    "tqdm": {"log"},
    "uvicorn": {"tools"},
    "wandb": {"trackers"},
    "yaml": {"dataset", "distributed", "tools"},
}
"""Third-party library -> the packages that may import it."""

DECLARATION_CACHES = {"_list_group_options", "_read_bundled_names", "_read_pipeline_class"}
"""Functions that may remember what they return: facts of the package's own declarations and files, of no run."""

PRINTING_PACKAGES = {"cli"}
"""Modules that may print."""

DEVICE_PACKAGES = {"distributed", "parallel"}
DEVICES = {"cuda", "cpu", "mps", "xpu", "npu", "hpu", "mlu"}
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 600, 60


def find_violations(path: PurePosixPath, source: str) -> list[str]:
    """What breaks the rules in the module at ``path`` below `library/` (``dataloader/buckets.py``)."""
    tree = ast.parse(source)
    found = []
    if len(source.splitlines()) > MAX_FILE_LINES:
        found.append(f"longer than {MAX_FILE_LINES} lines")
    if not ast.get_docstring(tree):
        found.append("no module docstring")
    if path.stem in FORBIDDEN_NAMES:
        found.append(f"a file called {path.stem}; name what it is")
    found += [f"line {node.lineno}: runs when imported" for node in tree.body if _runs_on_import(node)]
    for node in ast.walk(tree):
        found += [f"line {getattr(node, 'lineno', 1)}: {problem}" for problem in _check_node(node, path, tree)]
    return found


def get_package(path: PurePosixPath) -> str:
    """The top folder, or the module itself."""
    return path.with_suffix("").parts[0]


def get_module_name(path: PurePosixPath) -> str:
    return ".".join(("library", *path.with_suffix("").parts)).removesuffix(".__init__")


def find_import_cycle(sources: Mapping[PurePosixPath, str]) -> list[str]:
    """An import cycle as a list of modules, the first one twice; empty if there is none.

    Without cycles any module can be imported first.
    """
    names = {get_module_name(path) for path in sources}
    graph = {
        get_module_name(path): {*_list_module_imports(ast.parse(source), path, names)}
        for path, source in sources.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _list_module_imports(node: ast.AST, path: PurePosixPath, names: set[str]) -> Iterator[str]:
    """Modules of this package that are imported together with this one."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom) and child.level:
            inside = path.parent.parts[: len(path.parent.parts) - child.level + 1]
            source = ".".join(("library", *inside, *(child.module or "").split("."))).rstrip(".")
            for alias in child.names:
                yield f"{source}.{alias.name}" if f"{source}.{alias.name}" in names else source
        elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
                yield from _list_module_imports(child, path, names)


def _check_node(node: ast.AST, path: PurePosixPath, tree: ast.Module) -> Iterator[str]:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from _check_import(node, path)
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        if (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES:
            yield f"{node.name} is longer than {MAX_FUNCTION_LINES} lines"
        if node.name not in DECLARATION_CACHES:
            yield from (f"{node.name}: {name} keeps state in the module" for name in _list_cache_decorators(node))
    elif isinstance(node, ast.Global):
        yield "global"
    elif isinstance(node, ast.ExceptHandler) and node.type is None:
        yield "bare except"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
        if get_package(path) not in PRINTING_PACKAGES:
            yield "print; use the module's logger, or return the text"
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "args":
        if isinstance(node.ctx, ast.Store):
            yield "writes to args; configuration is frozen"
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        if node.value.split(":")[0] in DEVICES and get_package(path) not in DEVICE_PACKAGES:
            yield f"device name {node.value!r}; ask the accelerator for its device"
    if isinstance(node, ast.Attribute) and node.attr in DEVICES and get_package(path) not in DEVICE_PACKAGES:
        if isinstance(node.value, ast.Name) and node.value.id == "torch":
            yield f"torch.{node.attr}; ask the accelerator for its device"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
        yield ".cuda(); use .to(device)"
    if isinstance(node, ast.Assign) and node in tree.body:
        yield from (f"{name} is mutable module state" for name in _list_mutable_globals(node))


def _check_import(node: ast.Import | ast.ImportFrom, path: PurePosixPath) -> Iterator[str]:
    here = get_package(path)
    if isinstance(node, ast.ImportFrom) and node.level:
        base = [*path.parent.parts[: len(path.parent.parts) - node.level + 1], *(node.module or "").split(".")]
        base = [part for part in base if part]
        if node.level - 1 > len(path.parent.parts):
            yield "imports from outside the package"
        for target in {base[0]} if base else {alias.name for alias in node.names}:
            if _get_layer(target) > _get_layer(here):
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
    for library, packages in ENTRY_POINTS.items():
        if any(name == library or name.startswith(f"{library}.") for name in names) and here not in packages:
            yield f"{library} may be imported only in {', '.join(sorted(packages))}"


def _get_layer(name: str) -> int:
    for number, packages in enumerate(LAYERS):
        if name in packages:
            return number
    if name.startswith("__"):
        return 0
    raise AssertionError(
        f"library/{name} is in no layer; give it one in tests/support/import_rules.py and docs/architecture.md"
    )


def _runs_on_import(node: ast.stmt) -> bool:
    """Whether a top-level statement does more than define."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    if isinstance(node, ast.If):
        test = ast.unparse(node.test)
        return test not in ("TYPE_CHECKING", "__name__ == '__main__'") and "sys.version_info" not in test
    if isinstance(node, ast.Try):
        return not all(isinstance(item, (ast.Import, ast.ImportFrom)) for item in node.body)
    return isinstance(node, (ast.For, ast.While, ast.With, ast.AugAssign, ast.Delete))


def _list_cache_decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for decorator in node.decorator_list:
        text = ast.unparse(decorator)
        if text.split("(")[0].rpartition(".")[2] in ("cache", "lru_cache"):
            yield text


def _list_mutable_globals(node: ast.Assign) -> Iterator[str]:
    """Lists, dicts and sets under a name that is not a constant's."""
    for target in node.targets:
        if isinstance(target, ast.Name) and isinstance(node.value, (ast.List, ast.Dict, ast.Set)):
            if not target.id.strip("_").isupper() and target.id != "__all__":
                yield target.id
