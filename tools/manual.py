"""What mkdocs is told by Python: pages that are made of the code, and the parts of the navigation that nobody keeps.

Pages of the API come from `__all__` of the public packages, the page of commands from their own help, the list of
decisions from docs/adr, and files that live at the top of the repository are pages too. Whatever else is in docs/ and
in no part of the navigation is put under "More", so that a page which is written can be found.
"""

import argparse
import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = [
    "", "nn", "data", "optim", "server", "distributed", "lightning", "transformers", "ray", "spark", "topology",
    "testing",
]  # fmt: skip
ABOVE = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md", "security.md": "SECURITY.md"}


def public_names(package: str) -> list[str]:
    """What `__all__` of a package of ours has; nothing of it is imported."""
    source = (ROOT / "src/evenstep" / package / "__init__.py").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    raise ValueError(f"evenstep.{package} says nothing of what is public: it has no __all__")


def api_page(package: str) -> str:
    """A page for mkdocstrings: what the package says of itself, then everything in it."""
    module = f"evenstep.{package}".rstrip(".")
    names = sorted((name for name in public_names(package) if name not in PUBLIC), key=lambda n: n.endswith("Error"))
    own = {"members": False, "show_root_heading": False, "show_root_toc_entry": False}
    options = "\n".join(f"      {key}: {str(value).lower()}" for key, value in own.items())
    parts = [f"# {module}", f"::: {module}\n    options:\n{options}", *(f"::: {module}.{name}" for name in names)]
    return "\n\n".join(parts) + "\n"


def commands_page() -> str:
    """What every command says of itself."""
    os.environ["COLUMNS"] = "100"
    from evenstep.cli.main import _parser  # the one description of the command line that there is

    top = _parser()
    found: dict[str, argparse.ArgumentParser] = {}
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            found = dict(action.choices)
    parts = ["# Commands", "What `evenstep COMMAND --help` prints."]
    for name, parser in found.items():
        parts.append(f"## evenstep {name}\n\n```text\n{parser.format_help().rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def from_above(name: str) -> str:
    """A file from the top of the repository, with links as from docs/; what is not in the manual is not linked."""
    pages = {above: page for page, above in ABOVE.items()}

    def seen(link: re.Match[str]) -> str:
        words, target = link.groups()
        target = "adr/index.md" if target == "docs/adr/" else pages.get(target, target.removeprefix("docs/"))
        return f"[{words}]({target})" if ".md" in target or "//" in target else str(words)

    return re.sub(r"\[([^]]+)\]\(([^)]+)\)", seen, (ROOT / name).read_text())


def decisions() -> list[str]:
    """The files of docs/adr in their order."""
    return [f"adr/{path.name}" for path in sorted((ROOT / "docs/adr").glob("[0-9]*.md"))]


def decisions_page() -> str:
    """The list of decisions, each by its own heading."""
    lines = ["# Decisions", "Decisions that closed other ways: why, what was given up, and how we would notice.", ""]
    for path in decisions():
        heading = (ROOT / "docs" / path).read_text().splitlines()[0].removeprefix("# ")
        lines.append(f"- [{heading.partition('. ')[0]}]({path.removeprefix('adr/')}): {heading.partition('. ')[2]}")
    return "\n".join(lines) + "\n"


def generated() -> dict[str, str]:
    """All pages that are made here, by path."""
    api = {f"reference/{package or 'evenstep'}.md": api_page(package) for package in PUBLIC}
    above = {page: from_above(name) for page, name in ABOVE.items()}
    return {**api, **above, "reference/commands.md": commands_page(), "adr/index.md": decisions_page()}


def named(nav: Any) -> Iterator[str]:
    """All pages of a navigation."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, list | dict):
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from named(each)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the navigation."""
    nav = config.nav or []
    for part in nav:
        if isinstance(part, dict) and "API" in part:
            part["API"] = [f"reference/{package or 'evenstep'}.md" for package in PUBLIC]
        if isinstance(part, dict) and "Decisions" in part:
            part["Decisions"] = ["adr/index.md", *decisions()]
    docs = ROOT / "docs"
    written = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    if left := sorted(written - set(named(nav))):
        nav.append({"More": left})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    for path, text in generated().items():
        files.append(File.generated(config, path, content=text))
    return files
