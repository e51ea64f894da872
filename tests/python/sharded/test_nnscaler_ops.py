"""ringattn.nnscaler's functions as operators of nnscaler: annotations, and the code of partitioned calls."""
import os
import subprocess
import sys
import types

import pytest

torch = pytest.importorskip("torch", reason=os.environ.get("RINGATTN_NO_TORCH") or None)

from ringattn import _nnscaler_ops, nnscaler  # noqa: E402


@pytest.fixture
def operators(monkeypatch):
    """The registered operators: name to (annotation, code generator)."""
    registered = {}

    def register_op(annotation, emit_fn):
        return lambda function: registered.setdefault(function.__name__, (annotation, emit_fn))

    names = ["nnscaler", "nnscaler.graph", "nnscaler.graph.parser", "nnscaler.graph.parser.register"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[names[-1]].register_op = register_op
    _nnscaler_ops.register([nnscaler.wrap_ring_attn_func, nnscaler.wrap_zigzag_attn_func],
                           [nnscaler.wrap_ring_attn_varlen_func])
    return registered


def test_annotations(operators):
    q, k = torch.empty(1, 8, 6, 4), torch.empty(1, 8, 2, 4)
    offsets = torch.tensor([0, 8])
    for name in ("wrap_ring_attn_func", "wrap_zigzag_attn_func"):
        assert operators[name][0](q, k, k) == "b l (g 3) d^, b l g d^, b l g v^ -> b l (g 3) v^"
        assert operators[name][0](q, q, q, causal=False) == "b l h d^, b l h d^, b l h v^ -> b l h v^"
    annotate = operators["wrap_ring_attn_varlen_func"][0]
    assert annotate(q[0], k[0], k[0], offsets, offsets) == "l (g 3) d^, l g d^, l g v^, e^, e^ -> l (g 3) v^"


@pytest.mark.parametrize("name, part, device, ranks", [
    ("wrap_ring_attn_func", (2, 8, 6, 4), 0, "None"), ("wrap_ring_attn_func", (2, 2, 6, 4), 1, "[0, 1, 2, 3]"),
    ("wrap_zigzag_attn_func", (2, 2, 6, 4), 6, "[4, 5, 6, 7]"), ("wrap_zigzag_attn_func", (1, 8, 6, 4), 0, "None"),
    ("wrap_ring_attn_func", (2, 8, 3, 4), 0, "None"), ("wrap_ring_attn_varlen_func", (2, 6, 4), 5, "[4, 5, 6, 7]"),
    ("wrap_ring_attn_varlen_func", (8, 3, 4), 5, "None"),
])
def test_code(operators, name, part, device, ranks):
    whole = types.SimpleNamespace(shape=(2, 8, 6, 4)[-len(part):])
    node = types.SimpleNamespace(signature=f"ringattn.nnscaler.{name}",
                                 inputs=lambda: [types.SimpleNamespace(shape=part, parent=whole)])
    code = operators[name][1](node, ["q_1", "k_2", "v_3"], {"causal": "True", "process_group": "None"}, device, 4, 8)
    assert code == f"ringattn.nnscaler.{name}(q_1, k_2, v_3, causal=True, process_group={ranks})"


@pytest.mark.parametrize("part", [(2, 4, 6, 4), (1, 2, 6, 4)])
def test_partitions_that_are_refused(operators, part):
    whole = types.SimpleNamespace(shape=(2, 8, 6, 4))
    node = types.SimpleNamespace(signature="f", inputs=lambda: [types.SimpleNamespace(shape=part, parent=whole)])
    with pytest.raises(ValueError, match="^f: q is partitioned into .*; the sequence must be partitioned alone, into 4"):
        operators["wrap_ring_attn_func"][1](node, [], {}, 0, 4, 8)


def test_import_registers_the_functions(tmp_path):
    package = tmp_path / "nnscaler" / "graph" / "parser"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text("")
    (package / "register.py").write_text("def register_op(annotation, emit_fn):\n"
                                         "    return lambda function: print(function.__name__)\n")
    run = subprocess.run([sys.executable, "-c", "import ringattn.nnscaler"], capture_output=True, text=True, timeout=120,
                         env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"})
    assert run.stdout.split() == ["wrap_ring_attn_func", "wrap_zigzag_attn_func", "wrap_ring_attn_varlen_func"], run.stderr


def test_nnscaler_has_the_operators():
    register = pytest.importorskip("nnscaler.graph.parser.register")
    for name in nnscaler.__all__:
        assert register.CustomizedOps.exist(f"ringattn.nnscaler.{name}")
