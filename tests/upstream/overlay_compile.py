"""Kernels compiled from a wheel's headers and from the overlay over them, side by side. Needs nvcc and PyPI, no GPU.

In CI (CI=true) a missing wheel or compiler is a failure, elsewhere a skip with the reason. With XSTAGE_TEST_ALL_SHAPES=1 every
bundled shape is compiled, by default the hardest ones.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from xstage_plugin.moe.shapes import bundled_shapes
from xstage_plugin.upstream.check import unlisted_names
from xstage_plugin.upstream.overlay import build_overlay, plan_overlay
from xstage_plugin.upstream.pins import load_pin, source_bytes

NVCC_TIMEOUT_S = 300
# Most experts (most spills in the stock kernels) and the widest rows.
HARDEST = ("qwen3.5", "dsv4-pro")


@dataclass(frozen=True)
class Kernel:
    """``<name>_impl<arguments>`` of deep_gemm/impls/<name>.cuh; ``prelude`` are lines of C++ that the arguments use."""

    name: str
    arguments: tuple
    prelude: str = ""

    @property
    def source(self):
        arguments = ", ".join(str(argument) for argument in self.arguments)
        return (
            f"#include <deep_gemm/impls/{self.name}.cuh>\nusing namespace deep_gemm;\n{self.prelude}"
            f"void* kernel() {{ return reinterpret_cast<void*>(&{self.name}_impl<{arguments}>); }}\n"
        )


@dataclass(frozen=True)
class Cost:
    registers: int
    spilled_bytes: int

    def __str__(self):
        return f"{self.registers} registers, {self.spilled_bytes} B spilled"


@dataclass(frozen=True)
class Wheel:
    """A wheel unpacked, and the overlay over it: their include folders."""

    stock: Path
    ours: Path


def missing(reason):
    (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


def find_nvcc():
    return shutil.which("nvcc") or missing("nvcc is not on the PATH")


def unpack_wheel(version, folder):
    """The wheel sgl-deep-gemm ``version`` from PyPI below ``folder``, with its overlay."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    platform = ["--platform", "manylinux2014_x86_64", "--python-version", "3.12", "--implementation", "py", "--abi", "none"]
    run = subprocess.run([*command, *platform, f"sgl-deep-gemm=={version}"], capture_output=True, text=True, check=False)
    found = list(folder.glob("*.whl"))
    if run.returncode or not found:
        missing(f"sgl-deep-gemm {version} cannot be downloaded: {run.stderr.strip()[-200:]}")
    zipfile.ZipFile(found[0]).extractall(folder / "site")
    stock = folder / "site" / "deep_gemm" / "include"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        ours = build_overlay(plan_overlay(load_pin(f"sgl-deep-gemm-{version}"), stock)).include_root
    return Wheel(stock, ours)


def cases(targets):
    """(arch, shape) for every bundled shape that a kernel of ``targets`` (arch to width of a tile) takes.

    The kernels take an even number of tiles a row in both layers; those for SM100 one 16-byte piece of scales per 512.
    """
    return [
        (arch, shape)
        for arch, block_n in targets.items()
        for shape in bundled_shapes()
        if all(width % (2 * block_n) == 0 for width in (shape.hidden, 2 * shape.intermediate))
        and (arch == "sm_90a" or shape.intermediate % 512 == 0)
    ]


def chosen(every):
    """The cases to compile now."""
    return every if os.environ.get("XSTAGE_TEST_ALL_SHAPES") else [case for case in every if case[1].key in HARDEST]


def compiled(nvcc, include, arch, kernel, folder):
    """Cost of ``kernel``, compiled from the headers in ``include``."""
    folder.mkdir()
    source, number = folder / "kernel.cu", arch.removeprefix("sm_")
    source.write_text(kernel.source)
    options = ["-std=c++20", "-O3", f"-I{include}", f"-gencode=arch=compute_{number},code={arch}"]
    options += ["--expt-relaxed-constexpr", "-Xptxas", "-v", "-cubin", "-o", str(folder / "kernel.cubin"), str(source)]
    run = subprocess.run([nvcc, *options], capture_output=True, text=True, timeout=NVCC_TIMEOUT_S, check=False)
    assert run.returncode == 0, "\n".join(line for line in run.stderr.splitlines() if "error" in line)[:2000]
    assert (folder / "kernel.cubin").read_bytes().startswith(b"\x7fELF")
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", run.stderr)]
    spills = [int(number) for number in re.findall(r"(\d+) bytes spill", run.stderr)]
    return Cost(max(registers), sum(spills))


def compiled_both(nvcc, wheel, arch, kernel, folder):
    """Cost of ``kernel`` stock and with our headers."""
    stock = compiled(nvcc, wheel.stock, arch, kernel, folder / "stock")
    ours = compiled(nvcc, wheel.ours, arch, kernel, folder / "ours")
    print(f"{arch} {kernel.name}: stock {stock}; ours {ours}")
    return stock, ours


def shared_lines(pin, include):
    """Lines of more than a few characters of our headers that stand word for word in an upstream header."""
    upstream = {line.strip() for path in (include / "deep_gemm").rglob("*.cuh") for line in path.read_text().splitlines()}
    ours = [line.strip() for added in pin.ours for line in source_bytes(added.source).decode().splitlines()]
    ours += [line.lstrip("+").strip() for patch in pin.patches for line in source_bytes(patch.source).decode().splitlines()]
    # A bare include, a namespace and a loop's end belong to nobody.
    common = re.compile(r"#|namespace|//|\}|return true|return false")
    return [line for line in ours if len(line) > 16 and line in upstream and not common.match(line)]


def names_beyond_the_pin(pin, include):
    """Upstream's identifiers that our shadow headers, patches and CUDA headers use and the pin does not list."""
    upstream = [path.read_text() for path in (include / "deep_gemm").rglob("*.cuh")]
    own = [source_bytes(added.source).decode() for added in pin.additions if added.path.endswith(".hpp")]
    theirs = [*pin.shadows, *pin.patches, *(added for added in pin.additions if added.path.endswith(".cuh"))]
    texts = [source_bytes(part.source).decode() for part in theirs]
    texts = ["\n".join(re.findall(r"^\+(?!\+\+ )(.*)", text, re.MULTILINE)) if "\n@@ " in text else text for text in texts]
    return set().union(*(unlisted_names(text, upstream, pin.names, own) for text in texts))


def headers_beyond_the_pin(pin, include):
    """Upstream's headers that the pinned kernels and our own headers reach, and the pin has no hash of."""
    own = {added.path: source_bytes(added.source).decode() for added in pin.ours}
    originals = {shadow.original_as: shadow.path for shadow in pin.shadows}
    ahead = [pinned.path for pinned in pin.files if "/impls/" in pinned.path] + list(own)
    reached = set()
    while ahead:
        path = ahead.pop()
        if path in reached:
            continue
        reached.add(path)
        text = own.get(path) or (include / originals.get(path, path)).read_text()
        ahead += re.findall(r"#include <(deep_gemm/[^>]+)>", text)
    return reached - set(own) - set(originals) - {pinned.path for pinned in pin.files}
