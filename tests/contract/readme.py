"""Runs the README's commands: `python tests/contract/readme.py`.

Code blocks are tagged after the language: `run` as written, `dry-run` with dry_run=true, `ci` by CI as steps of their own
(here: the make target exists), `example` is text with placeholders.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TAGS = ("run", "dry-run", "ci", "example")


def blocks(text: str) -> list[tuple[str, list[str]]]:
    """(tag, commands) of each bash block."""
    found = []
    for tag, body in re.findall(r"^```bash ?(\S*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        lines = [line.split("  #")[0].strip() for line in body.splitlines()]
        found.append((tag, [line for line in lines if line and not line.startswith("#")]))
    return found


def main() -> int:
    untagged = re.findall(r"^```(?!bash (?:run|dry-run|ci|example)\n)\S.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    failed = [f"a code block without a tag: {line}" for line in untagged]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for tag, commands in blocks((ROOT / "README.md").read_text()):
        for command in commands:
            if tag == "example" and not command.startswith("make "):
                continue
            line = {"dry-run": f"{command} dry_run=true", "run": command}.get(tag, command.replace("make ", "make -n "))
            done = subprocess.run(line, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
            print(f"{'ok' if done.returncode == 0 else 'FAILED'}  [{tag}] {line}", flush=True)
            if done.returncode:
                failed.append(f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    print("\n".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
