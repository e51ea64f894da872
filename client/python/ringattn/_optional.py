"""Optional packages: errors that name the missing package and the command that installs it."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator

#: Packages that parts of ringattn need, and their names for people. pip has them under the same names.
_PACKAGES = {"torch": "PyTorch", "transformers": "Hugging Face transformers", "jax": "JAX", "ml_dtypes": "ml_dtypes",
             "vllm": "vLLM"}


@contextlib.contextmanager
def needed_by(user: str) -> Iterator[None]:
    """Imports of optional packages inside this block name `user`, the package and the pip command if they fail.

    Raises:
        ModuleNotFoundError: the package is not installed.
        ImportError: the installed version lacks a name that `user` imports.
    """
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _PACKAGES:
            raise
        title = _PACKAGES[package]
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise ModuleNotFoundError(f"{user} needs {title}, which is not installed; run: pip install {package}",
                                      name=package) from None
        if not isinstance(error, ModuleNotFoundError) and "cannot import name" not in str(error):
            raise  # installed, but it cannot be loaded
        version = getattr(importlib.import_module(package), "__version__", "of an unknown version")
        raise ImportError(f"{user} needs a newer {title}; {version} is installed ({error}); run: pip install --upgrade "
                          f"{package}", name=error.name) from error
