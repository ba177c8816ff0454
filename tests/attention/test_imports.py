import pkgutil
import subprocess
import sys

import xstage_plugin.attention


def test_no_module_of_attention_imports_torch_or_cuda():
    names = [f"xstage_plugin.attention.{module.name}" for module in pkgutil.iter_modules(xstage_plugin.attention.__path__)]
    assert len(names) > 10
    code = (
        f"import importlib, sys; [importlib.import_module(n) for n in {names}]; print({{'torch', 'cuda'}} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "set()"
