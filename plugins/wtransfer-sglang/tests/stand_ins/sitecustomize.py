"""Stand-ins for two modules that SGLang imports: one for CUDA alone, and torchvision.

Python imports this file at its start where its folder is on PYTHONPATH. A stand-in gives any name
that is asked of it and computes nothing: SGLang's CPU paths (torch's own attention and sampling)
call none of them, and a call of one raises.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types

MODULES = frozenset({"sgl_kernel", "torchvision"})


def _stand_in(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(name, (_Object,), {})


class _Anything(type):
    """A class whose attributes are stand-ins; it decorates by returning its argument."""

    def __getattr__(cls, name):
        return _stand_in(name)

    def __call__(cls, *args, **kwargs):
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        raise NotImplementedError(f"{cls.__name__} is a stand-in, and computes nothing")

    def __or__(cls, other):
        return cls

    __ror__ = __or__

    def __getitem__(cls, key):
        return cls


class _Object(metaclass=_Anything):
    def __init_subclass__(cls, **kwargs):
        pass


class _Module(types.ModuleType):
    def __getattr__(self, name):
        return _stand_in(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path, target=None):
        if fullname.partition(".")[0] in MODULES:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = _Module(spec.name)
        module.__version__ = "99.0"
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Finder())
