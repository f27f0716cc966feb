"""Test sessions in environments of their own: `nox -s tests`, `newest`, `lint`."""

import nox

nox.options.sessions = ["tests", "lint"]
# The standard library's venv: nothing else has to be installed first.
nox.options.default_venv_backend = "venv"


@nox.session(python="3.11")
def tests(session: nox.Session) -> None:
    """All tests, on the oldest Python and so the oldest JAX of the range."""
    session.install("-e", ".[test]")
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session(python=["3.12", "3.13"])
def newest(session: nox.Session) -> None:
    """The library's tests, but for the slow ones, on the newest JAX; `-- -m ""`: all.

    It compiles these small programs three times as long as the oldest.
    """
    session.install("-e", ".[test]")
    session.run("python", "-m", "sfpo_jax", "doctor")
    chosen = session.posargs or ["-m", "not slow"]
    session.run("python", "-m", "pytest", "--ignore=tests/experiments", *chosen)


@nox.session(python="3.11")
def lint(session: nox.Session) -> None:
    """Style, types, the arrows between the rooms, and the pages."""
    session.install("-e", ".[test,docs]")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("pyright", "--pythonpath", f"{session.bin}/python")
    session.run("lint-imports")
    session.run("mkdocs", "build", "--strict")
