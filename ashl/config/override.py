"""KEY=VALUE, as it is typed."""


def key_of(override: str) -> str:
    """The key; a leading `+` or `++` means nothing here."""
    return override.lstrip("+").partition("=")[0]
