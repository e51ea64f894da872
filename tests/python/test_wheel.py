"""The installed package: files, metadata, libraries, types."""
import ast
import importlib.metadata
import inspect
import os
import pathlib
import re
import subprocess
import sys

import pytest

import ringattn
from ringattn import _core

PACKAGE = pathlib.Path(ringattn.__file__).parent


def test_is_the_installed_one():
    assert "site-packages" in PACKAGE.parts
    assert importlib.metadata.version("ringattn") == ringattn.__version__


def test_metadata():
    metadata = importlib.metadata.metadata("ringattn")
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"
    names = {file.name for file in importlib.metadata.files("ringattn")}
    assert {"LICENSE", "py.typed", "_core.pyi", "RECORD"} <= names
    assert importlib.metadata.requires("ringattn")[0].startswith("numpy")
    assert len(metadata.get_payload()) > 500  # the description


def test_libraries_are_its_own():
    """Every library but the system's comes from the wheel, under a name that no other package's has."""
    ours = {path.name for path in (PACKAGE.parent / "ringattn.libs").iterdir()}
    assert all(re.search(r"-[0-9a-f]{8}\.so", name) for name in ours)
    lines = subprocess.run(["ldd", _core.__file__], check=True, capture_output=True, text=True,
                           env={"PATH": os.environ["PATH"]}).stdout.splitlines()
    foreign = [line for line in lines if "=>" in line and "ringattn.libs" not in line]
    assert all(re.match(r"\s*lib(c|m|dl|rt|pthread|resolv|stdc\+\+|gcc_s)\.so", line) for line in foreign), foreign


def test_the_extension_exports_its_entry_alone():
    """Another extension's symbols cannot become ours, nor ours theirs. (libstdc++'s own have a version.)"""
    lines = subprocess.run(["nm", "-D", "--defined-only", _core.__file__], check=True, capture_output=True,
                           text=True).stdout.splitlines()
    names = {line.split()[-1] for line in lines if line.split()[-2].isupper()}
    assert {name for name in names if not re.match(r"_ZNK?St", name)} == {"PyInit__core"}


def test_stubs_name_what_there_is():
    for node in ast.parse((PACKAGE / "_core.pyi").read_text()).body:
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                assert hasattr(getattr(_core, node.name), member.name), member.name
        elif isinstance(node, ast.FunctionDef):
            assert callable(getattr(_core, node.name))


def test_public_names_have_docstrings():
    for name in ringattn.__all__:
        if name == "__version__" or name in ringattn._OF_TORCH:
            continue
        value = getattr(ringattn, name)
        assert inspect.getdoc(value), name
        if inspect.isclass(value):
            for member, function in vars(value).items():
                assert member.startswith("_") or not inspect.isfunction(function) or inspect.getdoc(function), member


@pytest.mark.parametrize("stubs_first", [True, False])
def test_generated_stubs_may_lie_next_to_the_package(tmp_path, stubs_first):
    """protoc makes modules of ringattn.v1, in a folder that has no ringattn/__init__.py."""
    (tmp_path / "ringattn" / "v1").mkdir(parents=True)
    (tmp_path / "ringattn" / "v1" / "attention_pb2.py").write_text("NAME = 'a stub'\n")
    place = f"sys.path.{'insert(0, ' if stubs_first else 'append('}{str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", f"""
import sys; {place}
import ringattn, ringattn.v1.attention_pb2
from ringattn.v1 import attention_pb2
assert attention_pb2.NAME == "a stub" and ringattn.connect and ringattn.__version__
assert str({str(PACKAGE)!r}) == ringattn.__path__[0]
"""], check=True, cwd="/")


def test_pytorch_is_not_needed():
    subprocess.run([sys.executable, "-c", "import sys, ringattn; assert 'torch' not in sys.modules"], check=True)
