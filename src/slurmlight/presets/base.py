"""What every section of a preset is."""

from msgspec import Struct


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Immutable; refuses unknown keys. msgspec instead of pydantic: a dry run must answer in half a second."""
