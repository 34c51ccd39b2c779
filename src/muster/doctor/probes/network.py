"""Asks the resolver for this host's name, the way gloo does: a dead name server hangs."""

from __future__ import annotations

import socket
import sys

from muster.doctor.probes.report import begin, one_line, progress, result


def main(words: list[str]) -> int:
    """NAME: what it resolves to, in the resolver's order."""
    results = begin()
    name = words[0]
    progress(f"resolving {name}")
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        result(results, {"error": one_line(error)})
        return 0
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    result(results, {"addresses": addresses})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
