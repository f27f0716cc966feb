"""What several hosts agree on, kept in one process."""

import jax


class Table:
    """The coordinator's table, for several `Hosts` in one process."""

    def __init__(self) -> None:
        self.held = {}

    def key_value_set(self, key: str, value: str):
        if key in self.held:
            raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
        self.held[key] = value

    def blocking_key_value_get(self, key: str, timeout: int):
        return self.held[key]

    def key_value_try_get(self, key: str):
        if key not in self.held:
            raise jax.errors.JaxRuntimeError("NOT_FOUND")
        return self.held[key]
