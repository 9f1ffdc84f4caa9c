"""Build the site of the pages and of the API reference: python docs/site/build.py FOLDER.

The pages stay where they are and are links to each other as files. This stages them, with a page of reference for each
public module, under FOLDER-source, and runs Sphinx, for which a warning is an error.
"""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import ortrain

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
README = ROOT / "README.md"
# Chapters of the sidebar; links lead to all other pages.
CHAPTERS = {
    "First steps": [
        "fit",
        "commands",
        "tutorial",
        "tutorial-images",
        "tutorial-text",
        "tutorial-table",
        "tutorial-audio",
        "tutorial-series",
        "tutorial-resume",
    ],
    "Training": [
        "losses",
        "optimizers",
        "seeds",
        "batch-normalization",
        "lora",
        "checkpoints",
        "gpus",
        "distributed",
        "federated",
        "buffers",
        "gradients",
        "scikit-learn",
        "pytorch",
        "jax",
        "debugging",
    ],
    "Models": ["exporters", "quantized-models", "operators", "extending", "security"],
    "Speed": ["performance"],
    "From elsewhere": [
        "from-keras",
        "from-hugging-face",
        "from-ultralytics",
        "migrating",
        "orttrainer",
        "classic-session",
        "onnxcustom",
        "not-here",
        "csharp-training-session",
        "rust",
    ],
}
MODULES = [
    "ortrain",
    "ortrain.artifacts",
    "ortrain.api",
    "ortrain.api.checkpoint_state",
    "ortrain.api.module",
    "ortrain.api.optimizer",
    "ortrain.api.lr_scheduler",
    "ortrain.callbacks",
    "ortrain.data",
    "ortrain.lora",
    "ortrain.metrics",
    "ortrain.optim",
    "ortrain.schedules",
    "ortrain.api.outputs",
    "ortrain.api.profile",
    "ortrain.gradient",
    "ortrain.gradient.optimizers",
    "ortrain.gradient.optimizers_partial",
    "ortrain.gradient.sgd_learning_rate",
    "ortrain.gradient.sgd_learning_loss",
    "ortrain.gradient.sgd_learning_penalty",
    "ortrain.gradient.data_loader",
    "ortrain.gradient.grad_helper",
    "ortrain.gradient.excs",
    "ortrain.gradient.utils.onnx_function",
    "ortrain.gradient.utils.onnx_helper",
    "ortrain.gradient.utils.onnx_rewriter",
    "ortrain.gradient.utils.onnxruntime_helper",
    "ortrain.gradient.utils.orttraining_helper",
    "ortrain.torch",
    "ortrain.jax",
    "ortrain.flower",
    "ortrain.sklearn",
    "ortrain.session",
    "ortrain.classic",
    "ortrain.trainer",
    "ortrain.trainer.orttrainer",
    "ortrain.trainer.orttrainer_options",
    "ortrain.trainer.optim",
    "ortrain.trainer.optim.config",
    "ortrain.trainer.optim.lr_scheduler",
    "ortrain.trainer.amp",
    "ortrain.trainer.amp.loss_scaler",
    "ortrain.trainer.train_step_info",
    "ortrain.trainer.checkpoint",
    "ortrain.trainer.distributed",
    "ortrain.trainer.legacy",
    "ortrain.trainer.model_desc_validation",
    "ortrain.trainer.postprocess",
    "ortrain.inference",
    "ortrain.iobinding",
    "ortrain.ortvalue",
    "ortrain.capi",
    "ortrain.errors",
    "ortrain.examples",
    "ortrain.compat",
    "ortrain.backend",
    "ortrain.onnxblock",
    "ortrain.onnxblock.blocks",
    "ortrain.onnxblock.loss",
    "ortrain.onnxblock.optim",
]
# Links, and images after their exclamation mark.
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"^(```.*?^```)", re.DOTALL | re.MULTILINE)


class Stage:
    """The folder that Sphinx reads. Linked pages and files are staged, too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pages: set[Path] = set()

    def place(self, page: Path) -> Path:
        """Return the path of a repository file in the stage."""
        return self.folder / ("index.md" if page == README else page.relative_to(ROOT))

    def add(self, page: Path, before: str = "", after: str = "") -> None:
        """Stage a page with the targets of its links."""
        self.pages.add(page)
        place = self.place(page)
        place.parent.mkdir(parents=True, exist_ok=True)
        parts = FENCE.split(page.read_text())
        parts[::2] = [LINK.sub(lambda link: self.link(page, link), part) for part in parts[::2]]
        place.write_text(before + "".join(parts) + after)

    def link(self, page: Path, link: re.Match[str]) -> str:
        """Return a link with the path of its target in the stage."""
        text, path, anchor = link[1], link[2], link[3] or ""
        if path.startswith("http") or not path:
            return link[0]
        there = (page.parent / path).resolve()
        if there.is_dir() and (there / "README.md").exists():
            there = there / "README.md"
        if there.is_dir():
            return text  # a folder is no page
        if there.suffix == ".md":
            if there not in self.pages:
                self.add(there, before="---\norphan: true\n---\n\n")
        else:
            self.place(there).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(there, self.place(there))
        return f"[{text}]({os.path.relpath(self.place(there), self.place(page).parent)}{anchor})"


def reference(name: str, described: dict[int, str]) -> str:
    """Return the page of a module: its docstring and its public members.

    A member with a description on an earlier page, or in its defining module, is a link; ``described`` has its name.
    """
    module = importlib.import_module(name)
    lines = [name, "=" * len(name), "", f".. automodule:: {name}", "   :no-members:", ""]
    others = set(MODULES) - {name}
    elsewhere = []
    # Classes first, in the order of their names.
    for member in sorted(module.__all__, key=lambda member: (not member[:1].isupper(), member)):
        value = getattr(module, member)
        if not callable(value):
            continue
        if value.__module__ in others or id(value) in described:
            target = described.get(id(value), f"{value.__module__}.{value.__name__}")
            elsewhere.append(f"* :py:obj:`{member} <{target}>`")
            continue
        # Of two classes of one name a signature means the one that was described first.
        is_second = any(known.rpartition(".")[2] == member for known in described.values())
        described[id(value)] = f"{name}.{member}"
        lines.append(f".. auto{'class' if isinstance(value, type) else 'function'}:: {name}.{member}")
        if isinstance(value, type) and value.__bases__ != (object,):
            lines.append("   :show-inheritance:")
        if is_second:
            lines.append("   :no-index:")
        lines.append("")
    if elsewhere:
        lines += ["Also here", "---------", "", *elsewhere, ""]
    return "\n".join(lines)


def toctree(caption: str, entries: list[str]) -> str:
    """A chapter of the sidebar."""
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *entries, "```", ""])


def main(folder: Path) -> None:
    """Stage and build."""
    source = folder.with_name(f"{folder.name}-source")
    for old in (folder, source):
        shutil.rmtree(old, ignore_errors=True)
    stage = Stage(source)
    contents = {caption: [f"docs/{page}" for page in pages] for caption, pages in CHAPTERS.items()}
    contents["Reference"] = [f"reference/{name}" for name in MODULES]
    contents["The project"] = ["CHANGELOG", "CONTRIBUTING", "docs/guides", "docs/internals", "docs/style"]
    in_sidebar = [
        ROOT / f"{entry}.md" for caption, entries in contents.items() if caption != "Reference" for entry in entries
    ]
    missing = set((ROOT / "docs").glob("*.md")) - set(in_sidebar)
    if missing:
        sys.exit(f"in no chapter of the site: {sorted(path.name for path in missing)}")
    stage.pages.update(in_sidebar)
    for page in in_sidebar:
        stage.add(page)
    stage.add(README, after="".join(toctree(caption, entries) for caption, entries in contents.items()))
    (source / "reference").mkdir()
    described: dict[int, str] = {}
    for name in MODULES:
        (source / "reference" / f"{name}.rst").write_text(reference(name, described))
    shutil.copy(HERE / "conf.py", source)
    (source / "_static").mkdir()
    shutil.copy(HERE / "site.css", source / "_static")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "--builder", "html"]
    done = subprocess.run([*command, str(source), str(folder)], check=False)
    if done.returncode == 0:
        print(f"{folder / 'index.html'}: ortrain {ortrain.__version__}")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
