"""Run a command to which the kernel refuses process_vm_readv and process_vm_writev, as seccomp does in many containers.

python without_process_vm.py COMMAND...
"""

import ctypes
import errno
import os
import platform
import struct
import sys

_CALLS = {"x86_64": (310, 311), "aarch64": (270, 271)}  # of asm/unistd.h
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # linux/bpf_common.h
_ERRNO, _ALLOW = 0x50000, 0x7FFF0000  # linux/seccomp.h
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2  # linux/prctl.h


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def main() -> None:
    first, second = _CALLS[platform.machine()]
    lines = (
        (_LOAD, 0, 0, 0),  # number of the call
        (_JUMP_IF_EQUAL, 1, 0, first),
        (_JUMP_IF_EQUAL, 0, 1, second),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    )
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = _Program(len(lines), ctypes.addressof(packed))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(_SECCOMP, _FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp is refused")
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
