"""Which addresses a run listens on, seen from inside it."""

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from helpers.own_components import Countdown
from ppl_eval.data.sources import Content, EncodeRequest

_LISTENING = "0A"


def listening(pids: list[int]) -> list[str]:
    """Addresses of the TCP sockets that these processes listen on, from /proc."""
    addresses = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING:
                words = bytes.fromhex(fields[1].split(":")[0])
                # Each word of four bytes is in the machine's order.
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                addresses[f"socket:[{fields[9]}]"] = socket.inet_ntop(family, packed)
    found = []
    for pid in pids:
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            try:
                found.append(addresses.get(os.readlink(handle)))
            except OSError:
                continue
    return [address for address in found if address is not None]


@dataclass(frozen=True)
class Listening(Countdown):
    """A source that writes down who listens where, once the process group is formed."""

    def identify(self, request: EncodeRequest) -> Content:
        Path(self.remark).write_text(json.dumps(listening([os.getpid(), os.getppid()])))
        return Content({"listening": self.remark}, notes=())
