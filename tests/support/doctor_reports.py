"""Reports of `outrider doctor`, as they are printed."""


def sections(printed: str) -> dict[str, dict[str, str]]:
    """The printed report, by title and name."""
    found: dict[str, dict[str, str]] = {}
    for line in filter(str.strip, printed.splitlines()):
        name, *finding = [part.strip() for part in line.split("  ") if part.strip()]
        if finding:
            found[list(found)[-1]][name] = " ".join(finding)
        else:
            found[name] = {}
    return found
