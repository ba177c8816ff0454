"""A fabricated upstream library: headers of our own text, a distribution, a host library that keeps the state that is read."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from xstage_plugin.upstream import activate, pins
from xstage_plugin.upstream.pins import load_pin

HEADERS = {
    "deep_gemm/scheduler/mega_moe.cuh": "#pragma once\n#include <deep_gemm/layout/rooms.cuh>\nstruct Walk { int room(); };\n",
    "deep_gemm/scheduler/other.cuh": "#pragma once\n",
    "deep_gemm/layout/rooms.cuh": "#pragma once\nstruct Rooms { int count; };\n",
    "deep_gemm/impls/kernel.cuh": "#pragma once\n#include <deep_gemm/scheduler/mega_moe.cuh>\n",
    "cutlass/cutlass.h": "#pragma once\n",
}
SHADOW = "#pragma once\n#include <deep_gemm/scheduler/mega_moe.upstream.cuh>\n#include <deep_gemm/xstage/order.hpp>\n"
ORDER = "#pragma once\n#include <cstdint>\n"
SYMBOLS = """
[host]
library = "_C*.so"
library_root = "_ZN9deep_gemm8Compiler12library_rootB5cxx11E"
include_root = "_ZN9deep_gemm12include_rootB5cxx11E"
compiler = "_ZN9deep_gemmL8compilerE"
flags_offset = 40
"""
HOST = """
#include <filesystem>
#include <memory>
#include <string>
namespace deep_gemm {
struct Compiler {
    virtual ~Compiler() = default;
    std::string signature = "a signature that is too long to be kept inside the string";
    std::string flags;
    static std::filesystem::path library_root;
};
std::filesystem::path Compiler::library_root;
std::filesystem::path include_root;
static std::shared_ptr<Compiler> compiler;
}
extern "C" void set_root(const char* root) {
    deep_gemm::Compiler::library_root = root;
    deep_gemm::include_root = std::filesystem::path(root) / "include";
}
extern "C" void compile() {
    if (deep_gemm::compiler) return;
    deep_gemm::compiler = std::make_shared<deep_gemm::Compiler>();
    deep_gemm::compiler->flags = "-std=c++20 -I" + (deep_gemm::Compiler::library_root / "include").string() + " -O3";
}
"""
PACKAGE = """
import ctypes, os
ROOT = os.path.dirname(os.path.abspath(__file__))
class Host:
    def __init__(self):
        path = os.path.join(ROOT, "_C.so")
        self.so = ctypes.CDLL(path) if os.path.exists(path) else None
        self.given = []
        self.deaf = False
    def init(self, root, cuda_home):
        self.given.append(root)
        if self.so and not self.deaf:
            self.so.set_root(root.encode())
    def compile(self):
        self.so.compile()
def _find_cuda_home():
    return "/usr/local/cuda"
_C = Host()
_C.init(ROOT, _find_cuda_home())
"""


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


UNRUN = 'status = "unrun"\nreason = "nobody ran it"'


class World:
    """One fabricated library in ``site``, the pins of it in ``patches``, and a cache of its own."""

    name = "fake-gemm-1.0"

    def __init__(self, folder):
        self.site, self.patches, self.cache = folder / "site", folder / "patches", folder / "cache"
        self.package = self.site / "deep_gemm"
        self.include = self.package / "include"
        for path, text in HEADERS.items():
            (self.include / path).parent.mkdir(parents=True, exist_ok=True)
            (self.include / path).write_text(text)
        (self.package / "__init__.py").write_text(PACKAGE)
        self.release("1.0")
        self.write_pin(self.name, 'kind = "wheel"\npackage = "fake-gemm"\nversion = "1.0"\n')
        (self.patches / "ours").mkdir()
        (self.patches / "ours/mega_moe.cuh").write_text(SHADOW)
        (self.patches / "ours/order.hpp").write_text(ORDER)

    def release(self, version):
        for old in self.site.glob("*.dist-info"):
            shutil.rmtree(old)
        info = self.site / f"fake_gemm-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fake-gemm\nVersion: {version}\n")

    def write_pin(self, name, what, status='status = "ready"', shadow=True):
        text = f'schema = "xstage-pin/1"\nname = "{name}"\n{what}import_name = "deep_gemm"\narch = ["sm_90"]\n{status}\n'
        text += 'why = "a test"\nnames = ["Walk", "next_room"]\n' + SYMBOLS
        for path in ("deep_gemm/scheduler/mega_moe.cuh", "deep_gemm/layout/rooms.cuh"):
            role = "shadowed" if "scheduler" in path else "relied on"
            text += f'[[file]]\npath = "{path}"\nsha256 = "{sha256(HEADERS[path])}"\nrole = "{role}"\n'
        if shadow:
            text += '[[shadow]]\npath = "deep_gemm/scheduler/mega_moe.cuh"\nsource = "patches/ours/mega_moe.cuh"\n'
            text += 'original_as = "deep_gemm/scheduler/mega_moe.upstream.cuh"\n'
            text += "[schedule_word]\nfirst_byte = 12\n"
            text += '[[add]]\npath = "deep_gemm/xstage/order.hpp"\nsource = "patches/ours/order.hpp"\n'
        (self.patches / name).mkdir(parents=True, exist_ok=True)
        (self.patches / name / "pin.toml").write_text(text)

    def write_source_pin(self):
        self.write_pin(
            "fake-source",
            'kind = "submodule"\nrepository = "https://example.invalid/fake"\n'
            f'commit = "{"a" * 40}"\npath = "third_party/Fake"\npackage_path = "deep_gemm"\n',
        )

    def make_unrun(self):
        """The installed release is one whose kernels nobody ran."""
        self.write_pin(self.name, 'kind = "wheel"\npackage = "fake-gemm"\nversion = "1.0"\n', UNRUN)

    @property
    def pin(self):
        return load_pin(self.name, self.patches)


@pytest.fixture
def world(tmp_path, monkeypatch):
    made = World(tmp_path)
    monkeypatch.setattr(pins, "patches_folder", lambda: made.patches)
    monkeypatch.setattr(activate, "_active", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(made.cache))
    monkeypatch.syspath_prepend(made.site)
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    yield made
    sys.modules.pop("deep_gemm", None)


@pytest.fixture(scope="session")
def host_library(tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to make a host library")
    folder = tmp_path_factory.mktemp("host")
    (folder / "host.cpp").write_text(HOST)
    subprocess.run([compiler, "-std=c++17", "-shared", "-fPIC", "-o", folder / "_C.so", folder / "host.cpp"], check=True)
    return folder / "_C.so"


@pytest.fixture
def readable_world(world, host_library):
    """The library with a host library whose state can be read."""
    shutil.copy(host_library, Path(world.package) / "_C.so")
    return world
