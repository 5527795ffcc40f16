"""What an NCCL_DEBUG log says: which interface, which transport, who failed first."""

import re
from collections import Counter
from pathlib import Path

from ppl_eval.commands.doctor import Finding

# "host:pid:tid [device] NCCL INFO text", as NCCL writes with NCCL_DEBUG=INFO (src/debug.cc of NVIDIA/nccl).
_LINE = re.compile(
    r"(?P<host>\S+?):(?P<pid>\d+):\d+ \[(?P<device>\d+)\] (?:\S+ \S+ )?"
    r"NCCL (?P<level>INFO|WARN) (?P<text>.*)"
)
_INTERFACE = re.compile(r"(?:Bootstrap *: *Using|NET/\S+ *: *Using) (?P<what>.*)")
_RANK = re.compile(r"\brank (?P<rank>\d+) nranks (?P<size>\d+)")
_TRANSPORT = re.compile(r" via (?P<what>P2P\S*|SHM\S*|NET/[A-Za-z]+)")
_SLOW = {
    "NET/Socket": "data goes over TCP: where there is InfiniBand or RoCE, see NCCL_IB_DISABLE, NCCL_IB_HCA"
}


def read_log(path: Path) -> list[Finding]:
    """Summarise a log.

    Raises:
        ValueError: if no line of it is NCCL's.
    """
    interfaces: Counter[str] = Counter()
    transports: Counter[str] = Counter()
    ranks: dict[tuple[str, str, str], str] = {}
    warnings: list[tuple[str, str]] = []
    num_lines = 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            found = _LINE.search(line)
            if found is None:
                continue
            num_lines += 1
            who = (found["host"], found["pid"], found["device"])
            text = found["text"]
            if rank := _RANK.search(text):
                ranks[who] = rank["rank"]
            if interface := _INTERFACE.search(text):
                interfaces[f"{found['host']}: {interface['what'].strip()}"] += 1
            if transport := _TRANSPORT.search(text):
                transports[transport["what"]] += 1
            if found["level"] == "WARN":
                warnings.append(
                    (f"rank {ranks.get(who, '?')} on {found['host']} (device {found['device']})", text)
                )
    if not num_lines:
        raise ValueError(f"{path} has no line of NCCL's; run with NCCL_DEBUG=INFO and keep what it prints")
    findings = [Finding("lines of NCCL", "", str(num_lines)), Finding("ranks seen", "", str(len(ranks)))]
    findings += [Finding("interface", "", name) for name, _ in interfaces.most_common(8)]
    for name, count in transports.most_common():
        findings.append(Finding("transport", "", f"{name} ({count} connections)", _SLOW.get(name, "")))
    for rank_of, text in warnings[:1]:
        findings.append(
            Finding("first warning", "none", f"{rank_of}: {text}", "look at this rank's host first")
        )
    if len(warnings) > 1:
        findings.append(Finding("further warnings", "", str(len(warnings) - 1)))
    return findings
