"""NVLink as the driver reports it: what a GPU sends to the others of its host."""

import re
import shutil
import subprocess
from typing import NamedTuple

_GPU = re.compile(r"^GPU (\d+): (.*?)(?: \(UUID: .*\))?$")
_LINK = re.compile(r"^\s*Link (\d+): (?:([\d.]+) GB/s|<inactive>|(.*))$")
_TIMEOUT_S = 10


class NvLinks(NamedTuple):
    """The NVLinks of one GPU."""

    gpu: int  # the driver's number of it
    name: str
    active: int  # links that are up
    inactive: int
    bandwidth: float  # bytes a second in one direction, over all links that are up


def parse_nvlinks(text: str) -> list[NvLinks]:
    """Reads `nvidia-smi nvlink --status`.

    Args:
      text: its output: for each GPU a line, then one for each link with its rate in
        one direction, or "<inactive>".

    Returns:
      One entry a GPU; without links for one that has none or does not say.

    Example:
      >>> parse_nvlinks('''GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-0)
      ...          Link 0: 25 GB/s
      ...          Link 1: <inactive>''')
      [NvLinks(gpu=0, name='NVIDIA A100-SXM4-80GB', active=1, inactive=1,
      bandwidth=25000000000.0)]
    """
    found: list[NvLinks] = []
    for line in text.splitlines():
        if gpu := _GPU.match(line.strip()):
            found.append(NvLinks(int(gpu[1]), gpu[2], 0, 0, 0.0))
        elif found and (link := _LINK.match(line)):
            last = found[-1]
            rate = float(link[2] or 0)
            # A link that trained badly reports 0 GB/s.
            found[-1] = last._replace(
                active=last.active + (rate > 0),
                inactive=last.inactive + (rate == 0),
                bandwidth=last.bandwidth + 1e9 * rate,
            )
    return found


def nvlink_bandwidth(text: str) -> float | None:
    """Bytes a second that every GPU can send over NVLink; None without NVLink.

    The slowest GPU counts: a collective waits for it.

    Args:
      text: as for `parse_nvlinks`.
    """
    rates = [gpu.bandwidth for gpu in parse_nvlinks(text)]
    return min(rates, default=0.0) or None


def read_nvlinks() -> str:
    """What the driver says; empty where there is no driver or it does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "nvlink", "--status"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
