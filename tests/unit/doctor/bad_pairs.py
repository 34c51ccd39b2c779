"""Speaks as the probe ``copies pairs`` does, on GPUs of which two pairs are broken."""

from __future__ import annotations

import json
import os
import sys
import time

copies = []
for pair in sys.argv[4].split(","):
    print(f"at: {pair}", file=sys.stderr, flush=True)
    if pair == "1-0":
        time.sleep(600)
    if pair == "2-0":
        os.abort()
    source, target = map(int, pair.split("-"))
    copies.append({"source": source, "target": target, "is_right": True, "gb_s": 20.0})
    print(json.dumps({"copies": copies}), flush=True)
