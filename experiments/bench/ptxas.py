"""What NVIDIA's assembler says of the CUDA kernels: registers, stack and spills.

    python -m experiments.bench.ptxas

Compiles them with nvcc, which needs no GPU, and writes JSON and a table. Fails where a
kernel spills or has a stack frame.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

PROGRAM = "python -m experiments.bench.ptxas"
_OUT = Path("docs/results/ptxas.json")
_ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(sm_\d+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


def parse(text: str) -> list[dict[str, Any]]:
    """One row a kernel and architecture, from what `ptxas -v` prints."""
    rows: list[dict[str, Any]] = []
    for line in text.splitlines():
        if found := _ENTRY.search(line):
            rows.append({"kernel": _name(found[1]), "architecture": found[2]})
        elif (found := _STACK.search(line)) and rows:
            rows[-1]["stack_bytes"] = int(found[1])
            rows[-1]["spill_bytes"] = int(found[2]) + int(found[3])
        elif (found := _USED.search(line)) and rows:
            rows[-1]["registers"] = int(found[1])
            rows[-1]["shared_bytes"] = int(found[2] or 0)
    return rows


def _name(mangled: str) -> str:
    """The name of a kernel of an anonymous namespace, with its numbers as arguments."""
    found = re.search(r"_cu_[0-9a-f]{8}(\d+)", mangled)
    if found is None:
        return mangled
    digits, rest = found[1], mangled[found.end() :]
    name, rest = rest[: int(digits)], rest[int(digits) :]
    numbers = re.findall(r"L[a-z](\d+)E", rest.split("EE")[0] + "E")
    return f"{name}<{', '.join(numbers)}>" if numbers else name


def report() -> list[dict[str, Any]]:
    """Compiles every kernel.

    Raises:
      RuntimeError: cmake or nvcc is missing, or fails.
    """
    if not shutil.which("cmake") or not shutil.which("nvcc"):
        raise RuntimeError("`cmake` and `nvcc` must be on the PATH")
    source = Path(__file__).parents[2] / "xla_ffi"
    with tempfile.TemporaryDirectory() as folder:
        include = f"-DSFPO_XLA_INCLUDE={jax.ffi.include_dir()}"
        configure = ["cmake", "-S", str(source), "-B", folder, include]
        build = ["cmake", "--build", folder, "--target", "sfpo_ptxas_report"]
        for command in (configure, build):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        return parse((Path(folder) / "cuda" / "ptxas.txt").read_text("utf-8"))


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A table, kernels down and architectures across."""
    names = sorted({row["architecture"] for row in rows})
    heads = [f"registers, {name}" for name in names]
    lines = [f"| kernel | {' | '.join(heads)} | shared memory | stack | spills |"]
    lines.append("|---|" + "---:|" * (len(names) + 3))
    for kernel in sorted({row["kernel"] for row in rows}):
        own = {row["architecture"]: row for row in rows if row["kernel"] == kernel}
        cells = [str(own[name]["registers"]) for name in names]
        for key in ("shared_bytes", "stack_bytes", "spill_bytes"):
            cells.append(f"{max(row[key] for row in own.values())} B")
        lines.append(f"| `{kernel}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Writes the report; 1 where it cannot be made, or a kernel spills."""
    try:
        rows = report()
    except RuntimeError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    _OUT.parent.mkdir(parents=True, exist_ok=True)
    _OUT.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    _OUT.with_suffix(".md").write_text(markdown(rows), encoding="utf-8")
    print(markdown(rows))
    return int(any(row["stack_bytes"] or row["spill_bytes"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
