import hashlib
import os
import time

from muster import Reject


def note(text):
    handle = os.open(os.environ["CHAOS_NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, f"{text}\n".encode())
    os.close(handle)


class Hash:
    def process(self, batch):
        time.sleep(0.01)
        made = []
        for record in batch:
            note(record["n"])
            if record["n"] % 97 == 5:
                made.append(Reject("ninety-seven"))
            elif record["n"] % 31 == 2:
                made.append(None)
            elif record["n"] % 40 == 1:
                made.append([{"h": "twice"}, {"h": "twice"}])
            else:
                made.append({"h": hashlib.sha256(record["text"].encode()).hexdigest()})
        return made


class Later:
    concurrency = 10

    async def process_one(self, record):
        import asyncio

        note(record["n"])
        await asyncio.sleep(0.01 + record["n"] * 7919 % 13 / 500)
        if record["n"] % 97 == 5:
            raise Reject("ninety-seven")
        return {"h": hashlib.sha256(record["text"].encode()).hexdigest()}


class Mixed:
    """Takes records of any source: it changes some columns, leaves others, adds one to a few."""

    def process(self, batch):
        time.sleep(0.01)
        made = []
        for record in batch:
            n = int(record["n"])
            note(n)
            if n % 97 == 5:
                made.append(Reject("ninety-seven"))
            elif n % 31 == 2:
                made.append(None)
            elif n % 40 == 1:
                made.append([record, {**record, "text": record["text"][::-1], "again": True}])
            else:
                made.append({**record, "length": len(record["text"])})
        return made
