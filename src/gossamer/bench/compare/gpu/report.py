"""The GPU report: one Markdown file to send, with the same data as JSON at its end."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gossamer.bench.compare.gpu.findings import Finding, failures
from gossamer.core import files

AUTHOR = "<!-- a report on GPUs, written by gossamer doctor -->"
KIND = files.FileKind("report on GPUs", (AUTHOR.encode(),))
BEGIN, END = "```json\n", "\n```\n"


@dataclass
class Report:
    facts: dict[str, Any]
    findings: Sequence[Finding]

    @property
    def failures(self) -> list[str]:
        return failures(self.findings)

    def to_json(self) -> str:
        told = {"facts": self.facts, "failures": self.failures, "findings": [asdict(f) for f in self.findings]}
        return json.dumps(told, indent=1)

    def as_markdown(self) -> str:
        return "\n".join(
            [
                f"{AUTHOR}\n\n# gossamer on GPUs\n",
                self.verdict(),
                *[f"- {sentence}" for sentence in self.failures],
                "\n## Versions\n",
                *_table(("what", "which"), [(k, v) for k, v in self.facts.items()]),
                *[line for check in self.checks() for line in self._section(check)],
                "\n## The same as JSON\n",
                f"{BEGIN}{self.to_json()}{END}",
            ]
        )

    def verdict(self) -> str:
        """Number of findings by outcome, in one sentence."""
        counts = {o: sum(f.outcome == o for f in self.findings) for o in ("passed", "measured", "left out")}
        rest = ", ".join(f"{n} {name}" for name, n in counts.items() if n)
        failed = len(self.failures)
        return f"{f'{failed} failed' if failed else 'Nothing failed'}; {rest or 'nothing else was tried'}."

    def checks(self) -> list[str]:
        return list(dict.fromkeys(f.check for f in self.findings))

    def of(self, check: str) -> list[Finding]:
        return [f for f in self.findings if f.check == check]

    def _section(self, check: str) -> list[str]:
        rows = [(f.subject, f.outcome, f.says) for f in self.of(check)]
        return [f"\n## {check[:1].upper()}{check[1:]}\n", *_table(("what", "outcome", "in words"), rows)]


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(_cell(value) for value in line) + " |" for line in lines]


def _cell(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return " ".join(text.split()).replace("|", "\\|")
