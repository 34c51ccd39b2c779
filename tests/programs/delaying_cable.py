"""A cable between this network namespace and another that takes so many seconds in each direction:
NAMESPACE SECONDS NEAR FAR (addresses of the ends). It lasts as long as its stdin.

It stands for a link with that delay, where the kernel has no netem.
"""

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 1, 0x1000
CLONE_NEWNET = 0x40000000
MTU = 60_000  # few packets, each of which passes through here


def end_of_cable(name: str, own: str, other: str) -> int:
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    for words in (
        ["addr", "add", own, "peer", other, "dev", name],
        ["link", "set", name, "mtu", str(MTU), "txqueuelen", "10000", "up"],
    ):
        subprocess.run(["ip", *words], check=True)
    return tun


def enter(namespace: str) -> None:
    handle = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(handle, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def carry(one: int, other: int, delay_s: float) -> None:
    waiting: dict[int, deque[tuple[float, bytes]]] = {one: deque(), other: deque()}
    across = {one: other, other: one}
    while True:
        now = time.monotonic()
        for end, packets in waiting.items():
            while packets and packets[0][0] <= now:
                os.write(across[end], packets.popleft()[1])
        dues = [packets[0][0] for packets in waiting.values() if packets]
        left = max(0.0, min(dues) - time.monotonic()) if dues else None
        for ready in select.select([one, other, 0], [], [], left)[0]:
            if ready == 0:
                return
            waiting[ready].append((time.monotonic() + delay_s, os.read(ready, 1 << 16)))


def main(namespace: str, delay_s: float, near: str, far: str) -> None:
    name = f"m{os.getpid()}"
    one = end_of_cable(f"{name}a", near, far)
    enter(namespace)
    other = end_of_cable(f"{name}b", far, near)
    print("up", flush=True)
    carry(one, other, delay_s)


main(sys.argv[1], float(sys.argv[2]), sys.argv[3], sys.argv[4])
