"""Listens on whichever of these ports it can get, and reads what it is sent: SECONDS PORT…

It ends when it is told to (SIGTERM), or after so many seconds.
It answers as the server of an HTTP/2 connection does at first, so that who connects goes on.
"""

import json
import select
import signal
import socket
import sys
import time

ports = [int(word) for word in sys.argv[2:]]
end = time.monotonic() + float(sys.argv[1])
servers: dict[int, socket.socket] = {}
lines: list[socket.socket] = []
heard = 0
told: list[int] = []
signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
print("begun", flush=True)
while not told and time.monotonic() < end:
    for port in ports:
        if port not in servers:
            server = socket.socket()
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind(("127.0.0.1", port))
                server.listen()
                servers[port] = server
            except OSError:
                server.close()
    for one in select.select([*servers.values(), *lines], [], [], 0.002)[0]:
        try:
            if one in lines:
                data = one.recv(1 << 16)
                heard += len(data)
                if not data:
                    lines.remove(one)
            else:
                line = one.accept()[0]
                line.sendall(b"\0\0\0\4\0\0\0\0\0")
                lines.append(line)
        except OSError:
            if one in lines:
                lines.remove(one)
print(json.dumps({"got": sorted(servers), "heard": heard}))
