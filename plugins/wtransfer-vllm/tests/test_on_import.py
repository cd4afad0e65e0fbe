import importlib
import sys

from wtransfer_vllm.on_import import on_import


def test_a_module_is_shown_when_it_is_imported_and_once_only(tmp_path, monkeypatch):
    (tmp_path / "wtv_later.py").write_text("VALUE = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    on_import("wtv_later", lambda module: seen.append(module.VALUE))
    assert seen == []
    module = importlib.import_module("wtv_later")
    assert seen == [3]
    on_import("wtv_later", lambda module: seen.append(module.VALUE + 1))
    assert seen == [3, 4]
    importlib.reload(module)
    assert seen == [3, 4]
    del sys.modules["wtv_later"]


def test_a_module_that_does_not_exist_is_missing_as_ever(monkeypatch):
    seen = []
    on_import("wtv_never", seen.append)
    assert importlib.util.find_spec("wtv_never") is None
    assert seen == []
