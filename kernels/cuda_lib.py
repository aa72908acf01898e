"""CUDA C++ kernels: compiled by NVRTC at first use, kept as cubins on disk, launched through the driver.

NVRTC comes with torch, so no nvcc and no host compiler is needed. Cubins lie in `$JETRL_CACHE_DIR/cubin` (default
`~/.cache/jetrl/cubin`), named by a hash of source, macros, architecture and NVRTC version: a warm start compiles
nothing.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

ARCHITECTURE = "sm_90a"
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class CudaError(RuntimeError):
    """NVRTC or the driver refused; the message has its log or name of the error."""


def cache_folder() -> Path:
    """Where cubins are kept."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "jetrl"
    return Path(os.environ.get("JETRL_CACHE_DIR", default)) / "cubin"


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """libnvrtc of torch's CUDA version."""
    major = (torch.version.cuda or "13").split(".")[0]
    name = f"libnvrtc.so.{major}"
    try:
        return ctypes.CDLL(name)
    except OSError:
        import nvidia

        for root in nvidia.__path__:
            for path in sorted(Path(root).rglob(name)):
                return ctypes.CDLL(str(path))
        raise


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def available() -> bool:
    """Whether there are a Hopper GPU and NVRTC."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    try:
        _nvrtc()
    except (OSError, ImportError):
        return False
    return True


def takes(cols: int, *inputs: Tensor) -> bool:
    """Whether our kernels can run on 2-D CUDA inputs: rows that start on 16 bytes, `cols` in whole pieces of 8."""
    if not inputs[0].is_cuda or not inputs[0].numel() or not available() or cols % 8:
        return False
    return all(
        t.stride(-1) == 1 and t.stride(0) * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0 for t in inputs
    )


def aligned(t: Tensor) -> Tensor:
    """`t`, contiguous and starting on 16 bytes; copied only if it was not."""
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


@functools.cache
def source(*names: str) -> str:
    """`common.cu` and the files `names` (relative to this folder) as one source."""
    return "\n".join((Path(__file__).parent / name).read_text() for name in ("common.cu", *names))


def compile_cubin(source: str, macros: dict[str, int]) -> bytes:
    """Machine code for Hopper, from the disk cache or from NVRTC. Needs no GPU."""
    nvrtc = _nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    options = [f"--gpu-architecture={ARCHITECTURE}", "--std=c++17", *(f"-D{k}={v}" for k, v in sorted(macros.items()))]
    key = hashlib.sha256("\n".join([source, *options, f"{major.value}.{minor.value}"]).encode()).hexdigest()
    path = cache_folder() / f"{key}.cubin"
    if path.exists():
        return path.read_bytes()
    cubin = _compile(nvrtc, source, options)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(cubin)
    os.replace(file.name, path)  # another process may do the same; either file is right
    return cubin


def _compile(nvrtc: ctypes.CDLL, source: str, options: list[str]) -> bytes:
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    try:
        arguments = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        status = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
        size = ctypes.c_size_t()
        if status:
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CudaError(f"NVRTC: {log.value.decode()}")
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _check(status: int, what: str) -> None:
    if status:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(name))
        raise CudaError(f"{what}: {(name.value or b'unknown').decode()}")


@functools.cache
def _context(device: int) -> ctypes.c_void_p:
    """The primary context of a device, which torch uses."""
    context = ctypes.c_void_p()
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), f"context of device {device}")
    return context


class Kernel:
    """One `extern "C"` function of a source, for one set of macros, loaded once on each device.

    threads: of a block. shared: bytes of its dynamic shared memory.
    """

    def __init__(self, source: str, name: str, macros: dict[str, int], threads: int, shared: int = 0):
        self.source, self.name, self.macros, self.threads, self.shared = source, name, macros, threads, shared
        self._functions: dict[int, ctypes.c_void_p] = {}

    def _function(self, device: int) -> ctypes.c_void_p:
        if device not in self._functions:
            image = compile_cubin(self.source, self.macros)
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            _check(_driver().cuModuleLoadData(ctypes.byref(module), image), f"loading {self.name}")
            _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, self.name.encode()), self.name)
            status = _driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, self.shared)
            _check(status, f"{self.shared} bytes of shared memory for {self.name}")
            self._functions[device] = function
        return self._functions[device]

    def launch(self, blocks: int, arguments: bytes, device: torch.device) -> None:
        """Run on `device`'s current stream with one structure as the only parameter. Asynchronous."""
        index = torch.cuda.current_device() if device.index is None else device.index
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return self.launch(blocks, arguments, device)
        # A thread that torch has not yet used for this device (autograd's) has no current context.
        _check(_driver().cuCtxSetCurrent(_context(index)), "making the device's context current")
        buffer = ctypes.create_string_buffer(arguments, len(arguments))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(index))
        status = _driver().cuLaunchKernel(
            self._function(index), blocks, 1, 1, self.threads, 1, 1, self.shared, stream, parameters, None
        )
        return _check(status, f"launching {self.name}")
