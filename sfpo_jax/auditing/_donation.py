"""Memory of the state that a step was to reuse and does not."""

from sfpo_jax.auditing._leaves import Leaf
from sfpo_jax.auditing._program import NOTEWORTHY, Audited, name_some
from sfpo_jax.auditing._report import Finding


def find_unreused(audited: Audited) -> list[Finding]:
    """Donated arrays that no output takes the place of; state that is not donated."""
    aliases = audited.program.aliases
    reused = set(aliases.values())
    after = {before: pair.after for pair in audited.pairs for before in pair.before}
    failed = [x for x in audited.inputs if x.donated and x.number not in reused]
    kept = [
        x
        for x in after
        if not x.donated and after[x].number >= 0 and after[x].number not in aliases
    ]
    findings = []
    for leaves, fact, remedy in (
        (
            failed,
            "donated, and nothing that is returned is written in its place",
            "return it with the same shape, dtype and sharding, or do not donate it",
        ),
        (
            kept,
            "not donated, so that the state is there twice, old and new",
            "jax.jit(step, donate_argnums=...) with the state's number",
        ),
    ):
        found = sorted((x for x in leaves if x.bytes), key=lambda x: -x.bytes)
        size = sum(x.bytes for x in found)
        if size == 0 or size < NOTEWORTHY * audited.argument_bytes:
            continue
        grown = [x for x in found if _is_wider(x, after)]
        if grown and fact.startswith("donated"):
            remedy = f"return {name_some([x.name for x in grown])} as {grown[0].dtype}"
        place = after[found[0]].place if found[0] in after else ""
        findings.append(
            Finding(
                "donation",
                size,
                place or audited.definition,
                f"{name_some([x.name for x in found])}: {fact}",
                remedy,
            )
        )
    return findings


def _is_wider(leaf: Leaf, after: dict[Leaf, Leaf]) -> bool:
    return leaf in after and after[leaf].dtype.itemsize > leaf.dtype.itemsize
