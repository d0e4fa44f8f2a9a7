"""Arrows go one way: scripts -> bi_jax -> models -> pallas_kernels -> jax."""

import ast
import graphlib

import pytest

from tests import source_tree
from tests.source_tree import ROOT, import_graph, imports, modules

LAYERS = ("bi_jax.pallas_kernels", "bi_jax.models", "bi_jax")

# Inside a folder, from low to high; a module may import those before it. Modules that are not named
# here may stand anywhere as long as there is no circle.
ORDER = {
    "bi_jax.pallas_kernels": (
        *("contracts", "ragged", "pages", "rounding", "primitive", "differentiable"),
        *("fixed_rows", "lanes", "lanes_backward", "row_sums", "float_order", "vocab_blocks"),
        *("embedding", "merge", "matmul", "rms_norm", "rope", "attention"),
        *("log_softmax", "sampling"),
    ),
    "bi_jax.models": (
        *("axes", "cast", "config", "rope", "ops", "layers", "mlp", "attention", "transformer"),
        *("families", "checkpoint"),
    ),
    "bi_jax": (
        *("whole_file", "flag_table", "flags", "versions", "identity", "identity_file", "config"),
        *("sampling_params", "request", "page_pool", "prefix_cache", "scheduler", "metrics"),
        *("collectives", "kv_cache", "ops", "stock_ops", "sampling_rows", "sampling", "batch"),
        *("tokenizer_parts", "chat", "tokenizer_gguf", "tokenizer_folder", "tokenizer"),
        *("detokenize", "stop"),
        *("audit_rules", "audit_report", "audit_hlo", "audit_jaxpr", "audit_program"),
        *("program_store", "audited"),
        *("token_layout", "gradient_sum", "trainer_logprobs", "scoring"),
        *("runner", "active", "progress", "engine", "check", "battery"),
        *("certificate", "certificate_page", "certify_engine", "prompts_file", "output_file"),
        *("generate_command", "certify_command", "cli"),
    ),
}
# The ops that may lean on another. One Hopper kernel draws a token and scores it in one launch, in
# the order of additions that log_softmax states, and so has to call the same functions. The five
# products of attention's backward pass on Hopper are launches of the matmul kernel. A product in
# segments ends in the merge.
LEANS_ON = {
    "bi_jax.pallas_kernels.matmul": {"bi_jax.pallas_kernels.merge"},
    "bi_jax.pallas_kernels.sampling": {"bi_jax.pallas_kernels.log_softmax"},
    "bi_jax.pallas_kernels.attention": {"bi_jax.pallas_kernels.matmul"},
}
# Inside an op's folder.
OP_ORDER = (
    *("topology", "schedule", "cases", "reference", "kernel_hopper", "kernel_triton", "vjp", "api"),
)
# Plain Python, so that planning can be tested and reasoned about without a device.
HOST_ONLY = ("bi_jax.scheduler", "bi_jax.page_pool", "bi_jax.request", "bi_jax.config")
DEVICE_LIBRARIES = {"jax", "jaxlib", "flax", "optax", "orbax"}
SHADOWED = {"models", "pallas_kernels"}


def layer_of(module: str) -> str:
    return next(layer for layer in LAYERS if module == layer or module.startswith(layer + "."))


def upward_arrows(graph: dict[str, frozenset[str]]) -> list[str]:
    """Imports that leave a layer for a higher one."""
    found = []
    for module, targets in graph.items():
        for target in targets & graph.keys():
            # Importing bi_jax.models runs bi_jax/__init__.py, but nothing leans on what it holds.
            if LAYERS.index(layer_of(target)) > LAYERS.index(layer_of(module)):
                found.append(f"{module} -> {target}")
    return sorted(found)


def place(module: str, folder: str, order: tuple[str, ...]) -> int | None:
    head = module.removeprefix(folder + ".").split(".")[0]
    return order.index(head) if head in order else None


def arrows_against(folder: str, order: tuple[str, ...], graph: dict) -> list[str]:
    """Imports inside one folder that go from a lower name to a higher one in `order`."""
    inside = [m for m in graph if m.startswith(folder + ".") and layer_of(m) == layer_of(folder)]
    found = []
    for module in inside:
        for target in graph[module] & set(inside):
            low, high = place(module, folder, order), place(target, folder, order)
            if low is not None and high is not None and high > low:
                found.append(f"{module} -> {target}")
    return found


def op_folders(graph: dict) -> list[str]:
    return [m.removesuffix(".api") for m in graph if m.endswith(".api")]


def test_no_arrow_goes_up():
    assert upward_arrows(import_graph()) == []


def test_an_upward_arrow_is_seen():
    graph = {
        "bi_jax.engine": frozenset({"bi_jax.models.config"}),
        "bi_jax.models.config": frozenset({"bi_jax.engine", "bi_jax.pallas_kernels"}),
        "bi_jax.pallas_kernels": frozenset({"bi_jax.models.config", "jax"}),
    }
    assert upward_arrows(graph) == [
        "bi_jax.models.config -> bi_jax.engine",
        "bi_jax.pallas_kernels -> bi_jax.models.config",
    ]


@pytest.mark.parametrize("folder", ORDER)
def test_lower_modules_do_not_import_higher_ones(folder: str):
    assert arrows_against(folder, ORDER[folder], import_graph()) == []


def test_inside_an_op_arrows_go_one_way():
    for folder in op_folders(import_graph()):
        assert arrows_against(folder, OP_ORDER, import_graph()) == []


def test_an_arrow_against_the_order_is_seen():
    graph = {"bi_jax.flags": frozenset({"bi_jax.engine"}), "bi_jax.engine": frozenset()}
    assert arrows_against("bi_jax", ORDER["bi_jax"], graph) == ["bi_jax.flags -> bi_jax.engine"]


# The drawn token is scored by the one log-probability there is, not by a copy of it, and the norm
# that sums over ranks first does so by the exchange and in the order of the sum.
SHARED_BODIES = {
    ("bi_jax.pallas_kernels.sampling", "bi_jax.pallas_kernels.log_softmax"),
    ("bi_jax.pallas_kernels.rms_norm", "bi_jax.pallas_kernels.merge"),
}


def test_ops_do_not_import_one_another():
    folders = op_folders(import_graph())
    for module, targets in import_graph().items():
        for here in folders:
            others = [f for f in folders if f != here and f not in LEANS_ON.get(here, ())]
            if module == here or module.startswith(here + "."):
                others = [f for f in others if (here, f) not in SHARED_BODIES]
                wrong = [t for t in targets for f in others if t == f or t.startswith(f + ".")]
                assert not wrong, f"{module} imports another op: {wrong}"


def test_there_is_no_circle():
    # A package and its modules may lean on each other: `__init__` only gathers names.
    graph = {m: t & modules().keys() for m, t in import_graph().items()}
    packages = {m for m, path in modules().items() if path.name == "__init__.py"}
    plain = {m: t - packages for m, t in graph.items() if m not in packages}
    tuple(graphlib.TopologicalSorter(plain).static_order())


def test_the_lowest_layer_imports_jax_only():
    allowed = {"jax", "jax_triton", "triton", "jaxtyping", "numpy", "bi_jax"}
    for module, targets in import_graph().items():
        if layer_of(module) == "bi_jax.pallas_kernels":
            others = {t.split(".")[0] for t in targets} - allowed
            others -= _standard_library()
            assert not others, f"{module} imports {sorted(others)}"


def _standard_library() -> set[str]:
    import sys

    return set(sys.stdlib_module_names)


def reachable(start: str, graph: dict[str, frozenset[str]]) -> set[str]:
    """Everything a module imports, itself or through modules of ours."""
    seen, waiting = set(), [start]
    while waiting:
        for target in graph.get(waiting.pop(), ()):
            if target not in seen:
                seen.add(target)
                waiting.append(target)
    return seen


@pytest.mark.parametrize("module", HOST_ONLY)
def test_planning_is_plain_python(module: str):
    if module not in modules():
        pytest.skip(f"{module} does not exist yet")
    heads = {target.split(".")[0] for target in reachable(module, import_graph())}
    assert not heads & DEVICE_LIBRARIES


def test_a_hidden_device_library_is_seen():
    graph = {"bi_jax.request": frozenset({"bi_jax.x"}), "bi_jax.x": frozenset({"jax.numpy"})}
    assert "jax.numpy" in reachable("bi_jax.request", graph)


def test_nobody_uses_the_bare_folder_names():
    for path in source_tree.files():
        if path.suffix == ".py":
            heads = {name.split(".")[0] for name in imports(path.read_text(), "x")}
            assert not heads & SHADOWED, f"{path.relative_to(ROOT)} must import bi_jax.models etc."


def environment_uses(source: str) -> list[int]:
    """Lines that read or write environment variables."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            bad = node.attr in names and isinstance(node.value, ast.Name) and node.value.id == "os"
        elif isinstance(node, ast.ImportFrom):
            bad = node.module == "os" and any(alias.name in names for alias in node.names)
        else:
            bad = False
        if bad:
            lines.append(node.lineno)
    return lines


def test_only_flags_touches_the_environment():
    paths = [*modules().values(), *(ROOT / "scripts").glob("*.py")]
    for path in paths:
        if path != ROOT / "bi_jax" / "flags.py":
            assert not environment_uses(path.read_text()), path.relative_to(ROOT)


def test_a_touch_of_the_environment_is_seen():
    assert environment_uses("import os\nx = os.environ['HOME']\n") == [2]
    assert environment_uses("from os import getenv\n") == [1]
    assert environment_uses("import os\nx = os.path.join('a', 'b')\n") == []
