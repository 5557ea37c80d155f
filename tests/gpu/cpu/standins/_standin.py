"""Stand-ins for packages that SGLang imports on every machine but calls only where there is an accelerator.

``standin("triton")`` puts a module into ``sys.modules`` that has every attribute and every submodule one may import. Names that
begin with a capital are classes (usable as bases and in annotations), all others are modules that also work as decorators. Nothing
computes: a test that reaches one of these has left the CPU path, and finds a placeholder where it expected a number.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Names(type):
    """Class whose unknown attributes are their own names, as members of an enumeration would be."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Standin(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        value: Any = _Names(name, (), {"__module__": self.__name__}) if name[0].isupper() else sys.modules.get(full) or _create(full)
        setattr(self, name, value)
        return value

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """``@name`` and ``@name(options)`` both leave the function as it is."""
        if len(arguments) == 1 and callable(arguments[0]) and not options:
            return arguments[0]
        return lambda function: function


class _Submodules(MetaPathFinder, Loader):
    """Finds any submodule of the packages that are stood in for."""

    def __init__(self) -> None:
        self.packages: set[str] = set()

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self.packages:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Standin(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


_submodules = _Submodules()
sys.meta_path.insert(0, _submodules)


def _create(name: str) -> _Standin:
    module = _Standin(name)
    module.__path__ = []
    module.__file__ = __file__
    module.__spec__ = ModuleSpec(name, _submodules, is_package=True)
    sys.modules[name] = module
    return module


def standin(package: str, **attributes: Any) -> None:
    """Replace ``package``, which is being imported, by a stand-in with these attributes."""
    _submodules.packages.add(package)
    module = _create(package)
    for name, value in attributes.items():
        setattr(module, name, value)
