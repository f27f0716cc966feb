"""What is installed, on which devices it runs, and what to do about the rest.

Every check is a function from plain values to findings, so that each outcome can be
tested on any machine; only `examine` looks at the machine.
"""

import os
import platform
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from typing import NamedTuple

import jax

from sfpo_jax import memory
from sfpo_jax._requirements import Requirement, parse_requirement, satisfies
from sfpo_jax.kernels import Library, load_libraries, pool_problem
from sfpo_jax.units import format_bytes

PACKAGE = "sfpo_jax"
_INSTALL = "in the checkout: pip install -e ."


class Finding(NamedTuple):
    """One line of the report."""

    mark: str  # "ok", "note" (worth knowing) or "fix" (broken)
    topic: str  # what was looked at
    fact: str  # what was found
    remedy: str = ""  # what to do, empty if nothing


class Devices(NamedTuple):
    """The devices JAX found, or why it found none."""

    platform: str  # "cpu", "gpu", "tpu"; empty when the backend did not start
    kind: str  # the first device's model
    number: int  # over all processes
    processes: int
    bytes_limit: int | None  # what one device may allocate, None when not reported
    error: str  # empty when the backend started


def check_packages(
    requirements: Iterable[Requirement], find: Callable[[str], str | None]
) -> list[Finding]:
    """Versions of what is always needed, then one line for each extra.

    Args:
      requirements: what the package declares.
      find: the installed version of a distribution, or None.
    """
    findings: list[Finding] = []
    extras: dict[str, list[str]] = {}
    for need in requirements:
        version = find(need.name)
        is_good = version is not None and satisfies(version, need.bounds)
        if need.extra:
            missing = extras.setdefault(need.extra, [])
            if not is_good and need.name.replace("-", "_") != PACKAGE:
                missing.append(need.name + need.bounds)
            continue
        fact = f"{version or 'not installed'}, supported: {need.bounds or 'any'}"
        remedy = "" if is_good else f"pip install '{need.name}{need.bounds}'"
        findings.append(Finding("ok" if is_good else "fix", need.name, fact, remedy))
    for extra, missing in extras.items():
        topic = f"extra {extra}"
        if missing:
            fact = f"not installed: {', '.join(missing)}"
            remedy = f"if you want it, in the checkout: pip install -e '.[{extra}]'"
            findings.append(Finding("note", topic, fact, remedy))
        else:
            findings.append(Finding("ok", topic, "complete"))
    return findings


def check_devices(
    found: Devices, environ: Mapping[str, str], has_nvidia: bool
) -> list[Finding]:
    """The platform, and a GPU that JAX does not see."""
    if found.error:
        remedy = "check JAX_PLATFORMS and the driver; JAX_PLATFORMS=cpu always works"
        return [Finding("fix", "devices", f"no backend: {found.error}", remedy)]
    fact = f"{found.number} x {found.kind} ({found.platform})"
    if found.bytes_limit is not None:
        fact += f", {format_bytes(found.bytes_limit)} each for JAX"
    if found.processes > 1:
        fact += f", in {found.processes} processes"
    findings = [Finding("ok", "devices", fact)]
    if found.platform != "cpu":
        return findings
    if "xla_force_host_platform_device_count" in environ.get("XLA_FLAGS", ""):
        fact = "the devices are one CPU shown several times by XLA_FLAGS"
        remedy = "right for tests and for counting bytes; times mean nothing"
        findings.append(Finding("note", "devices", fact, remedy))
    if has_nvidia and "cpu" not in environ.get("JAX_PLATFORMS", ""):
        fact = "this machine has an NVIDIA GPU that JAX does not use"
        remedy = "pip install 'jax[cuda13]', or 'jax[cuda12]' for an older driver"
        findings.append(Finding("fix", "devices", fact, remedy))
    return findings


def check_memory(environ: Mapping[str, str], on: str) -> list[Finding]:
    """How JAX's allocator is set, and what that means.

    Args:
      environ: the environment.
      on: the platform; only "gpu" and "cuda" have this allocator.
    """
    topic = "gpu memory"
    new, old = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
    switch, kind = "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"
    given = [
        f"{key}={environ[key]}" for key in (new, old, switch, kind) if key in environ
    ]
    if on not in ("gpu", "cuda", "rocm"):
        fact = (
            f"{' '.join(given) or 'allocator settings'}: of no effect on {on or 'cpu'}"
        )
        return [Finding("ok", topic, fact)]
    if environ.get(new) and environ.get(old):
        fact = f"{new} and {old} are both set: JAX refuses to start"
        return [Finding("fix", topic, fact, f"unset {old}, the older name")]
    text = environ.get(new) or environ.get(old) or "0.75"
    try:
        fraction = float(text)
    except ValueError:
        fact = f"the memory fraction {text!r} is not a number"
        return [Finding("fix", topic, fact, f"export {new}=0.9")]
    findings: list[Finding] = []
    allocator = environ.get(kind, "default").lower()
    if allocator == "platform":
        fact = "every array is allocated by the driver and given back at once"
        remedy = f"slow, good for measuring memory; to train: unset {kind}"
        findings.append(Finding("note", topic, fact, remedy))
    elif allocator not in ("default", "bfc"):
        fact = f"the allocator {allocator}, with up to {fraction:.0%} of a device"
        remedy = f"JAX's own choice: unset {kind}"
        findings.append(Finding("note", topic, fact, remedy))
    elif environ.get(switch) in ("false", "False", "0"):
        fact = f"grows as needed up to {fraction:.0%} of a device; it may fragment"
        remedy = f"when a run nearly fills the device: unset {switch}"
        findings.append(Finding("note", topic, fact, remedy))
    else:
        fact = f"JAX reserves {fraction:.0%} of a device when it starts"
        remedy = f"for a larger model: export {new}=0.95; to share: {switch}=false"
        findings.append(Finding("ok", topic, fact, remedy))
    return findings


def check_planner(problem: str | None, command: str) -> list[Finding]:
    """Whether `plan` has XLA's GPU compiler.

    Args:
      problem: why not, None when it has.
      command: what installs it.
    """
    if problem is None:
        fact = "XLA's GPU compiler is there: `plan` needs no GPU"
        return [Finding("ok", "planner", fact)]
    fact = f"no GPU compiler, `plan` uses the CPU's and is less exact: {problem}"
    return [Finding("note", "planner", fact, f"if you want it: {command}")]


def check_kernels(libraries: Iterable[Library]) -> list[Finding]:
    """Which native kernels are loaded, and why others are not."""
    findings: list[Finding] = []
    for target, path, problem in libraries:
        topic = f"kernels {target}"
        if not problem:
            findings.append(Finding("ok", topic, f"native: {path}"))
            continue
        # One that was never built is a choice, one that is broken is not.
        mark, remedy = ("fix", _INSTALL) if path else ("note", "")
        fact = f"the jnp versions run, with the same results: {problem}"
        findings.append(Finding(mark, topic, fact, remedy))
    return findings


def check_pool(problems: Mapping[str, str]) -> list[Finding]:
    """Which memory a `sfpo_jax.memory.Pool` can be of.

    Args:
      problems: for "host" and "cuda", why there is no pool; empty where there is.
    """
    findings: list[Finding] = []
    for backend, problem in problems.items():
        topic = f"memory pool {backend}"
        if not problem:
            page = format_bytes(memory.DEFAULT_PAGE)
            fact = f"available, pages of {page} if not asked otherwise"
            findings.append(Finding("ok", topic, fact))
        else:
            findings.append(Finding("note", topic, f"not available: {problem}"))
    return findings


def standing_notes() -> list[Finding]:
    """What holds on every machine and is easily taken for something else."""
    return [
        Finding(
            "note",
            "the wire",
            "inside an automatically sharded jit with axis_name=None the compiler has "
            "already averaged the gradients densely: one-bit and sparse "
            "transformations then save nothing on the wire",
            "use sfpo_jax.make_train_step, or shard_map with axis_name set",
        ),
    ]


def installed(name: str) -> str | None:
    """The version of a distribution, None when it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def find_devices() -> Devices:
    """Starts JAX's backend, or tells why it does not start."""
    try:
        devices = jax.devices()
        first = jax.local_devices()[0]
        limit = (first.memory_stats() or {}).get("bytes_limit")
        return Devices(
            first.platform,
            first.device_kind,
            len(devices),
            jax.process_count(),
            limit,
            "",
        )
    # A backend can fail in any way, and the report is there to say so.
    except Exception as error:
        cause = str(error).strip().splitlines() or [""]
        return Devices("", "", 0, 0, None, f"{type(error).__name__} {cause[0]}".strip())


def examine() -> list[Finding]:
    """All findings about this machine, in the order of the report."""
    try:
        declared = metadata.requires(PACKAGE) or []
        version, python = metadata.version(PACKAGE), platform.python_version()
        supported = metadata.metadata(PACKAGE)["Requires-Python"]
        is_good = satisfies(python, supported)
        findings = [
            Finding("ok", PACKAGE, version),
            Finding(
                "ok" if is_good else "fix",
                "python",
                f"{python}, supported: {supported}",
                "" if is_good else f"make an environment with Python {supported}",
            ),
        ]
    except metadata.PackageNotFoundError:
        declared = []
        fact = "imported from a folder, not installed: its versions are not known"
        findings = [Finding("note", PACKAGE, fact, _INSTALL)]
    found, has_nvidia = find_devices(), os.path.exists("/dev/nvidiactl")
    # A wrong setting may be why the GPU is not there, so it is looked at all the same.
    is_wanted = has_nvidia and "cpu" not in os.environ.get("JAX_PLATFORMS", "")
    findings += check_packages(map(parse_requirement, declared), installed)
    findings += check_devices(found, os.environ, has_nvidia)
    findings += check_memory(os.environ, "gpu" if is_wanted else found.platform)
    findings += check_planner(memory.compiler_problem(), memory.install_command())
    findings += check_kernels(load_libraries())
    findings += check_pool({name: pool_problem(name) for name in ("host", "cuda")})
    return findings + standing_notes()


def render(findings: Iterable[Finding], width: int) -> str:
    """The report as aligned text, at most `width` columns where words allow it."""
    findings = list(findings)
    topics = max(len(finding.topic) for finding in findings)
    lines: list[str] = []
    for mark, topic, fact, remedy in findings:
        head = f"{mark:<4}  {topic:<{topics}}  "
        indent = " " * len(head)
        lines += textwrap.wrap(
            fact, width, initial_indent=head, subsequent_indent=indent
        )
        lines += textwrap.wrap(
            remedy,
            width,
            initial_indent=f"{indent}-> ",
            subsequent_indent=f"{indent}   ",
            break_on_hyphens=False,
        )
    broken = sum(finding.mark == "fix" for finding in findings)
    lines.append("")
    lines.append(f"{broken} to fix." if broken else "Nothing to fix.")
    return "\n".join(lines)


def run() -> int:
    """Prints the report; 1 when something is broken, else 0."""
    findings = examine()
    print(render(findings, max(60, shutil.get_terminal_size().columns)))
    return int(any(finding.mark == "fix" for finding in findings))
