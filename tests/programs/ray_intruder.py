"""Another local user: runs a task in the Ray cluster at HOST:PORT.

Usage: ray_intruder.py HOST:PORT MODE TOKEN MARK. The task writes the file MARK. Exit code 0 when it
ran; anything else when Ray refused.
"""

import os
import sys
from pathlib import Path

address, mode, token, mark = sys.argv[1:]
os.environ |= {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": token}

import ray  # noqa: E402  (reads the variables when it is imported)

host = address.partition(":")[0]
ray.init(address=address, logging_level="ERROR", log_to_driver=False, _node_ip_address=host)


@ray.remote(num_cpus=0)
def who() -> int:
    Path(mark).write_text(str(os.getuid()))
    return os.getuid()


print(ray.get(who.remote(), timeout=120))
