"""Asks the resolver, or meets the other nodes at MASTER_ADDR:MASTER_PORT and compares clocks.

    resolve NAME                the way gloo does it: a dead name server hangs
    serve ADDR PORT SECONDS     on the master: answers everybody with its clock
    join ADDR PORT SECONDS      elsewhere: asks several times and keeps the quickest answer

The clock's difference is taken at the middle of the round trip, as NTP does it (RFC 5905,
section 8), so its error is at most half of that trip.
"""

from __future__ import annotations

import socket
import struct
import time

from muster.doctor.probes.report import Tell, one_line, progress

_NUM_EXCHANGES = 8
_STAMP = struct.Struct("!d")
_RETRY_S = 0.2


def main(words: list[str], tell: Tell) -> None:
    role, addr = words[:2]
    if role == "resolve":
        progress(f"resolving {addr}")
        tell(resolve(addr))
        return
    port, seconds = int(words[2]), float(words[3])
    deadline_s = time.monotonic() + seconds
    progress(f"{role} {addr}:{port}")
    tell(serve(port, deadline_s) if role == "serve" else join(addr, port, deadline_s))


def resolve(name: str) -> dict[str, object]:
    """The addresses of ``name``, in the resolver's order."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return {"error": one_line(error)}
    return {"addresses": list(dict.fromkeys(str(entry[4][0]) for entry in found))}


def serve(port: int, deadline_s: float) -> dict[str, object]:
    """Answer every host that connects until ``deadline_s`` of the monotonic clock."""
    try:
        # Both families: what a name resolves to elsewhere is not known here.
        listener = socket.create_server(
            ("", port) if not socket.has_dualstack_ipv6() else ("::", port),
            family=socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET,
            dualstack_ipv6=socket.has_dualstack_ipv6(),
        )
    except OSError as error:
        return {"port_problem": one_line(error)}
    num_guests = 0
    with listener:
        while (left_s := deadline_s - time.monotonic()) > 0:
            listener.settimeout(left_s)
            try:
                guest, _ = listener.accept()
            except TimeoutError:
                break
            with guest:
                guest.settimeout(max(0.1, min(2.0, left_s)))
                num_guests += _answer(guest)
    return {"is_reachable": True, "num_guests": num_guests}


def _answer(guest: socket.socket) -> int:
    try:
        while guest.recv(1):
            guest.sendall(_STAMP.pack(time.time()))
    except OSError:
        return 0
    return 1


def join(addr: str, port: int, deadline_s: float) -> dict[str, object]:
    """Ask until the master answers, which may start a little later."""
    problem = "nobody answered"
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            with socket.create_connection((addr, port), timeout=min(2.0, left_s)) as line:
                return {"is_reachable": True, **_exchange(line)}
        except OSError as error:
            problem = one_line(error)
            time.sleep(min(_RETRY_S, max(0.0, left_s)))
    return {"is_reachable": False, "port_problem": problem}


def _exchange(line: socket.socket) -> dict[str, float]:
    best: tuple[float, float] | None = None
    for _ in range(_NUM_EXCHANGES):
        sent_s = time.time()
        line.sendall(b"?")
        data = b""
        while len(data) < _STAMP.size:
            part = line.recv(_STAMP.size - len(data))
            if not part:  # something else listens there
                return {}
            data += part
        back_s = time.time()
        skew_s = (sent_s + back_s) / 2 - _STAMP.unpack(data)[0]
        best = min(best or (back_s - sent_s, skew_s), (back_s - sent_s, skew_s))
    assert best is not None
    return {"round_trip_s": best[0], "clock_skew_s": best[1]}
