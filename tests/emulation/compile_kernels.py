"""Compiles the kernels of float32 for the emulator: python -m tests.emulation.compile_kernels"""

from concurrent.futures import ThreadPoolExecutor

from tests.emulation import activate

if __name__ == "__main__":
    activate()
    from distopt.kernels import cuda

    one_of = {kernel.source: cuda.instances(kernel.source)[0] for kernel in cuda.kernels().values()}
    with ThreadPoolExecutor() as pool:
        list(pool.map(cuda.load, one_of.values()))
