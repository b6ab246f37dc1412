"""The base of everything that crosses a file or a process: frozen, keyword-only, unknown fields refused.

Type checkers do not inherit `frozen` and `kw_only`, so each record repeats them.
"""

import msgspec


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A record that is written to, or read from, a file."""
