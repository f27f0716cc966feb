"""The section `distributed`: the hosts of a run, and when one of them is given up."""

import dataclasses
from typing import Literal

from sfpo_jax._validate import check_at_least
from sfpo_jax.parallel import Hosts, current_hosts, is_launched, join_hosts


@dataclasses.dataclass(frozen=True)
class Distributed:
    """Where a run happens; nothing that it computes depends on this."""

    enable: bool = False
    """Run on several hosts; --distributed for short. On by itself under
    python -m sfpo_jax launch."""
    coordinator: str = "auto"
    """HOST:PORT on the first host, where all meet and which must be reachable by them
    alone; auto: from SLURM, Open MPI, Kubernetes or the launcher."""
    hosts: int | Literal["auto"] = "auto"
    """Number of processes."""
    rank: int | Literal["auto"] = "auto"
    """Of this process, from 0."""
    deadline: float = 30.0
    """Seconds without a sign of life after which a host is given up."""
    stuck_after: float = 1800.0
    """Seconds that hosts wait for one that is alive but does not come further."""

    def __post_init__(self) -> None:
        for name in ("deadline", "stuck_after"):
            check_at_least(
                f"distributed.{name}", getattr(self, name), 1, "a number of seconds"
            )


def join(section: Distributed) -> Hosts:
    """Joins the run that a section names; this process alone where it names none.

    Errors are those of `join_hosts`.
    """
    if not (section.enable or is_launched()):
        return current_hosts()

    def known(value: str | int) -> str | int | None:
        return None if value == "auto" else value

    coordinator, hosts, rank = map(
        known, (section.coordinator, section.hosts, section.rank)
    )
    assert coordinator is None or isinstance(coordinator, str)
    assert not isinstance(hosts, str) and not isinstance(rank, str)
    return join_hosts(
        coordinator,
        hosts,
        rank,
        deadline=section.deadline,
        stuck_after=section.stuck_after,
    )
