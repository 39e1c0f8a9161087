"""How the documentation is built: `sphinx-build -W -b html docs docs/_build/html`."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]

import reference_pages  # noqa: E402
from sphinx.ext.napoleon import GoogleDocstring  # noqa: E402

import bendtrace  # noqa: E402 - from this checkout

project = "bendtrace"
author = "the developers of bendtrace"
copyright = "the developers of bendtrace"
version = release = bendtrace.__version__

extensions = [
    "myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon",
    "sphinx.ext.viewcode", "sphinx_copybutton",
]  # fmt: skip
exclude_patterns = ["_build", "**.ipynb_checkpoints", "texts"]
html_theme = "furo"
html_title = f"bendtrace {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]

# Markdown
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Notebooks are committed without outputs and executed here. `BENDTRACE_DOCS_NOTEBOOKS=off` leaves
# them as they are, for a look at a page.
shutil.rmtree(DOCS / "notebooks", ignore_errors=True)
(DOCS / "notebooks").mkdir()
for notebook in (ROOT / "notebooks").glob("*.ipynb"):
    pages = json.loads(notebook.read_text("utf-8").replace("](../docs/", "](../"))
    # What a figure shows, in words: nbconvert and myst_nb have different names for it.
    for cell in pages["cells"]:
        if "alt" in cell["metadata"]:
            cell["metadata"]["mystnb"] = {"image": {"alt": cell["metadata"]["alt"]}}
    (DOCS / "notebooks" / notebook.name).write_text(json.dumps(pages), "utf-8")
nb_execution_mode = os.environ.get("BENDTRACE_DOCS_NOTEBOOKS", "cache")
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True

# The reference
reference_pages.write_pages(DOCS / "reference" / "api")
autosummary_generate = False  # the pages are there
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_type_aliases = {name: name for name in reference_pages.ALIASES}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"
# Types are in the signatures, so a colon in a docstring does not end one. Seen in Sphinx 8 and 9;
# where the methods have other names, some texts are shown as types.
GoogleDocstring._consume_inline_attribute = lambda self: (
    "",
    GoogleDocstring(self._dedent(self._consume_to_end()), self._config).lines(),
)
GoogleDocstring._consume_returns_section = lambda self, preprocess_types=False: [
    ("", "", self._dedent(self._consume_to_next_section()))
]
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
default_role = "code"
add_module_names = False

_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
# Where links of the README, of CONTRIBUTING and of CHANGELOG lead to.
_HERE = {"docs/": "", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
         "README.md": "index.md"}  # fmt: skip


def _as_page(app: Any, name: str, source: list[str]) -> None:
    """Show blocks without a mark as they are, not coloured as Python."""
    source[0] = _FENCE.sub(lambda m: m[0] if m[1] else f"```text\n{m[2]}```", source[0])


def _included(app: Any, path: Path, name: str, source: list[str]) -> None:
    """Have a page that includes a file of the repository link to pages."""
    for there, here in _HERE.items():
        for link in (
            f"](https://github.com/bendtrace/bendtrace/blob/main/{there}",
            f"]({there}",
        ):
            source[0] = source[0].replace(link, f"]({here}")
    _as_page(app, name, source)


def setup(app: Any) -> None:
    """Connect what changes pages as they are read."""
    app.add_directive("public", reference_pages.Public)
    app.add_directive("returned", reference_pages.Returned)
    app.connect("source-read", _as_page)
    app.connect("include-read", _included)
    app.connect("missing-reference", reference_pages.link)
    app.connect("autodoc-process-signature", reference_pages.signature)
