"""A header of ours compiled for this machine behind a few lines of C++, as a library for ctypes."""

import ctypes
import shutil
import subprocess

import pytest

from xstage_plugin.bundled import bundled_folder
from xstage_plugin.moe.schedule_library import COMPILERS, FLAGS


def compile_header(source, folder):
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        pytest.skip(f"needs one of {', '.join(COMPILERS)}")
    command = [compiler, *FLAGS, "-Wall", "-Wextra", "-Werror", "-I", str(bundled_folder("moe") / "include"), "-x", "c++", "-"]
    run = subprocess.run([*command, "-o", str(folder / "header.so")], input=source, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[:2000]
    return ctypes.CDLL(str(folder / "header.so"))
