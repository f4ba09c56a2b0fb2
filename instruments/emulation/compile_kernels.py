"""Compiles the kernels for the emulator: python -m instruments.emulation.compile_kernels"""

from concurrent.futures import ThreadPoolExecutor

from instruments.emulation import activate

if __name__ == "__main__":
    activate()
    from distopt.kernels import cuda

    one_of = {source: name for name, (source, _) in cuda.kernels().items()}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: cuda.load(name, 0), one_of.values()))
